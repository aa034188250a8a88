// SPDX-License-Identifier: Apache-2.0
/// From the path that the user gives to files: a file, an index, or a folder.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "open_model.h"
#include "store/store.h"

/// No model has more files.
#define FILE_COUNT_MAX ((size_t)1 << 20)
#define INDEX_ENDING ".safetensors.index.json"

void fsti_model_paths_clear(model_paths *paths) {
    for (size_t i = 0; i < paths->count; i++) fsti_free(paths->paths[i]);
    fsti_free(paths->paths);
    fsti_index_clear(&paths->index);
    fsti_free(paths->index_path);
    if (paths->index_fd >= 0) close(paths->index_fd);
    *paths = (model_paths){.index_fd = -1};
}

/// Appends folder + "/" + name (`folder_size` bytes of the folder; 0: only the name).
static fst_status push_path(model_paths *out, const char *folder, size_t folder_size,
                            const char *name, fst_error *error) {
    size_t name_size = strlen(name), slash = folder_size > 0 && folder[folder_size - 1] != '/';
    char *path = fsti_alloc(folder_size + slash + name_size + 1);
    if (path == NULL || !fsti_array_reserve((void **)&out->paths, &out->capacity, out->count,
                                            sizeof *out->paths, FILE_COUNT_MAX)) {
        fsti_free(path);
        return fsti_error_memory(error, folder_size + name_size);
    }
    memcpy(path, folder, folder_size);
    if (slash) path[folder_size] = '/';
    memcpy(path + folder_size + slash, name, name_size + 1);
    out->paths[out->count++] = path;
    return FST_OK;
}

static int compare_paths(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

typedef struct ending_search {
    const char *folder, *ending;
    model_paths *out;
} ending_search;

static fst_status add_ending(void *context, const fsti_folder_entry *entry, fst_error *error) {
    const ending_search *search = context;
    // Hidden files are unfinished downloads and saves.
    if (entry->name[0] == '.' || !fsti_ends_with(entry->name, search->ending)) return FST_OK;
    return push_path(search->out, search->folder, strlen(search->folder), entry->name, error);
}

/// Fills `out` with the folder's entries that have this ending, sorted.
static fst_status list_folder(const char *folder, const char *ending, model_paths *out,
                              fst_error *error) {
    ending_search search = {folder, ending, out};
    FST_TRY(fsti_folder_visit(folder, add_ending, &search, error));
    if (out->count > 1) qsort(out->paths, out->count, sizeof *out->paths, compare_paths);
    return FST_OK;
}

/// Parses an index and takes over `bytes`. The error for another kind of file names the kind.
static fst_status parse_index(char *bytes, size_t byte_count, const char *path, uint64_t hash_key,
                              fsti_index *out, fst_error *error) {
    char start[KIND_READ_BYTES], kind[200];
    size_t start_bytes = byte_count < sizeof start ? byte_count : sizeof start;
    memcpy(start, bytes, start_bytes); // names are decoded in place
    fst_status status = fsti_index_parse(bytes, byte_count, path, hash_key, out, error);
    if (status != FST_E_INDEX_JSON || error == NULL ||
        !fsti_model_index_kind(start, start_bytes, byte_count, kind, sizeof kind))
        return status;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    return fsti_error_set(error, status, location, "%s: not an index of shards: it is %s",
                          fsti_status_name(status), kind);
}

static fst_status open_index(const char *path, uint64_t hash_key,
                             const model_verification *verification, model_paths *out,
                             fst_error *error) {
    char *bytes;
    size_t byte_count;
    out->index_path = fsti_string_copy(path, strlen(path));
    if (out->index_path == NULL) return fsti_error_memory(error, strlen(path));
    out->index_fd = open(path, O_PATH | O_CLOEXEC);
    out->has_index = true;
    FST_TRY(fsti_model_read_text(path, &bytes, &byte_count, error));
    fst_status status = fsti_verification_check(verification, path, bytes, byte_count, error);
    if (status != FST_OK) {
        fsti_free(bytes);
        return status;
    }
    FST_TRY(parse_index(bytes, byte_count, path, hash_key, &out->index, error));
    const char *slash = strrchr(path, '/');
    size_t folder_size = slash == NULL ? 0 : (size_t)(slash - path) + 1;
    for (size_t i = 0; i < out->index.file_count; i++)
        FST_TRY(
            push_path(out, path, folder_size, out->index.bytes + out->index.files[i].at, error));
    return fsti_verification_check_index(verification, out, error);
}

/// Whether a folder still has no index, and the same files.
static fst_status compare_list(const char *folder, const model_paths *before, bool *same,
                               fst_error *error) {
    model_paths indices = {.index_fd = -1}, files = {.index_fd = -1};
    fst_status status = list_folder(folder, ".safetensors", &files, error);
    if (status == FST_OK) status = list_folder(folder, INDEX_ENDING, &indices, error);
    *same = status == FST_OK && indices.count == 0 && files.count == before->count;
    for (size_t i = 0; *same && i < files.count; i++)
        *same = strcmp(files.paths[i], before->paths[i]) == 0;
    fsti_model_paths_clear(&indices);
    fsti_model_paths_clear(&files);
    return status == FST_E_NOT_FOUND ? FST_OK : status; // the folder is gone
}

static fst_status open_without_index(const char *folder, const model_verification *verification,
                                     model_paths *out, fst_error *error) {
    out->index_path = fsti_string_copy(folder, strlen(folder));
    if (out->index_path == NULL) return fsti_error_memory(error, strlen(folder));
    FST_TRY(list_folder(folder, ".safetensors", out, error));
    FST_TRY(fsti_model_check_shards(out, folder, error));
    return fsti_verification_check_set(verification, out, error);
}

static fst_status open_folder(const char *folder, uint64_t hash_key,
                              const model_verification *verification, model_paths *out,
                              fst_error *error) {
    model_paths indices = {.index_fd = -1};
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = folder;
    fst_status status = list_folder(folder, INDEX_ENDING, &indices, error);
    if (status == FST_OK && indices.count > 1)
        status = fsti_error_set(error, FST_E_ARGUMENT, location,
                                "the folder has %zu index files (%.100s, ...). Open one of them",
                                indices.count, indices.paths[0]);
    else if (status == FST_OK && indices.count == 1)
        status = open_index(indices.paths[0], hash_key, verification, out, error);
    else if (status == FST_OK)
        status = open_without_index(folder, verification, out, error);
    fsti_model_paths_clear(&indices);
    if (status == FST_OK && !out->has_index && out->count == 0) {
        char hint[256];
        fsti_model_folder_hint(folder, hint, sizeof hint);
        status = fsti_error_set(error, FST_E_NO_TENSORS, location,
                                "no *.safetensors file in the folder%s", hint);
    }
    return status;
}

static fst_status fail_stat(const char *path, int os_errno, fst_error *error) {
    if (fsti_location_looks_like_url(path)) return fsti_location_require_path(path, error);
    if (strstr(path, "://") == NULL) return fsti_error_errno(error, os_errno, path, "open");
    char name[256];
    fsti_url_redact(path, name, sizeof name);
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = name;
    return fsti_error_set(error, FST_E_NOT_FOUND, location,
                          "unsupported URL scheme; expected one of: https, http, s3, gs, az, hf");
}

// ---- URLs ----

/// The same for URLs, which get the query of the requested one.
static fst_status push_url(model_paths *out, const char *base, const char *name, fst_error *error) {
    char *url = fsti_url_sibling(base, name);
    if (url == NULL) return fsti_error_memory(error, strlen(base));
    fst_status status = push_path(out, "", 0, url, error);
    fsti_free(url);
    return status;
}

/// No index_path: a replaced object has another version, which identifies it better than a path
/// does.
static fst_status open_index_url(const char *url, uint64_t hash_key,
                                 const model_verification *verification, model_paths *out,
                                 fst_error *error) {
    char *bytes, name[1024];
    size_t byte_count;
    out->has_index = true;
    fsti_url_redact(url, name, sizeof name);
    FST_TRY(fsti_model_read_text(url, &bytes, &byte_count, error));
    fst_status status = fsti_verification_check(verification, name, bytes, byte_count, error);
    if (status != FST_OK) {
        fsti_free(bytes);
        return status;
    }
    FST_TRY(parse_index(bytes, byte_count, name, hash_key, &out->index, error));
    for (size_t i = 0; i < out->index.file_count; i++)
        FST_TRY(push_url(out, url, out->index.bytes + out->index.files[i].at, error));
    return fsti_verification_check_index(verification, out, error);
}

typedef struct key_search {
    const char *folder;
    model_paths *files, *indices;
} key_search;

static fst_status add_key(void *context, const char *name, fst_error *error) {
    const key_search *search = context;
    if (fsti_name_is_index(name)) return push_url(search->indices, search->folder, name, error);
    return fsti_name_is_model(name) ? push_url(search->files, search->folder, name, error) : FST_OK;
}

/// Without an index, drops files of a save that has not been committed.
static void drop_tagged(model_paths *paths) {
    size_t kept = 0;
    for (size_t i = 0; i < paths->count; i++) kept += !fsti_model_is_tagged(paths->paths[i]);
    if (kept == 0 || kept == paths->count) return;
    size_t count = paths->count;
    paths->count = 0;
    for (size_t i = 0; i < count; i++) {
        if (fsti_model_is_tagged(paths->paths[i]))
            fsti_free(paths->paths[i]);
        else
            paths->paths[paths->count++] = paths->paths[i];
    }
}

/// Uses the folder's only index, or else all its files.
static fst_status choose_keys(const char *name, const model_paths *indices, uint64_t hash_key,
                              const model_verification *verification, model_paths *out,
                              fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = name;
    if (indices->count > 1)
        return fsti_error_set(error, FST_E_ARGUMENT, location,
                              "the folder has %zu index files. Open one of them", indices->count);
    if (indices->count == 1) {
        fsti_model_paths_clear(out);
        return open_index_url(indices->paths[0], hash_key, verification, out, error);
    }
    if (out->count == 0)
        return fsti_error_set(error, FST_E_NO_TENSORS, location,
                              "no *.safetensors file in the folder");
    drop_tagged(out);
    qsort(out->paths, out->count, sizeof *out->paths, compare_paths);
    FST_TRY(fsti_model_check_shards(out, name, error));
    return fsti_verification_check_set(verification, out, error);
}

static fst_status open_folder_url(const char *url, uint64_t hash_key,
                                  const model_verification *verification, model_paths *out,
                                  fst_error *error) {
    char name[1024];
    model_paths indices = {.index_fd = -1};
    key_search search = {url, out, &indices};
    fsti_url_redact(url, name, sizeof name);
    fst_status status = fsti_store_list(url, NULL, add_key, &search, error);
    if (status == FST_OK) status = choose_keys(name, &indices, hash_key, verification, out, error);
    fsti_model_paths_clear(&indices);
    return status;
}

static fst_status open_bucket_url(const char *url, uint64_t hash_key,
                                  const model_verification *verification, model_paths *out,
                                  fst_error *error) {
    size_t size = strlen(url);
    char *folder = fsti_alloc(size + 2);
    if (folder == NULL) return fsti_error_memory(error, size + 2);
    snprintf(folder, size + 2, "%s/", url);
    fst_status status = open_folder_url(folder, hash_key, verification, out, error);
    fsti_free(folder);
    return status;
}

static fst_status open_url(const char *url, uint64_t hash_key,
                           const model_verification *verification, model_paths *out,
                           fst_error *error) {
    static const char ending[] = ".index.json";
    size_t length = strcspn(url, "?#"), size = sizeof ending - 1;
    bool is_index = length > size && strncmp(url + length - size, ending, size) == 0;
    bool is_folder = length > 0 && url[length - 1] == '/';
    if (fsti_location_is_bucket(url))
        return open_bucket_url(url, hash_key, verification, out, error);
    if (!is_index && !is_folder) return push_path(out, "", 0, url, error);
    // Pin the revision, so that all files are of one commit even if the branch moves.
    char *pinned = NULL;
    FST_TRY(fsti_store_pin_revision(url, &pinned, error));
    const char *base = pinned == NULL ? url : pinned;
    fst_status status = is_index ? open_index_url(base, hash_key, verification, out, error)
                                 : open_folder_url(base, hash_key, verification, out, error);
    fsti_free(pinned);
    return status;
}

fst_status fsti_model_paths(const char *path, uint64_t hash_key,
                            const model_verification *verification, model_paths *out,
                            fst_error *error) {
    *out = (model_paths){.index_fd = -1};
    struct stat info;
    fst_status status;
    if (fsti_location_is_url(path))
        status = open_url(path, hash_key, verification, out, error);
    else if (stat(path, &info) != 0)
        status = fail_stat(path, errno, error);
    else if (S_ISDIR(info.st_mode))
        status = open_folder(path, hash_key, verification, out, error);
    else if (fsti_ends_with(path, ".index.json"))
        status = open_index(path, hash_key, verification, out, error);
    else
        status = push_path(out, "", 0, path, error);
    return status;
}

fst_status fsti_model_paths_same(const model_paths *paths, bool *same, fst_error *error) {
    struct stat opened, there;
    *same = true;
    if (paths->index_path == NULL) return FST_OK;
    if (!paths->has_index) return compare_list(paths->index_path, paths, same, error);
    *same = fstat(paths->index_fd, &opened) == 0 && stat(paths->index_path, &there) == 0 &&
            opened.st_dev == there.st_dev && opened.st_ino == there.st_ino;
    return FST_OK;
}
