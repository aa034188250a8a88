// SPDX-License-Identifier: Apache-2.0
/// A packing on its way: private to pack.c and pack_header.c.
#ifndef FSTI_PACK_JOB_H
#define FSTI_PACK_JOB_H

#include "encode_ring.h"
#include "pack.h"

typedef struct pack_job {
    const pack_request *request;
    fsti_output *output;
    fst_error *error;
    char *original; ///< header's bytes of the original
    uint64_t original_bytes, true_bytes;
    encode_item *items; ///< candidates
    uint32_t *tensors;  ///< of the original, by item
    size_t item_count;
    uint64_t chunk_count; ///< of all items
    fsti_packed_mark *marks;
    uint64_t mark_count;
    fsti_packed_draft_tensor *packed; ///< tensors that are
    uint32_t *packed_tensors;         ///< which of the original they are
    uint64_t *packed_bytes;           ///< of their entries
    uint32_t packed_count;
    bool *is_packed;                    ///< by tensor of the original
    uint64_t header_bytes, entry_bytes; ///< room for the header, and of the directory's entry
    uint64_t at;                        ///< end of what is written
    uint64_t room_bytes;                ///< that the output has been given
    uint64_t bytes_done;                ///< of tensors that were tried
} pack_job;

static inline const fsti_tensor *tensor_of(const pack_job *job, uint32_t index) {
    return &job->request->header->tensors[index];
}

static inline uint64_t size_of(const fsti_tensor *tensor) { return tensor->end - tensor->begin; }

/// The compressed file's header: of what has been packed, job->header_bytes long; or, as a draft,
/// one that is longer than any that can come of it. *out is from fsti_alloc.
fst_status fsti_pack_header(const pack_job *job, bool is_draft, char **out, size_t *size_bytes);

#endif
