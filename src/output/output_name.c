// SPDX-License-Identifier: Apache-2.0
/// How files that are made get their names, and how names come back.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "output_private.h"

/// What is copied at a time where there are no hard links.
#define COPY_BYTES ((size_t)1 << 20)

const char *fsti_output_hidden(const fsti_output *output) { return fsti_path_name(output->hidden); }

const char *fsti_output_hidden_path(const fsti_output *output) { return output->hidden; }

/// Whether link() says that the file system has no (more) hard links for this file.
static bool has_no_links(int failure) {
    return failure == EPERM || failure == EOPNOTSUPP || failure == ENOSYS || failure == EMLINK ||
           failure == EINVAL || failure == EACCES;
}

/// A name for the file behind a descriptor: the way that needs no privilege.
static int link_descriptor(int fd, const char *path) {
    char from[64];
    snprintf(from, sizeof from, "/proc/self/fd/%d", fd);
    return linkat(AT_FDCWD, from, AT_FDCWD, path, AT_SYMLINK_FOLLOW);
}

fst_status fsti_output_name(fsti_output *output, fst_error *error) {
    if (output->has_hidden) return FST_OK;
    if (output->upload != NULL) return fsti_output_refuse_object(output, error);
    if (link_descriptor(output->fd, output->hidden) != 0)
        return fsti_error_errno(error, errno, output->hidden, "giving the new file a hidden name");
    output->has_hidden = true;
    return FST_OK;
}

fst_status fsti_output_unname(fsti_output *output, fst_error *error) {
    if (!output->has_hidden) return FST_OK;
    output->has_hidden = false;
    return fsti_path_remove(output->hidden, error);
}

int fsti_output_is_placed(const fsti_output *output) {
    struct stat own, there;
    if (output->upload != NULL) return fsti_upload_is_committed(output->upload);
    if (lstat(output->target.path, &there) != 0) return errno == ENOENT ? 0 : -1;
    if (fstat(output->fd, &own) != 0) return -1;
    return own.st_dev == there.st_dev && own.st_ino == there.st_ino;
}

static fst_status rename_to_path(const fsti_output *output, const char *from, fst_error *error) {
    if (rename(from, output->target.path) == 0) return FST_OK;
    int failure = errno;
    // Over a network the answer may be an error for what was done.
    if (fsti_output_is_placed(output) == 1) return FST_OK;
    return fsti_error_errno(error, failure, output->target.path, "putting the new file in place");
}

/// 0, or what went wrong.
static int copy_blocks(const fsti_output *output, int to, char *block) {
    struct stat info;
    if (fstat(output->fd, &info) != 0 || fchmod(to, info.st_mode & 07777) != 0) return errno;
    for (uint64_t at = 0; at < output->size_bytes;) {
        ssize_t got = pread(output->fd, block, COPY_BYTES, (off_t)at);
        ssize_t put = got <= 0 ? got : pwrite(to, block, (size_t)got, (off_t)at);
        if (put < 0 && errno != EINTR) return errno;
        if (put == 0) return EIO;
        at += put < 0 ? 0 : (uint64_t)put;
    }
    return output->is_durable && fsync(to) != 0 ? errno : 0;
}

/// The bytes of the output in a file of their own, with its permissions.
static fst_status copy_bytes(const fsti_output *output, int to, fst_error *error) {
    char *block = fsti_alloc(COPY_BYTES);
    if (block == NULL) return fsti_error_memory(error, COPY_BYTES);
    int failure = copy_blocks(output, to, block);
    fsti_free(block);
    if (failure == 0) return FST_OK;
    return fsti_error_errno(error, failure, output->target.path, "copying to its place");
}

static fst_status place_copy(const fsti_output *output, const char *second, fst_error *error) {
    int fd = fsti_hidden_create(second);
    if (fd < 0) return fsti_error_errno(error, errno, output->target.path, "making a copy");
    fst_status status = copy_bytes(output, fd, error);
    if (status == FST_OK && rename(second, output->target.path) != 0)
        status = fsti_error_errno(error, errno, output->target.path, "putting a copy in place");
    if (status != FST_OK) unlink(second);
    close(fd);
    return status;
}

/// A second name of the file goes to the path, the hidden one stays.
static fst_status place_second(const fsti_output *output, fst_error *error) {
    char *second = fsti_hidden_path(output->target.folder, output->target.path);
    if (second == NULL) return fsti_error_memory(error, strlen(output->target.path));
    fst_status status;
    if (link(output->hidden, second) == 0) {
        status = rename_to_path(output, second, error);
        // rename() of two names of one file does nothing and leaves both.
        unlink(second);
    } else if (has_no_links(errno)) {
        status = place_copy(output, second, error);
    } else {
        status = fsti_error_errno(error, errno, output->target.path, "a second name for the file");
    }
    fsti_free(second);
    return status;
}

fst_status fsti_output_place(fsti_output *output, bool keep_hidden, fst_error *error) {
    if (output->upload != NULL) return fsti_upload_commit(output->upload, error);
    if (keep_hidden) return place_second(output, error);
    // Nothing to replace: one step, and no hidden name even for an instant.
    if (!output->has_hidden && link_descriptor(output->fd, output->target.path) == 0) return FST_OK;
    FST_TRY(fsti_output_name(output, error));
    FST_TRY(rename_to_path(output, output->hidden, error));
    output->has_hidden = false;
    return FST_OK;
}

/// Whether a sticky folder lets nobody but others take the file's name away: a second name could
/// not be removed again, and nothing put in place.
static bool is_stuck(const char *path) {
    struct stat folder, file;
    size_t size = (size_t)(fsti_path_name(path) - path);
    char *name = size == 0 ? fsti_string_copy(".", 1) : fsti_string_copy(path, size);
    bool stuck = name != NULL && stat(name, &folder) == 0 && lstat(path, &file) == 0 &&
                 (folder.st_mode & S_ISVTX) != 0 && geteuid() != 0 && folder.st_uid != geteuid() &&
                 file.st_uid != geteuid();
    fsti_free(name);
    return stuck;
}

/// Holds what is at the path as a save's own, so that nobody takes the kept name for left over; -1
/// where it can't be opened.
static int lock_old(const char *path) {
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0) (void)flock(fd, LOCK_EX | LOCK_NB); // without locks nobody looks for any
    return fd;
}

/// A hidden name beside the path, from fsti_alloc.
static char *make_hidden(const char *path) {
    const char *name = fsti_path_name(path);
    char *folder =
        name == path ? fsti_string_copy(".", 1) : fsti_string_copy(path, (size_t)(name - path));
    char *hidden = folder == NULL ? NULL : fsti_hidden_path(folder, path);
    fsti_free(folder);
    return hidden;
}

static void forget_hidden(char **kept, int *lock) {
    if (*lock >= 0) close(*lock);
    *lock = -1;
    fsti_free(*kept);
    *kept = NULL;
}

fst_status fsti_path_keep(const char *path, char **kept, int *lock, fst_error *error) {
    *kept = make_hidden(path);
    if (*kept == NULL) return fsti_error_memory(error, strlen(path));
    int failure = is_stuck(path) ? EPERM : 0;
    bool refused = failure != 0;
    *lock = refused ? -1 : lock_old(path);
    if (!refused && link(path, *kept) == 0) return FST_OK;
    failure = refused ? failure : errno;
    forget_hidden(kept, lock);
    if (!refused && (failure == ENOENT || has_no_links(failure))) return FST_OK;
    return fsti_error_errno(error, failure, path, "keeping what is there");
}

fst_status fsti_path_hide(const char *path, char **kept, int *lock, fst_error *error) {
    *kept = make_hidden(path);
    if (*kept == NULL) return fsti_error_memory(error, strlen(path));
    *lock = lock_old(path);
    if (rename(path, *kept) == 0) return FST_OK;
    int failure = errno;
    forget_hidden(kept, lock);
    return failure == ENOENT ? FST_OK : fsti_error_errno(error, failure, path, "taking it away");
}

fst_status fsti_path_restore(const char *path, const char *kept, fst_error *error) {
    if (rename(kept, path) != 0) return fsti_error_errno(error, errno, path, "bringing it back");
    unlink(kept); // there still, where both were names of one file
    return FST_OK;
}

fst_status fsti_path_remove(const char *path, fst_error *error) {
    if (fsti_net_is_url(path)) return fsti_net_remove(path, NULL, NULL, NULL, error);
    if (unlink(path) == 0 || errno == ENOENT) return FST_OK;
    return fsti_error_errno(error, errno, path, "removing");
}
