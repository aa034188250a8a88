// SPDX-License-Identifier: Apache-2.0
/// Which engine reads what of a file: the table of engines, and the choice with its reason.
#include <stdio.h>
#include <string.h>

#include "io_private.h"

const fsti_io_engine *fsti_io_engine_get(fst_engine engine) {
    static const fsti_io_engine *const engines[FST_ENGINE_COUNT] = {
        [FST_ENGINE_PREAD] = &fsti_io_engine_pread, [FST_ENGINE_DIRECT] = &fsti_io_engine_direct,
        [FST_ENGINE_URING] = &fsti_io_engine_uring, [FST_ENGINE_MMAP] = &fsti_io_engine_mmap,
        [FST_ENGINE_GDS] = &fsti_io_engine_gds,
    };
    return (unsigned)engine < FST_ENGINE_COUNT ? engines[engine] : NULL;
}

static fst_status choose_forced(fsti_file *file, fst_engine forced, bool guard_allowed,
                                fsti_io_choice *out, fst_error *error) {
    const fsti_io_engine *engine = fsti_io_engine_get(forced);
    char reason[160];
    if (engine == NULL)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NOWHERE, "unknown engine %d",
                              (int)forced);
    bool usable = engine->usable(file, reason, sizeof reason);
    if (engine->is_remote) {
        usable = false;
        snprintf(reason, sizeof reason, "it reads to devices: choose it by gds");
    }
    if (usable && engine->is_mapped && !(guard_allowed && fsti_io_guard_ready())) {
        usable = false;
        snprintf(reason, sizeof reason, "there is no SIGBUS guard");
    }
    if (!usable) {
        fsti_error_place place = FSTI_NOWHERE;
        place.file = fsti_file_path(file);
        return fsti_error_set(error, FST_E_UNSUPPORTED, place, "engine %s can't be used: %s",
                              engine->name, reason);
    }
    out->absent = out->resident = engine;
    snprintf(out->reason, sizeof out->reason, "%s was asked for", engine->name);
    return FST_OK;
}

fst_status fsti_io_choose(fsti_file *file, fst_engine forced, bool guard_allowed,
                          fsti_io_choice *out, fst_error *error) {
    if (forced != FST_ENGINE_AUTO) return choose_forced(file, forced, guard_allowed, out, error);
    char why_absent[160], why_uring[160];
    const char *why_resident = "cached chunks are copied from a mapping";
    out->absent = &fsti_io_engine_pread;
    out->resident = &fsti_io_engine_mmap;
    if (fsti_io_engine_direct.usable(file, why_absent, sizeof why_absent)) {
        bool async = fsti_io_engine_uring.usable(file, why_uring, sizeof why_uring);
        out->absent = async ? &fsti_io_engine_uring : &fsti_io_engine_direct;
        if (!async) snprintf(why_absent, sizeof why_absent, "%.150s", why_uring);
    }
    if (!(guard_allowed && fsti_io_guard_ready())) {
        out->resident = &fsti_io_engine_pread;
        why_resident = "cached chunks are read with pread: no SIGBUS guard";
    } else if (fsti_io_file_mapping(file) == NULL) {
        out->resident = &fsti_io_engine_pread;
        why_resident = "cached chunks are read with pread: the file can't be mapped";
    }
    snprintf(out->reason, sizeof out->reason, "absent chunks by %s (%.120s), %s", out->absent->name,
             why_absent, why_resident);
    return FST_OK;
}

void fsti_io_choose_plain(fsti_io_choice *out) {
    out->absent = out->resident = &fsti_io_engine_pread;
    snprintf(out->reason, sizeof out->reason, "small: read at once by the thread that asks");
}
