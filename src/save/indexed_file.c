// SPDX-License-Identifier: Apache-2.0
/// Indexes in folders: reading one, and whether one refers to a file, also through links, "./f", or
/// a parent folder.
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "io/io.h"
#include "save_state.h"

/// Length of the folder of a path with its slash; 0 if the path has none.
static int folder_size(const char *path) { return (int)(fsti_path_name(path) - path); }

bool fsti_save_is_same_file(const char *one, const char *other) {
    struct stat first, second;
    bool has_first = stat(one, &first) == 0, has_second = stat(other, &second) == 0;
    if (!has_first && !has_second && strcmp(fsti_path_name(one), fsti_path_name(other)) == 0) {
        char folder[PATH_MAX];
        snprintf(folder, sizeof folder, "%.*s.", folder_size(one), one);
        has_first = stat(folder, &first) == 0;
        snprintf(folder, sizeof folder, "%.*s.", folder_size(other), other);
        has_second = stat(folder, &second) == 0;
    }
    return has_first && has_second && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}

// ---- reading an index ----

static fst_status read_text(const char *path, char **bytes, size_t *byte_count, fst_error *error) {
    fsti_file *file;
    FST_TRY(fsti_file_open(path, &file, error));
    uint64_t size = fsti_file_size(file);
    fst_status status = FST_OK;
    *bytes = NULL;
    if (size > FSTI_FORMAT_TEXT_BYTES_MAX)
        status = fsti_error_errno(error, EFBIG, path, "reading the index");
    if (status == FST_OK) *bytes = fsti_alloc_zeroed(1, size + FSTI_FORMAT_PADDING_BYTES);
    if (status == FST_OK && *bytes == NULL) status = fsti_error_memory(error, size);
    if (status == FST_OK) status = fsti_file_read(file, *bytes, size, 0, byte_count, error);
    fsti_file_unref(file);
    if (status == FST_OK) return FST_OK;
    fsti_free(*bytes);
    return status;
}

fst_status fsti_save_read_index(const char *folder, const char *name, fsti_index *out,
                                fst_error *error) {
    char path[PATH_MAX];
    char *bytes;
    size_t byte_count;
    int size = snprintf(path, sizeof path, "%s/%s", folder, name);
    if (size < 0 || (size_t)size >= sizeof path)
        return fsti_error_errno(error, ENAMETOOLONG, name, "reading the index");
    FST_TRY(read_text(path, &bytes, &byte_count, error));
    return fsti_index_parse(bytes, byte_count, path, fsti_hash_key(), out, error);
}

// ---- looking for a file in indexes ----

/// A search through the indexes of a folder.
typedef struct index_search {
    const char *path;   ///< of the file
    const char *folder; ///< of the indexes
    bool is_own;        ///< the file's own folder
    bool is_found;
} index_search;

/// Includes variants: "model.safetensors.index.fp16.json".
static bool is_index_name(const char *name) {
    return name[0] != '.' && strstr(name, ".index.") != NULL && fsti_ends_with(name, ".json");
}

static bool names_file(const fsti_index *index, const index_search *search) {
    char path[PATH_MAX];
    for (size_t f = 0; f < index->file_count; f++) {
        const char *name = index->bytes + index->files[f].at;
        int size = snprintf(path, sizeof path, "%s/%s", search->folder, name);
        if (size > 0 && (size_t)size < sizeof path && fsti_save_is_same_file(path, search->path))
            return true;
    }
    return false;
}

/// An invalid or unreadable index refers to no file.
static fst_status search_index(void *context, const fsti_folder_entry *entry, fst_error *error) {
    index_search *search = context;
    const char *name = entry->name;
    fsti_index index = {0};
    if (search->is_found || !is_index_name(name)) return FST_OK;
    bool must_read = search->is_own && fsti_name_is_index(name);
    fst_status status =
        fsti_save_read_index(search->folder, name, &index, must_read ? error : NULL);
    search->is_found = status == FST_OK && names_file(&index, search);
    fsti_index_clear(&index);
    if (status == FST_E_NO_MEMORY && !must_read) return fsti_error_memory(error, sizeof index);
    return must_read ? status : FST_OK;
}

/// Searches the file's folder and its parent: the real parent, and that of the path as written.
static fst_status search_folders(const char *path, bool *is_indexed, fst_error *error) {
    char folder[PATH_MAX], above[PATH_MAX + 4], written[PATH_MAX];
    int size = snprintf(folder, sizeof folder, "%.*s.", folder_size(path), path);
    if (size < 0 || (size_t)size >= sizeof folder)
        return fsti_error_errno(error, ENAMETOOLONG, path, "looking for an index");
    index_search search = {.path = path, .folder = folder, .is_own = true};
    FST_TRY(fsti_folder_visit(folder, search_index, &search, error));
    search.is_own = false;
    search.folder = above;
    snprintf(above, sizeof above, "%s/..", folder);
    // A folder without list permission cannot be opened as a model.
    fst_status status = fsti_folder_visit(above, search_index, &search, NULL);
    folder[size > 1 ? size - 2 : 0] = '\0';
    snprintf(written, sizeof written, "%.*s.", folder_size(folder), folder);
    search.folder = written;
    if (status != FST_E_NO_MEMORY && !fsti_save_is_same_file(above, written))
        status = fsti_folder_visit(written, search_index, &search, NULL);
    *is_indexed = search.is_found;
    return status == FST_E_NO_MEMORY ? fsti_error_memory(error, sizeof search) : FST_OK;
}

fst_status fsti_save_is_indexed(const char *path, bool *is_indexed, fst_error *error) {
    fsti_target target;
    FST_TRY(fsti_target_find(path, true, &target, error));
    fst_status status = search_folders(path, is_indexed, error);
    if (status == FST_OK && !*is_indexed && strcmp(path, target.path) != 0)
        status = search_folders(target.path, is_indexed, error);
    fsti_target_clear(&target);
    return status;
}
