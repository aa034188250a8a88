// SPDX-License-Identifier: Apache-2.0
/// What a model is held against: the manifest that was given, or that lies beside it.
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "net/net.h"
#include "whole_digests.h"

#define FILE_ENDING ".manifest"
#define FOLDER_NAME "model.manifest"

void fsti_verification_close(model_verification *verification) {
    while (verification != NULL) {
        model_verification *next = verification->next;
        fsti_manifest_clear(&verification->manifest);
        fsti_whole_close(verification->whole);
        fsti_free(verification->path);
        fsti_free(verification->source);
        fsti_free(verification->folder);
        fsti_free(verification);
        verification = next;
    }
}

/// The folder of a model with its last slash: of a file, the part of its path before its name.
static char *make_folder(const char *path, bool is_dir) {
    const char *slash = strrchr(path, '/');
    size_t size = is_dir ? strlen(path) : slash == NULL ? 0 : (size_t)(slash - path) + 1;
    char *folder = fsti_alloc(size + 2);
    if (folder == NULL) return NULL;
    memcpy(folder, path, size);
    if (is_dir && size > 0 && path[size - 1] != '/') folder[size++] = '/';
    folder[size] = '\0';
    return folder;
}

fst_status fsti_model_folder(const char *path, char **out, fst_error *error) {
    path_look look;
    FST_TRY(fsti_model_look(path, &look, error));
    *out = make_folder(path, look == PATH_IS_FOLDER);
    return *out == NULL ? fsti_error_memory(error, strlen(path)) : FST_OK;
}

/// Whether an object is there. Who may not list a bucket is refused what is not there as well.
static fst_status look_at_object(const char *url, path_look *out, fst_error *error) {
    fsti_file *file = NULL;
    fst_error cause = {0};
    fst_status status = fsti_file_open(url, &file, &cause);
    fsti_file_unref(file);
    *out = status == FST_OK ? PATH_IS_FILE : PATH_IS_ABSENT;
    if (status == FST_OK || status == FST_E_NOT_FOUND || status == FST_E_PERMISSION) return FST_OK;
    if (error != NULL) *error = cause;
    return status;
}

/// The path `start` + `end`, if something lies there; else *out is NULL.
static fst_status find_path(const char *start, const char *end, char **out, fst_error *error) {
    path_look look = PATH_IS_ABSENT;
    *out = NULL;
    char *path = fsti_model_join(start, end);
    struct stat info;
    if (path == NULL) return fsti_error_memory(error, strlen(start));
    bool is_url = fsti_net_is_url(path);
    fst_status status =
        is_url ? look_at_object(path, &look, error) : fsti_model_look(path, &look, error);
    // A link that leads nowhere is a manifest that is missing, and no leave to do without.
    if (status == FST_OK && !is_url && look == PATH_IS_ABSENT && lstat(path, &info) == 0)
        look = PATH_IS_OTHER;
    if (status == FST_OK && look != PATH_IS_ABSENT)
        *out = path;
    else
        fsti_free(path);
    return status;
}

/// The manifest that lies beside the model at `path`: *out is its path, or NULL.
static fst_status find_beside(const char *path, const char *folder, bool is_dir, char **out,
                              fst_error *error) {
    *out = NULL;
    if (!is_dir) FST_TRY(find_path(path, FILE_ENDING, out, error));
    return *out != NULL ? FST_OK : find_path(folder, FOLDER_NAME, out, error);
}

/// What else there is: lists of whole files, or digests inside.
static fst_status find_whole(const char *path, const char *folder, const model_wish *wish,
                             model_verification *made, fst_error *error) {
    FST_TRY(fsti_whole_find(path, folder, wish, &made->whole, &made->path, error));
    if (made->whole != NULL) return FST_OK;
    made->path = fsti_model_tell(path);
    if (made->path == NULL) return fsti_error_memory(error, strlen(path));
    return fsti_whole_inside(&made->whole, error);
}

/// A text whose seal does not fit has been damaged, whatever it says.
static fst_status check_seal(const char *path, const char *bytes, size_t byte_count,
                             fst_error *error) {
    fsti_manifest found;
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    fsti_error_place place = FSTI_NOWHERE;
    place.file = path;
    if (!fsti_manifest_peek(bytes, byte_count, &found))
        return fsti_error_set(error, FST_E_MANIFEST, place,
                              "not a manifest, or not to its end: 'fastsafetensors hash "
                              "--manifest' makes one");
    FST_TRY(found.kind->ready(error));
    if (found.kind->hash(bytes, found.sealed_bytes, digest) &&
        memcmp(digest, found.seal, found.kind->digest_bytes) == 0)
        return FST_OK;
    return fsti_error_set(error, FST_E_MANIFEST, place,
                          "the manifest was changed: its last line does not fit the others");
}

/// The folder that a path lies in, without links; its slash only if it is the root.
static bool real_folder(const char *path, char *out) {
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    size_t size = slash == NULL ? 1 : (size_t)(slash - path) + 1;
    if (size >= sizeof folder) return false;
    memcpy(folder, slash == NULL ? "." : path, size);
    folder[size] = '\0';
    return realpath(folder, out) != NULL;
}

/// What of a path lies below a folder, by the folders that the path is written with: where one of
/// them is a link to elsewhere, what lies there is still called by that name. NULL: not below.
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

/// The same of a bundle at an address.
static const char *signed_below(const char *path, const char *bundle, char *text) {
    char folder[PATH_MAX];
    fsti_url_tell(bundle, folder, sizeof folder);
    char *slash = strrchr(folder, '/');
    if (slash == NULL || !fsti_net_is_url(path)) return NULL;
    slash[1] = '\0';
    bool is_below = strncmp(path, folder, strlen(folder)) == 0;
    return is_below && fsti_url_below(path, folder, text, PATH_MAX) ? text : NULL;
}

/// A file's path in the folder that the bundle lies in and signs; NULL where it does not lie there
/// or below, as a bundle may be kept elsewhere. `text` has room for two paths.
static const char *signed_name(const char *path, const char *bundle, char *text) {
    char signed_folder[PATH_MAX];
    struct stat info;
    if (fsti_net_is_url(bundle)) return signed_below(path, bundle, text);
    const char *slash = strrchr(path, '/'), *name = slash == NULL ? path : slash + 1;
    if (!real_folder(bundle, signed_folder)) return NULL;
    const char *below = stat(signed_folder, &info) == 0 ? part_below(path, &info) : NULL;
    if (below != NULL) return below;
    // Written by way of a link that leads into it.
    if (!real_folder(path, text)) return NULL;
    size_t prefix = strlen(signed_folder);
    if (prefix == 1) prefix = 0; // the root, whose slash is the path's first
    if (strncmp(text, signed_folder, prefix) != 0) return NULL;
    if (text[prefix] != '/' || text[prefix + 1] == '\0') return NULL;
    snprintf(text + strlen(text), PATH_MAX, "/%s", name);
    return text + prefix + 1;
}

/// A manifest counts as signed when the bundle lists it with the digest of this very text.
static fst_status check_signed(const model_verification *verification, const model_wish *wish,
                               const char *bytes, size_t byte_count, fst_error *error) {
    signed_bundle signed_by;
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    char text[2 * PATH_MAX];
    const char *name = signed_name(verification->path, wish->signature, text);
    bool found = false;
    if (name == NULL) { // the bundle is kept elsewhere: of its files only names are known
        name = strrchr(verification->path, '/');
        name = name == NULL ? verification->path : name + 1;
    }
    FST_TRY(fsti_signed_bundle_open(wish->signature, wish->public_key, &signed_by, error));
    bool hashed = fsti_digest_sha256.hash(bytes, byte_count, digest);
    for (size_t i = 0; i < signed_by.statement.file_count && hashed && !found; i++) {
        const fsti_signed_file *file = &signed_by.statement.files[i];
        found = !file->is_listed_otherwise && file->name_size == strlen(name) &&
                memcmp(file->name, name, file->name_size) == 0 &&
                memcmp(file->digest, digest, 32) == 0;
    }
    fsti_signed_bundle_close(&signed_by);
    if (found) return FST_OK;
    fsti_error_place place = FSTI_NOWHERE;
    place.file = verification->path;
    if (fsti_net_is_url(wish->signature)) fsti_url_tell(wish->signature, text, sizeof text);
    return fsti_error_set(error, FST_E_SIGNATURE, place,
                          "the signature is not of this manifest: %.200s does not list it with "
                          "these bytes",
                          fsti_net_is_url(wish->signature) ? text : wish->signature);
}

static fst_status check_text(const model_verification *verification, const model_wish *wish,
                             const char *bytes, size_t byte_count, fst_error *error) {
    FST_TRY(check_seal(verification->path, bytes, byte_count, error));
    if (wish->signature == NULL) return FST_OK;
    fsti_manifest found;
    if (fsti_manifest_peek(bytes, byte_count, &found) && !found.kind->is_secure)
        return fsti_error_set(error, FST_E_SIGNATURE, FSTI_NOWHERE,
                              "a manifest of %s proves nothing to whom a signature matters: make "
                              "one of sha256 or blake3",
                              found.kind->name);
    return check_signed(verification, wish, bytes, byte_count, error);
}

static fst_status read_manifest(model_verification *verification, const model_wish *wish,
                                fst_error *error) {
    char *bytes;
    size_t byte_count;
    FST_TRY(fsti_model_read_text(verification->source, &bytes, &byte_count, error));
    fst_status status =
        wish->signature == NULL
            ? fsti_whole_read(verification->path, bytes, byte_count, &verification->whole, error)
            : FST_OK;
    if (status != FST_OK || verification->whole != NULL) return status;
    status = check_text(verification, wish, bytes, byte_count, error);
    if (status == FST_OK)
        return fsti_manifest_parse(bytes, byte_count, verification->path, &verification->manifest,
                                   error);
    fsti_free(bytes);
    return status;
}

/// Where to look, and what is there: nothing of it has been read.
static fst_status find_manifest(const char *path, const model_wish *wish, model_verification *made,
                                fst_error *error) {
    path_look look;
    if (fsti_net_is_url(path) && fsti_model_is_bucket(path)) {
        char *bucket = fsti_model_join(path, "/");
        if (bucket == NULL) return fsti_error_memory(error, strlen(path));
        fst_status found = find_manifest(bucket, wish, made, error);
        fsti_free(bucket);
        return found;
    }
    FST_TRY(fsti_model_look(path, &look, error));
    bool is_dir = look == PATH_IS_FOLDER;
    char *folder = fsti_net_is_url(path) ? fsti_url_beside(path, "") : make_folder(path, is_dir);
    if (folder != NULL) made->folder = fsti_model_tell(folder);
    if (folder == NULL || made->folder == NULL) {
        fsti_free(folder);
        return fsti_error_memory(error, strlen(path));
    }
    fst_status status = FST_OK;
    if (wish->manifest != NULL)
        made->source = fsti_string_copy(wish->manifest, strlen(wish->manifest));
    else
        status = find_beside(path, folder, is_dir, &made->source, error);
    if (status == FST_OK && made->source != NULL)
        made->path = fsti_model_tell(made->source);
    else if (status == FST_OK && wish->manifest == NULL)
        status = find_whole(path, folder, wish, made, error);
    fsti_free(folder);
    return status == FST_OK && made->path == NULL ? fsti_error_memory(error, strlen(path)) : status;
}

/// Those of a load are cut at the same places.
static fst_status check_chunks(const model_verification *made, const model_verification *before,
                               fst_error *error) {
    if (before == NULL || before->manifest.chunk_bytes == made->manifest.chunk_bytes) return FST_OK;
    fsti_error_place place = FSTI_NOWHERE;
    place.file = made->path;
    return fsti_error_set(error, FST_E_UNSUPPORTED, place,
                          "chunks of %u bytes here and of %u bytes in %.200s: make both of one "
                          "size, or open the files one by one",
                          made->manifest.chunk_bytes, before->manifest.chunk_bytes, before->path);
}

fst_status fsti_verification_add(const char *path, const model_wish *wish,
                                 model_verification **list, fst_error *error) {
    if (wish->manifest == NULL && (wish->flags & FST_OPEN_VERIFY) == 0) return FST_OK;
    model_verification *made = fsti_alloc_zeroed(1, sizeof *made), *before = *list;
    if (made == NULL) return fsti_error_memory(error, sizeof *made);
    fst_status status = find_manifest(path, wish, made, error);
    if (status == FST_OK && before != NULL && strcmp(before->path, made->path) == 0) {
        fsti_verification_close(made);
        return FST_OK;
    }
    if (status == FST_OK && made->whole == NULL) status = read_manifest(made, wish, error);
    if (made->whole != NULL)
        made->manifest =
            (fsti_manifest){.kind = &fsti_digest_blake3, .chunk_bytes = FSTI_WHOLE_CHUNK_BYTES};
    if (status == FST_OK) status = check_chunks(made, before, error);
    if (status != FST_OK) {
        fsti_verification_close(made);
        return status;
    }
    made->next = before;
    *list = made;
    return FST_OK;
}

fst_status fsti_verification_open(const char *path, const model_wish *wish,
                                  model_verification **out, fst_error *error) {
    *out = NULL;
    return fsti_verification_add(path, wish, out, error);
}

/// A file's path relative to the model's folder. `text` has room for a path.
static const char *name_inside(const model_verification *verification, const char *path,
                               char *text) {
    if (fsti_net_is_url(path) && fsti_url_below(path, verification->folder, text, PATH_MAX))
        return text;
    size_t folder_size = strlen(verification->folder);
    const char *slash = strrchr(path, '/'), *name = slash == NULL ? path : slash + 1;
    return strncmp(path, verification->folder, folder_size) == 0 ? path + folder_size : name;
}

const char *fsti_verification_name(const model_verification *verification, const char *path,
                                   char *text) {
    bool is_signed = verification->whole != NULL && fsti_whole_is_signed(verification->whole);
    const char *name = is_signed ? signed_name(path, verification->path, text) : NULL;
    return name != NULL ? name : name_inside(verification, path, text);
}

fst_status fsti_verification_list(model_verification *verification, fsti_file *file,
                                  const fsti_manifest_file **out, fst_error *error) {
    char text[2 * PATH_MAX];
    const char *path = fsti_file_path(file);
    if (verification->whole == NULL) return fsti_verification_find(verification, path, out, error);
    whole_file whole = {fsti_verification_name(verification, path, text), file};
    return fsti_whole_scan(verification->whole, &whole, out, error);
}

fst_status fsti_verification_find(const model_verification *verification, const char *path,
                                  const fsti_manifest_file **out, fst_error *error) {
    char text[PATH_MAX];
    const char *name = name_inside(verification, path, text);
    *out = fsti_manifest_find(&verification->manifest, name, strlen(name));
    if (*out != NULL) return FST_OK;
    fsti_error_place place = FSTI_NOWHERE;
    place.file = path;
    return fsti_error_set(error, FST_E_DIGEST, place, "%.200s lists no file of the name %.200s",
                          verification->path, name);
}

fst_status fsti_verification_check(const model_verification *verification, const char *path,
                                   const char *bytes, uint64_t size_bytes, fst_error *error) {
    const fsti_manifest_file *listed;
    if (verification == NULL) return FST_OK;
    fsti_error_place place = FSTI_NOWHERE;
    place.file = path;
    if (verification->whole != NULL) {
        char text[2 * PATH_MAX];
        if (fsti_whole_holds(verification->whole, fsti_verification_name(verification, path, text),
                             bytes, (size_t)size_bytes))
            return FST_OK;
        return fsti_error_set(error, FST_E_DIGEST, place, "its bytes are not what %.200s says",
                              verification->path);
    }
    FST_TRY(fsti_verification_find(verification, path, &listed, error));
    if (listed->size_bytes != size_bytes)
        return fsti_error_set(error, FST_E_DIGEST, place, "its size is not what the manifest says");
    fsti_digest_list list = {.kind = verification->manifest.kind,
                             .digests = listed->digests,
                             .file_bytes = size_bytes,
                             .chunk_bytes = verification->manifest.chunk_bytes};
    if (fsti_digest_list_holds(&list, 0, bytes, size_bytes, &place.byte_offset)) return FST_OK;
    return fsti_error_set(error, FST_E_DIGEST, place, "its bytes are not what the manifest says");
}

void fsti_model_verification(const fst_model *model, fst_verification *out) {
    const model_verification *verification = model->verification;
    if (verification == NULL) return;
    size_t file_count = 0;
    for (; verification != NULL; verification = verification->next) {
        out->manifest = verification->path; // the last is the first path's
        out->digest = verification->manifest.kind->number;
        out->chunk_bytes = verification->manifest.chunk_bytes;
        out->file_count = verification->manifest.file_count;
        out->source = FST_VERIFIED_BY_MANIFEST;
        if (verification->whole != NULL) fsti_whole_describe(verification->whole, out);
        file_count += out->file_count;
    }
    out->file_count = file_count;
}
