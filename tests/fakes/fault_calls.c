// SPDX-License-Identifier: Apache-2.0
/// Implements fault_calls.h. The errors are those in the manual pages that a save can meet.
#include "fault_calls.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool is_on;
static fault_plan plan;
static fault_report report;

void fault_calls_begin(const fault_plan *wanted) {
    plan = *wanted;
    report = (fault_report){0};
    is_on = true;
}

fault_report fault_calls_end(void) {
    is_on = false;
    return report;
}

/// Whether this call fails; errno is set then.
static bool fails(const char *name, const int *errors, unsigned error_count) {
    if (!is_on) return false;
    pthread_mutex_lock(&lock);
    long number = ++report.call_count;
    bool is_due = number == plan.nth;
    bool failing = (is_due && plan.kind == FAULT_ONCE) ||
                   (number >= plan.nth && plan.kind == FAULT_FOREVER && plan.nth > 0);
    if (is_due) {
        report.failed = name;
        report.errno_count = error_count;
    }
    pthread_mutex_unlock(&lock);
    if (is_due && plan.kind == FAULT_KILL) _exit(9);
    if (is_due && plan.kind == FAULT_ACTION) {
        int before = errno; // readdir() reports errors in it
        is_on = false;
        plan.action();
        is_on = true;
        errno = before;
    }
    if (failing) errno = errors[plan.errno_index % error_count];
    return failing;
}

#define FAILS(name, ...)                                                                           \
    fails(name, (const int[]){__VA_ARGS__}, sizeof((const int[]){__VA_ARGS__}) / sizeof(int))

/// A call whose failure is -1: its parameters, how they are handed on, and its errors.
#define WRAP(type, name, parameters, arguments, ...)                                               \
    type __real_##name parameters;                                                                 \
    type __wrap_##name parameters;                                                                 \
    type __wrap_##name parameters {                                                                \
        return FAILS(#name, __VA_ARGS__) ? (type) - 1 : __real_##name arguments;                   \
    }

WRAP(int, rename, (const char *from, const char *to), (from, to), EIO, ENOSPC, EPERM)
WRAP(int, renameat2,
     (int from_folder, const char *from, int to_folder, const char *to, unsigned flags),
     (from_folder, from, to_folder, to, flags), EIO, EINVAL)
WRAP(int, unlink, (const char *path), (path), EPERM, EIO)
WRAP(int, unlinkat, (int folder, const char *path, int flags), (folder, path, flags), EPERM)
WRAP(int, rmdir, (const char *path), (path), EIO)
WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode), ENOSPC, EACCES)
WRAP(int, fchmod, (int fd, mode_t mode), (fd, mode), EIO)
WRAP(int, fchown, (int fd, uid_t owner, gid_t group), (fd, owner, group), EPERM, EIO)
WRAP(int, fallocate64, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size), ENOSPC,
     EOPNOTSUPP, EINTR, EIO)
WRAP(int, ftruncate64, (int fd, off_t size), (fd, size), EIO)
WRAP(ssize_t, pwrite64, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at),
     ENOSPC, EIO, EINTR)
WRAP(int, fstat64, (int fd, struct stat *info), (fd, info), EIO)
WRAP(int, stat64, (const char *path, struct stat *info), (path, info), EACCES)
WRAP(int, lstat64, (const char *path, struct stat *info), (path, info), EIO)
WRAP(int, fstatat64, (int folder, const char *path, struct stat *info, int flags),
     (folder, path, info, flags), EIO)
WRAP(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size), ENOSPC, EINTR)
WRAP(int, access, (const char *path, int mode), (path, mode), EIO)
WRAP(int, faccessat, (int folder, const char *path, int mode, int flags),
     (folder, path, mode, flags), EACCES)
WRAP(ssize_t, getxattr, (const char *path, const char *name, void *value, size_t size),
     (path, name, value, size), EIO, ENODATA)
WRAP(ssize_t, copy_file_range,
     (int from, off_t *from_at, int to, off_t *to_at, size_t size, unsigned flags),
     (from, from_at, to, to_at, size, flags), EIO, ENOSPC, EINTR, EXDEV, EINVAL)
WRAP(int, flock, (int fd, int operation), (fd, operation), ENOLCK)

/// Reads fail only if a test requests it.
ssize_t __real_pread64(int fd, void *data, size_t size, off_t at);
ssize_t __wrap_pread64(int fd, void *data, size_t size, off_t at);
ssize_t __wrap_pread64(int fd, void *data, size_t size, off_t at) {
    return plan.with_reads && FAILS("pread", EIO, EINTR, ENOMEM)
               ? -1
               : __real_pread64(fd, data, size, at);
}

ssize_t __real_read(int fd, void *data, size_t size);
ssize_t __wrap_read(int fd, void *data, size_t size);
ssize_t __wrap_read(int fd, void *data, size_t size) {
    return plan.with_reads && FAILS("read", EIO, EINTR, ENOMEM) ? -1 : __real_read(fd, data, size);
}

/// Simulates a file system with shared blocks by copying.
static int copy_blocks(int to, const struct file_clone_range *range) {
    char block[4096];
    for (off_t done = 0;;) {
        ssize_t got = __real_pread64((int)range->src_fd, block, sizeof block,
                                     (off_t)range->src_offset + done);
        if (got <= 0) return (int)got;
        if (__real_pwrite64(to, block, (size_t)got, (off_t)range->dest_offset + done) != got)
            return -1;
        done += got;
    }
}

int __wrap_ioctl(int fd, unsigned long request, void *argument);
int __wrap_ioctl(int fd, unsigned long request, void *argument) {
    if (FAILS("ioctl", EOPNOTSUPP, EXDEV, EINVAL, EIO)) return -1;
    if (is_on && plan.shares_blocks && request == FICLONERANGE) return copy_blocks(fd, argument);
    errno = EOPNOTSUPP;
    return -1;
}

/// Files need not survive the test, so syncing does nothing.
int __wrap_fsync(int fd);
int __wrap_fsync(int fd) {
    (void)fd;
    return FAILS("fsync", EIO, ENOSPC, EINTR, EINVAL) ? -1 : 0;
}

int __real_link(const char *from, const char *to);
int __wrap_link(const char *from, const char *to);
int __wrap_link(const char *from, const char *to) {
    if (FAILS("link", EIO, ENOSPC, EPERM)) return -1;
    if (!is_on || !plan.no_links) return __real_link(from, to);
    errno = EPERM;
    return -1;
}

int __real_linkat(int from_folder, const char *from, int to_folder, const char *to, int flags);
int __wrap_linkat(int from_folder, const char *from, int to_folder, const char *to, int flags);
int __wrap_linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    return FAILS("linkat", EIO, ENOSPC) ? -1
                                        : __real_linkat(from_folder, from, to_folder, to, flags);
}

int __real_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    if (plan.with_reads && (flags & O_ACCMODE) == O_RDONLY)
        return FAILS("open", EIO, EMFILE, ENOMEM, EINTR) ? -1 : __real_open64(path, flags, mode);
    return FAILS("open", ENOSPC, EMFILE, EACCES) ? -1 : __real_open64(path, flags, mode);
}

int __real_openat64(int folder, const char *path, int flags, ...);
int __wrap_openat64(int folder, const char *path, int flags, ...);
int __wrap_openat64(int folder, const char *path, int flags, ...) {
    return FAILS("openat", EMFILE) ? -1 : __real_openat64(folder, path, flags);
}

DIR *__real_opendir(const char *path);
DIR *__wrap_opendir(const char *path);
DIR *__wrap_opendir(const char *path) {
    return FAILS("opendir", EMFILE, EIO) ? NULL : __real_opendir(path);
}

struct dirent *__real_readdir64(DIR *folder);
struct dirent *__wrap_readdir64(DIR *folder);
struct dirent *__wrap_readdir64(DIR *folder) {
    return FAILS("readdir", EIO) ? NULL : __real_readdir64(folder);
}
