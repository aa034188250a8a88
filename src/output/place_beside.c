// SPDX-License-Identifier: Apache-2.0
/// Publishes files that lie next to models and may never replace one: manifests, checksum lists and
/// signatures. Another process may save a model at the path at any moment, so a file that was there
/// is examined after it was moved to a temporary name, where no other process replaces it.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/io.h"
#include "output_private.h"

/// How often a file of another process is moved away from the path.
#define PLACE_TRIES 16

fst_status fsti_path_put_back(const char *path, const char *kept, fst_error *error) {
    if (fsti_rename_new(kept, path) == 0) return FST_OK;
    // A newer file there would have replaced this one.
    if (errno == EEXIST) return fsti_path_remove(kept, error);
    return fsti_error_errno(error, errno, path, "restoring it");
}

static fst_status refuse_model(const char *path, fst_error *error) {
    fsti_error_location where = {.file = path, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_FILE_CHANGED, where,
                          "another process has saved a model there meanwhile, which this would "
                          "overwrite. Choose another path");
}

/// Moves the file at the path away: a model is put back, another file is deleted.
static fst_status clear_path(const char *path, fst_error *error) {
    char *kept;
    int lock;
    FST_TRY(fsti_path_hide(path, &kept, &lock, error));
    if (kept == NULL) return FST_OK;
    bool is_model = fsti_path_is_model(kept);
    fst_status status =
        is_model ? fsti_path_put_back(path, kept, error) : fsti_path_remove(kept, error);
    if (lock >= 0) close(lock);
    fsti_free(kept);
    return status == FST_OK && is_model ? refuse_model(path, error) : status;
}

static bool is_own(const fsti_output *output, const char *path) {
    struct stat own, there;
    return fstat(output->fd, &own) == 0 && lstat(path, &there) == 0 && own.st_dev == there.st_dev &&
           own.st_ino == there.st_ino;
}

/// Takes the output away from the path and puts the model back that lies under the output's
/// temporary name.
static fst_status give_back(const fsti_output *output, fst_error *error) {
    const char *path = output->target.path;
    char *kept;
    int lock;
    fst_status status = fsti_path_hide(path, &kept, &lock, error);
    if (status != FST_OK) return fsti_path_restore(path, output->hidden, error);
    if (kept != NULL)
        status = is_own(output, kept) ? fsti_path_remove(kept, error)
                                      : fsti_path_put_back(path, kept, error);
    if (lock >= 0 && kept != NULL) close(lock);
    fsti_free(kept);
    return status == FST_OK ? fsti_path_put_back(path, output->hidden, error) : status;
}

/// Whether the output, at its path, describes something that is not there any more. If that is
/// unknown now, the check before has to do.
static fst_status check_placed(const fsti_output *output, fsti_output_check check, void *context,
                               fst_error *error) {
    fst_error own = {0};
    fst_status status = check == NULL ? FST_OK : check(context, true, &own);
    if (status == FST_OK) return FST_OK;
    if (status != FST_E_FILE_CHANGED && status != FST_E_NOT_FOUND) {
        fsti_log(FST_LOG_WARNING, "%s may describe an older model: %s", output->target.path,
                 own.message);
        return FST_OK;
    }
    if (error != NULL) *error = own;
    return status;
}

/// Takes the output away from the path, if it is still there; then the file comes back that it
/// replaced (NULL: none). Another file that is there was put there later, and stays.
static void take_away(const fsti_output *output, const char *replaced) {
    const char *path = output->target.path;
    char *kept = NULL;
    int lock = -1;
    bool was_there = fsti_path_hide(path, &kept, &lock, NULL) == FST_OK && kept != NULL;
    bool was_own = was_there && is_own(output, kept);
    if (was_own)
        (void)fsti_path_remove(kept, NULL);
    else if (was_there)
        (void)fsti_path_put_back(path, kept, NULL);
    if (replaced != NULL && was_own)
        (void)fsti_path_put_back(path, replaced, NULL);
    else if (replaced != NULL)
        (void)fsti_path_remove(replaced, NULL);
    if (lock >= 0 && was_there) close(lock);
    fsti_free(kept);
}

static bool swap(const fsti_output *output) {
    return renameat2(AT_FDCWD, output->hidden, AT_FDCWD, output->target.path, RENAME_EXCHANGE) == 0;
}

/// Deletes the old file, which has the output's temporary name now. If that fails, the output gets
/// the name back; if that fails too, the output is in place and the old file is left over.
static fst_status remove_old(fsti_output *output, fst_error *error) {
    fst_status status = fsti_path_remove(output->hidden, error);
    if (status == FST_OK) return FST_OK;
    output->has_hidden = is_own(output, output->target.path) && swap(output);
    if (output->has_hidden) return status;
    fsti_log(FST_LOG_WARNING, "%s was not deleted", output->hidden);
    return FST_OK;
}

/// What the path had is under the output's temporary name now.
static fst_status settle(fsti_output *output, fsti_output_check check, void *context,
                         fst_error *error) {
    output->has_hidden = false;
    if (fsti_path_is_model(output->hidden)) {
        FST_TRY(give_back(output, error));
        return refuse_model(output->target.path, error);
    }
    fst_status status = check_placed(output, check, context, error);
    if (status == FST_OK) return remove_old(output, error);
    take_away(output, output->hidden);
    return status;
}

/// Exchanges the output with the file at the path, so that there always is one. *done: whether it
/// was; otherwise the file system cannot do this, or the file has been removed.
static fst_status exchange(fsti_output *output, bool *done, fsti_output_check check, void *context,
                           fst_error *error) {
    const char *path = output->target.path;
    int lock = fsti_lock_old(path);
    *done = swap(output);
    int failure = *done ? 0 : errno;
    fst_status status = FST_OK;
    if (*done)
        status = settle(output, check, context, error);
    else if (failure != ENOENT && failure != EINVAL && failure != ENOSYS && failure != EOPNOTSUPP)
        status = fsti_error_errno(error, failure, path, "renaming the new file");
    if (lock >= 0) close(lock);
    return status;
}

fst_status fsti_output_place_beside(fsti_output *output, fsti_output_check check, void *context,
                                    fst_error *error) {
    const char *path = output->target.path;
    fsti_error_location where = {.file = path, .byte_offset = FST_NO_OFFSET};
    for (int turn = 0; turn < PLACE_TRIES; turn++) {
        bool exists, done;
        FST_TRY(fsti_output_place_new(output, &exists, error));
        if (!exists) {
            fst_status status = check_placed(output, check, context, error);
            if (status != FST_OK) take_away(output, NULL);
            return status;
        }
        fst_status status = exchange(output, &done, check, context, error);
        if (done || status != FST_OK) return status;
        FST_TRY(clear_path(path, error));
    }
    return fsti_error_set(error, FST_E_FILE_CHANGED, where,
                          "other processes keep putting a file there. Choose another path");
}
