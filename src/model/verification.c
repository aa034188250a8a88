// SPDX-License-Identifier: Apache-2.0
/// Finds what a model is verified against: the given manifest, or one next to the model.
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "location/location.h"
#include "file_digests.h"

#define FILE_ENDING ".manifest"
#define FOLDER_NAME "model.manifest"

void fsti_verification_close(model_verification *verification) {
    while (verification != NULL) {
        model_verification *next = verification->next;
        fsti_manifest_clear(&verification->manifest);
        fsti_file_digests_close(verification->expected);
        fsti_free(verification->path);
        fsti_free(verification->source);
        fsti_free(verification->folder);
        fsti_free(verification);
        verification = next;
    }
}

fst_status fsti_model_folder(const char *path, char **out, fst_error *error) {
    path_kind found_kind;
    FST_TRY(fsti_model_path_kind(path, &found_kind, error));
    *out = fsti_location_folder(path, found_kind == PATH_IS_FOLDER);
    return *out == NULL ? fsti_error_memory(error, strlen(path)) : FST_OK;
}

/// The path `start` + `end` if it exists; else *out is NULL.
static fst_status find_path(const char *start, const char *end, char **out, fst_error *error) {
    bool exists = false;
    *out = NULL;
    char *path = fsti_location_join(start, end);
    if (path == NULL) return fsti_error_memory(error, strlen(start));
    // A link whose target is missing is found, so that the missing manifest is an error.
    fst_status status = fsti_model_path_exists(path, &exists, error);
    if (status == FST_OK && exists)
        *out = path;
    else
        fsti_free(path);
    return status;
}

/// The manifest next to the model at `path`: *out is its path, or NULL.
static fst_status find_sibling(const char *path, const char *folder, bool is_dir, char **out,
                               fst_error *error) {
    *out = NULL;
    if (!is_dir) FST_TRY(find_path(path, FILE_ENDING, out, error));
    return *out != NULL ? FST_OK : find_path(folder, FOLDER_NAME, out, error);
}

/// Other digest sources: lists of whole files, or embedded digests.
static fst_status find_file_digests(const char *path, const char *folder,
                                    const model_request *request, model_verification *made,
                                    fst_error *error) {
    FST_TRY(fsti_file_digests_find(path, folder, request, &made->expected, &made->path, error));
    if (made->expected != NULL) return FST_OK;
    made->path = fsti_location_redact(path);
    if (made->path == NULL) return fsti_error_memory(error, strlen(path));
    return fsti_file_digests_embedded(&made->expected, error);
}

/// A manifest whose checksum line does not match is damaged.
static fst_status check_seal(const char *path, const char *bytes, size_t byte_count,
                             fst_error *error) {
    fsti_manifest found;
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    if (!fsti_manifest_peek(bytes, byte_count, &found))
        return fsti_error_set(error, FST_E_MANIFEST, location,
                              "not a manifest, or truncated. 'fastsafetensors hash "
                              "--manifest' creates one");
    FST_TRY(found.kind->ready(error));
    if (found.kind->hash(bytes, found.sealed_bytes, digest) &&
        memcmp(digest, found.seal, found.kind->digest_bytes) == 0)
        return FST_OK;
    return fsti_error_set(error, FST_E_MANIFEST, location,
                          "the manifest was modified: its checksum line does not match");
}

/// Resolves the folder of a path. It has a final slash only if it is the root.
static bool resolve_folder(const char *path, char *out) {
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    size_t size = slash == NULL ? 1 : (size_t)(slash - path) + 1;
    if (size >= sizeof folder) return false;
    memcpy(folder, slash == NULL ? "." : path, size);
    folder[size] = '\0';
    return realpath(folder, out) != NULL;
}

/// The part of a path below a folder; NULL: not below. Compares each folder along the path as
/// written, because lists contain the names of links to folders, not of their targets.
static const char *part_below(const char *path, const struct stat *folder) {
    char above[PATH_MAX];
    size_t size = strlen(path);
    do {
        struct stat info;
        while (size > 0 && path[size - 1] != '/') size--;
        if (size >= sizeof above) return NULL;
        memcpy(above, size > 0 ? path : ".", size > 0 ? size : 1);
        above[size > 0 ? size : 1] = '\0';
        if (stat(above, &info) == 0 && info.st_dev == folder->st_dev &&
            info.st_ino == folder->st_ino)
            return path + size;
        while (size > 0 && path[size - 1] == '/') size--;
    } while (size > 0);
    return NULL;
}

/// signed_name() for a remote bundle.
static const char *signed_below(const char *path, const char *bundle, char *text) {
    char folder[PATH_MAX];
    fsti_url_redact(bundle, folder, sizeof folder);
    char *slash = strrchr(folder, '/');
    if (slash == NULL) return NULL;
    slash[1] = '\0';
    bool is_below = strncmp(path, folder, strlen(folder)) == 0;
    return is_below && fsti_url_relative(path, folder, text, PATH_MAX) ? text : NULL;
}

/// A file's path relative to the folder that contains the bundle and is signed by it. NULL if it is
/// elsewhere, because a bundle may be stored separately. `text` has space for two paths.
static const char *signed_name(const char *path, const char *bundle, char *text) {
    char signed_folder[PATH_MAX];
    struct stat info;
    if (fsti_location_is_url(bundle)) return signed_below(path, bundle, text);
    const char *slash = strrchr(path, '/'), *name = slash == NULL ? path : slash + 1;
    if (!resolve_folder(bundle, signed_folder)) return NULL;
    const char *below = stat(signed_folder, &info) == 0 ? part_below(path, &info) : NULL;
    if (below != NULL) return below;
    // The path goes through a link into the folder.
    if (!resolve_folder(path, text)) return NULL;
    size_t prefix = strlen(signed_folder);
    if (prefix == 1) prefix = 0; // the root's slash is the first character
    if (strncmp(text, signed_folder, prefix) != 0) return NULL;
    if (text[prefix] != '/' || text[prefix + 1] == '\0') return NULL;
    snprintf(text + strlen(text), PATH_MAX, "/%s", name);
    return text + prefix + 1;
}

/// A manifest counts as signed if the bundle lists it with the digest of exactly this text. The
/// digest is of the bytes that are parsed later, not of another read of the file.
static fst_status check_signed(const model_verification *verification, const model_request *request,
                               const char *bytes, size_t byte_count, fst_error *error) {
    signed_bundle signed_by;
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    char text[2 * PATH_MAX];
    const char *name = signed_name(verification->path, request->signature, text);
    bool found = false;
    if (name == NULL) { // a bundle in another folder lists names without a path
        name = strrchr(verification->path, '/');
        name = name == NULL ? verification->path : name + 1;
    }
    FST_TRY(fsti_signed_bundle_open(request->signature, request->public_key, &signed_by, error));
    bool hashed = fsti_digest_sha256.hash(bytes, byte_count, digest);
    for (size_t i = 0; i < signed_by.statement.file_count && hashed && !found; i++) {
        const fsti_signed_file *file = &signed_by.statement.files[i];
        found = !file->is_listed_otherwise && file->name_size == strlen(name) &&
                memcmp(file->name, name, file->name_size) == 0 &&
                memcmp(file->digest, digest, 32) == 0;
    }
    fsti_signed_bundle_close(&signed_by);
    if (found) return FST_OK;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = verification->path;
    char *signature = fsti_location_redact(request->signature);
    if (signature == NULL) return fsti_error_memory(error, strlen(request->signature));
    fst_status status =
        fsti_error_set(error, FST_E_SIGNATURE, location,
                       "the signature does not cover this manifest: %.200s does not list it with "
                       "this digest",
                       signature);
    fsti_free(signature);
    return status;
}

static fst_status check_text(const model_verification *verification, const model_request *request,
                             const char *bytes, size_t byte_count, fst_error *error) {
    FST_TRY(check_seal(verification->path, bytes, byte_count, error));
    if (request->signature == NULL) return FST_OK;
    fsti_manifest found;
    if (fsti_manifest_peek(bytes, byte_count, &found) && !found.kind->is_secure)
        return fsti_error_set(error, FST_E_SIGNATURE, FSTI_NO_LOCATION,
                              "a manifest with %s digests can't be signed securely. Create "
                              "one with sha256 or blake3",
                              found.kind->name);
    return check_signed(verification, request, bytes, byte_count, error);
}

static fst_status read_manifest(model_verification *verification, const model_request *request,
                                fst_error *error) {
    char *bytes;
    size_t byte_count;
    struct stat info;
    if (!fsti_location_is_url(verification->source) && stat(verification->source, &info) == 0) {
        verification->device = (uint64_t)info.st_dev;
        verification->inode = (uint64_t)info.st_ino;
        verification->changed = info.st_ctim;
    }
    FST_TRY(fsti_model_read_text(verification->source, &bytes, &byte_count, error));
    fst_status status = request->signature == NULL
                            ? fsti_file_digests_read(verification->path, bytes, byte_count,
                                                     &verification->expected, error)
                            : FST_OK;
    if (status != FST_OK || verification->expected != NULL) return status;
    status = check_text(verification, request, bytes, byte_count, error);
    if (status == FST_OK)
        return fsti_manifest_parse(bytes, byte_count, verification->path, &verification->manifest,
                                   error);
    fsti_free(bytes);
    return status;
}

static bool is_same_file(const model_verification *verification) {
    struct stat info;
    return stat(verification->source, &info) == 0 &&
           (uint64_t)info.st_dev == verification->device &&
           (uint64_t)info.st_ino == verification->inode &&
           info.st_ctim.tv_sec == verification->changed.tv_sec &&
           info.st_ctim.tv_nsec == verification->changed.tv_nsec;
}

bool fsti_verification_same(const model_verification *verification) {
    for (; verification != NULL; verification = verification->next)
        if (verification->inode != 0 && !is_same_file(verification)) return false;
    return true;
}

/// Finds the manifest or other digests, without reading them.
static fst_status find_manifest(const char *path, const model_request *request,
                                model_verification *made, fst_error *error) {
    path_kind found_kind;
    if (fsti_location_is_bucket(path)) {
        char *bucket = fsti_location_join(path, "/");
        if (bucket == NULL) return fsti_error_memory(error, strlen(path));
        fst_status found = find_manifest(bucket, request, made, error);
        fsti_free(bucket);
        return found;
    }
    FST_TRY(fsti_model_path_kind(path, &found_kind, error));
    bool is_dir = found_kind == PATH_IS_FOLDER;
    char *folder = fsti_location_folder(path, is_dir);
    if (folder != NULL) made->folder = fsti_location_redact(folder);
    if (folder == NULL || made->folder == NULL) {
        fsti_free(folder);
        return fsti_error_memory(error, strlen(path));
    }
    fst_status status = FST_OK;
    if (request->manifest != NULL)
        made->source = fsti_string_copy(request->manifest, strlen(request->manifest));
    else
        status = find_sibling(path, folder, is_dir, &made->source, error);
    if (status == FST_OK && made->source != NULL)
        made->path = fsti_location_redact(made->source);
    else if (status == FST_OK && request->manifest == NULL)
        status = find_file_digests(path, folder, request, made, error);
    fsti_free(folder);
    return status == FST_OK && made->path == NULL ? fsti_error_memory(error, strlen(path)) : status;
}

/// All manifests of a load must have one chunk size, because a load divides all files at the same
/// offsets.
static fst_status check_chunks(const model_verification *made, const model_verification *before,
                               fst_error *error) {
    if (before == NULL || before->manifest.chunk_bytes == made->manifest.chunk_bytes) return FST_OK;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = made->path;
    return fsti_error_set(error, FST_E_UNSUPPORTED, location,
                          "chunks of %u bytes here and of %u bytes in %.200s. Use one chunk "
                          "size for both, or open the files one by one",
                          made->manifest.chunk_bytes, before->manifest.chunk_bytes, before->path);
}

fst_status fsti_verification_add(const char *path, const model_request *request,
                                 model_verification **list, fst_error *error) {
    if (request->manifest == NULL && (request->flags & FST_OPEN_VERIFY) == 0) return FST_OK;
    model_verification *made = fsti_alloc_zeroed(1, sizeof *made), *before = *list;
    if (made == NULL) return fsti_error_memory(error, sizeof *made);
    fst_status status = find_manifest(path, request, made, error);
    if (status == FST_OK && before != NULL && strcmp(before->path, made->path) == 0) {
        fsti_verification_close(made);
        return FST_OK;
    }
    if (status == FST_OK && made->expected == NULL) status = read_manifest(made, request, error);
    if (made->expected != NULL)
        made->manifest = (fsti_manifest){.kind = &fsti_digest_blake3,
                                         .chunk_bytes = FSTI_FILE_DIGESTS_CHUNK_BYTES};
    if (status == FST_OK) status = check_chunks(made, before, error);
    if (status != FST_OK) {
        fsti_verification_close(made);
        return status;
    }
    made->next = before;
    *list = made;
    return FST_OK;
}

fst_status fsti_verification_open(const char *path, const model_request *request,
                                  model_verification **out, fst_error *error) {
    *out = NULL;
    return fsti_verification_add(path, request, out, error);
}

/// A file's path relative to the model's folder. `text` has space for a path.
static const char *name_inside(const model_verification *verification, const char *path,
                               char *text) {
    return fsti_location_below(path, verification->folder, text, PATH_MAX);
}

const char *fsti_verification_name(const model_verification *verification, const char *path,
                                   char *text) {
    bool is_signed =
        verification->expected != NULL && fsti_file_digests_are_signed(verification->expected);
    const char *name = is_signed ? signed_name(path, verification->path, text) : NULL;
    return name != NULL ? name : name_inside(verification, path, text);
}

fst_status fsti_verification_list(model_verification *verification, fsti_file *file,
                                  const fsti_manifest_file **out, fst_error *error) {
    char text[2 * PATH_MAX];
    const char *path = fsti_file_path(file);
    if (verification->expected == NULL)
        return fsti_verification_find(verification, path, out, error);
    named_file expected = {fsti_verification_name(verification, path, text), file};
    return fsti_file_digests_scan(verification->expected, &expected, out, error);
}

fst_status fsti_verification_find(const model_verification *verification, const char *path,
                                  const fsti_manifest_file **out, fst_error *error) {
    char text[PATH_MAX];
    const char *name = name_inside(verification, path, text);
    *out = fsti_manifest_find(&verification->manifest, name, strlen(name));
    if (*out != NULL) return FST_OK;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    return fsti_error_set(error, FST_E_DIGEST, location, "%.200s does not list %.200s",
                          verification->path, name);
}

fst_status fsti_verification_check(const model_verification *verification, const char *path,
                                   const char *bytes, uint64_t size_bytes, fst_error *error) {
    const fsti_manifest_file *listed;
    if (verification == NULL) return FST_OK;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    if (verification->expected != NULL) {
        char text[2 * PATH_MAX];
        if (fsti_file_digests_match(verification->expected,
                                    fsti_verification_name(verification, path, text), bytes,
                                    (size_t)size_bytes))
            return FST_OK;
        return fsti_error_set(error, FST_E_DIGEST, location, "its bytes do not match %.200s",
                              verification->path);
    }
    FST_TRY(fsti_verification_find(verification, path, &listed, error));
    if (listed->size_bytes != size_bytes)
        return fsti_error_set(error, FST_E_DIGEST, location,
                              "its size does not match the manifest");
    fsti_digest_list list = {.kind = verification->manifest.kind,
                             .digests = listed->digests,
                             .file_bytes = size_bytes,
                             .chunk_bytes = verification->manifest.chunk_bytes};
    if (fsti_digest_list_matches(&list, 0, bytes, size_bytes, &location.byte_offset)) return FST_OK;
    return fsti_error_set(error, FST_E_DIGEST, location, "its bytes do not match the manifest");
}

void fsti_model_verification(const fst_model *model, fst_verification *out) {
    const model_verification *verification = model->verification;
    if (verification == NULL) return;
    size_t file_count = 0;
    for (; verification != NULL; verification = verification->next) {
        out->manifest = verification->path; // the last entry belongs to the first path
        out->digest = verification->manifest.kind->number;
        out->chunk_bytes = verification->manifest.chunk_bytes;
        out->file_count = verification->manifest.file_count;
        out->source = FST_VERIFIED_BY_MANIFEST;
        if (verification->expected != NULL) fsti_file_digests_describe(verification->expected, out);
        file_count += out->file_count;
    }
    out->file_count = file_count;
}
