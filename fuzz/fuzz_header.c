// SPDX-License-Identifier: Apache-2.0
/// Fuzzes the header parser: the input is a whole file, length field and data included.
#include <string.h>

#include "format/format.h"
#include "fuzz_target.h"

static void parse(const uint8_t *data, size_t size, bool lenient) {
    fsti_header_rules rules = {
        .path = "fuzz", .file_size = size, .lenient = lenient, .hash_key = 1};
    uint64_t header_bytes;
    fst_error error;
    if (fsti_header_length(data, &rules, &header_bytes, &error) != FST_OK) return;
    char *bytes = fsti_alloc_zeroed(header_bytes + FSTI_FORMAT_PADDING_BYTES, 1);
    if (bytes == NULL) return;
    memcpy(bytes, data + FSTI_FORMAT_LENGTH_BYTES, header_bytes);
    fsti_header *header;
    if (fsti_header_parse(bytes, header_bytes, &rules, &header, &error) != FST_OK) return;
    // An accepted header must be consistent.
    uint64_t covered = 0;
    for (size_t i = 0; i < header->tensor_count; i++) {
        const fsti_tensor *tensor = &header->tensors[i];
        const char *name = fsti_header_name(header, tensor);
        if (tensor->begin != covered || fsti_header_find(header, name, tensor->name_size) != i)
            __builtin_trap();
        covered = tensor->end;
    }
    if (header->data_begin + covered > size) __builtin_trap();
    fsti_header_unref(header);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    parse(data, size, false);
    parse(data, size, true);
    return 0;
}
