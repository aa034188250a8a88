// SPDX-License-Identifier: Apache-2.0
/// Compares files with what they were.
#include "file_watch.h"

#include <string.h>
#include <sys/stat.h>

#include "location/location.h"

#define FILE_COUNT_MAX ((size_t)1 << 20)

struct watched_file {
    char *path;
    uint64_t device, inode, size_bytes;
    struct timespec modified; ///< not the time of the last change: a new hard link changes that
};

static bool look_at(const char *path, watched_file *out) {
    struct stat info;
    if (stat(path, &info) != 0) return false;
    out->device = info.st_dev;
    out->size_bytes = (uint64_t)info.st_size;
    out->inode = info.st_ino;
    out->modified = info.st_mtim;
    return true;
}

fst_status fsti_file_watch_add(file_watch *watch, const char *folder, const char *name,
                               fst_error *error) {
    watched_file file = {0};
    if (fsti_location_is_url(folder)) return FST_OK;
    size_t folder_size = strlen(folder), name_size = strlen(name);
    file.path = fsti_alloc(folder_size + name_size + 1);
    if (file.path == NULL) return fsti_error_memory(error, folder_size + name_size);
    memcpy(file.path, folder, folder_size);
    memcpy(file.path + folder_size, name, name_size + 1);
    bool is_there = look_at(file.path, &file);
    if (is_there && fsti_array_reserve((void **)&watch->files, &watch->capacity, watch->count,
                                       sizeof *watch->files, FILE_COUNT_MAX)) {
        watch->files[watch->count++] = file;
        return FST_OK;
    }
    fsti_free(file.path);
    return is_there ? fsti_error_memory(error, sizeof file) : FST_OK;
}

static bool is_same(const watched_file *a, const watched_file *b) {
    return a->device == b->device && a->inode == b->inode && a->size_bytes == b->size_bytes &&
           a->modified.tv_sec == b->modified.tv_sec && a->modified.tv_nsec == b->modified.tv_nsec;
}

fst_status fsti_file_watch_check(const file_watch *watch, bool (*wants)(const char *path),
                                 fst_error *error) {
    for (size_t i = 0; i < watch->count; i++) {
        const watched_file *file = &watch->files[i];
        watched_file now;
        if (wants != NULL && !wants(file->path)) continue;
        if (look_at(file->path, &now) && is_same(&now, file)) continue;
        fsti_error_location location = {.file = file->path, .byte_offset = FST_NO_OFFSET};
        return fsti_error_set(error, FST_E_FILE_CHANGED, location,
                              "the file was replaced or changed while the files of its folder were "
                              "read. Try again");
    }
    return FST_OK;
}

void fsti_file_watch_clear(file_watch *watch) {
    for (size_t i = 0; i < watch->count; i++) fsti_free(watch->files[i].path);
    fsti_free(watch->files);
    *watch = (file_watch){0};
}
