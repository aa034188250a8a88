// SPDX-License-Identifier: Apache-2.0
/// Fuzzes whole compressed files: a flag byte, then the file. If the flag says so, the directory's
/// checksum is corrected, so that mutations get past it. The file is opened as the original and as
/// stored, loaded, and rewritten.
#include "codec/codec.h"
#include "format/format.h"
#include "fuzz_files.h"
#include "fuzz_target.h"

enum { FLAG_RESEAL = 1, FLAG_CUT = 2 };

/// The first tensor of the file, if it has a good header; else 0 bytes.
static size_t find_directory(const uint8_t *file, size_t size, size_t *begin) {
    uint64_t header_bytes;
    fsti_header *header;
    fsti_header_rules rules = {.path = "fuzz", .file_size = size, .cut = true};
    if (fsti_header_length(file, &rules, &header_bytes, NULL) != FST_OK) return 0;
    char *text = fsti_alloc_zeroed((size_t)header_bytes + FSTI_FORMAT_PADDING_BYTES, 1);
    if (text == NULL) return 0;
    memcpy(text, file + FSTI_FORMAT_LENGTH_BYTES, (size_t)header_bytes);
    if (fsti_header_parse(text, (size_t)header_bytes, &rules, &header, NULL) != FST_OK) return 0;
    *begin = (size_t)header->data_begin;
    size_t directory_bytes = 0;
    if (fsti_packed_is(header)) directory_bytes = (size_t)header->tensors[0].end;
    fsti_header_unref(header);
    return directory_bytes >= FSTI_PACKED_HEAD_BYTES ? directory_bytes : 0;
}

static void reseal(uint8_t *file, size_t size) {
    size_t begin, directory_bytes = find_directory(file, size, &begin);
    if (directory_bytes == 0 || directory_bytes > size - begin) return;
    uint8_t *field = file + begin + 56; // the checksum, zero while it is computed
    memset(field, 0, 4);
    uint32_t crc = fsti_crc32c(file + begin, directory_bytes);
    for (unsigned i = 0; i < 4; i++) field[i] = (uint8_t)(crc >> 8 * i);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1 + FSTI_FORMAT_LENGTH_BYTES) return 0;
    fuzz_enter("packed");
    uint8_t flags = data[0];
    uint8_t *file = malloc(--size);
    require(file != NULL);
    memcpy(file, data + 1, size);
    if ((flags & FLAG_RESEAL) != 0) reseal(file, size);
    fuzz_put("m.safetensors", file, size);
    free(file);
    uint32_t cut = (flags & FLAG_CUT) != 0 ? FST_OPEN_CUT : 0;
    (void)fuzz_open("m.safetensors", cut);
    (void)fuzz_open("m.safetensors", FST_OPEN_STORED | cut);
    return 0;
}
