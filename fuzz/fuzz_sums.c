// SPDX-License-Identifier: Apache-2.0
/// Fuzzes the parsers of sha256sum lists and of digest files. Accepted names must be inside the
/// folder, and writing and parsing the result must give the same again.
#include <string.h>

#include "format/format.h"
#include "fuzz_target.h"

#define SIDECAR_START "fastsafetensors-digest 1 "

static char *padded(const void *data, size_t size) {
    char *bytes = fsti_alloc_zeroed(size + FSTI_FORMAT_PADDING_BYTES, 1);
    if (bytes != NULL && size > 0) memcpy(bytes, data, size);
    return bytes;
}

static void look_at_names(const fsti_sums *sums) {
    for (size_t i = 0; i < sums->file_count; i++) {
        const fsti_signed_file *file = &sums->files[i];
        if (!fsti_path_stays_inside(file->name, file->name_size)) __builtin_trap();
        if (file->name[file->name_size] != '\0') __builtin_trap();
    }
}

static void write_again(const fsti_sums *sums) {
    fsti_sums again;
    char *text, *copy;
    size_t size;
    if (fsti_sums_write(sums->files, sums->file_count, &text, &size, NULL) != FST_OK) return;
    copy = padded(text, size);
    fsti_free(text);
    if (copy == NULL) return;
    if (!fsti_sums_peek(copy, size)) __builtin_trap();
    if (fsti_sums_parse(copy, size, "fuzz", &again, NULL) != FST_OK) __builtin_trap();
    if (again.file_count != sums->file_count) __builtin_trap();
    for (size_t i = 0; i < again.file_count; i++) {
        const fsti_signed_file *a = &again.files[i], *b = &sums->files[i];
        if (a->name_size != b->name_size || memcmp(a->name, b->name, a->name_size) != 0 ||
            memcmp(a->digest, b->digest, sizeof a->digest) != 0)
            __builtin_trap();
    }
    fsti_sums_clear(&again);
}

static void fuzz_sidecar(const uint8_t *data, size_t size, const fsti_digest_kind *kind) {
    fsti_sums sums;
    char *bytes = padded(data, size);
    if (bytes == NULL) return;
    if (fsti_sidecar_parse(bytes, size, kind, &sums, FSTI_NO_LOCATION, NULL) != FST_OK) return;
    look_at_names(&sums);
    fsti_sums_clear(&sums);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fsti_sums sums;
    if (size >= strlen(SIDECAR_START) && memcmp(data, SIDECAR_START, strlen(SIDECAR_START)) == 0) {
        fuzz_sidecar(data, size, &fsti_digest_xxh3_64);
        fuzz_sidecar(data, size, &fsti_digest_sha256);
        return 0;
    }
    char *bytes = padded(data, size);
    if (bytes == NULL || fsti_sums_parse(bytes, size, "fuzz", &sums, NULL) != FST_OK) return 0;
    look_at_names(&sums);
    write_again(&sums);
    fsti_sums_clear(&sums);
    return 0;
}
