// SPDX-License-Identifier: Apache-2.0
/// Lists, pins and deletes segments, for the command and the public API.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "share_private.h"

/// The folder, open and locked. folder_fd is -1 if the folder does not exist.
typedef struct locked_folder {
    int folder_fd, lock_fd;
    share_settings settings;
} locked_folder;

static fst_status lock_folder(const char *path, locked_folder *out, fst_error *error) {
    char why[160];
    *out = (locked_folder){.folder_fd = -1, .lock_fd = -1};
    if (!fsti_share_settings(path, &out->settings, why, sizeof why))
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "%s", why);
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = out->settings.folder;
    out->folder_fd = fsti_share_folder_open(out->settings.folder, false, why, sizeof why);
    if (out->folder_fd < 0 && errno == ENOENT) return FST_OK;
    if (out->folder_fd < 0)
        return fsti_error_set(error, errno == EACCES ? FST_E_PERMISSION : FST_E_IO, location, "%s",
                              why);
    out->lock_fd = fsti_share_folder_lock(out->folder_fd, SHARE_LOCK_WAIT_MS);
    if (out->lock_fd >= 0) return FST_OK;
    int failure = errno;
    fsti_lockable_close(out->folder_fd);
    return fsti_error_errno(error, failure, out->settings.folder, "locking the folder of segments");
}

static void unlock_folder(const locked_folder *folder) {
    if (folder->lock_fd >= 0) fsti_share_folder_unlock(folder->lock_fd);
    if (folder->folder_fd >= 0) fsti_lockable_close(folder->folder_fd);
}

/// The segments whose names begin with `prefix`.
typedef struct segment_list {
    const char *prefix;
    share_file *files;
    size_t count, capacity;
    bool lacks_memory;
} segment_list;

#define SEGMENT_COUNT_MAX ((size_t)1 << 20)

static uint64_t count_done(const share_file *file) {
    uint64_t done = 0;
    char states[4096];
    for (uint64_t at = 0; at < file->head.chunk_count;) {
        size_t size = (size_t)fsti_min(sizeof states, file->head.chunk_count - at);
        if (pread(file->fd, states, size, (off_t)(SHARE_HEADER_BYTES + at)) != (ssize_t)size) break;
        for (size_t i = 0; i < size; i++) done += states[i] == 1;
        at += size;
    }
    return done;
}

static void collect(void *context, const share_file *file) {
    segment_list *list = context;
    void *files = list->files;
    if (!file->is_valid || strncmp(file->name, list->prefix, strlen(list->prefix)) != 0) return;
    if (!fsti_array_reserve(&files, &list->capacity, list->count, sizeof *list->files,
                            SEGMENT_COUNT_MAX)) {
        list->lacks_memory = true;
        return;
    }
    list->files = files;
    share_file *copy = &list->files[list->count++];
    *copy = *file;
    copy->done_count = count_done(file);
}

static int compare_use(const void *a, const void *b) {
    long long first = ((const share_file *)a)->head.used_s;
    long long second = ((const share_file *)b)->head.used_s;
    return first < second ? -1 : first > second;
}

/// Lists the segments of a locked folder, the least recently used first. The caller frees
/// out->files.
static fst_status list_segments(const locked_folder *folder, const char *name, segment_list *out,
                                fst_error *error) {
    *out = (segment_list){.prefix = name == NULL ? "" : name};
    if (folder->folder_fd < 0) return FST_OK;
    int failure = fsti_share_folder_visit(folder->folder_fd, collect, out);
    if (out->lacks_memory) return fsti_error_memory(error, sizeof *out->files);
    if (failure != 0)
        return fsti_error_errno(error, failure, folder->settings.folder, "listing segments");
    if (out->count > 1) qsort(out->files, out->count, sizeof *out->files, compare_use);
    return FST_OK;
}

/// Locks the folder and lists its segments. On success the caller frees out->files and unlocks the
/// folder.
static fst_status find_segments(const char *path, const char *name, locked_folder *folder,
                                segment_list *out, fst_error *error) {
    FST_TRY(lock_folder(path, folder, error));
    fst_status status = list_segments(folder, name, out, error);
    if (status == FST_OK && out->count == 0 && name != NULL)
        status = fsti_error_set(error, FST_E_NOT_FOUND, FSTI_NO_LOCATION,
                                "no shared segment's name begins with %s", name);
    if (status == FST_OK) return FST_OK;
    fsti_free(out->files);
    unlock_folder(folder);
    return status;
}

fst_status fsti_share_visit(const char *folder_path, fst_segment_visitor visit, void *context,
                            fst_error *error) {
    locked_folder folder;
    segment_list list;
    FST_TRY(find_segments(folder_path, NULL, &folder, &list, error));
    // Unlocked first, because the visitor may start a load, which locks the folder.
    unlock_folder(&folder);
    for (size_t i = 0; i < list.count; i++) {
        const share_file *file = &list.files[i];
        const fst_segment segment = {.struct_size = sizeof segment,
                                     .name = file->name,
                                     .label = file->head.label,
                                     .size_bytes = file->head.data_bytes,
                                     .memory_bytes = fsti_share_memory_of(&file->stamp),
                                     .grace_s = file->head.grace_s,
                                     .used_s = file->head.used_s,
                                     .is_complete = file->done_count == file->head.chunk_count,
                                     .is_pinned = file->head.is_pinned != 0,
                                     .in_use = file->in_use};
        visit(context, &segment);
    }
    fsti_free(list.files);
    return FST_OK;
}

fst_status fsti_share_drop(const char *folder_path, const char *name, fst_segments_dropped *out,
                           fst_error *error) {
    locked_folder folder;
    segment_list list;
    FST_TRY(find_segments(folder_path, name, &folder, &list, error));
    for (size_t i = 0; i < list.count; i++) {
        fsti_share_folder_remove(folder.folder_fd, list.files[i].name);
        out->count++;
        out->memory_bytes += fsti_share_memory_of(&list.files[i].stamp);
    }
    fsti_free(list.files);
    unlock_folder(&folder);
    return FST_OK;
}

static fst_status set_pin(const locked_folder *folder, const char *name, bool is_pinned,
                          fst_error *error) {
    share_file file;
    unsigned pin = is_pinned;
    if (!fsti_share_file_open(folder->folder_fd, name, &file))
        return fsti_error_errno(error, errno, folder->settings.folder, "opening a segment");
    ssize_t written = pwrite(file.fd, &pin, sizeof pin, offsetof(share_header, is_pinned));
    int failure = errno;
    fsti_lockable_close(file.fd);
    if (written == (ssize_t)sizeof pin) return FST_OK;
    return fsti_error_errno(error, failure, folder->settings.folder, "writing a segment");
}

fst_status fsti_share_pin(const char *folder_path, const char *name, bool is_pinned,
                          fst_error *error) {
    locked_folder folder;
    segment_list list;
    FST_TRY(find_segments(folder_path, name, &folder, &list, error));
    fst_status status =
        list.count == 1 ? set_pin(&folder, list.files[0].name, is_pinned, error)
                        : fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                                         "%zu shared segments have names that begin with %s. Give "
                                         "more digits",
                                         list.count, name);
    fsti_free(list.files);
    unlock_folder(&folder);
    return status;
}
