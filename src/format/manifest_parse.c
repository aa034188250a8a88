// SPDX-License-Identifier: Apache-2.0
/// Parses manifests: a line for each file, its header, its chunks and optionally its tensors
/// (docs/verify.md). Only one spelling is accepted for each content.
#include <stdlib.h>
#include <string.h>

#include "json_reader.h"

#define FIRST_WORD "fastsafetensors-manifest 1 "

typedef struct manifest_build {
    fsti_manifest *manifest;
    const char *path;
    json_reader reader;
    size_t file_capacity;
    bool out_of_memory;
} manifest_build;

void fsti_manifest_clear(fsti_manifest *manifest) {
    fsti_free(manifest->bytes);
    fsti_free(manifest->files);
    *manifest = (fsti_manifest){0};
}

static bool take_word(json_reader *reader, const char *word) {
    size_t size = strlen(word);
    if ((size_t)(reader->end - reader->cursor) < size || memcmp(reader->cursor, word, size) != 0)
        return false;
    reader->cursor += size;
    return true;
}

static bool expect_word(json_reader *reader, const char *word, const char *what) {
    return take_word(reader, word) || json_fault(reader, what);
}

/// Digits only: fsti_json_read_u64() would skip white space first.
static bool read_number(json_reader *reader, uint64_t *out) {
    if (*reader->cursor < '0' || *reader->cursor > '9')
        return json_fault(reader, "expected a number");
    return fsti_json_read_u64(reader, out);
}

static bool read_digest(manifest_build *build, unsigned char *out) {
    json_reader *reader = &build->reader;
    size_t size = build->manifest->kind->digest_bytes;
    if ((size_t)(reader->end - reader->cursor) < 2 * size ||
        !fsti_digest_read(reader->cursor, size, out))
        return json_fault(reader,
                          "expected a digest of the algorithm's length in lower-case hexadecimal");
    reader->cursor += 2 * size;
    return true;
}

/// Reads a name, a JSON string at the end of its line. Decoded in place and NUL-terminated.
static bool read_name(manifest_build *build, const char **name, size_t *size) {
    json_reader *reader = &build->reader;
    json_string text;
    if (*reader->cursor != '"') return json_fault(reader, "no name in quotes");
    if (!fsti_json_read_string(reader, &text)) return false;
    if (!expect_word(reader, "\n", "unexpected text after the name")) return false;
    char *start = build->manifest->bytes + (text.text - build->manifest->bytes);
    *size = text.escaped ? fsti_json_decode(&text, start) : text.size;
    start[*size] = '\0';
    *name = start;
    return true;
}

static bool read_file_name(manifest_build *build, fsti_manifest_file *file) {
    const fsti_manifest *manifest = build->manifest;
    if (!read_name(build, &file->name, &file->name_size)) return false;
    if (!fsti_path_stays_inside(file->name, file->name_size))
        return json_fault(&build->reader, "a file name outside the model's folder");
    if (manifest->file_count == 0) return true;
    const fsti_manifest_file *before = &manifest->files[manifest->file_count - 1];
    size_t shorter = file->name_size < before->name_size ? file->name_size : before->name_size;
    int order = memcmp(before->name, file->name, shorter);
    if (order < 0 || (order == 0 && before->name_size < file->name_size)) return true;
    return json_fault(&build->reader, "file names are not sorted or not unique");
}

static bool read_stamp_line(manifest_build *build, fsti_file_stamp *stamp) {
    json_reader *reader = &build->reader;
    if (!take_word(reader, "stamp ")) return true;
    return read_number(reader, &stamp->modified_ns) &&
           expect_word(reader, " ", "expected a second time") &&
           read_number(reader, &stamp->changed_ns) && expect_word(reader, " ", "no inode") &&
           read_number(reader, &stamp->inode) &&
           expect_word(reader, "\n", "unexpected text after the inode") &&
           (stamp->inode != 0 || json_fault(reader, "invalid inode number"));
}

static bool read_header_line(manifest_build *build, fsti_manifest_file *file) {
    json_reader *reader = &build->reader;
    if (!take_word(reader, "header ")) return true;
    if (!read_number(reader, &file->header_bytes) ||
        !expect_word(reader, " ", "expected the digest of the header") ||
        !read_digest(build, file->header))
        return false;
    bool fits = file->header_bytes >= FSTI_FORMAT_LENGTH_BYTES &&
                file->header_bytes <= file->size_bytes &&
                file->header_bytes <= FSTI_FORMAT_LENGTH_BYTES + FSTI_FORMAT_HEADER_BYTES_MAX;
    if (!fits) return json_fault(reader, "the header is larger than its file");
    return expect_word(reader, "\n", "unexpected text after the digest");
}

static bool read_chunk_lines(manifest_build *build, fsti_manifest_file *file) {
    json_reader *reader = &build->reader;
    uint64_t count = fsti_digest_chunk_count(file->size_bytes, build->manifest->chunk_bytes);
    // Check the number first: that many lines must follow.
    if (count > (uint64_t)(reader->end - reader->cursor))
        return json_fault(reader, "more file bytes than its chunks cover");
    // Digests are stored over these lines, which are longer than their digests.
    char *text = build->manifest->bytes;
    unsigned char *digest = (unsigned char *)text + (reader->cursor - reader->start);
    file->digests = digest;
    for (uint64_t i = 0; i < count; i++) {
        if (!expect_word(reader, "chunk ", "too few chunks for the file's size")) return false;
        if (!read_digest(build, digest)) return false;
        digest += build->manifest->kind->digest_bytes;
        if (!expect_word(reader, "\n", "unexpected text after the digest")) return false;
    }
    return true;
}

/// Lines of tensors are checked and kept as text.
static bool read_tensor_lines(manifest_build *build, fsti_manifest_file *file) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    json_reader *reader = &build->reader;
    json_string name;
    file->tensor_lines = reader->cursor;
    while (take_word(reader, "tensor ")) {
        if (!read_digest(build, digest) || !expect_word(reader, " ", "expected the tensor's name"))
            return false;
        if (*reader->cursor != '"') return json_fault(reader, "no name in quotes");
        if (!fsti_json_read_string(reader, &name) ||
            !expect_word(reader, "\n", "unexpected text after the name"))
            return false;
    }
    file->tensor_lines_size = (size_t)(reader->cursor - file->tensor_lines);
    return true;
}

static bool read_file(manifest_build *build) {
    fsti_manifest *manifest = build->manifest;
    fsti_manifest_file file = {.header_bytes = 0};
    if (!read_number(&build->reader, &file.size_bytes) ||
        !expect_word(&build->reader, " ", "expected the file's name") ||
        !read_file_name(build, &file) || !read_stamp_line(build, &file.stamp) ||
        !read_header_line(build, &file) || !read_chunk_lines(build, &file) ||
        !read_tensor_lines(build, &file))
        return false;
    if (!fsti_array_reserve((void **)&manifest->files, &build->file_capacity, manifest->file_count,
                            sizeof *manifest->files, UINT32_MAX)) {
        build->out_of_memory = true;
        return false;
    }
    manifest->files[manifest->file_count++] = file;
    return true;
}

static bool is_power_of_two(uint64_t number) { return (number & (number - 1)) == 0; }

static bool read_first_line(manifest_build *build) {
    json_reader *reader = &build->reader;
    uint64_t chunk_bytes;
    if (!expect_word(reader, FIRST_WORD, "not a manifest of version 1")) return false;
    const char *name = reader->cursor;
    while (*reader->cursor > ' ') reader->cursor++;
    build->manifest->kind = fsti_digest_find(name, (size_t)(reader->cursor - name));
    if (build->manifest->kind == NULL) return json_fault(reader, "unknown algorithm");
    if (!expect_word(reader, " ", "expected the chunk size") || !read_number(reader, &chunk_bytes))
        return false;
    if (chunk_bytes < FSTI_DIGEST_CHUNK_BYTES_MIN || chunk_bytes > FSTI_DIGEST_CHUNK_BYTES_MAX ||
        !is_power_of_two(chunk_bytes))
        return json_fault(reader, "the chunk size is not a power of two from 64 KiB to 1 MiB");
    build->manifest->chunk_bytes = (uint32_t)chunk_bytes;
    return expect_word(reader, "\n", "unexpected text after the chunk size");
}

static bool read_manifest(manifest_build *build) {
    json_reader *reader = &build->reader;
    if (!read_first_line(build)) return false;
    while (take_word(reader, "file "))
        if (!read_file(build)) return false;
    build->manifest->sealed_bytes = (size_t)(reader->cursor - reader->start);
    if (!expect_word(reader, "seal ", "unknown kind of line")) return false;
    if (!read_digest(build, build->manifest->seal)) return false;
    if (!expect_word(reader, "\n", "unexpected text after the checksum line")) return false;
    return reader->cursor == reader->end ||
           json_fault(reader, "unexpected text after the checksum line");
}

static fst_status manifest_failure(const manifest_build *build, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = build->path;
    if (build->out_of_memory) return fsti_error_memory(error, 64);
    location.byte_offset = (uint64_t)(build->reader.cursor - build->reader.start);
    return fsti_error_set(error, FST_E_MANIFEST, location, "invalid manifest: %s",
                          build->reader.fault);
}

bool fsti_manifest_peek(const char *bytes, size_t byte_count, fsti_manifest *out) {
    manifest_build build = {
        .manifest = out,
        .reader = {.start = bytes, .cursor = bytes, .end = bytes + byte_count},
    };
    static const char mark[] = "\nseal ";
    *out = (fsti_manifest){0};
    if (!read_first_line(&build)) return false;
    // The seal's line has a fixed length, so it is found from the end.
    size_t tail = strlen(mark) + 2 * out->kind->digest_bytes + 1;
    if (byte_count < tail) return false;
    const char *line = bytes + byte_count - tail;
    if (memcmp(line, mark, strlen(mark)) != 0) return false;
    out->sealed_bytes = (size_t)(line + 1 - bytes);
    return fsti_digest_read(line + strlen(mark), out->kind->digest_bytes, out->seal);
}

fst_status fsti_manifest_parse(char *bytes, size_t byte_count, const char *path, fsti_manifest *out,
                               fst_error *error) {
    *out = (fsti_manifest){.bytes = bytes};
    manifest_build build = {.manifest = out, .path = path};
    fst_status status = FST_OK;
    if (!fsti_json_begin(&build.reader, bytes, byte_count) || !read_manifest(&build))
        status = manifest_failure(&build, error);
    if (status != FST_OK) fsti_manifest_clear(out);
    return status;
}

/// A name to search for.
typedef struct wanted_name {
    const char *bytes;
    size_t size;
} wanted_name;

static int compare_names(const void *a, const void *b) {
    const wanted_name *wanted = a;
    const fsti_manifest_file *file = b;
    size_t shorter = wanted->size < file->name_size ? wanted->size : file->name_size;
    int order = memcmp(wanted->bytes, file->name, shorter);
    if (order != 0) return order;
    return wanted->size < file->name_size ? -1 : wanted->size > file->name_size;
}

const fsti_manifest_file *fsti_manifest_find(const fsti_manifest *manifest, const char *name,
                                             size_t name_size) {
    wanted_name wanted = {name, name_size};
    if (manifest->file_count == 0) return NULL;
    return bsearch(&wanted, manifest->files, manifest->file_count, sizeof *manifest->files,
                   compare_names);
}
