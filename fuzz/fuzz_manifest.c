// SPDX-License-Identifier: Apache-2.0
/// Fuzzes the parsers of manifests and of signature bundles with their statements.
#include <string.h>

#include "format/format.h"
#include "fuzz_target.h"

static char *padded(const uint8_t *data, size_t size) {
    char *bytes = fsti_alloc_zeroed(size + FSTI_FORMAT_PADDING_BYTES, 1);
    if (bytes != NULL && size > 0) memcpy(bytes, data, size);
    return bytes;
}

static void look_at_file(const fsti_manifest *manifest, const fsti_manifest_file *file) {
    uint64_t count = fsti_digest_chunk_count(file->size_bytes, manifest->chunk_bytes);
    volatile unsigned char seen = 0; // volatile unsigned char seen = 0; // reads every digest
    for (uint64_t i = 0; i < count * manifest->kind->digest_bytes; i++) seen = file->digests[i];
    if (file->name[0] == '/' || strncmp(file->name, "../", 3) == 0) __builtin_trap();
    if (fsti_manifest_find(manifest, file->name, file->name_size) != file) __builtin_trap();
    if (file->header_bytes > file->size_bytes) __builtin_trap();
    (void)seen;
}

static void fuzz_manifest(const uint8_t *data, size_t size) {
    char *bytes = padded(data, size);
    fsti_manifest manifest, peeked;
    if (bytes == NULL) return;
    bool has_ends = fsti_manifest_peek(bytes, size, &peeked);
    if (fsti_manifest_parse(bytes, size, "fuzz", &manifest, NULL) != FST_OK) return;
    // The checksum line covers exactly the bytes that were parsed.
    if (!has_ends || peeked.sealed_bytes != manifest.sealed_bytes) __builtin_trap();
    for (size_t i = 0; i < manifest.file_count; i++) look_at_file(&manifest, &manifest.files[i]);
    fsti_manifest_clear(&manifest);
}

static void fuzz_bundle(const uint8_t *data, size_t size) {
    char *bytes = padded(data, size);
    fsti_bundle bundle;
    fsti_statement statement;
    if (bytes == NULL || fsti_bundle_parse(bytes, size, "fuzz", &bundle, NULL) != FST_OK) return;
    if (fsti_statement_parse(&bundle, "fuzz", &statement, NULL) == FST_OK) {
        for (size_t i = 0; i < statement.file_count; i++)
            if (!fsti_path_stays_inside(statement.files[i].name, statement.files[i].name_size))
                __builtin_trap();
        fsti_statement_clear(&statement);
    }
    fsti_bundle_clear(&bundle);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size > 0 && data[0] == '{')
        fuzz_bundle(data, size);
    else
        fuzz_manifest(data, size);
    return 0;
}
