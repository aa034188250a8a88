// SPDX-License-Identifier: Apache-2.0
/// New files. With O_TMPFILE the file has no name until it is complete, so that even a kill leaves
/// nothing behind; otherwise it has a temporary name.
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "io/io.h"
#include "output_private.h"

/// Attempts to find an unused temporary name.
#define NAME_TRIES_MAX 100
/// Attempts to reserve space despite signals; after that, free space is only compared.
#define RESERVE_TRIES_MAX 20
#define ACCESS_LIST "system.posix_acl_access"
/// Maximum size of a write; the kernel limits it to 2 GiB.
#define WRITE_BYTES_MAX ((size_t)64 << 20)
/// For durable files, buffered writes of this size start writeback at once.
#define EARLY_BYTES ((ssize_t)1 << 20)

const char *fsti_output_path(const fsti_output *output) { return output->target.path; }

/// Opens an unnamed file, if it can be linked later, which needs /proc.
static int open_unnamed(const char *folder) {
#ifdef O_TMPFILE
    char link[64];
    int fd = -1;
    if (!fsti_io_test_disables(FSTI_TEST_NO_TMPFILE))
        fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0666);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (fd >= 0 && !fsti_io_test_disables(FSTI_TEST_NO_PROC) && access(link, F_OK) == 0) {
        (void)flock(fd, LOCK_EX | LOCK_NB); // protects its later name
        return fd;
    }
    if (fd >= 0) close(fd);
#endif
    return -1;
}

static fst_status open_hidden(fsti_output *output, fst_error *error) {
    for (unsigned tries = 0; tries < NAME_TRIES_MAX; tries++) {
        output->fd = fsti_hidden_create(output->hidden);
        output->has_hidden = output->fd >= 0;
        if (output->has_hidden) return FST_OK;
        if (errno != EEXIST && errno != EAGAIN) break;
        fsti_free(output->hidden);
        output->hidden = fsti_hidden_path(output->target.folder, output->target.path);
        if (output->hidden == NULL) return fsti_error_memory(error, strlen(output->target.path));
    }
    if (errno == ENOENT) {
        fsti_error_location location = FSTI_NO_LOCATION;
        location.file = output->target.path;
        location.os_errno = ENOENT;
        // /proc and similar file systems exist but accept no files.
        bool folder_exists = access(output->target.folder, F_OK) == 0;
        return fsti_error_set(error, FST_E_NOT_FOUND, location,
                              folder_exists ? "no file can be created in the folder '%s'"
                                            : "the folder '%s' does not exist",
                              output->target.folder);
    }
    return fsti_error_errno(error, errno, output->target.path, "creating the temporary file");
}

/// Permissions if owner or group change: never more than before for any user. Members of the old
/// group count as others, and members of the new group may have been others.
static mode_t restrict_mode(mode_t mode, bool has_owner, bool has_group) {
    mode_t user = mode >> 6 & 7, group = mode >> 3 & 7, other = mode & 7;
    if (!has_group) group = other = group & other;
    if (!has_owner) {
        group &= user;
        other &= user;
    }
    mode_t bits = user << 6 | group << 3 | other;
    return has_owner && has_group ? mode : bits;
}

/// Copies the old file's access control list, if there is one and it may be kept; otherwise removes
/// the list that the new file inherited from the folder. False if losing or keeping a list could
/// widen access; then the mode must only allow the owner.
static bool copy_access_list(const char *from, int to, bool may_keep) {
    char list[4096];
    ssize_t size = getxattr(from, ACCESS_LIST, list, sizeof list);
    bool had_list = size >= 0 || (errno != ENODATA && errno != ENOTSUP && errno != ENOENT);
    if (size >= 0 && may_keep && fsetxattr(to, ACCESS_LIST, list, (size_t)size, 0) == 0)
        return true;
    bool is_clean = fremovexattr(to, ACCESS_LIST) == 0 || errno == ENODATA || errno == ENOTSUP;
    return is_clean && !had_list;
}

fst_status fsti_file_keep_rights(int fd, const fsti_target *target, fst_error *error) {
    // Owner first, because changing it clears set-id bits. Only root can change owners, but users
    // can set their own groups. The descriptor is open here.
    // NOLINTNEXTLINE(clang-analyzer-unix.StdCLibraryFunctions)
    bool has_owner = fchown(fd, target->owner, target->group) == 0;
    // EINVAL: an owner unknown in this user namespace.
    if (!has_owner && errno != EPERM && errno != EINVAL && errno != EOPNOTSUPP)
        return fsti_error_errno(error, errno, target->path, "keeping the owner");
    struct stat own;
    bool has_group = has_owner || fchown(fd, (uid_t)-1, target->group) == 0;
    if (fstat(fd, &own) != 0)
        return fsti_error_errno(error, errno, target->path, "examining the new file");
    has_owner = own.st_uid == target->owner;
    has_group = has_group || own.st_gid == target->group;
    mode_t mode = restrict_mode(target->mode, has_owner, has_group);
    const char *like = target->like != NULL ? target->like : target->path;
    if (!copy_access_list(like, fd, has_owner && has_group)) mode &= 0700;
    if (fchmod(fd, mode) != 0)
        return fsti_error_errno(error, errno, target->path, "keeping the permissions");
    return FST_OK;
}

/// Creates a file with the old file's permissions, or the default ones.
static fst_status create_file(fsti_output *output, fst_error *error) {
    const fsti_target *target = &output->target;
    output->hidden = fsti_hidden_path(target->folder, target->path);
    if (output->hidden == NULL) return fsti_error_memory(error, strlen(target->path));
    output->fd = open_unnamed(target->folder);
    if (output->fd < 0) FST_TRY(open_hidden(output, error));
    return target->has_rights ? fsti_file_keep_rights(output->fd, target, error) : FST_OK;
}

static bool is_space_errno(int failure) {
    return failure == ENOSPC || failure == EDQUOT || failure == EFBIG;
}

/// failure: the errno that the system gave, one of those above.
static fst_status no_space(const fsti_output *output, int failure, fst_error *error) {
    if (failure != ENOSPC)
        return fsti_error_errno(error, failure, output->target.path, "writing the file");
    // The part that this file has already reserved was free before.
    uint64_t available = fsti_space_free(output->fd), own = fsti_space_taken(output->fd);
    uint64_t before = available > UINT64_MAX - own ? UINT64_MAX : available + own;
    return fsti_space_refuse(output->target.path, output->size_bytes, before, error);
}

fst_status fsti_file_check_limit(const char *path, uint64_t size_bytes, fst_error *error) {
    uint64_t limit = fsti_file_size_max();
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    location.os_errno = EFBIG;
    if (size_bytes <= limit) return FST_OK;
    return fsti_error_set(error, FST_E_NO_SPACE, location,
                          "the file would have %" PRIu64
                          " bytes, but this process can only write files of "
                          "%" PRIu64 " at most (ulimit -f)",
                          size_bytes, limit);
}

/// Reserves space. Refuses first if the file system is too small, because ext4 allocates everything
/// it has before it fails, and other programs would find a full disk.
static fst_status reserve_space(fsti_output *output, fst_error *error) {
    FST_TRY(fsti_file_check_limit(output->target.path, output->size_bytes, error));
    uint64_t own = fsti_space_taken(output->fd);
    if (fsti_space_free(output->fd) < output->size_bytes - fsti_min(own, output->size_bytes))
        return no_space(output, ENOSPC, error);
    int failure = output->size_bytes > 0 ? EINTR : 0;
    // On tmpfs an interrupted call is rolled back, so frequent signals could make it fail forever.
    for (unsigned tries = 0; failure == EINTR && tries < RESERVE_TRIES_MAX; tries++)
        failure = fallocate(output->fd, 0, 0, (off_t)output->size_bytes) == 0 ? 0 : errno;
    output->is_unreserved = failure != 0;
    if (failure == 0) return FST_OK;
    if (is_space_errno(failure)) return no_space(output, failure, error);
    if (ftruncate(output->fd, (off_t)output->size_bytes) != 0)
        return fsti_error_errno(error, errno, output->target.path, "setting the size");
    return FST_OK;
}

static fst_status copy_target(const fsti_target *from, fsti_target *to, fst_error *error) {
    *to = *from;
    to->folder = fsti_string_copy(from->folder, strlen(from->folder));
    to->path = fsti_string_copy(from->path, strlen(from->path));
    if (to->folder != NULL && to->path != NULL) return FST_OK;
    fsti_target_clear(to);
    return fsti_error_memory(error, strlen(from->path));
}

fst_status fsti_output_reserve(fsti_output *output, uint64_t size_bytes, fst_error *error) {
    output->size_bytes = size_bytes;
    return reserve_space(output, error);
}

fst_status fsti_output_allocate(fsti_output *output, uint64_t begin, uint64_t end,
                                fst_error *error) {
    static char zeros[1 << 16]; // nothing writes to it
    fst_status status = FST_OK;
    if (!output->is_unreserved) return FST_OK;
    for (uint64_t at = begin; at < end && status == FST_OK; at += sizeof zeros)
        status =
            fsti_output_write(output, zeros, (size_t)fsti_min(sizeof zeros, end - at), at, error);
    return status;
}

fst_status fsti_output_trim(fsti_output *output, uint64_t size_bytes, fst_error *error) {
    output->size_bytes = size_bytes;
    if (ftruncate(output->fd, (off_t)size_bytes) == 0) return FST_OK;
    return fsti_error_errno(error, errno, output->target.path, "setting the size");
}

int fsti_output_descriptor(const fsti_output *output) { return output->fd; }

static fst_status make_file(fsti_output *output, fst_error *error) {
    FST_TRY(create_file(output, error));
    return reserve_space(output, error);
}

fst_status fsti_output_open(const fsti_target *target, uint64_t size_bytes, bool durable,
                            fsti_output **out, fst_error *error) {
    fsti_output *output = fsti_alloc_zeroed(1, sizeof *output);
    if (output == NULL) return fsti_error_memory(error, sizeof *output);
    output->fd = output->fd_direct = -1;
    output->size_bytes = size_bytes;
    output->is_durable = durable;
    fst_status status = copy_target(target, &output->target, error);
    if (status == FST_OK)
        status = target->is_object
                     ? fsti_upload_open(target->path, size_bytes, target->watch,
                                        target->expected_version, &output->upload, error)
                     : make_file(output, error);
    if (status != FST_OK) {
        fsti_output_close(output);
        return status;
    }
    *out = output;
    return FST_OK;
}

static fst_status open_existing(fsti_output *output, const char *hidden, fst_error *error) {
    struct stat info;
    FST_TRY(fsti_path_absolute(hidden, &output->hidden, error));
    output->fd = open(hidden, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (output->fd < 0 || fstat(output->fd, &info) != 0)
        return fsti_error_errno(error, errno, hidden, "opening the temporary file");
    output->has_hidden = true;
    output->size_bytes = (uint64_t)info.st_size;
    bool is_itself = strcmp(hidden, output->target.path) == 0; // already has its final name
    return output->target.has_rights && !is_itself
               ? fsti_file_keep_rights(output->fd, &output->target, error)
               : FST_OK;
}

fst_status fsti_output_adopt(const fsti_target *target, const char *hidden, fsti_output **out,
                             fst_error *error) {
    fsti_output *output = fsti_alloc_zeroed(1, sizeof *output);
    if (output == NULL) return fsti_error_memory(error, sizeof *output);
    output->fd = output->fd_direct = -1;
    fst_status status = copy_target(target, &output->target, error);
    if (status == FST_OK) status = open_existing(output, hidden, error);
    if (status != FST_OK) {
        fsti_output_close(output);
        return status;
    }
    *out = output;
    return FST_OK;
}

void fsti_output_close(fsti_output *output) {
    if (output == NULL) return;
    if (output->has_hidden) unlink(output->hidden);
    fsti_output_abandon(output);
}

void fsti_output_abandon(fsti_output *output) {
    if (output == NULL) return;
    fsti_output_unmap(output);
    fsti_upload_close(output->upload);
    if (output->fd_direct >= 0) close(output->fd_direct);
    if (output->fd >= 0) close(output->fd);
    fsti_target_clear(&output->target);
    fsti_free(output->hidden);
    fsti_free(output);
}

int fsti_output_direct(fsti_output *output, char *reason, size_t reason_size) {
    if (!output->direct_probed) {
        output->direct_probed = true;
        output->fd_direct =
            fsti_io_reopen_direct(output->fd, output->hidden, O_RDWR, output->direct_reason,
                                  sizeof output->direct_reason);
    }
    snprintf(reason, reason_size, "%s", output->direct_reason);
    return output->fd_direct;
}

void fsti_output_direct_close(fsti_output *output) {
    if (output->fd_direct >= 0) close(output->fd_direct);
    output->fd_direct = -1;
    output->direct_probed = false;
}

uint32_t fsti_output_memory_alignment(const fsti_output *output) {
#ifdef STATX_DIOALIGN
    struct statx info;
    if (statx(output->fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 &&
        (info.stx_mask & STATX_DIOALIGN) != 0 && info.stx_dio_mem_align > 0 &&
        info.stx_dio_mem_align < FSTI_IO_PAGE_BYTES)
        return info.stx_dio_mem_align;
#endif
    (void)output;
    return FSTI_IO_PAGE_BYTES; // no common device needs more
}

static ssize_t write_once(fsti_output *output, const void *data, size_t size, uint64_t offset) {
    fsti_io_op op = {.is_write = true,
                     .write_fd = output->fd,
                     .offset = offset,
                     .size = size < WRITE_BYTES_MAX ? size : WRITE_BYTES_MAX};
    ssize_t written = pwrite(output->fd, data, op.size, (off_t)offset);
    op.result = written < 0 ? -errno : written;
    fsti_io_finish(&op);
    return (ssize_t)op.result;
}

fst_status fsti_output_write(fsti_output *output, const void *data, size_t size, uint64_t offset,
                             fst_error *error) {
    const char *from = data;
    if (output->upload != NULL) return fsti_upload_write(output->upload, data, size, offset, error);
    for (size_t done = 0; done < size;) {
        ssize_t written = write_once(output, from + done, size - done, offset + done);
        if (written == -EINTR) continue;
        if (is_space_errno((int)-written)) return no_space(output, (int)-written, error);
        if (written <= 0) {
            fsti_error_location location = {.file = output->target.path,
                                            .byte_offset = offset + done,
                                            .os_errno = written == 0 ? EIO : (int)-written};
            return fsti_error_set(error, FST_E_IO, location, "write failed");
        }
        // Start writeback early, so that the final sync is short.
        if (output->is_durable && written >= EARLY_BYTES)
            (void)sync_file_range(output->fd, (off_t)(offset + done), written,
                                  SYNC_FILE_RANGE_WRITE);
        done += (size_t)written;
    }
    return FST_OK;
}

fst_status fsti_output_map(fsti_output *output, char **out, fst_error *error) {
    if (output->upload != NULL) return fsti_output_refuse_object(output, error);
    if (output->mapping == NULL) {
        void *address = MAP_FAILED;
        int failure = ENOMEM;
        if (!fsti_alloc_fails()) {
            address =
                mmap(NULL, output->size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, output->fd, 0);
            failure = errno;
        }
        if (address == MAP_FAILED)
            return fsti_error_errno(error, failure, output->target.path, "mapping the new file");
        output->mapping = address;
    }
    *out = output->mapping;
    return FST_OK;
}

void fsti_output_unmap(fsti_output *output) {
    if (output->mapping != NULL) munmap(output->mapping, output->size_bytes);
    output->mapping = NULL;
}

fst_status fsti_output_sync(fsti_output *output, fst_error *error) {
    if (output->upload != NULL) return fsti_upload_drain(output->upload, error);
    // fsync() instead of fdatasync(), because size and permissions must be durable too.
    while (fsync(output->fd) != 0)
        if (errno != EINTR) return fsti_error_errno(error, errno, output->target.path, "fsync");
    return FST_OK;
}
