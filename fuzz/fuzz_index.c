// SPDX-License-Identifier: Apache-2.0
/// Fuzzes the parser of index files.
#include <string.h>

#include "format/format.h"
#include "fuzz_target.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *bytes = fsti_alloc_zeroed(size + FSTI_FORMAT_PADDING_BYTES, 1);
    if (bytes == NULL) return 0;
    memcpy(bytes, data, size);
    fsti_index index;
    if (fsti_index_parse(bytes, size, "fuzz", 1, &index, NULL) != FST_OK) return 0;
    for (size_t i = 0; i < index.entry_count; i++)
        if (index.entries[i].file >= index.file_count) __builtin_trap();
    for (size_t i = 0; i < index.file_count; i++) {
        const char *name = index.bytes + index.files[i].at;
        if (name[0] == '/' || strncmp(name, "../", 3) == 0) __builtin_trap();
    }
    fsti_index_clear(&index);
    return 0;
}
