// SPDX-License-Identifier: Apache-2.0
/// Checks that files which were opened one after the other belong to one save.
///
/// A save that replaces a set of files changes their names one at a time. From before the first
/// change until after the last one, the set's index names hidden files (save/publish.c). So a list
/// of open files mixes two saves only if one of these is true after the last file was opened:
///
///   - an index next to the files names hidden files that will be renamed to some of them;
///   - a file that was opened is no longer the one at its path;
///   - the names say so, because files of the save before are deleted after the index has its final
///     content: "a-00001-of-00003.safetensors" and "a-00001-of-00008.safetensors", or at stores
///     "a-00001-of-00003-0123456789abcdef.safetensors".
///
/// The index is read before the paths are looked at. A save that ends between the two has replaced
/// a file that was opened, so the second check finds it.
///
/// A path may be a link to a file in another folder: then that folder's indexes and the name there
/// count, too.
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "open_model.h"
#include "location/location.h"

#define HIDDEN_ENDING ".tmp"
/// ".", the 16 digits and the ending that follow the name of the target in a hidden name.
#define HIDDEN_TAIL_BYTES 21u
/// Hidden names repeat at least this many bytes of a name that is too long for them.
#define HIDDEN_BASE_BYTES 196u

/// The local files of several models, as one list.
typedef struct open_files {
    char **places; ///< paths, none of which is a link
    size_t count;
    bool has_links;        ///< one of the files was opened by a link
    const char *own_index; ///< the index that they were opened by: it is not searched; or NULL
} open_files;

/// Whether a file was opened by a local path: only such a file can be compared with its path.
static bool has_local_path(const fsti_file *file) {
    return fsti_file_identity(file) >= 0 && !fsti_file_is_disk_cached(file);
}

static const char *name_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

/// Whether `hidden` is what a save calls the file `name` before that gets its final name.
static bool is_hidden_name_of(const char *hidden, const char *name) {
    size_t size = strlen(hidden);
    if (size <= 1 + HIDDEN_TAIL_BYTES || hidden[0] != '.' || !fsti_ends_with(hidden, HIDDEN_ENDING))
        return false;
    size_t base_size = size - 1 - HIDDEN_TAIL_BYTES;
    return hidden[1 + base_size] == '.' && strncmp(hidden + 1, name, base_size) == 0 &&
           (name[base_size] == '\0' || base_size >= HIDDEN_BASE_BYTES);
}

/// Whether one of the files is in the folder and is to be replaced by `hidden`.
static bool is_replaced_by(const open_files *files, const char *folder, const char *hidden) {
    size_t folder_size = strlen(folder);
    for (size_t i = 0; i < files->count; i++) {
        const char *path = files->places[i], *name = name_of(path);
        bool is_inside =
            folder_size == (size_t)(name - path) && memcmp(path, folder, folder_size) == 0;
        if (is_inside && is_hidden_name_of(hidden, name)) return true;
    }
    return false;
}

/// A search for indexes that name hidden files of the list.
typedef struct index_search {
    const open_files *files;
    const char *folder; ///< with its last slash, or ""
    char *found;        ///< the path of such an index, from fsti_alloc, or NULL
} index_search;

/// Whether an index, which is parsed in place, names a hidden file of the list.
static fst_status look_for_hidden(const index_search *search, const char *path, bool *found,
                                  fst_error *error) {
    char *bytes;
    size_t byte_count;
    fsti_index index;
    *found = false;
    fst_status status = fsti_model_read_text(path, &bytes, &byte_count, error);
    // An index that is missing, unreadable or invalid gives no information about the files.
    if (status != FST_OK) return status == FST_E_NO_MEMORY ? status : FST_OK;
    if (memmem(bytes, byte_count, HIDDEN_ENDING "\"", sizeof HIDDEN_ENDING) == NULL) {
        fsti_free(bytes);
        return FST_OK;
    }
    status = fsti_index_parse(bytes, byte_count, path, fsti_hash_key(), &index, error);
    if (status != FST_OK) return status == FST_E_NO_MEMORY ? status : FST_OK;
    for (size_t i = 0; i < index.file_count && !*found; i++)
        *found = is_replaced_by(search->files, search->folder, index.bytes + index.files[i].at);
    fsti_index_clear(&index);
    return FST_OK;
}

static fst_status visit_index(void *context, const fsti_folder_entry *entry, fst_error *error) {
    index_search *search = context;
    bool found = false;
    if (search->found != NULL || entry->name[0] == '.' || !fsti_name_is_index(entry->name))
        return FST_OK;
    char *path = fsti_location_join(search->folder, entry->name);
    if (path == NULL) return fsti_error_memory(error, strlen(search->folder));
    const char *own = search->files->own_index;
    bool is_own = own != NULL && strcmp(path, own) == 0;
    fst_status status = is_own ? FST_OK : look_for_hidden(search, path, &found, error);
    if (status == FST_OK && found)
        search->found = path;
    else
        fsti_free(path);
    return status;
}

/// Reads the indexes next to one file, unless `before` is in the same folder.
static fst_status search_folder(index_search *search, const char *path, const char *before,
                                fst_error *error) {
    size_t size = (size_t)(name_of(path) - path);
    if (before != NULL && (size_t)(name_of(before) - before) == size &&
        memcmp(before, path, size) == 0)
        return FST_OK;
    char *folder = fsti_string_copy(path, size);
    if (folder == NULL) return fsti_error_memory(error, size);
    search->folder = folder;
    fst_status status = fsti_folder_visit(size == 0 ? "." : folder, visit_index, search, error);
    search->folder = NULL;
    fsti_free(folder);
    // A folder that can't be listed shows no index.
    return status == FST_E_NO_MEMORY ? status : FST_OK;
}

static fst_status search_indexes(const open_files *files, char **found, fst_error *error) {
    index_search search = {.files = files};
    for (size_t i = 0; i < files->count && search.found == NULL; i++)
        FST_TRY(
            search_folder(&search, files->places[i], i == 0 ? NULL : files->places[i - 1], error));
    *found = search.found;
    return FST_OK;
}

static bool is_link(const char *path) {
    struct stat found;
    return lstat(path, &found) == 0 && S_ISLNK(found.st_mode);
}

/// The path of the file that a link leads to; NULL without memory. A link whose target was removed
/// is left unchanged: then the file is not the one at its path.
static char *follow_link(const char *path) {
    char there[PATH_MAX];
    if (is_link(path) && realpath(path, there) != NULL) path = there;
    return fsti_string_copy(path, strlen(path));
}

static void clear_files(open_files *files) {
    for (size_t i = 0; i < files->count; i++) fsti_free(files->places[i]);
    fsti_free(files->places);
}

static fst_status list_files(const fst_model *const *models, size_t model_count, size_t file_count,
                             open_files *out, fst_error *error) {
    *out = (open_files){.places = fsti_alloc_zeroed(file_count, sizeof *out->places)};
    if (out->places == NULL) return fsti_error_memory(error, file_count * sizeof *out->places);
    for (size_t m = 0; m < model_count; m++)
        for (size_t i = 0; i < models[m]->file_count; i++) {
            const fsti_file *file = models[m]->files[i].file;
            if (!has_local_path(file)) continue;
            char *place = follow_link(fsti_file_path(file));
            if (place == NULL) return fsti_error_memory(error, strlen(fsti_file_path(file)));
            out->places[out->count++] = place;
            out->has_links = out->has_links || strcmp(place, fsti_file_path(file)) != 0;
        }
    return FST_OK;
}

/// Whether the open files are still those at their paths. Without an index, only this shows that a
/// save has replaced some of them meanwhile.
static bool has_same_files(const fst_model *model) {
    struct stat opened, there;
    for (size_t i = 0; i < model->file_count; i++) {
        const fsti_file *file = model->files[i].file;
        if (!has_local_path(file)) continue;
        if (fstat(fsti_file_identity(file), &opened) != 0 ||
            stat(fsti_file_path(file), &there) != 0 || opened.st_dev != there.st_dev ||
            opened.st_ino != there.st_ino)
            return false;
    }
    return true;
}

/// A path whose folder has one spelling, as two paths of one folder may differ; the name is kept,
/// also of a link. A URL is unchanged. NULL without memory.
static char *spell_folder(const char *path) {
    char there[PATH_MAX + 1];
    const char *name = name_of(path);
    size_t size = (size_t)(name - path);
    char *folder = size == 0 ? fsti_string_copy(".", 1) : fsti_string_copy(path, size);
    if (folder == NULL) return NULL;
    bool is_found = !fsti_location_is_url(path) && realpath(folder, there) != NULL;
    fsti_free(folder);
    if (!is_found) return fsti_string_copy(path, strlen(path));
    size = strlen(there);
    if (there[size - 1] != '/') memcpy(there + size, "/", 2);
    return fsti_location_join(there, name);
}

/// The paths by which the files of models were opened, each with its folder spelled out.
typedef struct spelled_paths {
    char **paths;
    size_t count;
    bool follows_links; ///< the names are those of the files that links lead to
} spelled_paths;

/// A path whose folder is spelled out, of the file itself or of a link to it. NULL without memory.
static char *spell_path(const char *path, bool follows_links) {
    char *place = follows_links ? follow_link(path) : fsti_string_copy(path, strlen(path));
    char *spelled = place == NULL ? NULL : spell_folder(place);
    fsti_free(place);
    return spelled;
}

static fst_status spell_paths(const fst_model *const *models, size_t model_count, size_t file_count,
                              spelled_paths *out, fst_error *error) {
    out->paths = fsti_alloc_zeroed(file_count, sizeof *out->paths);
    if (out->paths == NULL) return fsti_error_memory(error, file_count * sizeof *out->paths);
    for (size_t m = 0; m < model_count; m++)
        for (size_t i = 0; i < models[m]->file_count; i++) {
            const char *given = fsti_file_path(models[m]->files[i].file);
            char *path = spell_path(given, out->follows_links);
            if (path == NULL) return fsti_error_memory(error, PATH_MAX);
            out->paths[out->count++] = path;
        }
    return FST_OK;
}

/// Refuses files whose names show two saves: those of the paths, or those that links lead to.
static fst_status check_file_names(const fst_model *const *models, size_t model_count,
                                   size_t file_count, bool follows_links, fst_error *error) {
    const char *found[2] = {NULL, NULL};
    spelled_paths spelled = {.follows_links = follows_links};
    fst_status status = spell_paths(models, model_count, file_count, &spelled, error);
    if (status == FST_OK)
        status = fsti_model_find_two_saves((const char *const *)spelled.paths, spelled.count, found,
                                           error);
    if (found[0] != NULL) {
        fsti_error_location location = {.file = found[0], .byte_offset = FST_NO_OFFSET};
        status = fsti_error_set(error, FST_E_FILE_CHANGED, location,
                                "%s is of another save of this model. Open the index or the "
                                "folder, or save the model again",
                                name_of(found[1]));
    }
    for (size_t i = 0; i < spelled.count; i++) fsti_free(spelled.paths[i]);
    fsti_free(spelled.paths);
    return status;
}

fst_status fsti_models_check_save(const fst_model *const *models, size_t model_count,
                                  const char *own_index, bool *is_unfinished, fst_error *error) {
    open_files files;
    char *index = NULL;
    fsti_error_location location = FSTI_NO_LOCATION;
    size_t file_count = 0;
    *is_unfinished = false;
    for (size_t m = 0; m < model_count; m++) file_count += models[m]->file_count;
    if (file_count < 2) return FST_OK;
    fst_status status = list_files(models, model_count, file_count, &files, error);
    files.own_index = own_index;
    if (status == FST_OK) status = search_indexes(&files, &index, error);
    // An index knows better which files are its own.
    bool checks_names = index == NULL && own_index == NULL;
    if (status == FST_OK && checks_names)
        status = check_file_names(models, model_count, file_count, false, error);
    if (status == FST_OK && checks_names && files.has_links)
        status = check_file_names(models, model_count, file_count, true, error);
    *is_unfinished = status == FST_E_FILE_CHANGED;
    clear_files(&files);
    if (status != FST_OK) return status;
    if (index != NULL) {
        location.file = index;
        *is_unfinished = true;
        status = fsti_error_set(
            error, FST_E_FILE_CHANGED, location,
            "a save of this model did not finish. Some of its files may be from the previous save. "
            "Open the index or the folder, or save the model again");
        fsti_free(index);
        return status;
    }
    for (size_t m = 0; m < model_count; m++) {
        if (has_same_files(models[m])) continue;
        location.file = fsti_file_path(models[m]->files[0].file);
        return fsti_error_set(error, FST_E_FILE_CHANGED, location,
                              "a save replaced files of the model while they were opened one "
                              "by one. Open them again");
    }
    return FST_OK;
}
