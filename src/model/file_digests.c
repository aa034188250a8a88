// SPDX-License-Identifier: Apache-2.0
/// Finds digests of whole files: checksum lists, signed bundles, sidecars, names in the Hub cache.
#include "file_digests.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "location/location.h"
#include "file_digests_scan.h"

#define SIDECAR_START "fastsafetensors-digest 1 "

void fsti_file_digests_close(file_digests *expected) {
    if (expected == NULL) return;
    for (size_t i = 0; i < expected->scan_count; i++) {
        fsti_free(expected->scans[i]->chunks);
        fsti_free(expected->scans[i]);
    }
    fsti_free(expected->scans);
    fsti_sums_clear(&expected->sums);
    if (expected->has_bundle) fsti_signed_bundle_close(&expected->bundle);
    fsti_free(expected);
}

static fst_status make_file_digests(fst_verified_by source, const fsti_digest_kind *kind,
                                    file_digests **out, fst_error *error) {
    FST_TRY(kind->ready(error));
    *out = fsti_alloc_zeroed(1, sizeof **out);
    if (*out == NULL) {
        (void)fsti_error_memory(error, sizeof **out);
        return FST_E_NO_MEMORY;
    }
    (*out)->source = source;
    (*out)->kind = kind;
    return FST_OK;
}

fst_status fsti_file_digests_embedded(file_digests **out, fst_error *error) {
    return make_file_digests(FST_VERIFIED_BY_TENSORS, &fsti_digest_xxh3_64, out, error);
}

/// On failure frees *out. Returns `status`.
static fst_status pin(fst_status status, file_digests **out) {
    if (status == FST_OK) return FST_OK;
    fsti_file_digests_close(*out);
    *out = NULL;
    return status;
}

static fst_status read_sidecar(const char *path, char *bytes, size_t byte_count, file_digests **out,
                               fst_error *error) {
    const char *name = bytes + strlen(SIDECAR_START);
    const char *end = memchr(name, '\n', byte_count - strlen(SIDECAR_START));
    const fsti_digest_kind *kind =
        end == NULL ? NULL : fsti_digest_of_stored_name(name, (size_t)(end - name));
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    fst_status status =
        kind == NULL ? fsti_error_set(error, FST_E_MANIFEST, location, "unknown digest algorithm")
                     : make_file_digests(FST_VERIFIED_BY_SIDECAR, kind, out, error);
    if (status != FST_OK) {
        fsti_free(bytes);
        return status;
    }
    return pin(fsti_sidecar_parse(bytes, byte_count, kind, &(*out)->sums, location, error), out);
}

fst_status fsti_file_digests_read(const char *path, char *bytes, size_t byte_count,
                                  file_digests **out, fst_error *error) {
    *out = NULL;
    if (byte_count > strlen(SIDECAR_START) &&
        memcmp(bytes, SIDECAR_START, strlen(SIDECAR_START)) == 0)
        return read_sidecar(path, bytes, byte_count, out, error);
    if (!fsti_sums_peek(bytes, byte_count)) return FST_OK;
    fst_status status = make_file_digests(FST_VERIFIED_BY_SUMS, &fsti_digest_sha256, out, error);
    if (status != FST_OK) {
        fsti_free(bytes);
        return status;
    }
    return pin(fsti_sums_parse(bytes, byte_count, path, &(*out)->sums, error), out);
}

// ---- searching ----

/// Reads the file `start` + `end` if it exists and is a list. *found is its path.
static fst_status try_list(const char *start, const char *end, file_digests **out, char **found,
                           fst_error *error) {
    path_kind found_kind = PATH_IS_ABSENT;
    char *bytes;
    size_t byte_count;
    char *path = fsti_location_join(start, end),
         *redacted = path == NULL ? NULL : fsti_location_redact(path);
    if (redacted == NULL) {
        fsti_free(path);
        return fsti_error_memory(error, strlen(start));
    }
    fst_status status = fsti_model_path_kind(path, &found_kind, error);
    if (status == FST_OK && found_kind != PATH_IS_FILE) status = FST_E_NOT_FOUND;
    if (status == FST_OK) status = fsti_model_read_text(path, &bytes, &byte_count, error);
    if (status == FST_OK) {
        status = fsti_file_digests_read(redacted, bytes, byte_count, out, error);
        if (status == FST_OK && *out == NULL) {
            // A list next to the model must be usable; weaker digests do not replace it.
            fsti_error_location location = {.file = redacted, .byte_offset = FST_NO_OFFSET};
            fsti_free(bytes);
            status = fsti_error_set(error, FST_E_MANIFEST, location,
                                    "neither a list of sha256sum nor a digest file of 'hash "
                                    "--write' does");
        }
    }
    if (status == FST_OK && *out != NULL)
        *found = redacted;
    else
        fsti_free(redacted);
    bool is_absent = fsti_model_path_is_absent(path, status);
    fsti_free(path);
    return is_absent ? FST_OK : status;
}

/// Whether a path leads into the Hub cache: a file in a folder "blobs" whose real name is a
/// SHA-256, or a snapshot folder.
static bool is_in_hub(const char *path) {
    char real[PATH_MAX + sizeof "/../../blobs"];
    unsigned char digest[32];
    struct stat info;
    if (realpath(path, real) == NULL) return false;
    if (fsti_file_digests_hub(real, digest)) return true;
    const char *slash = strrchr(real, '/');
    if (slash == NULL || slash - real < 10 || memcmp(slash - 10, "/snapshots", 10) != 0)
        return false;
    memcpy(real + strlen(real), "/../../blobs", sizeof "/../../blobs");
    return stat(real, &info) == 0 && S_ISDIR(info.st_mode);
}

static fst_status find_lists(const char *path, const char *folder, file_digests **out, char **found,
                             fst_error *error) {
    static const char *const lists[] = {"SHA256SUMS", "SHA256SUMS.txt", "sha256sums.txt"};
    bool is_folder = fsti_ends_with(path, "/") || strncmp(path, folder, strlen(path)) == 0;
    if (!is_folder) FST_TRY(try_list(path, ".sha256", out, found, error));
    for (size_t i = 0; i < sizeof lists / sizeof *lists && *out == NULL; i++)
        FST_TRY(try_list(folder, lists[i], out, found, error));
    return FST_OK;
}

/// `hash --write` puts a folder's sidecar next to the folder that the path leads to.
static fst_status find_sidecar(const char *path, file_digests **out, char **found,
                               fst_error *error) {
    char real[PATH_MAX];
    struct stat info;
    bool is_folder =
        !fsti_location_looks_like_url(path) && stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    // Below a parent that may not be searched only the given path leads there.
    if (is_folder && realpath(path, real) != NULL && stat(real, &info) == 0) path = real;
    size_t size = strlen(path);
    while (size > 1 && path[size - 1] == '/') size--;
    char *trimmed = fsti_string_copy(path, size);
    if (trimmed == NULL) return fsti_error_memory(error, size);
    fst_status status = try_list(trimmed, ".digest", out, found, error);
    fsti_free(trimmed);
    return status;
}

static fst_status open_bundle(const model_request *request, file_digests **out, char **found,
                              fst_error *error) {
    FST_TRY(make_file_digests(FST_VERIFIED_BY_BUNDLE, &fsti_digest_sha256, out, error));
    fst_status status =
        fsti_signed_bundle_open(request->signature, request->public_key, &(*out)->bundle, error);
    (*out)->has_bundle = status == FST_OK;
    if (status == FST_OK) *found = fsti_location_redact(request->signature);
    if (status == FST_OK && *found == NULL) status = fsti_error_memory(error, 1);
    return pin(status, out);
}

fst_status fsti_file_digests_find(const char *path, const char *folder,
                                  const model_request *request, file_digests **out, char **found,
                                  fst_error *error) {
    *out = NULL;
    // If a signature is required, only a bundle counts.
    if (request->signature != NULL) return open_bundle(request, out, found, error);
    FST_TRY(find_lists(path, folder, out, found, error));
    if (*out == NULL && is_in_hub(path)) {
        FST_TRY(make_file_digests(FST_VERIFIED_BY_HUB, &fsti_digest_sha256, out, error));
        *found = fsti_string_copy(path, strlen(path));
        return pin(*found == NULL ? fsti_error_memory(error, 1) : FST_OK, out);
    }
    return *out == NULL ? find_sidecar(path, out, found, error) : FST_OK;
}

bool fsti_file_digests_are_signed(const file_digests *expected) { return expected->has_bundle; }

bool fsti_file_digests_match(const file_digests *expected, const char *name, const char *bytes,
                             size_t byte_count) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    const unsigned char *known = fsti_file_digests_lookup(expected, name);
    if (known == NULL) return expected->source >= FST_VERIFIED_BY_HUB;
    return expected->kind->hash(bytes, byte_count, digest) &&
           memcmp(digest, known, expected->kind->digest_bytes) == 0;
}

void fsti_file_digests_describe(const file_digests *expected, fst_verification *out) {
    out->source = expected->source;
    out->digest = expected->kind->number;
    out->chunk_bytes = 0;
    out->file_count =
        expected->has_bundle ? expected->bundle.statement.file_count : expected->sums.file_count;
}
