// SPDX-License-Identifier: Apache-2.0
/// Fuzzes the directory of compressed files. The input is a whole file. Its CRC is corrected, so
/// that the checks after the CRC are reached.
#include <string.h>

#include "format/format.h"
#include "fuzz_input.h"
#include "fuzz_target.h"

static void look_at_tensor(const fsti_packed *packed, size_t index, uint64_t file_size) {
    const fsti_packed_tensor *tensor = &packed->tensors[index];
    const fsti_tensor *original = &packed->header->tensors[index];
    require(tensor->stored_begin <= tensor->stored_end && tensor->stored_end <= file_size);
    uint64_t at = tensor->stored_begin, true_bytes = original->end - original->begin;
    if (!tensor->is_packed) {
        require(tensor->stored_end - at == true_bytes);
        return;
    }
    require(tensor->chunk_first + tensor->chunk_count <= packed->chunk_count);
    require(tensor->chunk_count << tensor->chunk_log >= true_bytes);
    for (uint64_t i = 0; i < tensor->chunk_count; i++) {
        const fsti_packed_chunk *chunk = &packed->chunks[tensor->chunk_first + i];
        require(chunk->begin == at && chunk->stored_bytes > 0);
        at += chunk->stored_bytes;
    }
    require(at <= tensor->stored_end);
}

static void parse_directory(const fsti_header *header, const uint8_t *data, size_t size,
                            bool seals) {
    size_t entry = (size_t)header->tensors[0].end;
    fsti_packed_source source = {
        .header = header, .file_size = size, .path = "fuzz", .hash_key = 1};
    fsti_packed packed;
    fst_error error;
    char *bytes = fsti_alloc(entry + 1);
    if (bytes == NULL) return;
    memcpy(bytes, data + header->data_begin, entry);
    if (seals && entry >= FSTI_PACKED_HEAD_BYTES) {
        memset(bytes + 56, 0, 4);
        uint32_t crc = fsti_crc32c(bytes, entry);
        for (int i = 0; i < 4; i++) bytes[56 + i] = (char)(crc >> 8 * i & 0xff);
    }
    if (fsti_packed_parse(bytes, entry, &source, &packed, &error) != FST_OK) return;
    require(packed.true_bytes <= size * FSTI_PACKED_FACTOR_MAX + FSTI_PACKED_SLACK);
    for (size_t i = 0; i < packed.header->tensor_count; i++) look_at_tensor(&packed, i, size);
    if (packed.true_bytes > packed.original_bytes) {
        size_t last = fsti_packed_tensor_at(&packed, packed.true_bytes - 1);
        require(last < packed.header->tensor_count);
    }
    fsti_packed_clear(&packed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fsti_header_rules rules = {.path = "fuzz", .file_size = size, .hash_key = 1};
    uint64_t header_bytes;
    fst_error error;
    fsti_header *header;
    if (fsti_header_length(data, &rules, &header_bytes, &error) != FST_OK) return 0;
    char *bytes = fsti_alloc_zeroed((size_t)header_bytes + FSTI_FORMAT_PADDING_BYTES, 1);
    if (bytes == NULL) return 0;
    memcpy(bytes, data + FSTI_FORMAT_LENGTH_BYTES, (size_t)header_bytes);
    if (fsti_header_parse(bytes, (size_t)header_bytes, &rules, &header, &error) != FST_OK) return 0;
    if (fsti_packed_is(header)) {
        parse_directory(header, data, size, false);
        parse_directory(header, data, size, true);
    }
    fsti_header_unref(header);
    return 0;
}
