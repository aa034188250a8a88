// SPDX-License-Identifier: Apache-2.0
/// The cache folder and its files, which belong to one user and are never opened through links.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "cache_private.h"

/// Creating and deleting files takes milliseconds, so a longer wait means that the lock's owner is
/// stopped.
#define LOCK_PATIENCE_NS ((uint64_t)10000000000)
#define LOCK_PAUSE_US 2000
/// Marks the folder as a cache for backup and indexing programs (bford.info/cachedir).
static const char tag[] = "Signature: 8a477f597d28d172789f06886806bc55\n"
                          "# Objects cached by fastsafetensors; they can be downloaded again.\n";

/// Creates a folder and its parents.
static int make_folders(const char *path) {
    char text[CACHE_PATH_BYTES];
    size_t size = strlen(path);
    if (size >= sizeof text) return ENAMETOOLONG;
    memcpy(text, path, size + 1);
    for (char *slash = strchr(text + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (mkdir(text, 0700) != 0 && errno != EEXIST) return errno;
        *slash = '/';
    }
    return mkdir(text, 0700) != 0 && errno != EEXIST ? errno : 0;
}

/// Refuses a folder in which another user may change names, because cached objects are trusted by
/// name. Group write permission counts too, since the group may have other members. Access lists
/// that allow writing show up in the group bits.
static fst_status check_folder(const char *path, int fd, fst_error *error) {
    struct stat info;
    if (fstat(fd, &info) != 0) return fsti_error_errno(error, errno, path, "stat");
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET, .os_errno = EPERM};
    if (info.st_uid != geteuid())
        return fsti_error_set(error, FST_E_PERMISSION, location,
                              "the cache folder belongs to another user. Give a subfolder that "
                              "does not exist; it is created for this user only");
    if ((info.st_mode & (S_IWGRP | S_IWOTH)) == 0) return FST_OK;
    return fsti_error_set(error, FST_E_PERMISSION, location,
                          "%s can write to the cache folder. Run chmod go-w on it, or give a "
                          "subfolder that does not exist",
                          (info.st_mode & S_IWOTH) != 0 ? "everybody" : "its group");
}

fst_status fsti_cache_folder_open(const char *given, bool makes, cache_folder *out,
                                  fst_error *error) {
    const int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    *out = (cache_folder){.fd = -1, .lock_fd = -1};
    if (strlen(given) >= sizeof out->path)
        return fsti_error_errno(error, ENAMETOOLONG, given, "opening the cache folder");
    snprintf(out->path, sizeof out->path, "%s", given);
    fsti_path_trim(out->path);
    const char *path = out->path;
    int fd = open(path, flags);
    if (fd < 0 && errno == ENOENT && makes) {
        int failed = make_folders(path);
        if (failed != 0) return fsti_error_errno(error, failed, path, "creating the cache folder");
        fd = open(path, flags);
    }
    if (fd < 0) return fsti_error_errno(error, errno, path, "opening the cache folder");
    fst_status status = check_folder(path, fd, error);
    if (status == FST_OK)
        out->fd = fd;
    else
        close(fd);
    return status;
}

void fsti_cache_folder_close(cache_folder *folder) {
    fsti_cache_folder_unlock(folder);
    if (folder->fd >= 0) close(folder->fd);
    folder->fd = -1;
}

int fsti_cache_file_open(const cache_folder *folder, const char *name, int flags) {
    struct stat info;
    int fd = openat(folder->fd, name, flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600);
    if (fd < 0) return -1;
    int failed = fstat(fd, &info) != 0 ? errno : 0;
    if (failed == 0 && (!S_ISREG(info.st_mode) || info.st_uid != geteuid() || info.st_nlink > 1))
        failed = EPERM;
    if (failed == 0) return fd;
    close(fd);
    errno = failed;
    return -1;
}

/// Writes the cache directory tag once.
static void write_tag(const cache_folder *folder) {
    int fd = fsti_cache_file_open(folder, "CACHEDIR.TAG", O_WRONLY | O_CREAT | O_EXCL);
    if (fd < 0) return;
    (void)fsti_write_at(fd, tag, sizeof tag - 1, 0); // optional, so errors are ignored
    close(fd);
}

int fsti_cache_folder_lock(cache_folder *folder) {
    uint64_t begun_ns = fsti_now_ns();
    if (folder->lock_fd < 0) {
        write_tag(folder);
        folder->lock_fd = fsti_cache_file_open(folder, "lock", O_RDWR | O_CREAT);
    }
    if (folder->lock_fd < 0) return errno;
    while (flock(folder->lock_fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK && errno != EINTR) return errno;
        if (fsti_now_ns() - begun_ns > LOCK_PATIENCE_NS) return ETIMEDOUT;
        usleep(LOCK_PAUSE_US);
    }
    return 0;
}

void fsti_cache_folder_unlock(cache_folder *folder) {
    // Unlock explicitly: after a fork, the child's copy of the descriptor would keep the lock.
    if (folder->lock_fd >= 0) {
        flock(folder->lock_fd, LOCK_UN);
        close(folder->lock_fd);
    }
    folder->lock_fd = -1;
}

void fsti_cache_file_name(char out[CACHE_FILE_NAME_BYTES], const char *name, const char *ending) {
    snprintf(out, CACHE_FILE_NAME_BYTES, "%s%s", name, ending);
}
