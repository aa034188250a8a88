// SPDX-License-Identifier: Apache-2.0
/// Publishes files under their names, and restores old ones.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "output_private.h"

/// Copy size if there are no hard links.
#define COPY_BYTES ((size_t)1 << 20)

const char *fsti_output_hidden(const fsti_output *output) { return fsti_path_name(output->hidden); }

const char *fsti_output_hidden_path(const fsti_output *output) { return output->hidden; }

/// Whether link() failed because the file system supports no (more) hard links for the file.
static bool has_no_links(int failure) {
    return failure == EPERM || failure == EOPNOTSUPP || failure == ENOSYS || failure == EMLINK ||
           failure == EINVAL || failure == EACCES;
}

/// Links the file behind a descriptor, without privileges.
static int link_descriptor(int fd, const char *path) {
    char from[64];
    snprintf(from, sizeof from, "/proc/self/fd/%d", fd);
    return linkat(AT_FDCWD, from, AT_FDCWD, path, AT_SYMLINK_FOLLOW);
}

fst_status fsti_output_name(fsti_output *output, fst_error *error) {
    if (output->has_hidden) return FST_OK;
    if (output->upload != NULL) return fsti_output_refuse_object(output, error);
    if (link_descriptor(output->fd, output->hidden) != 0)
        return fsti_error_errno(error, errno, output->hidden,
                                "giving the new file a temporary name");
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
    // On a network file system a call may report an error although it succeeded.
    if (fsti_output_is_placed(output) == 1) return FST_OK;
    return fsti_error_errno(error, failure, output->target.path, "renaming the new file");
}

/// Returns 0 or an errno.
static int copy_blocks(const fsti_output *output, int to, char *block) {
    struct stat info;
    if (fstat(output->fd, &info) != 0 || fchmod(to, info.st_mode & 07777) != 0) return errno;
    for (uint64_t at = 0; at < output->size_bytes;) {
        ssize_t got = pread(output->fd, block, COPY_BYTES, (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        int failure = got > 0 ? fsti_write_at(to, block, (size_t)got, at) : got < 0 ? errno : EIO;
        if (failure != 0) return failure;
        at += (uint64_t)got;
    }
    return output->is_durable && fsync(to) != 0 ? errno : 0;
}

/// Copies the output's bytes and permissions to another file.
static fst_status copy_bytes(const fsti_output *output, int to, fst_error *error) {
    char *block = fsti_alloc(COPY_BYTES);
    if (block == NULL) return fsti_error_memory(error, COPY_BYTES);
    int failure = copy_blocks(output, to, block);
    fsti_free(block);
    if (failure == 0) return FST_OK;
    return fsti_error_errno(error, failure, output->target.path, "copying to the target");
}

static fst_status place_copy(const fsti_output *output, const char *second, fst_error *error) {
    int fd = fsti_hidden_create(second);
    if (fd < 0) return fsti_error_errno(error, errno, output->target.path, "creating a copy");
    fst_status status = copy_bytes(output, fd, error);
    if (status == FST_OK && rename(second, output->target.path) != 0)
        status = fsti_error_errno(error, errno, output->target.path, "renaming a copy");
    if (status != FST_OK) unlink(second);
    close(fd);
    return status;
}

/// Gives the file a second name at the path; the temporary one stays, because an index may name it.
/// link() does not replace files and rename() would remove the temporary name, so a third name is
/// linked and then renamed to the path.
static fst_status place_link(const fsti_output *output, fst_error *error) {
    char *second = fsti_hidden_path(output->target.folder, output->target.path);
    if (second == NULL) return fsti_error_memory(error, strlen(output->target.path));
    fst_status status;
    if (link(output->hidden, second) == 0) {
        status = rename_to_path(output, second, error);
        // rename() of two names of one file does nothing, so remove one.
        unlink(second);
    } else if (has_no_links(errno)) {
        status = place_copy(output, second, error);
    } else {
        status = fsti_error_errno(error, errno, output->target.path, "linking the file");
    }
    fsti_free(second);
    return status;
}

fst_status fsti_output_place(fsti_output *output, bool keep_hidden, fst_error *error) {
    if (output->upload != NULL)
        return fsti_upload_commit(output->upload, output->target.is_unique, error);
    if (keep_hidden) return place_link(output, error);
    // If no file is replaced, link directly, without a temporary name.
    if (!output->has_hidden && link_descriptor(output->fd, output->target.path) == 0) return FST_OK;
    FST_TRY(fsti_output_name(output, error));
    FST_TRY(rename_to_path(output, output->hidden, error));
    output->has_hidden = false;
    return FST_OK;
}

int fsti_rename_new(const char *from, const char *path) {
    if (renameat2(AT_FDCWD, from, AT_FDCWD, path, RENAME_NOREPLACE) == 0) return 0;
    if (errno == EEXIST) return -1;
    // Some file systems cannot rename without replacing.
    if (link(from, path) == 0) {
        unlink(from);
        return 0;
    }
    return has_no_links(errno) ? rename(from, path) : -1;
}

fst_status fsti_output_place_new(fsti_output *output, bool *exists, fst_error *error) {
    const char *path = output->target.path;
    *exists = false;
    if (!output->has_hidden && link_descriptor(output->fd, path) == 0) return FST_OK;
    FST_TRY(fsti_output_name(output, error));
    if (fsti_rename_new(output->hidden, path) == 0) {
        output->has_hidden = false;
        return FST_OK;
    }
    *exists = errno == EEXIST;
    return *exists ? FST_OK : fsti_error_errno(error, errno, path, "renaming the new file");
}

/// Whether a sticky folder prevents removing the file's name: a second name could not be removed
/// later.
static bool is_in_sticky_folder(const char *path) {
    struct stat folder, file;
    size_t size = (size_t)(fsti_path_name(path) - path);
    char *name = size == 0 ? fsti_string_copy(".", 1) : fsti_string_copy(path, size);
    bool stuck = name != NULL && stat(name, &folder) == 0 && lstat(path, &file) == 0 &&
                 (folder.st_mode & S_ISVTX) != 0 && geteuid() != 0 && folder.st_uid != geteuid() &&
                 file.st_uid != geteuid();
    fsti_free(name);
    return stuck;
}

int fsti_lock_old(const char *path) {
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0)
        (void)flock(fd, LOCK_EX | LOCK_NB); // without lock support there are no leftover searches
    return fd;
}

/// A temporary name next to the path, from fsti_alloc().
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
    int failure = is_in_sticky_folder(path) ? EPERM : 0;
    bool refused = failure != 0;
    *lock = refused ? -1 : fsti_lock_old(path);
    if (!refused && link(path, *kept) == 0) return FST_OK;
    failure = refused ? failure : errno;
    forget_hidden(kept, lock);
    if (!refused && (failure == ENOENT || has_no_links(failure))) return FST_OK;
    return fsti_error_errno(error, failure, path, "keeping the existing file");
}

fst_status fsti_path_hide(const char *path, char **kept, int *lock, fst_error *error) {
    *kept = make_hidden(path);
    if (*kept == NULL) return fsti_error_memory(error, strlen(path));
    *lock = fsti_lock_old(path);
    if (rename(path, *kept) == 0) return FST_OK;
    int failure = errno;
    forget_hidden(kept, lock);
    return failure == ENOENT ? FST_OK : fsti_error_errno(error, failure, path, "removing it");
}

fst_status fsti_path_restore(const char *path, const char *kept, fst_error *error) {
    if (rename(kept, path) != 0) return fsti_error_errno(error, errno, path, "restoring it");
    unlink(kept); // still there if both were names of one file
    return FST_OK;
}

fst_status fsti_path_remove(const char *path, fst_error *error) {
    if (fsti_location_is_url(path)) return fsti_store_remove(path, NULL, NULL, NULL, error);
    if (unlink(path) == 0 || errno == ENOENT) return FST_OK;
    return fsti_error_errno(error, errno, path, "removing");
}
