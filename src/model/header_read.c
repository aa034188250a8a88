// SPDX-License-Identifier: Apache-2.0
/// Reads a file's header: usually with one read, large ones with two.
#include <string.h>

#include "packed_file.h"

/// Enough for the header of a few hundred tensors.
#define FIRST_READ_BYTES ((size_t)64 << 10)

static fst_status file_ended(const fsti_file *file, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = fsti_file_path(file);
    return fsti_error_set(error, FST_E_SHORT_READ, location, "the file ended inside its header");
}

/// Reads the rest of a header after the `have` bytes of the first read.
static fst_status read_rest(model_file *target, char **bytes, size_t have, size_t header_bytes,
                            fst_error *error) {
    size_t wanted = FSTI_FORMAT_LENGTH_BYTES + header_bytes, got;
    char *grown = fsti_realloc(*bytes, wanted + FSTI_FORMAT_PADDING_BYTES);
    if (grown == NULL) return fsti_error_memory(error, wanted);
    *bytes = grown;
    if (have < wanted) {
        FST_TRY(fsti_file_read(target->file, grown + have, wanted - have, have, &got, error));
        if (got < wanted - have) return file_ended(target->file, error);
    }
    // Move the text to the start of the block, without the length field, followed by zeros.
    memmove(grown, grown + FSTI_FORMAT_LENGTH_BYTES, header_bytes);
    memset(grown + header_bytes, 0, FSTI_FORMAT_PADDING_BYTES);
    return FST_OK;
}

/// Adds the kind of a refused file to its error, if its first bytes identify it. The status stays.
static fst_status name_kind(fsti_file *file, const fsti_header_rules *rules, fst_status status,
                            fst_error *error) {
    char start[KIND_READ_BYTES], kind[200];
    size_t wanted = (size_t)fsti_min(rules->file_size, sizeof start), got = 0;
    if (error == NULL || status < FST_E_HEADER_TOO_SMALL || status > FST_E_INVALID_HEADER_JSON ||
        fsti_file_read(file, start, wanted, 0, &got, NULL) != FST_OK ||
        !fsti_model_file_kind(start, got, rules->file_size, kind, sizeof kind))
        return status;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = rules->path;
    return fsti_error_set(error, status, location, "not a safetensors file: it is %s", kind);
}

static fst_status refuse_digest(const fsti_file *file, const char *what, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = fsti_file_path(file);
    return fsti_error_set(error, FST_E_DIGEST, location, "%s does not match the manifest", what);
}

/// Verifies size and header digest against the manifest before the header is parsed.
static fst_status check_header(const model_file *target, const fsti_manifest_file *listed,
                               const char *bytes, fst_error *error) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    const fsti_digest_kind *kind = target->digests.kind;
    if (kind == NULL || !kind->hash(bytes, (size_t)listed->header_bytes, digest) ||
        memcmp(digest, listed->header, kind->digest_bytes) != 0)
        return refuse_digest(target->file, "its header", error);
    return FST_OK;
}

/// Finds the manifest entry of the file. *listed stays NULL without a manifest.
static fst_status find_digests(const fst_model *model, model_file *target,
                               const fsti_manifest_file **listed, fst_error *error) {
    model_verification *verification = model->verification;
    *listed = NULL;
    if (verification == NULL) return FST_OK;
    FST_TRY(fsti_verification_list(verification, target->file, listed, error));
    if ((*listed)->size_bytes != fsti_file_size(target->file))
        return refuse_digest(target->file, "its size", error);
    if ((*listed)->header_bytes == 0)
        return refuse_digest(target->file, "that it is a safetensors file", error);
    target->digests = (fsti_digest_list){.kind = verification->manifest.kind,
                                         .digests = (*listed)->digests,
                                         .file_bytes = (*listed)->size_bytes,
                                         .chunk_bytes = verification->manifest.chunk_bytes};
    return FST_OK;
}

static fst_status read_header(model_file *target, const fsti_header_rules *rules,
                              const fsti_manifest_file *listed, char **bytes,
                              uint64_t *header_bytes, fst_error *error) {
    size_t first = (size_t)fsti_min(rules->file_size, FIRST_READ_BYTES), got;
    if (listed != NULL) first = (size_t)listed->header_bytes;
    *bytes = fsti_alloc(first + FSTI_FORMAT_PADDING_BYTES);
    if (*bytes == NULL) return fsti_error_memory(error, first);
    FST_TRY(fsti_file_read(target->file, *bytes, first, 0, &got, error));
    if (got < first) return file_ended(target->file, error);
    if (listed != NULL) FST_TRY(check_header(target, listed, *bytes, error));
    FST_TRY(fsti_header_length((unsigned char *)*bytes, rules, header_bytes, error));
    // The parsed bytes must be exactly the digested ones.
    if (listed != NULL && *header_bytes != first - FSTI_FORMAT_LENGTH_BYTES)
        return refuse_digest(target->file, "the length of its header", error);
    return read_rest(target, bytes, got, (size_t)*header_bytes, error);
}

fst_status fsti_model_file_open(const fst_model *model, const char *path, uint32_t flags,
                                model_file *out, fst_error *error) {
    fsti_file *file;
    FST_TRY(fsti_file_open(path, &file, error));
    return fsti_model_file_adopt(model, file, flags, out, error);
}

fst_status fsti_model_file_adopt(const fst_model *model, fsti_file *file, uint32_t flags,
                                 model_file *out, fst_error *error) {
    *out = (model_file){.file = file};
    fsti_header_rules rules = {.path = fsti_file_path(file),
                               .file_size = fsti_file_size(out->file),
                               .lenient = (flags & FST_OPEN_LENIENT) != 0,
                               .cut = (flags & FST_OPEN_CUT) != 0,
                               .hash_key = model->hash_key};
    char *bytes = NULL;
    uint64_t header_bytes = 0;
    const fsti_manifest_file *listed;
    if ((flags & FST_OPEN_PARTS) != 0) fsti_file_read_parts(file);
    fst_status status = find_digests(model, out, &listed, error);
    if (status == FST_OK) status = read_header(out, &rules, listed, &bytes, &header_bytes, error);
    if (status == FST_OK)
        status = fsti_header_parse(bytes, (size_t)header_bytes, &rules, &out->header, error);
    else
        fsti_free(bytes);
    fsti_file *stored = out->file; // lives as long as the derived file
    bool is_packed =
        status == FST_OK && (flags & FST_OPEN_STORED) == 0 && fsti_packed_is(out->header);
    if (is_packed) status = fsti_packed_file_open(model, out, flags, error);
    if (out->file != NULL) out->header_reads = fsti_file_read_count(stored);
    if (status == FST_OK) {
        out->padding_count = fsti_header_padding_count(out->header);
        return FST_OK;
    }
    if (is_packed) {
        fsti_model_file_clear(out);
        return status;
    }
    status = name_kind(out->file, &rules, status, error);
    // A server may have reported a wrong size, which the disk cache would keep.
    if (status <= FST_E_METADATA_INCOMPLETE_BUFFER) fsti_file_invalidate(stored);
    fsti_model_file_clear(out);
    return status;
}

void fsti_model_file_clear(model_file *file) {
    fsti_header_unref(file->header);
    fsti_header_unref(file->stored_header);
    fsti_file_unref(file->file);
    *file = (model_file){0};
}
