// SPDX-License-Identifier: Apache-2.0
/// The table of engines, and which of them work for a file.
#include <stdio.h>
#include <string.h>

#include "io_private.h"

const fsti_io_engine *fsti_io_engine_get(fst_engine engine) {
    static const fsti_io_engine *const engines[FSTI_ENGINE_COUNT] = {
        [FST_ENGINE_PREAD] = &fsti_io_engine_pread, [FST_ENGINE_DIRECT] = &fsti_io_engine_direct,
        [FST_ENGINE_URING] = &fsti_io_engine_uring, [FST_ENGINE_MMAP] = &fsti_io_engine_mmap,
        [FSTI_ENGINE_GDS] = &fsti_io_engine_gds,    [FSTI_ENGINE_HTTP] = &fsti_io_engine_http,
    };
    return (unsigned)engine < FSTI_ENGINE_COUNT ? engines[engine] : NULL;
}

/// If address space is limited, a mapping takes at most this fraction,
#define MAPPED_DIVISOR 2u
/// and leaves space for buffers, and this much for threads.
#define THREADS_BYTES ((uint64_t)32 << 20)

static bool leaves_room(fsti_file *file, uint64_t buffer_bytes) {
    uint64_t left = fsti_address_space_left(), size = fsti_file_size(file), wanted;
    return left == UINT64_MAX ||
           (size <= left / MAPPED_DIVISOR && fsti_add(size, buffer_bytes, &wanted) &&
            fsti_add(wanted, THREADS_BYTES, &wanted) && wanted <= left);
}

/// Whether pages of the file's mapping can be copied, and the reason if not.
static bool can_copy_mapping(fsti_file *file, const fsti_io_request *request,
                             const char **why_not) {
    *why_not = request->no_mapping;
    if (*why_not != NULL) return false;
    *why_not = "no SIGBUS guard";
    if (!fsti_io_guard_ready()) return false;
    *why_not = "the address space is limited";
    if (!leaves_room(file, request->buffer_bytes)) return false;
    *why_not = "the file can't be mapped";
    return fsti_io_file_mapping(file) != NULL;
}

fst_status fsti_io_check_forced(fsti_file *file, fst_engine forced, const fsti_io_request *request,
                                const fsti_io_engine **out, fst_error *error) {
    const fsti_io_engine *engine = *out = fsti_io_engine_get(forced);
    char reason[160];
    const char *why_not;
    if (engine == NULL)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "unknown engine %d",
                              (int)forced);
    bool usable = engine->usable(file, reason, sizeof reason);
    if (engine->reads_to_device) {
        usable = false;
        snprintf(reason, sizeof reason, "it reads to devices. Select it with gds");
    } else if (usable && engine->is_mapped && !can_copy_mapping(file, request, &why_not)) {
        usable = false;
        snprintf(reason, sizeof reason, "%s", why_not);
    }
    if (usable) return FST_OK;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = fsti_file_path(file);
    return fsti_error_set(error, FST_E_UNSUPPORTED, location, "engine %s can't be used: %s",
                          engine->name, reason);
}

void fsti_io_probe(fsti_file *file, const fsti_io_request *request, fsti_io_facts *out) {
    const char *why_not = "its small pages are slow to map";
    *out = (fsti_io_facts){.copies_mapping = !fsti_io_file_is_memory(file) &&
                                             can_copy_mapping(file, request, &why_not)};
    snprintf(out->resident_reason, sizeof out->resident_reason, "%s%s",
             out->copies_mapping ? "copied from a mapping" : "read with pread: ",
             out->copies_mapping ? "" : why_not);
    out->has_direct =
        fsti_io_engine_direct.usable(file, out->absent_reason, sizeof out->absent_reason);
    if (out->has_direct)
        out->has_ring =
            fsti_io_engine_uring.usable(file, out->absent_reason, sizeof out->absent_reason);
}
