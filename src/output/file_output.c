// SPDX-License-Identifier: Apache-2.0
/// Files being made. Where the file system can (O_TMPFILE), the new file has no name until it is
/// complete, so that even a kill leaves nothing behind; elsewhere it has a hidden one.
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "io/io.h"
#include "output.h"

/// Tries for a hidden name that nobody has.
#define NAME_TRIES_MAX 100
/// Writes are cut to this, so that none is too large for the kernel (2 GiB).
#define WRITE_BYTES_MAX ((size_t)64 << 20)
/// A buffered write this large is pushed to the device at once when it has to get there anyway.
#define EARLY_BYTES ((ssize_t)1 << 20)

struct fsti_output {
    fsti_target target;
    char *hidden; ///< path of the hidden name
    bool has_hidden, is_durable;
    int fd, fd_direct;
    uint64_t size_bytes;
    bool direct_probed;
    char direct_reason[128];
    void *mapping;
};

const char *fsti_output_path(const fsti_output *output) { return output->target.path; }

static const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

/// A hidden name beside the target: nobody's glob finds it, and it says what it belongs to.
static void make_hidden_name(const fsti_output *output, char *hidden, size_t capacity) {
    static atomic_uint_fast64_t counter;
    uint64_t number = atomic_fetch_add(&counter, 1);
    uint64_t words[3] = {number, fsti_now_ns(), (uint64_t)getpid()};
    // A long name of the target's is cut: with ours it must stay within NAME_MAX.
    snprintf(hidden, capacity, "%s/.%.200s.%016" PRIx64 ".tmp", output->target.folder,
             file_name(output->target.path), fsti_hash(words, sizeof words, fsti_hash_key()));
}

static int open_unnamed(const char *folder) {
#ifdef O_TMPFILE
    if (!fsti_io_hidden(FSTI_IO_HIDE_TMPFILE))
        return open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0666);
#endif
    (void)folder;
    errno = EOPNOTSUPP;
    return -1;
}

static fst_status open_hidden(fsti_output *output, size_t capacity, fst_error *error) {
    for (unsigned tries = 0; tries < NAME_TRIES_MAX; tries++) {
        make_hidden_name(output, output->hidden, capacity);
        output->fd = open(output->hidden, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
        output->has_hidden = output->fd >= 0;
        if (output->has_hidden) return FST_OK;
        if (errno != EEXIST) break;
    }
    return fsti_error_errno(error, errno, output->target.path, "making a file beside it");
}

/// A new file with the permissions that the old one has, or that new files get.
static fst_status create_file(fsti_output *output, fst_error *error) {
    const fsti_target *target = &output->target;
    size_t capacity = strlen(target->folder) + 256;
    output->hidden = fsti_alloc(capacity);
    if (output->hidden == NULL) return fsti_error_memory(error, capacity);
    output->fd = open_unnamed(target->folder);
    if (output->fd < 0) FST_TRY(open_hidden(output, capacity, error));
    if (!target->exists || output->fd < 0) return FST_OK;
    // Owner first: changing it clears set-id bits. Only root may, and nobody else needs to.
    if (fchown(output->fd, target->owner, target->group) != 0 && errno != EPERM)
        return fsti_error_errno(error, errno, target->path, "keeping the owner");
    if (fchmod(output->fd, target->mode) != 0)
        return fsti_error_errno(error, errno, target->path, "keeping the permissions");
    return FST_OK;
}

static fst_status no_space(const fsti_output *output, uint64_t available, fst_error *error) {
    fsti_error_place place = FSTI_NOWHERE;
    place.file = output->target.path;
    place.os_errno = ENOSPC;
    return fsti_error_set(error, FST_E_NO_SPACE, place,
                          "not enough space for %" PRIu64 " bytes, %" PRIu64 " are free",
                          output->size_bytes, available);
}

static uint64_t free_bytes(int fd) {
    struct statvfs info;
    if (fstatvfs(fd, &info) != 0) return UINT64_MAX;
    uint64_t bytes;
    return fsti_mul(info.f_bavail, info.f_frsize, &bytes) ? bytes : UINT64_MAX;
}

/// Reserves the space, or at least looks whether it is there.
static fst_status reserve_space(fsti_output *output, fst_error *error) {
    struct rlimit limit;
    // Beyond the limit the kernel sends a signal that ends programs.
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        output->size_bytes > limit.rlim_cur)
        return no_space(output, limit.rlim_cur, error);
    int failure = 0;
    while (output->size_bytes > 0 && fallocate(output->fd, 0, 0, (off_t)output->size_bytes) != 0) {
        failure = errno;
        if (failure != EINTR) break;
        failure = 0;
    }
    if (failure == ENOSPC || failure == EDQUOT || failure == EFBIG)
        return no_space(output, free_bytes(output->fd), error);
    if (failure == 0) return FST_OK;
    uint64_t available = free_bytes(output->fd);
    if (available < output->size_bytes) return no_space(output, available, error);
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

fst_status fsti_output_open(const fsti_target *target, uint64_t size_bytes, bool durable,
                            fsti_output **out, fst_error *error) {
    fsti_output *output = fsti_alloc_zeroed(1, sizeof *output);
    if (output == NULL) return fsti_error_memory(error, sizeof *output);
    output->fd = output->fd_direct = -1;
    output->size_bytes = size_bytes;
    output->is_durable = durable;
    fst_status status = copy_target(target, &output->target, error);
    if (status == FST_OK) status = create_file(output, error);
    if (status == FST_OK) status = reserve_space(output, error);
    if (status != FST_OK) {
        fsti_output_close(output);
        return status;
    }
    *out = output;
    return FST_OK;
}

void fsti_output_close(fsti_output *output) {
    if (output == NULL) return;
    fsti_output_unmap(output);
    if (output->has_hidden) unlink(output->hidden);
    if (output->fd_direct >= 0) close(output->fd_direct);
    if (output->fd >= 0) close(output->fd);
    fsti_target_clear(&output->target);
    fsti_free(output->hidden);
    fsti_free(output);
}

int fsti_output_direct(fsti_output *output, char *reason, size_t reason_size) {
    if (!output->direct_probed) {
        output->direct_probed = true;
        output->fd_direct = fsti_io_reopen_direct(output->fd, O_RDWR, output->direct_reason,
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
    return FSTI_IO_PAGE_BYTES; // no device that is sold wants more
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
    for (size_t done = 0; done < size;) {
        ssize_t written = write_once(output, from + done, size - done, offset + done);
        if (written == -EINTR) continue;
        if (written == -ENOSPC || written == -EDQUOT)
            return no_space(output, free_bytes(output->fd), error);
        if (written <= 0) {
            fsti_error_place place = {.file = output->target.path,
                                      .byte_offset = offset + done,
                                      .os_errno = written == 0 ? EIO : (int)-written};
            return fsti_error_set(error, FST_E_IO, place, "write failed");
        }
        // Starting the device early: syncing at the end then waits for little.
        if (output->is_durable && written >= EARLY_BYTES)
            (void)sync_file_range(output->fd, (off_t)(offset + done), written,
                                  SYNC_FILE_RANGE_WRITE);
        done += (size_t)written;
    }
    return FST_OK;
}

fst_status fsti_output_map(fsti_output *output, char **out, fst_error *error) {
    if (output->mapping == NULL) {
        void *address = fsti_alloc_fails() ? MAP_FAILED
                                           : mmap(NULL, output->size_bytes, PROT_READ | PROT_WRITE,
                                                  MAP_SHARED, output->fd, 0);
        if (address == MAP_FAILED)
            return fsti_error_errno(error, ENOMEM, output->target.path, "mmap");
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
    // fsync, not fdatasync: size and permissions are part of the promise.
    while (fsync(output->fd) != 0)
        if (errno != EINTR) return fsti_error_errno(error, errno, output->target.path, "fsync");
    return FST_OK;
}

/// A name for the file behind a descriptor: the way that needs no privilege.
static int link_descriptor(int fd, const char *path) {
    char from[64];
    snprintf(from, sizeof from, "/proc/self/fd/%d", fd);
    return linkat(AT_FDCWD, from, AT_FDCWD, path, AT_SYMLINK_FOLLOW);
}

fst_status fsti_output_link(fsti_output *output, const char **name, fst_error *error) {
    size_t capacity = strlen(output->target.folder) + 256;
    for (unsigned tries = 0; !output->has_hidden; tries++) {
        make_hidden_name(output, output->hidden, capacity);
        if (link_descriptor(output->fd, output->hidden) == 0)
            output->has_hidden = true;
        else if (errno != EEXIST || tries == NAME_TRIES_MAX)
            return fsti_error_errno(error, errno, output->target.path, "naming the new file");
    }
    if (name != NULL) *name = file_name(output->hidden);
    return FST_OK;
}

static fst_status rename_failure(const fsti_output *output, fst_error *error) {
    int failure = errno;
    return fsti_error_errno(error, failure, output->target.path, "putting the new file in place");
}

/// Puts a second name of the file in place and leaves the hidden one; false where the file system
/// has no hard links.
static bool publish_copy(fsti_output *output, fst_status *status, fst_error *error) {
    size_t capacity = strlen(output->target.folder) + 256;
    char *second = fsti_alloc(capacity);
    if (second == NULL) return false;
    make_hidden_name(output, second, capacity);
    bool linked = link(output->hidden, second) == 0;
    if (linked && rename(second, output->target.path) != 0) {
        *status = rename_failure(output, error);
        unlink(second);
    }
    fsti_free(second);
    return linked;
}

fst_status fsti_output_publish(fsti_output *output, bool keep_hidden, bool *kept,
                               fst_error *error) {
    fst_status status = FST_OK;
    if (kept != NULL) *kept = false;
    if (keep_hidden && output->has_hidden && publish_copy(output, &status, error)) {
        if (kept != NULL) *kept = true;
        return status;
    }
    // Nothing to replace: one step, and no hidden name even for an instant.
    if (!output->has_hidden && !output->target.exists &&
        link_descriptor(output->fd, output->target.path) == 0)
        return FST_OK;
    FST_TRY(fsti_output_link(output, NULL, error));
    if (rename(output->hidden, output->target.path) != 0) return rename_failure(output, error);
    output->has_hidden = false;
    return FST_OK;
}

void fsti_output_drop_hidden(fsti_output *output) {
    if (output->has_hidden) unlink(output->hidden);
    output->has_hidden = false;
}
