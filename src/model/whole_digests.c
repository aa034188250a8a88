// SPDX-License-Identifier: Apache-2.0
/// Lists of what whole files should be: where they lie and what they say.
#include "whole_digests.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "net/net.h"
#include "whole_scan.h"

#define SIDECAR_START "fastsafetensors-digest 1 "

void fsti_whole_close(whole_digests *whole) {
    if (whole == NULL) return;
    for (size_t i = 0; i < whole->scan_count; i++) {
        fsti_free(whole->scans[i]->chunks);
        fsti_free(whole->scans[i]);
    }
    fsti_free(whole->scans);
    fsti_sums_clear(&whole->sums);
    if (whole->has_bundle) fsti_signed_bundle_close(&whole->bundle);
    fsti_free(whole);
}

static fst_status make_whole(fst_verified_by source, const fsti_digest_kind *kind,
                             whole_digests **out, fst_error *error) {
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

fst_status fsti_whole_inside(whole_digests **out, fst_error *error) {
    return make_whole(FST_VERIFIED_BY_TENSORS, &fsti_digest_xxh3_64, out, error);
}

/// Takes `status` over: what was made goes where it is none that is good.
static fst_status settle(fst_status status, whole_digests **out) {
    if (status == FST_OK) return FST_OK;
    fsti_whole_close(*out);
    *out = NULL;
    return status;
}

static fst_status read_sidecar(const char *path, char *bytes, size_t byte_count,
                               whole_digests **out, fst_error *error) {
    const char *name = bytes + strlen(SIDECAR_START);
    const char *end = memchr(name, '\n', byte_count - strlen(SIDECAR_START));
    const fsti_digest_kind *kind =
        end == NULL ? NULL : fsti_digest_of_kept(name, (size_t)(end - name));
    fsti_error_place place = {.file = path, .byte_offset = FST_NO_OFFSET};
    fst_status status = kind == NULL
                            ? fsti_error_set(error, FST_E_MANIFEST, place,
                                             "digests by an algorithm that is not known here")
                            : make_whole(FST_VERIFIED_BY_SIDECAR, kind, out, error);
    if (status != FST_OK) {
        fsti_free(bytes);
        return status;
    }
    return settle(fsti_sidecar_parse(bytes, byte_count, kind, &(*out)->sums, place, error), out);
}

fst_status fsti_whole_read(const char *path, char *bytes, size_t byte_count, whole_digests **out,
                           fst_error *error) {
    *out = NULL;
    if (byte_count > strlen(SIDECAR_START) &&
        memcmp(bytes, SIDECAR_START, strlen(SIDECAR_START)) == 0)
        return read_sidecar(path, bytes, byte_count, out, error);
    if (!fsti_sums_peek(bytes, byte_count)) return FST_OK;
    fst_status status = make_whole(FST_VERIFIED_BY_SUMS, &fsti_digest_sha256, out, error);
    if (status != FST_OK) {
        fsti_free(bytes);
        return status;
    }
    return settle(fsti_sums_parse(bytes, byte_count, path, &(*out)->sums, error), out);
}

// ---- what lies there ----

/// The text at `start` + `end`, if it is a list: *found is its path.
static fst_status try_list(const char *start, const char *end, whole_digests **out, char **found,
                           fst_error *error) {
    path_look look = PATH_IS_ABSENT;
    char *bytes;
    size_t byte_count;
    char *path = fsti_model_join(start, end), *told = path == NULL ? NULL : fsti_model_tell(path);
    if (told == NULL) {
        fsti_free(path);
        return fsti_error_memory(error, strlen(start));
    }
    fst_status status = fsti_model_look(path, &look, error);
    if (status == FST_OK && look != PATH_IS_FILE) status = FST_E_NOT_FOUND;
    if (status == FST_OK) status = fsti_model_read_text(path, &bytes, &byte_count, error);
    if (status == FST_OK) {
        status = fsti_whole_read(told, bytes, byte_count, out, error);
        if (status == FST_OK && *out == NULL) {
            // Whoever put it there meant it to count: nothing weaker stands in for it.
            fsti_error_place place = {.file = told, .byte_offset = FST_NO_OFFSET};
            fsti_free(bytes);
            status = fsti_error_set(error, FST_E_MANIFEST, place,
                                    "not a list as sha256sum writes it, or a digest as 'hash "
                                    "--write' does");
        }
    }
    if (status == FST_OK && *out != NULL)
        *found = told;
    else
        fsti_free(told);
    // Who may not list a bucket is refused what is not there as well.
    bool is_absent =
        status == FST_E_NOT_FOUND || (status == FST_E_PERMISSION && fsti_net_is_url(path));
    fsti_free(path);
    return is_absent ? FST_OK : status;
}

/// Whether a path leads into the Hub's cache: a file whose true name is a SHA-256 in a folder
/// called blobs, or a snapshot's folder.
static bool is_in_hub(const char *path) {
    char real[PATH_MAX + sizeof "/../../blobs"];
    unsigned char digest[32];
    struct stat info;
    if (realpath(path, real) == NULL) return false;
    if (fsti_whole_hub_digest(real, digest)) return true;
    const char *slash = strrchr(real, '/');
    if (slash == NULL || slash - real < 10 || memcmp(slash - 10, "/snapshots", 10) != 0)
        return false;
    memcpy(real + strlen(real), "/../../blobs", sizeof "/../../blobs");
    return stat(real, &info) == 0 && S_ISDIR(info.st_mode);
}

static fst_status find_lists(const char *path, const char *folder, whole_digests **out,
                             char **found, fst_error *error) {
    static const char *const lists[] = {"SHA256SUMS", "SHA256SUMS.txt", "sha256sums.txt"};
    bool is_folder = fsti_ends_with(path, "/") || strncmp(path, folder, strlen(path)) == 0;
    if (!is_folder) FST_TRY(try_list(path, ".sha256", out, found, error));
    for (size_t i = 0; i < sizeof lists / sizeof *lists && *out == NULL; i++)
        FST_TRY(try_list(folder, lists[i], out, found, error));
    return FST_OK;
}

/// `hash --write` puts a folder's sidecar beside it.
static fst_status find_sidecar(const char *path, whole_digests **out, char **found,
                               fst_error *error) {
    size_t size = strlen(path);
    while (size > 1 && path[size - 1] == '/') size--;
    char *trimmed = fsti_string_copy(path, size);
    if (trimmed == NULL) return fsti_error_memory(error, size);
    fst_status status = try_list(trimmed, ".digest", out, found, error);
    fsti_free(trimmed);
    return status;
}

static fst_status open_bundle(const model_wish *wish, whole_digests **out, char **found,
                              fst_error *error) {
    FST_TRY(make_whole(FST_VERIFIED_BY_BUNDLE, &fsti_digest_sha256, out, error));
    fst_status status =
        fsti_signed_bundle_open(wish->signature, wish->public_key, &(*out)->bundle, error);
    (*out)->has_bundle = status == FST_OK;
    if (status == FST_OK) *found = fsti_model_tell(wish->signature);
    if (status == FST_OK && *found == NULL) status = fsti_error_memory(error, 1);
    return settle(status, out);
}

fst_status fsti_whole_find(const char *path, const char *folder, const model_wish *wish,
                           whole_digests **out, char **found, fst_error *error) {
    *out = NULL;
    // Whom a signature matters nothing else will do.
    if (wish->signature != NULL) return open_bundle(wish, out, found, error);
    FST_TRY(find_lists(path, folder, out, found, error));
    if (*out == NULL && is_in_hub(path)) {
        FST_TRY(make_whole(FST_VERIFIED_BY_HUB, &fsti_digest_sha256, out, error));
        *found = fsti_string_copy(path, strlen(path));
        return settle(*found == NULL ? fsti_error_memory(error, 1) : FST_OK, out);
    }
    return *out == NULL ? find_sidecar(path, out, found, error) : FST_OK;
}

bool fsti_whole_is_signed(const whole_digests *whole) { return whole->has_bundle; }

bool fsti_whole_holds(const whole_digests *whole, const char *name, const char *bytes,
                      size_t byte_count) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    const unsigned char *known = fsti_whole_known(whole, name);
    if (known == NULL) return whole->source >= FST_VERIFIED_BY_HUB;
    return whole->kind->hash(bytes, byte_count, digest) &&
           memcmp(digest, known, whole->kind->digest_bytes) == 0;
}

void fsti_whole_describe(const whole_digests *whole, fst_verification *out) {
    out->source = whole->source;
    out->digest = whole->kind->number;
    out->chunk_bytes = 0;
    out->file_count =
        whole->has_bundle ? whole->bundle.statement.file_count : whole->sums.file_count;
}
