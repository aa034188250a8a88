// SPDX-License-Identifier: Apache-2.0
/// For LD_PRELOAD: logs what a program does to the files in a folder (IO_LOG_FOLDER) to IO_LOG,
/// with the bytes, so that a test can replay every state that a crash could have left.
///   c INODE PATH      made with a name          n INODE           made without one
///   w INODE AT SIZE   then SIZE bytes           t INODE SIZE      its size is at least that
///   z INODE SIZE      its size is that          s INODE           its bytes are on the device
///   S PATH            the folder's names are    l INODE PATH      has this name, too
///   r FROM TO         renamed                   u PATH            removed
///   m PATH            a folder was made
#undef _FILE_OFFSET_BITS // both names of each function are wanted
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *stream;

/// The log, with the lock held; NULL without a log.
static FILE *open_log(void) {
    pthread_mutex_lock(&lock);
    const char *path = getenv("IO_LOG");
    if (stream == NULL && path != NULL) stream = fopen(path, "abe");
    return stream;
}

static void close_log(void) {
    if (stream != NULL) fflush(stream);
    pthread_mutex_unlock(&lock);
}

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...) {
    FILE *log = open_log();
    va_list arguments;
    va_start(arguments, format);
    if (log != NULL) vfprintf(log, format, arguments);
    va_end(arguments);
    close_log();
}

/// Whether a path lies in the folder that is watched.
static bool is_watched(const char *path) {
    char real[PATH_MAX], folder[PATH_MAX];
    const char *wanted = getenv("IO_LOG_FOLDER");
    snprintf(folder, sizeof folder, "%s", path);
    char *slash = strrchr(folder, '/');
    struct stat info;
    if (stat(path, &info) != 0 || !S_ISDIR(info.st_mode)) {
        if (slash == NULL) return false;
        *slash = '\0';
    }
    return wanted != NULL && realpath(folder, real) != NULL &&
           strncmp(real, wanted, strlen(wanted)) == 0;
}

/// The inode of a watched regular file or folder; 0 for others.
static unsigned long inode_of(int fd, bool *is_folder) {
    char link[64], path[PATH_MAX];
    struct stat info;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0 || fstat(fd, &info) != 0) return 0;
    path[size] = '\0';
    const char *wanted = getenv("IO_LOG_FOLDER");
    *is_folder = S_ISDIR(info.st_mode);
    bool inside = wanted != NULL && strncmp(path, wanted, strlen(wanted)) == 0;
    return inside && (*is_folder || S_ISREG(info.st_mode)) ? info.st_ino : 0;
}

static int note_open(int fd, const char *path, int flags) {
    bool is_folder;
    unsigned long inode = fd >= 0 ? inode_of(fd, &is_folder) : 0;
    if (inode == 0) return fd;
    if ((flags & O_TMPFILE) == O_TMPFILE)
        note("n %lu\n", inode);
    else if (flags & O_CREAT)
        note("c %lu %s\n", inode, path);
    return fd;
}

EXPORT int open64(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    return note_open(REAL(int, open64, const char *, int, ...)(path, flags, mode), path, flags);
}

EXPORT int open(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    return note_open(REAL(int, open, const char *, int, ...)(path, flags, mode), path, flags);
}

static void note_write(int fd, const void *data, ssize_t size, off_t at) {
    bool is_folder;
    unsigned long inode = size > 0 ? inode_of(fd, &is_folder) : 0;
    if (inode == 0) return;
    FILE *log = open_log();
    if (log != NULL) {
        fprintf(log, "w %lu %lld %zd\n", inode, (long long)at, size);
        fwrite(data, 1, (size_t)size, log);
    }
    close_log();
}

EXPORT ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) {
    ssize_t done = REAL(ssize_t, pwrite64, int, const void *, size_t, off_t)(fd, data, size, at);
    note_write(fd, data, done, at);
    return done;
}

EXPORT ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    ssize_t done = REAL(ssize_t, pwrite, int, const void *, size_t, off_t)(fd, data, size, at);
    note_write(fd, data, done, at);
    return done;
}

/// Records the bytes that a file received from another one, from `at` on.
static void note_copied(int fd, off_t at, size_t size) {
    char *bytes = malloc(size);
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int reader = open(link, O_RDONLY | O_CLOEXEC);
    ssize_t got = bytes == NULL || reader < 0 ? -1 : pread(reader, bytes, size, at);
    note_write(fd, bytes, got, at);
    if (reader >= 0) close(reader);
    free(bytes);
}

#define COPY_PARAMETERS int from, off_t *from_at, int to, off_t *to_at, size_t size, unsigned flags

EXPORT ssize_t copy_file_range(COPY_PARAMETERS) {
    off_t at = to_at == NULL ? 0 : *to_at;
    ssize_t done = REAL(ssize_t, copy_file_range, int, off_t *, int, off_t *, size_t,
                        unsigned)(from, from_at, to, to_at, size, flags);
    if (done > 0) note_copied(to, at, (size_t)done);
    return done;
}

static int note_size(int result, int fd, const char *what, off_t size) {
    bool is_folder;
    unsigned long inode = result == 0 ? inode_of(fd, &is_folder) : 0;
    if (inode != 0) note("%s %lu %lld\n", what, inode, (long long)size);
    return result;
}

EXPORT int fallocate64(int fd, int mode, off_t at, off_t size) {
    int result = REAL(int, fallocate64, int, int, off_t, off_t)(fd, mode, at, size);
    return note_size(result, fd, "t", at + size);
}

EXPORT int fallocate(int fd, int mode, off_t at, off_t size) {
    int result = REAL(int, fallocate, int, int, off_t, off_t)(fd, mode, at, size);
    return note_size(result, fd, "t", at + size);
}

EXPORT int ftruncate64(int fd, off_t size) {
    return note_size(REAL(int, ftruncate64, int, off_t)(fd, size), fd, "z", size);
}

EXPORT int ftruncate(int fd, off_t size) {
    return note_size(REAL(int, ftruncate, int, off_t)(fd, size), fd, "z", size);
}

EXPORT int fsync(int fd) {
    char link[64], path[PATH_MAX];
    bool is_folder;
    unsigned long inode = inode_of(fd, &is_folder);
    int result = REAL(int, fsync, int)(fd);
    if (inode == 0 || result != 0) return result;
    if (!is_folder) {
        note("s %lu\n", inode);
        return result;
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = '\0';
    note("S %s\n", path);
    return result;
}

static int note_link(int result, const char *path) {
    struct stat info;
    if (result == 0 && is_watched(path) && lstat(path, &info) == 0)
        note("l %lu %s\n", (unsigned long)info.st_ino, path);
    return result;
}

EXPORT int linkat(int from_fd, const char *from, int to_fd, const char *to, int flags) {
    return note_link(REAL(int, linkat, int, const char *, int, const char *, int)(from_fd, from,
                                                                                  to_fd, to, flags),
                     to);
}

EXPORT int link(const char *from, const char *to) {
    return note_link(REAL(int, link, const char *, const char *)(from, to), to);
}

EXPORT int rename(const char *from, const char *to) {
    int result = REAL(int, rename, const char *, const char *)(from, to);
    if (result == 0 && is_watched(to)) note("r %s\t%s\n", from, to);
    return result;
}

EXPORT int unlink(const char *path) {
    bool watched = is_watched(path);
    int result = REAL(int, unlink, const char *)(path);
    if (result == 0 && watched) note("u %s\n", path);
    return result;
}

EXPORT int unlinkat(int folder_fd, const char *name, int flags) {
    char link[64], path[PATH_MAX], whole[PATH_MAX + 300];
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder_fd);
    ssize_t size = folder_fd >= 0 ? readlink(link, path, sizeof path - 1) : -1;
    path[size < 0 ? 0 : size] = '\0';
    snprintf(whole, sizeof whole, "%s%s%.255s", path, size < 0 ? "" : "/", name);
    bool watched = is_watched(whole);
    int result = REAL(int, unlinkat, int, const char *, int)(folder_fd, name, flags);
    if (result == 0 && watched) note("u %s\n", whole);
    return result;
}

EXPORT int mkdir(const char *path, mode_t mode) {
    int result = REAL(int, mkdir, const char *, mode_t)(path, mode);
    if (result == 0 && is_watched(path)) note("m %s\n", path);
    return result;
}
