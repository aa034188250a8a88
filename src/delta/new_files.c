// SPDX-License-Identifier: Apache-2.0
/// Makes copies of a checkpoint's files, and renames them to the files' names after they were
/// changed.
#include "new_files.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "output/output.h"

#define COPY_ENDING ".delta-tmp"
#define COPY_BYTES ((size_t)1 << 20)

/// Copies the bytes on file systems without reflinks: with copy_file_range(), or with reads and
/// writes if the kernel refuses that.
static fst_status copy_bytes(int from, int to, const char *path, fst_error *error) {
    off_t at = 0;
    for (;;) {
        ssize_t done = copy_file_range(from, &at, to, NULL, (size_t)1 << 30, 0);
        if (done == 0) return FST_OK;
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && at > 0) return fsti_error_errno(error, errno, path, "copying");
        if (done < 0) break;
    }
    char *buffer = fsti_alloc(COPY_BYTES);
    if (buffer == NULL) return fsti_error_memory(error, COPY_BYTES);
    fst_status status = FST_OK;
    while (status == FST_OK) {
        ssize_t got = pread(from, buffer, COPY_BYTES, at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) status = fsti_error_errno(error, errno, path, "reading");
        if (got <= 0) break;
        int failure = fsti_write_at(to, buffer, (size_t)got, (uint64_t)at);
        if (failure != 0) status = fsti_error_errno(error, failure, path, "copying");
        at += got;
    }
    fsti_free(buffer);
    return status;
}

/// Fills the copy at `path` of the file `original`.
static fst_status fill_copy(int from, int to, const char *original, char *path, fst_error *error) {
    struct stat info;
    if (fstat(from, &info) != 0) return fsti_error_errno(error, errno, path, "examining the file");
    fsti_target rights = {.path = path,
                          .like = original,
                          .mode = info.st_mode & 07777,
                          .owner = info.st_uid,
                          .group = info.st_gid};
    FST_TRY(fsti_file_keep_rights(to, &rights, error));
    FST_TRY(fsti_file_check_limit(path, (uint64_t)info.st_size, error));
    if (ioctl(to, FICLONE, from) == 0) return FST_OK;
    int failure = posix_fallocate(to, 0, info.st_size);
    if (failure == ENOSPC) return fsti_error_errno(error, failure, path, "reserving the new file");
    return copy_bytes(from, to, path, error);
}

static fst_status refuse_copy(const char *copy, fst_error *error) {
    if (errno != EEXIST) return fsti_error_errno(error, errno, copy, "making the new file");
    fsti_error_location location = {.file = copy, .byte_offset = FST_NO_OFFSET, .os_errno = EEXIST};
    return fsti_error_set(error, FST_E_IO, location,
                          "the file exists, and .weight_sync does not list it: delete it if a "
                          "killed update left it");
}

fst_status fsti_new_file_make(const char *path, int *fd, fsti_delta_stamp *stamp,
                              fst_error *error) {
    struct stat info;
    *fd = -1;
    char *copy = fsti_location_join(path, COPY_ENDING);
    if (copy == NULL) return fsti_error_memory(error, strlen(path));
    int from = open(path, O_RDONLY | O_CLOEXEC);
    fst_status status = from < 0 ? fsti_error_errno(error, errno, path, "opening") : FST_OK;
    if (from >= 0) {
        if (fstat(from, &info) == 0) {
            stamp->size_bytes = (uint64_t)info.st_size;
            stamp->modified_ns = fsti_sync_modified_ns(&info);
        }
        *fd = open(copy, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
        status = *fd < 0 ? refuse_copy(copy, error) : fill_copy(from, *fd, path, copy, error);
    }
    if (status != FST_OK && *fd >= 0) {
        close(*fd);
        (void)unlink(copy);
        *fd = -1;
    }
    if (from >= 0) close(from);
    fsti_free(copy);
    return status;
}

/// The path of a file of the checkpoint, or of its copy. From fsti_alloc, or NULL.
static char *join(const sync_folder *sync, const char *name, const char *ending) {
    char *start = fsti_location_join(sync->checkpoint, "/");
    char *path = start == NULL ? NULL : fsti_location_join(start, name);
    char *whole = path == NULL ? NULL : fsti_location_join(path, ending);
    fsti_free(start);
    fsti_free(path);
    return whole;
}

static fst_status write_list(const sync_folder *sync, const char *path,
                             const fsti_delta_state *list, bool durable, fst_error *error) {
    char *text = NULL;
    size_t size;
    FST_TRY(fsti_delta_state_write(list, &text, &size, error));
    fst_status status =
        fsti_sync_replace(sync, path, (fsti_octets){(unsigned char *)text, size}, durable, error);
    fsti_free(text);
    return status;
}

/// Removes a copy. Takes over its path.
static fst_status remove_copy(char *path, fst_error *error) {
    if (path == NULL) return fsti_error_memory(error, 64);
    fst_status status = fsti_sync_remove(path, error);
    fsti_free(path);
    return status;
}

/// Removes the copies that an update has listed, and then the list. After an error the list stays,
/// because only it shows that the copies are not the user's.
static fst_status remove_copies(const sync_folder *sync, fst_error *error) {
    fsti_delta_state list;
    fst_error own = {0};
    if (!fsti_sync_may_exist(sync->copies_path)) return FST_OK;
    fst_status read = fsti_sync_read_note(sync->copies_path, &list, &own), status = FST_OK;
    if (read == FST_E_NOT_FOUND) return FST_OK;
    // A damaged list names no files.
    if (read == FST_E_NO_MEMORY || own.os_errno != 0) status = read;
    for (size_t i = 0; read == FST_OK && i < list.file_count; i++) {
        fst_status one = remove_copy(join(sync, list.files[i].name, COPY_ENDING), &own);
        if (one != FST_OK) status = one;
    }
    if (read == FST_OK) fsti_delta_state_clear(&list);
    if (status == FST_OK) status = fsti_sync_remove(sync->copies_path, &own);
    if (status != FST_OK && error != NULL) *error = own;
    return status;
}

void fsti_new_files_remove(const sync_folder *sync) { (void)remove_copies(sync, NULL); }

fst_status fsti_new_files_begin(const sync_folder *sync, const fst_model *model, fst_error *error) {
    fsti_delta_state list = {.version = "0"};
    FST_TRY(remove_copies(sync, error));
    list.files = fsti_alloc_zeroed(model->file_count + 1, sizeof *list.files);
    if (list.files == NULL) return fsti_error_memory(error, model->file_count);
    fst_status status = FST_OK;
    for (size_t i = 0; i < model->file_count && status == FST_OK; i++) {
        struct stat info;
        const char *name = fsti_sync_name(sync, fsti_file_path(model->files[i].file));
        char *copy = join(sync, name, COPY_ENDING);
        if (copy == NULL) status = fsti_error_memory(error, 64);
        // A file that is there already belongs to the user.
        bool is_there = copy != NULL && lstat(copy, &info) == 0;
        if (copy != NULL && !is_there && errno != ENOENT)
            status = fsti_error_errno(error, errno, copy, "looking for it");
        if (copy != NULL && !is_there) list.files[list.file_count++].name = name;
        fsti_free(copy);
    }
    if (status == FST_OK) status = write_list(sync, sync->copies_path, &list, false, error);
    fsti_free(list.files);
    return status;
}

static fst_status refuse_changed(const char *path, fst_error *error) {
    fsti_error_location place = {.file = path, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(
        error, FST_E_FILE_CHANGED, place,
        "the file was replaced or changed after it was copied for the new "
        "version, and was not replaced. Copy the checkpoint again unless its files "
        "are complete, and delete .weight_sync and the files *" COPY_ENDING);
}

/// Gets the copy's stamp. If it is that of the old file, because both were written within one tick
/// of the file system's clock, the copy gets a later time, because stamps distinguish the two
/// files.
static fst_status stamp_copy(const char *copy, const fsti_delta_stamp *old, fsti_delta_stamp *out,
                             fst_error *error) {
    static const uint64_t steps_ns[] = {1, 2000000000u}; // some file systems store even seconds
    FST_TRY(fsti_sync_stamp(copy, out, error));
    for (size_t i = 0; i < 2 && out->size_bytes == old->size_bytes; i++) {
        if (out->modified_ns != old->modified_ns) return FST_OK;
        uint64_t time = old->modified_ns + steps_ns[i];
        const struct timespec times[2] = {
            {.tv_nsec = UTIME_OMIT},
            {.tv_sec = (time_t)(time / 1000000000u), .tv_nsec = (long)(time % 1000000000u)}};
        if (utimensat(AT_FDCWD, copy, times, 0) != 0)
            return fsti_error_errno(error, errno, copy, "setting the time");
        FST_TRY(fsti_sync_stamp(copy, out, error));
    }
    return FST_OK;
}

/// Makes the two rows of a file in the list of renames: the stamps of the file and of its copy. A
/// rename does not change a stamp.
static fst_status list_copy(const sync_folder *sync, const char *path, fsti_delta_stamp *rows,
                            fst_error *error) {
    if (!fsti_sync_is_same(path, &rows[0])) return refuse_changed(path, error);
    char *copy = fsti_location_join(path, COPY_ENDING);
    if (copy == NULL) return fsti_error_memory(error, strlen(path));
    rows[0].name = rows[1].name = fsti_sync_name(sync, path);
    fst_status status = stamp_copy(copy, &rows[0], &rows[1], error);
    fsti_free(copy);
    return status;
}

/// The list of renames has the format of a version note: the version, and two rows for each file
/// to be renamed.
static fst_status write_renames(const sync_folder *sync, const new_file_set *set,
                                fst_error *error) {
    const fst_model *model = set->model;
    fsti_delta_state list = {.version = set->version};
    list.files = fsti_alloc_zeroed(2 * model->file_count + 1, sizeof *list.files);
    if (list.files == NULL) return fsti_error_memory(error, model->file_count);
    fst_status status = FST_OK;
    for (size_t i = 0; i < model->file_count && status == FST_OK; i++) {
        if (!set->is_changed[i]) continue;
        fsti_delta_stamp *rows = &list.files[list.file_count];
        rows[0] = set->stamps[i];
        status = list_copy(sync, fsti_file_path(model->files[i].file), rows, error);
        list.file_count += 2;
    }
    if (status == FST_OK) status = write_list(sync, sync->renames_path, &list, set->durable, error);
    fsti_free(list.files);
    return status;
}

/// Gives the copy the file's name. The old file gets the copy's name, so that it can be put back;
/// file systems that cannot exchange two names remove it.
static int replace_name(const char *copy, const char *path) {
    if (renameat2(AT_FDCWD, copy, AT_FDCWD, path, RENAME_EXCHANGE) == 0) return 0;
    return errno == EINVAL || errno == ENOSYS ? rename(copy, path) : -1;
}

/// Renames a copy, or (`is_check`) only checks that this is possible. A file that has the copy's
/// stamp was renamed before a kill.
static fst_status rename_one(const sync_folder *sync, const fsti_delta_stamp *rows, bool is_check,
                             fst_error *error) {
    char *path = join(sync, rows[0].name, "");
    char *copy = join(sync, rows[0].name, COPY_ENDING);
    fst_status status = FST_OK;
    if (path == NULL || copy == NULL)
        status = fsti_error_memory(error, 64);
    else if (!fsti_sync_is_same(path, &rows[1]) &&
             (!fsti_sync_is_same(path, &rows[0]) || !fsti_sync_is_same(copy, &rows[1])))
        status = refuse_changed(path, error);
    else if (!is_check && !fsti_sync_is_same(path, &rows[1]) && replace_name(copy, path) != 0)
        status = fsti_error_errno(error, errno, path, "renaming the new file");
    fsti_free(path);
    fsti_free(copy);
    return status;
}

/// Renames the remaining copies of the list, after a check of all of them.
static fst_status rename_all(const sync_folder *sync, const fsti_delta_state *list,
                             fst_error *error) {
    fsti_error_location place = {.file = sync->renames_path, .byte_offset = FST_NO_OFFSET};
    bool is_paired = list->file_count % 2 == 0;
    for (size_t i = 0; i + 1 < list->file_count; i += 2)
        is_paired = is_paired && strcmp(list->files[i].name, list->files[i + 1].name) == 0;
    if (!is_paired)
        return fsti_error_set(error, FST_E_CORRUPT, place,
                              "this is not a list of this version of fastsafetensors. Copy the "
                              "checkpoint again and delete .weight_sync");
    for (int is_check = 1; is_check >= 0; is_check--)
        for (size_t i = 0; i < list->file_count; i += 2)
            FST_TRY(rename_one(sync, &list->files[i], is_check != 0, error));
    return FST_OK;
}

/// Gives the old files their names again. False if one of them cannot be put back.
static bool put_back(const sync_folder *sync, const fsti_delta_state *list) {
    bool is_old = true;
    for (size_t i = 0; i + 1 < list->file_count; i += 2) {
        const fsti_delta_stamp *rows = &list->files[i];
        char *path = join(sync, rows[0].name, "");
        char *copy = join(sync, rows[0].name, COPY_ENDING);
        if (path != NULL && copy != NULL && fsti_sync_is_same(path, &rows[1]) &&
            fsti_sync_is_same(copy, &rows[0]))
            (void)renameat2(AT_FDCWD, copy, AT_FDCWD, path, RENAME_EXCHANGE);
        is_old = is_old && path != NULL && fsti_sync_is_same(path, &rows[0]);
        fsti_free(path);
        fsti_free(copy);
    }
    return is_old;
}

/// Undoes the renames after an error. `version`: of the note that was removed; NULL: there was
/// none. The message says so if the folder has not its old state again.
static void undo_renames(const sync_folder *sync, const new_file_set *set, const char *version,
                         fst_error *error) {
    fsti_delta_state list;
    const char *outcome = "could not be rolled back and holds files of two versions";
    fst_status status = fsti_sync_read_note(sync->renames_path, &list, NULL);
    bool is_old = status == FST_OK && put_back(sync, &list);
    if (status == FST_OK) fsti_delta_state_clear(&list);
    if (is_old) {
        outcome = "has its old files again, but not the note of its version";
        status = version == NULL
                     ? fsti_sync_remove(sync->state_path, NULL)
                     : fsti_sync_write_state(sync, version, set->model, set->durable, NULL);
        if (status == FST_OK) status = fsti_sync_remove(sync->renames_path, NULL);
        if (status == FST_OK) return;
    }
    fsti_sync_add_outcome(outcome, error);
}

/// Renames the copies and writes the note. Each step can be repeated after a kill.
static fst_status rename_and_note(const sync_folder *sync, bool durable, fst_error *error) {
    fsti_delta_state list;
    fst_model *model = NULL;
    model_request wish = {0};
    FST_TRY(fsti_sync_read_note(sync->renames_path, &list, error));
    fst_status status = rename_all(sync, &list, error);
    if (status == FST_OK && durable) status = fsti_folder_sync(sync->checkpoint, error);
    if (status == FST_OK) status = fsti_model_open(sync->checkpoint, &wish, &model, error);
    if (status == FST_OK) status = fsti_sync_write_state(sync, list.version, model, durable, error);
    fsti_model_unref(model);
    fsti_delta_state_clear(&list);
    return status;
}

/// The last steps: removes the list of renames, and then the old files.
static fst_status end_renames(const sync_folder *sync, fst_error *error) {
    fst_status status = fsti_sync_remove(sync->renames_path, error);
    if (status == FST_OK)
        fsti_new_files_remove(sync);
    else
        fsti_sync_add_outcome("has the new files, but its update still counts as interrupted",
                              error);
    return status;
}

fst_status fsti_new_files_publish(const sync_folder *sync, const new_file_set *set,
                                  fst_error *error) {
    fsti_delta_state before;
    FST_TRY(fsti_sync_read_state(sync, &before, error));
    fst_status status = write_renames(sync, set, error);
    // Between the renames, other programs must not find a note that names the old version.
    if (status == FST_OK) status = fsti_sync_remove(sync->state_path, error);
    if (status == FST_OK) status = rename_and_note(sync, set->durable, error);
    // The list may be there although writing it failed, where only its folder was not synced.
    if (status != FST_OK && fsti_sync_may_exist(sync->renames_path))
        undo_renames(sync, set, before.version, error);
    fsti_delta_state_clear(&before);
    return status == FST_OK ? end_renames(sync, error) : status;
}

fst_status fsti_new_files_resume(const sync_folder *sync, bool durable, bool *is_done,
                                 fst_error *error) {
    *is_done = access(sync->renames_path, F_OK) == 0;
    if (!*is_done && errno == ENOENT) return FST_OK;
    if (!*is_done) return fsti_error_errno(error, errno, sync->renames_path, "looking for it");
    fst_status status = rename_and_note(sync, durable, error);
    if (status == FST_OK) return end_renames(sync, error);
    fsti_sync_add_outcome("holds files of two versions until this update is finished", error);
    return status;
}
