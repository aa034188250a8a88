// SPDX-License-Identifier: Apache-2.0
/// The state of a compression. Private to pack.c and pack_header.c.
#ifndef FSTI_PACK_JOB_H
#define FSTI_PACK_JOB_H

#include "encode_ring.h"
#include "pack.h"

typedef struct pack_job {
    const pack_request *request;
    fsti_output *output;
    fst_error *error;
    char *original; ///< the original's header bytes
    uint64_t original_bytes, true_bytes;
    encode_item *items; ///< tensors to try
    uint32_t *tensors;  ///< original index, by item
    size_t item_count;
    uint64_t chunk_count; ///< of all items
    fsti_packed_mark *marks;
    uint64_t mark_count;
    fsti_packed_draft_tensor *packed; ///< compressed tensors
    uint32_t *packed_tensors;         ///< their original indices
    uint64_t *packed_bytes;           ///< sizes of their entries
    uint32_t packed_count;
    bool *is_packed;                    ///< by original index
    uint64_t header_bytes, entry_bytes; ///< space for the header; size of the directory's entry
    uint64_t at;                        ///< end of the written bytes
    uint64_t reserved_bytes;            ///< space reserved for the output
    uint64_t bytes_done;                ///< of tensors that were tried
} pack_job;

static inline const fsti_tensor *tensor_of(const pack_job *job, uint32_t index) {
    return &job->request->header->tensors[index];
}

static inline uint64_t size_of(const fsti_tensor *tensor) { return tensor->end - tensor->begin; }

/// Writes the compressed file's header: job->header_bytes long or, as a draft, longer than any
/// possible result. *out is from fsti_alloc().
fst_status fsti_pack_header(const pack_job *job, bool is_draft, char **out, size_t *size_bytes);

#endif
