// SPDX-License-Identifier: Apache-2.0
/// Writes the directory of a compressed file.
#include <string.h>

#include "format.h"

uint64_t fsti_packed_bytes(uint64_t tensor_count, uint64_t chunk_count, uint64_t original_bytes) {
    uint64_t bytes = FSTI_PACKED_HEAD_BYTES + tensor_count * FSTI_PACKED_TENSOR_BYTES +
                     chunk_count * FSTI_PACKED_CHUNK_BYTES + original_bytes;
    return fsti_align_up(bytes, FSTI_PACKED_ALIGNMENT);
}

static unsigned char *put_tensor(unsigned char *at, const fsti_packed_draft_tensor *tensor) {
    at = fsti_number_store(at, (uint64_t)tensor->dtype, 1);
    at = fsti_number_store(at, (uint64_t)fsti_codec_layout_of(tensor->dtype), 1);
    at = fsti_number_store(at, FSTI_CODER_ZSTD, 1);
    at = fsti_number_store(at, tensor->chunk_log, 1);
    at = fsti_number_store(at, 0, 4);
    at = fsti_number_store(at, tensor->true_bytes, 8);
    at = fsti_number_store(at, tensor->chunk_first, 8);
    return fsti_number_store(at, 0, 8);
}

void fsti_packed_put(const fsti_packed_draft *draft, unsigned char *target) {
    uint64_t used = FSTI_PACKED_HEAD_BYTES + draft->tensor_count * FSTI_PACKED_TENSOR_BYTES +
                    draft->mark_count * FSTI_PACKED_CHUNK_BYTES + draft->original_bytes;
    unsigned char *at = target + 8;
    memset(target, 0, (size_t)draft->entry_bytes);
    for (int i = 0; i < 8; i++) target[i] = (unsigned char)FSTI_PACKED_MAGIC[i];
    at = fsti_number_store(at, FSTI_PACKED_VERSION, 4);
    at = fsti_number_store(at, 0, 4);
    at = fsti_number_store(at, used, 8);
    at = fsti_number_store(at, draft->tensor_count, 4);
    at = fsti_number_store(at, 0, 4);
    at = fsti_number_store(at, draft->mark_count, 8);
    at = fsti_number_store(at, draft->true_bytes, 8);
    at = fsti_number_store(at, draft->original_bytes, 8);
    at = fsti_number_store(at, 0, 8);
    for (uint32_t i = 0; i < draft->tensor_count; i++) at = put_tensor(at, &draft->tensors[i]);
    for (uint64_t i = 0; i < draft->mark_count; i++) {
        at = fsti_number_store(at, draft->marks[i].stored, 4);
        at = fsti_number_store(at, draft->marks[i].crc, 4);
    }
    memcpy(at, draft->original, (size_t)draft->original_bytes);
    fsti_number_store(target + 56, fsti_crc32c(target, (size_t)draft->entry_bytes), 4);
}
