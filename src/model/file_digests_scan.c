// SPDX-License-Identifier: Apache-2.0
/// Reads a file once and computes the digest of the whole file, or of its tensors, and of each
/// chunk.
#include "file_digests_scan.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define ALGORITHM_KEY "digest.algorithm"
#define TENSOR_KEY "digest.tensor."
#define CHUNK FSTI_FILE_DIGESTS_CHUNK_BYTES

bool fsti_file_digests_hub(const char *real, unsigned char *digest) {
    static const char folder[] = "/blobs/";
    size_t size = strlen(real), tail = strlen(folder) + 64;
    return size > tail && memcmp(real + size - tail, folder, strlen(folder)) == 0 &&
           fsti_digest_read(real + size - 64, 32, digest);
}

/// The state of a scan.
typedef struct scan_pass {
    const file_digests *expected;
    fsti_file *file;
    const char *name;
    scanned_file *made;
    fsti_header *header; ///< only if tensors are digested
    const fsti_digest_kind *kind;
    void *state;        ///< of the whole file, or of the current tensor
    void *header_state; ///< of the bytes up to the end of the header
    char *buffer;
    size_t tensor;                               ///< next tensor in file order
    unsigned char parsed[FSTI_DIGEST_BYTES_MAX]; ///< BLAKE3 of the length and the header
} scan_pass;

static fst_status refuse(const scan_pass *pass, fst_status status, const char *what,
                         fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = fsti_file_path(pass->file);
    return fsti_error_set(error, status, location, "%s", what);
}

// ---- embedded digests ----

static const char *find_metadata(const fsti_header *header, const char *prefix, const char *name) {
    size_t prefix_size = strlen(prefix), name_size = strlen(name);
    for (size_t i = 0; header != NULL && i < header->metadata_count; i++) {
        const fsti_metadata_pair *pair = &header->metadata[i];
        const char *key = header->bytes + pair->key.at;
        if (pair->key.size == prefix_size + name_size && memcmp(key, prefix, prefix_size) == 0 &&
            memcmp(key + prefix_size, name, name_size) == 0)
            return header->bytes + pair->value.at;
    }
    return NULL;
}

/// Digests the parsed header, to verify later that the scan reads the same bytes.
static bool hash_header(const char *bytes, size_t size, unsigned char *digest) {
    unsigned char length[FSTI_FORMAT_LENGTH_BYTES];
    (void)fsti_number_store(length, size, sizeof length);
    void *state = fsti_digest_blake3.begin();
    return state != NULL && fsti_digest_blake3.update(state, length, sizeof length) &&
           fsti_digest_blake3.update(state, bytes, size) && fsti_digest_blake3.end(state, digest);
}

static fst_status read_header(scan_pass *pass, fst_error *error) {
    fsti_header_rules rules = {.path = fsti_file_path(pass->file),
                               .file_size = fsti_file_size(pass->file),
                               .hash_key = fsti_hash_key()};
    size_t size = (size_t)(pass->made->file.header_bytes - FSTI_FORMAT_LENGTH_BYTES), got;
    char *bytes = fsti_alloc(size + FSTI_FORMAT_PADDING_BYTES);
    if (bytes == NULL) return fsti_error_memory(error, size);
    memset(bytes + size, 0, FSTI_FORMAT_PADDING_BYTES);
    fst_status status =
        fsti_file_read(pass->file, bytes, size, FSTI_FORMAT_LENGTH_BYTES, &got, error);
    if (status == FST_OK && got < size)
        status = refuse(pass, FST_E_SHORT_READ, "the file became shorter while it was read", error);
    if (status == FST_OK && !hash_header(bytes, size, pass->parsed))
        status = fsti_error_memory(error, size);
    if (status == FST_OK) return fsti_header_parse(bytes, size, &rules, &pass->header, error);
    fsti_free(bytes);
    return status;
}

/// Parses the header that has the tensors' expected digests.
static fst_status begin_tensors(scan_pass *pass, fst_error *error) {
    FST_TRY(read_header(pass, error));
    const char *algorithm = find_metadata(pass->header, ALGORITHM_KEY, "");
    if (algorithm != NULL && fsti_packed_is(pass->header))
        return refuse(
            pass, FST_E_UNSUPPORTED,
            "the digests of a compressed file describe the original tensors. Verify it with "
            "a manifest ('hash --manifest' makes one) or with 'verify --hash'",
            error);
    if (algorithm == NULL)
        return refuse(pass, FST_E_NOT_FOUND,
                      "no digests to verify against. Create a manifest with 'fastsafetensors hash "
                      "--manifest' "
                      "(also accepted: SHA256SUMS, a .digest file, digests in the header, file "
                      "names of the Hub's cache)",
                      error);
    pass->kind = fsti_digest_of_stored_name(algorithm, strlen(algorithm));
    if (pass->kind != NULL) return pass->kind->ready(error);
    return refuse(pass, FST_E_MANIFEST, "the embedded digests use an unknown algorithm", error);
}

/// Verifies a tensor that has ended against its embedded digest.
static fst_status end_tensor(scan_pass *pass, fst_error *error) {
    const fsti_tensor *tensor = &pass->header->tensors[pass->tensor];
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    char text[2 * FSTI_DIGEST_BYTES_MAX + 1];
    const char *name = fsti_header_name(pass->header, tensor);
    bool good = pass->kind->end(pass->state, digest);
    pass->state = NULL;
    if (!good) return fsti_error_memory(error, FSTI_DIGEST_BYTES_MAX);
    const char *known = find_metadata(pass->header, TENSOR_KEY, name);
    fsti_digest_print(digest, pass->kind->digest_bytes, text);
    if (known != NULL && strcmp(known, text) == 0) return FST_OK;
    if (known == NULL && fsti_header_is_padding(pass->header, tensor)) return FST_OK;
    fsti_error_location location = {.file = fsti_file_path(pass->file),
                                    .tensor = name,
                                    .tensor_size = tensor->name_size,
                                    .byte_offset = pass->header->data_begin + tensor->begin};
    return fsti_error_set(error, FST_E_DIGEST, location,
                          known == NULL ? "the embedded digests lack this tensor"
                                        : "its bytes do not match the embedded %s digest",
                          pass->kind->name);
}

/// Digests the part of [begin, end) that belongs to tensors.
static fst_status take_tensors(scan_pass *pass, uint64_t begin, size_t size, fst_error *error) {
    uint64_t data = pass->header->data_begin;
    for (; pass->tensor < pass->header->tensor_count; pass->tensor++) {
        const fsti_tensor *tensor = &pass->header->tensors[pass->tensor];
        uint64_t from = fsti_max(data + tensor->begin, begin);
        uint64_t until = fsti_min(data + tensor->end, begin + size);
        if (data + tensor->begin > begin + size) break;
        if (pass->state == NULL) pass->state = pass->kind->begin();
        if (pass->state == NULL) return fsti_error_memory(error, FSTI_DIGEST_BYTES_MAX);
        if (from < until &&
            !pass->kind->update(pass->state, pass->buffer + (from - begin), (size_t)(until - from)))
            return fsti_error_memory(error, FSTI_DIGEST_BYTES_MAX);
        if (data + tensor->end > begin + size) break;
        FST_TRY(end_tensor(pass, error));
    }
    return FST_OK;
}

// ---- scanning ----

static fst_status take_chunk(scan_pass *pass, uint64_t begin, size_t size, fst_error *error) {
    fsti_manifest_file *file = &pass->made->file;
    unsigned char *chunk = pass->made->chunks + begin / CHUNK * fsti_digest_blake3.digest_bytes;
    bool good = fsti_digest_blake3.hash(pass->buffer, size, chunk);
    if (begin < file->header_bytes)
        good &= fsti_digest_blake3.update(pass->header_state, pass->buffer,
                                          (size_t)fsti_min(size, file->header_bytes - begin));
    if (pass->header != NULL) FST_TRY(take_tensors(pass, begin, size, error));
    if (pass->header == NULL) good &= pass->kind->update(pass->state, pass->buffer, size);
    return good ? FST_OK : fsti_error_memory(error, CHUNK);
}

static fst_status read_all(scan_pass *pass, fst_error *error) {
    uint64_t file_bytes = pass->made->file.size_bytes;
    for (uint64_t at = 0; at < file_bytes; at += CHUNK) {
        size_t size = (size_t)fsti_min(CHUNK, file_bytes - at), got;
        FST_TRY(fsti_file_read(pass->file, pass->buffer, size, at, &got, error));
        if (got < size)
            return refuse(pass, FST_E_SHORT_READ, "the file became shorter while it was read",
                          error);
        FST_TRY(take_chunk(pass, at, size, error));
    }
    return fsti_file_check(pass->file, error);
}

/// Verifies the whole file's digest against its list or its name in the Hub cache.
static fst_status check_file(scan_pass *pass, fst_error *error) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX], hub[32];
    char real[PATH_MAX];
    const unsigned char *known = fsti_file_digests_lookup(pass->expected, pass->name);
    bool good = pass->kind->end(pass->state, digest);
    pass->state = NULL;
    if (!good) return fsti_error_memory(error, FSTI_DIGEST_BYTES_MAX);
    if (pass->expected->source == FST_VERIFIED_BY_HUB) {
        const char *path = fsti_file_path(pass->file);
        bool is_named = path != NULL && realpath(path, real) != NULL;
        known = is_named && fsti_file_digests_hub(real, hub) ? hub : NULL;
        if (known == NULL)
            return refuse(
                pass, FST_E_NOT_FOUND,
                "no digest to verify it against: its name in the Hub's cache is not a SHA-256",
                error);
    }
    if (known == NULL) return refuse(pass, FST_E_DIGEST, "the digest list lacks it", error);
    if (memcmp(digest, known, pass->kind->digest_bytes) == 0) return FST_OK;
    return refuse(pass, FST_E_DIGEST, "its bytes do not match the digest of the whole file", error);
}

/// Reads the header's length from the first bytes. An invalid length is reported by the parser.
static fst_status measure_header(scan_pass *pass, fst_error *error) {
    unsigned char start[FSTI_FORMAT_LENGTH_BYTES] = {0};
    uint64_t size = pass->made->file.size_bytes, header_bytes;
    size_t got;
    fsti_header_rules rules = {.path = fsti_file_path(pass->file), .file_size = size};
    FST_TRY(fsti_file_read(pass->file, start, sizeof start, 0, &got, error));
    FST_TRY(fsti_header_length(start, &rules, &header_bytes, error));
    pass->made->file.header_bytes = FSTI_FORMAT_LENGTH_BYTES + header_bytes;
    return FST_OK;
}

static fst_status begin_pass(scan_pass *pass, fst_error *error) {
    uint64_t count = fsti_digest_chunk_count(pass->made->file.size_bytes, CHUNK);
    pass->buffer = fsti_alloc(CHUNK);
    pass->made->chunks = fsti_alloc(count * fsti_digest_blake3.digest_bytes + 1);
    pass->made->file.digests = pass->made->chunks;
    if (pass->buffer == NULL || pass->made->chunks == NULL) return fsti_error_memory(error, CHUNK);
    FST_TRY(measure_header(pass, error));
    if (pass->expected->source == FST_VERIFIED_BY_TENSORS) FST_TRY(begin_tensors(pass, error));
    pass->header_state = fsti_digest_blake3.begin();
    if (pass->header == NULL) pass->state = pass->kind->begin();
    bool good = pass->header_state != NULL && (pass->header != NULL || pass->state != NULL);
    return good ? FST_OK : fsti_error_memory(error, FSTI_DIGEST_BYTES_MAX);
}

static fst_status run_pass(scan_pass *pass, fst_error *error) {
    FST_TRY(begin_pass(pass, error));
    FST_TRY(read_all(pass, error));
    bool good = fsti_digest_blake3.end(pass->header_state, pass->made->file.header);
    pass->header_state = NULL;
    if (!good) return fsti_error_memory(error, FSTI_DIGEST_BYTES_MAX);
    if (pass->header == NULL) return check_file(pass, error);
    bool same = memcmp(pass->made->file.header, pass->parsed, sizeof pass->parsed) == 0;
    if (same && pass->tensor == pass->header->tensor_count) return FST_OK;
    return refuse(pass, FST_E_FILE_CHANGED, "the file was modified while it was read", error);
}

fst_status fsti_file_digests_scan(file_digests *expected, const named_file *file,
                                  const fsti_manifest_file **listed, fst_error *error) {
    if (!fsti_array_reserve((void **)&expected->scans, &expected->scan_capacity,
                            expected->scan_count, sizeof *expected->scans, UINT32_MAX))
        return fsti_error_memory(error, sizeof *expected->scans);
    scan_pass pass = {
        .expected = expected, .file = file->file, .name = file->name, .kind = expected->kind};
    pass.made = fsti_alloc_zeroed(1, sizeof *pass.made);
    if (pass.made == NULL) return fsti_error_memory(error, sizeof *pass.made);
    pass.made->file.size_bytes = fsti_file_size(file->file);
    expected->scans[expected->scan_count++] = pass.made;
    fst_status status = run_pass(&pass, error);
    if (pass.state != NULL && pass.kind != NULL) pass.kind->end(pass.state, NULL);
    if (pass.header_state != NULL) fsti_digest_blake3.end(pass.header_state, NULL);
    fsti_header_unref(pass.header);
    fsti_free(pass.buffer);
    if (status == FST_OK) expected->kind = pass.kind;
    *listed = &pass.made->file;
    return status;
}
