// SPDX-License-Identifier: Apache-2.0
/// Verifies bytes against digests on the thread that read them, while they are in its CPU cache.
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "sink.h"

/// One piece of a mapping. Its digest is started and freed outside the guard, which returns by a
/// jump and would leak memory.
typedef struct mapped_piece {
    const fsti_digest_kind *kind;
    void *state;
    const char *bytes;
    size_t size_bytes;
    bool good;
} mapped_piece;

static void digest_piece(void *context) {
    mapped_piece *piece = context;
    piece->good = piece->kind->update(piece->state, piece->bytes, piece->size_bytes);
}

/// Like fsti_digest_list_matches() for mapped pages, whose reads may fail. *lost: one failed.
static bool mapping_holds(const fsti_digest_list *list, const fsti_verify_range *range,
                          uint64_t *bad_begin, bool *lost) {
    const fsti_digest_kind *kind = list->kind;
    for (uint64_t begin = range->begin; begin < range->end; begin += list->chunk_bytes) {
        uint64_t size = fsti_min(list->chunk_bytes, range->end - begin);
        unsigned char digest[FSTI_DIGEST_BYTES_MAX];
        mapped_piece piece = {.kind = kind,
                              .state = kind->begin(),
                              .bytes = range->bytes + (begin - range->begin),
                              .size_bytes = (size_t)size};
        *bad_begin = begin;
        if (piece.state == NULL) return false;
        *lost = !fsti_io_guarded(digest_piece, &piece, piece.bytes, size);
        bool ended = kind->end(piece.state, digest) && !*lost && piece.good;
        const unsigned char *listed =
            list->digests + begin / list->chunk_bytes * kind->digest_bytes;
        if (!ended || memcmp(digest, listed, kind->digest_bytes) != 0) return false;
    }
    return true;
}

static fst_status refuse(const fsti_pipeline *pipeline, const fsti_plan_extent *extent,
                         const fsti_digest_list *list, uint64_t bad_begin, fst_error *error) {
    fsti_error_location location = fsti_pipeline_locate(pipeline, extent, bad_begin);
    uint64_t bad_end = fsti_min(bad_begin + list->chunk_bytes, list->file_bytes);
    location.file = fsti_file_path(pipeline->job.files[extent->file].file);
    return fsti_error_set(error, FST_E_DIGEST, location,
                          "chunk %" PRIu64 " of the file, its bytes %" PRIu64 " to %" PRIu64
                          ", differs from its %s digest",
                          bad_begin / list->chunk_bytes, bad_begin, bad_end, list->kind->name);
}

fst_status fsti_pipeline_verify(const fsti_pipeline *pipeline, const fsti_plan_extent *extent,
                                const fsti_verify_range *range, worker_counts *counts,
                                fst_error *error) {
    if (!pipeline->job.verifies) return FST_OK;
    const fsti_digest_list *list = pipeline->job.files[extent->file].digests;
    if (list->kind == NULL)
        return FST_OK; // a compressed file: its stored bytes are verified instead
    uint64_t bad_begin = range->begin, size = range->end - range->begin, start_ns = fsti_now_ns();
    bool lost = false,
         is_guarded = range->is_mapped && pipeline->job.guard_allowed && fsti_io_guard_ready();
    bool holds = is_guarded
                     ? mapping_holds(list, range, &bad_begin, &lost)
                     : fsti_digest_list_matches(list, range->begin, range->bytes, size, &bad_begin);
    counts->digest_ns += fsti_now_ns() - start_ns;
    if (holds) {
        counts->verified_bytes += size;
        return FST_OK;
    }
    // A changed file is a better explanation than a wrong digest.
    FST_TRY(fsti_pipeline_check_file(pipeline, extent, bad_begin, error));
    if (!lost) return refuse(pipeline, extent, list, bad_begin, error);
    fsti_pipeline_describe(pipeline, extent, bad_begin, FST_E_IO, EIO, error);
    return FST_E_IO;
}
