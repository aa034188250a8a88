// SPDX-License-Identifier: Apache-2.0
/// The files of a model's folder that manifests cover.
#include "folder_files.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "file_tree.h"
#include "location/location.h"
#include "model/open_model.h"

#define FILE_COUNT_MAX ((size_t)1 << 20)

void fsti_folder_files_clear(folder_files *files) {
    for (size_t i = 0; i < files->count; i++) fsti_free(files->names[i]);
    fsti_free(files->names);
    fsti_free(files->folder);
    *files = (folder_files){0};
}

char *fsti_folder_join(const folder_files *files, const char *name) {
    size_t folder_size = strlen(files->folder), name_size = strlen(name);
    char *path = fsti_alloc(folder_size + name_size + 1);
    if (path == NULL) return NULL;
    memcpy(path, files->folder, folder_size);
    memcpy(path + folder_size, name, name_size + 1);
    return path;
}

fst_status fsti_folder_files_check_names(const folder_files *files, fst_error *error) {
    for (size_t i = 0; i < files->count; i++) {
        char *path = fsti_folder_join(files, files->names[i]);
        if (path == NULL) return fsti_error_memory(error, strlen(files->names[i]));
        fst_status status = fsti_utf8_require_name(files->names[i], path, error);
        fsti_free(path);
        FST_TRY(status);
    }
    return FST_OK;
}

static fst_status push_name(folder_files *out, const char *name, fst_error *error) {
    char *copy = fsti_string_copy(name, strlen(name));
    if (copy == NULL || !fsti_array_reserve((void **)&out->names, &out->capacity, out->count,
                                            sizeof *out->names, FILE_COUNT_MAX)) {
        fsti_free(copy);
        return fsti_error_memory(error, strlen(name));
    }
    out->names[out->count++] = copy;
    return FST_OK;
}

/// Generated files in the folder are not part of the model.
static bool is_made(const char *name) {
    static const char *const endings[] = {".manifest", ".digest", ".sig"};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (fsti_ends_with(name, endings[i])) return true;
    return false;
}

static fst_status push_entry(void *context, const fsti_folder_entry *entry, fst_error *error) {
    folder_files *out = context;
    struct stat info;
    if (entry->name[0] == '.' || is_made(entry->name)) return FST_OK;
    if (fstatat(entry->folder_fd, entry->name, &info, 0) == 0)
        return S_ISREG(info.st_mode) ? push_name(out, entry->name, error) : FST_OK;
    // A dangling link is not a file. Any other failure must not hide a file.
    if (errno == ENOENT || errno == ELOOP) return FST_OK;
    int cause = errno;
    char *path = fsti_folder_join(out, entry->name);
    if (path == NULL) return fsti_error_memory(error, strlen(entry->name));
    fst_status status = fsti_error_errno(error, cause, path, "examining the file");
    fsti_free(path);
    return status;
}

static fst_status list_entries(folder_files *out, fst_error *error) {
    return fsti_folder_visit(out->folder[0] == '\0' ? "." : out->folder, push_entry, out, error);
}

/// Adds files of subfolders that an index names. A folder at a URL is not listed here, so all files
/// are added that the model has.
static fst_status push_below(folder_files *out, const model_paths *paths, fst_error *error) {
    size_t folder_size = strlen(out->folder);
    bool is_url = fsti_location_is_url(out->folder);
    for (size_t i = 0; i < paths->count; i++) {
        if (strncmp(paths->paths[i], out->folder, folder_size) != 0) continue;
        const char *name = paths->paths[i] + folder_size;
        if (is_url || strchr(name, '/') != NULL) FST_TRY(push_name(out, name, error));
    }
    return FST_OK;
}

static int compare_names(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static fst_status fill_files(const char *path, const model_paths *paths, folder_files *out,
                             fst_error *error) {
    path_kind look;
    FST_TRY(fsti_model_path_kind(path, &look, error));
    bool is_dir = look == PATH_IS_FOLDER;
    const char *slash = strrchr(path, '/');
    size_t size = is_dir ? strlen(path) : slash == NULL ? 0 : (size_t)(slash - path) + 1;
    out->folder = fsti_alloc(size + 2);
    if (out->folder == NULL) return fsti_error_memory(error, size);
    memcpy(out->folder, path, size);
    if (is_dir && size > 0 && path[size - 1] != '/') out->folder[size++] = '/';
    out->folder[size] = '\0';
    out->is_single = !is_dir && !paths->has_index;
    if (out->is_single) return push_name(out, path + size, error);
    if (!fsti_location_is_url(path)) FST_TRY(list_entries(out, error));
    FST_TRY(push_below(out, paths, error));
    if (out->count > 1) qsort(out->names, out->count, sizeof *out->names, compare_names);
    return FST_OK;
}

/// Checks that the files that an index lists exist, are files, and have their final names.
static fst_status check_listed(const model_paths *paths, fst_error *error) {
    FST_TRY(fsti_model_name_missing(paths, FST_OK, error));
    for (size_t i = 0; i < paths->count; i++) {
        struct stat found;
        const char *path = paths->paths[i], *slash = strrchr(path, '/');
        fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
        if ((slash == NULL ? path : slash + 1)[0] == '.')
            return fsti_error_set(error, FST_E_FILE_CHANGED, location,
                                  "a save of this model did not finish, or is running. Try again, "
                                  "or save the model again");
        if (!fsti_location_is_url(path) && stat(path, &found) == 0 && !S_ISREG(found.st_mode))
            return fsti_error_set(error, FST_E_IO, location, "not a regular file");
    }
    return FST_OK;
}

static fst_status list_files(const char *path, bool is_complete, folder_files *out,
                             fst_error *error) {
    *out = (folder_files){0};
    model_paths paths;
    fst_status status = fsti_model_paths(path, fsti_hash_key(), NULL, &paths, error);
    if (status == FST_OK && is_complete && paths.has_index) status = check_listed(&paths, error);
    if (status == FST_OK) status = fill_files(path, &paths, out, error);
    fsti_model_paths_clear(&paths);
    return status;
}

fst_status fsti_folder_models(const char *path, folder_files *out, fst_error *error) {
    path_kind look;
    fst_error cause = {0};
    *out = (folder_files){0};
    FST_TRY(fsti_model_path_kind(path, &look, error));
    // A listed file that is missing is reported later.
    if (look == PATH_IS_ABSENT) return FST_OK;
    fst_status status = list_files(path, false, out, &cause);
    if (status == FST_OK) return FST_OK;
    if (status != FST_E_NO_MEMORY && look == PATH_IS_FOLDER) {
        // The folder is not a model, or its index is invalid: each file may be a model by itself.
        model_paths none = {0};
        fsti_folder_files_clear(out);
        return fill_files(path, &none, out, error);
    }
    if (error != NULL) *error = cause;
    return status;
}

fst_status fsti_folder_files(const char *path, folder_files *out, file_watch *watch,
                             fst_error *error) {
    FST_TRY(list_files(path, true, out, error));
    for (size_t i = 0; i < out->count; i++)
        FST_TRY(fsti_file_watch_add(watch, out->folder, out->names[i], error));
    return FST_OK;
}

/// Whether both lists have the same model files. Other programs may write logs meanwhile.
static bool has_same_models(const folder_files *a, const folder_files *b) {
    size_t i = 0, k = 0;
    for (;;) {
        while (i < a->count && !fsti_name_leads_to_model(a->names[i])) i++;
        while (k < b->count && !fsti_name_leads_to_model(b->names[k])) k++;
        if (i == a->count || k == b->count) return i == a->count && k == b->count;
        if (strcmp(a->names[i++], b->names[k++]) != 0) return false;
    }
}

fst_status fsti_folder_files_check(void *context, bool is_placed, fst_error *error) {
    const folder_check *check = context;
    folder_files again;
    // The index before the files: of a save that runs, it has hidden names; one that ends between
    // the two has replaced a file.
    fst_status status = list_files(check->path, true, &again, error);
    bool is_same = status != FST_OK || has_same_models(check->files, &again);
    fsti_folder_files_clear(&again);
    FST_TRY(status);
    bool only_models = is_placed && !check->files->is_single;
    FST_TRY(
        fsti_file_watch_check(check->watch, only_models ? fsti_name_leads_to_model : NULL, error));
    fsti_error_location location = {.file = check->path, .byte_offset = FST_NO_OFFSET};
    return is_same ? FST_OK
                   : fsti_error_set(error, FST_E_FILE_CHANGED, location,
                                    "model files were added or removed while the files of the "
                                    "folder were read. Try again");
}

void fsti_folder_files_omit(folder_files *files, const char *target) {
    const char *folder = files->folder[0] == '\0' ? "." : files->folder;
    const char *own_name = target == NULL ? NULL : fsti_file_tree_name_inside(folder, target);
    size_t kept = 0;
    for (size_t i = 0; i < files->count; i++) {
        if (own_name != NULL && strcmp(files->names[i], own_name) == 0)
            fsti_free(files->names[i]);
        else
            files->names[kept++] = files->names[i];
    }
    files->count = kept;
}

void fsti_manifest_report_path(const fst_manifest_options *options, const char *path) {
    if (options->written_path != NULL)
        snprintf(options->written_path, options->written_path_size, "%s", path);
}
