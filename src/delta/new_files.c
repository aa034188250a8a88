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
        for (ssize_t done = 0; done < got && status == FST_OK;) {
            ssize_t put = pwrite(to, buffer + done, (size_t)(got - done), at + done);
            if (put < 0 && errno == EINTR) continue;
            if (put <= 0)
                status = fsti_error_errno(error, put == 0 ? ENOSPC : errno, path, "copying");
            else
                done += put;
        }
        at += got;
    }
    fsti_free(buffer);
    return status;
}

static fst_status fill_copy(int from, int to, const char *path, fst_error *error) {
    struct stat info;
    if (fstat(from, &info) != 0) return fsti_error_errno(error, errno, path, "examining the file");
    (void)fchmod(to, info.st_mode & 07777);
    if (ioctl(to, FICLONE, from) == 0) return FST_OK;
    int failure = posix_fallocate(to, 0, info.st_size);
    if (failure == ENOSPC) return fsti_error_errno(error, failure, path, "reserving the new file");
    return copy_bytes(from, to, path, error);
}

fst_status fsti_new_file_make(const char *path, int *fd, fst_error *error) {
    *fd = -1;
    char *copy = fsti_location_join(path, COPY_ENDING);
    if (copy == NULL) return fsti_error_memory(error, strlen(path));
    int from = open(path, O_RDONLY | O_CLOEXEC);
    fst_status status = from < 0 ? fsti_error_errno(error, errno, path, "opening") : FST_OK;
    if (status == FST_OK) {
        (void)unlink(copy);
        *fd = open(copy, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
        status = *fd < 0 ? fsti_error_errno(error, errno, copy, "making the new file")
                         : fill_copy(from, *fd, copy, error);
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

void fsti_new_files_remove(const fst_model *model) {
    for (size_t i = 0; i < model->file_count; i++) {
        char *copy = fsti_location_join(fsti_file_path(model->files[i].file), COPY_ENDING);
        if (copy != NULL) (void)unlink(copy);
        fsti_free(copy);
    }
}

/// Makes a row of the list of renames: the file's name and the stamp of its copy. A rename does not
/// change the stamp.
static fst_status list_copy(const sync_folder *sync, const char *path, fsti_delta_stamp *out,
                            fst_error *error) {
    char *copy = fsti_location_join(path, COPY_ENDING);
    if (copy == NULL) return fsti_error_memory(error, strlen(path));
    out->name = fsti_sync_name(sync, path);
    fst_status status = fsti_sync_stamp(copy, out, error);
    fsti_free(copy);
    return status;
}

/// The list of renames has the format of a version note: the version, and the files to be renamed.
static fst_status write_renames(const sync_folder *sync, const new_file_set *set,
                                fst_error *error) {
    const fst_model *model = set->model;
    fsti_delta_state list = {.version = set->version};
    char *text = NULL;
    size_t size;
    list.files = fsti_alloc_zeroed(model->file_count + 1, sizeof *list.files);
    if (list.files == NULL) return fsti_error_memory(error, model->file_count);
    fst_status status = FST_OK;
    for (size_t i = 0; i < model->file_count && status == FST_OK; i++)
        if (set->is_changed[i])
            status = list_copy(sync, fsti_file_path(model->files[i].file),
                               &list.files[list.file_count++], error);
    if (status == FST_OK) status = fsti_delta_state_write(&list, &text, &size, error);
    if (status == FST_OK)
        status = fsti_sync_replace(sync, sync->renames_path,
                                   (fsti_octets){(unsigned char *)text, size}, set->durable, error);
    fsti_free(text);
    fsti_free(list.files);
    return status;
}

/// Renames the remaining copies of the list. If a copy is missing and the file has the copy's
/// stamp, it was renamed before a kill.
static fst_status rename_all(const sync_folder *sync, const fsti_delta_state *list,
                             fst_error *error) {
    for (size_t i = 0; i < list->file_count; i++) {
        char *start = fsti_location_join(sync->checkpoint, "/");
        char *path = start == NULL ? NULL : fsti_location_join(start, list->files[i].name);
        char *copy = path == NULL ? NULL : fsti_location_join(path, COPY_ENDING);
        fst_status status = FST_OK;
        if (copy == NULL)
            status = fsti_error_memory(error, 64);
        else if (rename(copy, path) != 0 &&
                 (errno != ENOENT || !fsti_sync_is_same(path, &list->files[i])))
            status = fsti_error_errno(error, errno, path, "renaming the new file");
        fsti_free(start);
        fsti_free(path);
        fsti_free(copy);
        FST_TRY(status);
    }
    return FST_OK;
}

/// Does all steps that follow after the list of renames was written. Each can be repeated after a
/// kill.
static fst_status finish_renames(const sync_folder *sync, bool durable, fst_error *error) {
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
    return status == FST_OK ? fsti_sync_remove(sync->renames_path, error) : status;
}

fst_status fsti_new_files_publish(const sync_folder *sync, const new_file_set *set,
                                  fst_error *error) {
    FST_TRY(write_renames(sync, set, error));
    // Between the renames, other programs must not find a note that names the old version.
    FST_TRY(fsti_sync_remove(sync->state_path, error));
    return finish_renames(sync, set->durable, error);
}

fst_status fsti_new_files_resume(const sync_folder *sync, bool durable, bool *is_done,
                                 fst_error *error) {
    *is_done = access(sync->renames_path, F_OK) == 0;
    return *is_done ? finish_renames(sync, durable, error) : FST_OK;
}
