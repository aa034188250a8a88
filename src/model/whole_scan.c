// SPDX-License-Identifier: Apache-2.0
/// One pass over a file: its whole digest or those of its tensors, and one of each chunk.
#include "whole_scan.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define ALGORITHM_KEY "digest.algorithm"
#define TENSOR_KEY "digest.tensor."
#define CHUNK FSTI_WHOLE_CHUNK_BYTES

bool fsti_whole_hub_digest(const char *real, unsigned char *digest) {
    static const char folder[] = "/blobs/";
    size_t size = strlen(real), tail = strlen(folder) + 64;
    return size > tail && memcmp(real + size - tail, folder, strlen(folder)) == 0 &&
           fsti_digest_read(real + size - 64, 32, digest);
}

/// A pass on its way.
typedef struct whole_pass {
    const whole_digests *whole;
    fsti_file *file;
    const char *name;
    whole_listed *made;
    fsti_header *header; ///< only where tensors are digested
    const fsti_digest_kind *kind;
    void *state;        ///< of the whole file, or of the tensor that is being read
    void *header_state; ///< of the bytes up to the header's end
    char *buffer;
    size_t tensor;                               ///< the next one, in file order
    unsigned char parsed[FSTI_DIGEST_BYTES_MAX]; ///< BLAKE3 of the length and the header
} whole_pass;

static fst_status refuse(const whole_pass *pass, fst_status status, const char *what,
                         fst_error *error) {
    fsti_error_place place = FSTI_NOWHERE;
    place.file = fsti_file_path(pass->file);
    return fsti_error_set(error, status, place, "%s", what);
}

// ---- digests inside ----

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

/// What is parsed is known again when the pass comes by.
static bool hash_header(const char *bytes, size_t size, unsigned char *digest) {
    unsigned char length[FSTI_FORMAT_LENGTH_BYTES];
    for (uint32_t i = 0; i < sizeof length; i++)
        length[i] = (unsigned char)((uint64_t)size >> 8 * i);
    void *state = fsti_digest_blake3.begin();
    return state != NULL && fsti_digest_blake3.update(state, length, sizeof length) &&
           fsti_digest_blake3.update(state, bytes, size) && fsti_digest_blake3.end(state, digest);
}

static fst_status read_header(whole_pass *pass, fst_error *error) {
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
        status = refuse(pass, FST_E_SHORT_READ, "the file ended meanwhile", error);
    if (status == FST_OK && !hash_header(bytes, size, pass->parsed))
        status = fsti_error_memory(error, size);
    if (status == FST_OK) return fsti_header_parse(bytes, size, &rules, &pass->header, error);
    fsti_free(bytes);
    return status;
}

/// The header that says what tensors should be.
static fst_status begin_tensors(whole_pass *pass, fst_error *error) {
    FST_TRY(read_header(pass, error));
    if (fsti_packed_is(pass->header))
        return refuse(pass, FST_E_UNSUPPORTED,
                      "a compressed file's digests are of tensors as they were: hold it against a "
                      "manifest, which 'hash --manifest' makes, or compare by 'verify --hash'",
                      error);
    const char *algorithm = find_metadata(pass->header, ALGORITHM_KEY, "");
    if (algorithm == NULL)
        return refuse(pass, FST_E_NOT_FOUND,
                      "nothing to verify it with: neither a manifest, which 'hash --manifest' "
                      "makes, nor sums, a .digest beside it, digests inside, or a name that the "
                      "Hub's cache gave it",
                      error);
    pass->kind = fsti_digest_of_kept(algorithm, strlen(algorithm));
    if (pass->kind != NULL) return pass->kind->ready(error);
    return refuse(pass, FST_E_MANIFEST, "its digests inside are of an unknown algorithm", error);
}

/// Holds the tensor that has just ended against what is inside.
static fst_status end_tensor(whole_pass *pass, fst_error *error) {
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
    if (known == NULL && fsti_header_is_filler(pass->header, tensor)) return FST_OK;
    fsti_error_place place = {.file = fsti_file_path(pass->file),
                              .tensor = name,
                              .tensor_size = tensor->name_size,
                              .byte_offset = pass->header->data_begin + tensor->begin};
    return fsti_error_set(error, FST_E_DIGEST, place,
                          known == NULL ? "the digests inside have none of this tensor"
                                        : "its bytes differ from the %s digest inside",
                          pass->kind->name);
}

/// Takes what [begin, begin + size) has of tensors.
static fst_status take_tensors(whole_pass *pass, uint64_t begin, size_t size, fst_error *error) {
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

// ---- the pass ----

static fst_status take_chunk(whole_pass *pass, uint64_t begin, size_t size, fst_error *error) {
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

static fst_status read_all(whole_pass *pass, fst_error *error) {
    uint64_t file_bytes = pass->made->file.size_bytes;
    for (uint64_t at = 0; at < file_bytes; at += CHUNK) {
        size_t size = (size_t)fsti_min(CHUNK, file_bytes - at), got;
        FST_TRY(fsti_file_read(pass->file, pass->buffer, size, at, &got, error));
        if (got < size) return refuse(pass, FST_E_SHORT_READ, "the file ended meanwhile", error);
        FST_TRY(take_chunk(pass, at, size, error));
    }
    return fsti_file_check(pass->file, error);
}

/// What the whole file's digest should be, by its list or by its name in the Hub's cache.
static fst_status hold_whole(whole_pass *pass, fst_error *error) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX], hub[32];
    char real[PATH_MAX];
    const unsigned char *known = fsti_whole_known(pass->whole, pass->name);
    bool good = pass->kind->end(pass->state, digest);
    pass->state = NULL;
    if (!good) return fsti_error_memory(error, FSTI_DIGEST_BYTES_MAX);
    if (pass->whole->source == FST_VERIFIED_BY_HUB) {
        const char *path = fsti_file_path(pass->file);
        bool is_named = path != NULL && realpath(path, real) != NULL;
        known = is_named && fsti_whole_hub_digest(real, hub) ? hub : NULL;
        if (known == NULL)
            return refuse(pass, FST_E_NOT_FOUND,
                          "nothing to verify it with: its name in the Hub's cache is no SHA-256",
                          error);
    }
    if (known == NULL)
        return refuse(pass, FST_E_DIGEST, "the list of digests does not have it", error);
    if (memcmp(digest, known, pass->kind->digest_bytes) == 0) return FST_OK;
    return refuse(pass, FST_E_DIGEST, "its bytes are not the ones of the digest of the whole file",
                  error);
}

/// Up to where the header goes, by its first bytes; where they lie, the parser will say it.
static fst_status measure_header(whole_pass *pass, fst_error *error) {
    unsigned char start[FSTI_FORMAT_LENGTH_BYTES] = {0};
    uint64_t size = pass->made->file.size_bytes, header_bytes;
    size_t got;
    fsti_header_rules rules = {.path = fsti_file_path(pass->file), .file_size = size};
    FST_TRY(fsti_file_read(pass->file, start, sizeof start, 0, &got, error));
    FST_TRY(fsti_header_length(start, &rules, &header_bytes, error));
    pass->made->file.header_bytes = FSTI_FORMAT_LENGTH_BYTES + header_bytes;
    return FST_OK;
}

static fst_status begin_pass(whole_pass *pass, fst_error *error) {
    uint64_t count = fsti_digest_chunk_count(pass->made->file.size_bytes, CHUNK);
    pass->buffer = fsti_alloc(CHUNK);
    pass->made->chunks = fsti_alloc(count * fsti_digest_blake3.digest_bytes + 1);
    pass->made->file.digests = pass->made->chunks;
    if (pass->buffer == NULL || pass->made->chunks == NULL) return fsti_error_memory(error, CHUNK);
    FST_TRY(measure_header(pass, error));
    if (pass->whole->source == FST_VERIFIED_BY_TENSORS) FST_TRY(begin_tensors(pass, error));
    pass->header_state = fsti_digest_blake3.begin();
    if (pass->header == NULL) pass->state = pass->kind->begin();
    bool good = pass->header_state != NULL && (pass->header != NULL || pass->state != NULL);
    return good ? FST_OK : fsti_error_memory(error, FSTI_DIGEST_BYTES_MAX);
}

static fst_status run_pass(whole_pass *pass, fst_error *error) {
    FST_TRY(begin_pass(pass, error));
    FST_TRY(read_all(pass, error));
    bool good = fsti_digest_blake3.end(pass->header_state, pass->made->file.header);
    pass->header_state = NULL;
    if (!good) return fsti_error_memory(error, FSTI_DIGEST_BYTES_MAX);
    if (pass->header == NULL) return hold_whole(pass, error);
    bool same = memcmp(pass->made->file.header, pass->parsed, sizeof pass->parsed) == 0;
    if (same && pass->tensor == pass->header->tensor_count) return FST_OK;
    return refuse(pass, FST_E_FILE_CHANGED, "the file was written to meanwhile", error);
}

fst_status fsti_whole_scan(whole_digests *whole, const whole_file *file,
                           const fsti_manifest_file **listed, fst_error *error) {
    if (!fsti_array_reserve((void **)&whole->scans, &whole->scan_capacity, whole->scan_count,
                            sizeof *whole->scans, UINT32_MAX))
        return fsti_error_memory(error, sizeof *whole->scans);
    whole_pass pass = {.whole = whole, .file = file->file, .name = file->name, .kind = whole->kind};
    pass.made = fsti_alloc_zeroed(1, sizeof *pass.made);
    if (pass.made == NULL) return fsti_error_memory(error, sizeof *pass.made);
    pass.made->file.size_bytes = fsti_file_size(file->file);
    whole->scans[whole->scan_count++] = pass.made;
    fst_status status = run_pass(&pass, error);
    if (pass.state != NULL && pass.kind != NULL) pass.kind->end(pass.state, NULL);
    if (pass.header_state != NULL) fsti_digest_blake3.end(pass.header_state, NULL);
    fsti_header_unref(pass.header);
    fsti_free(pass.buffer);
    if (status == FST_OK) whole->kind = pass.kind;
    *listed = &pass.made->file;
    return status;
}
