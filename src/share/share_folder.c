// SPDX-License-Identifier: Apache-2.0
/// The folder of segments: opened by its owner alone, locked for changes, searched for segments
/// that are over.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "share_private.h"

static const char lock_name[] = "lock";
#define LOCK_PAUSE_MS 2

int fsti_share_folder_open(const char *given, bool is_wanted, char *why, size_t why_size) {
    char path[SHARE_PATH_BYTES];
    snprintf(path, sizeof path, "%s", given); // the settings have checked its length
    fsti_path_trim(path);
    if (is_wanted) (void)mkdir(path, S_IRWXU);
    // A link could lead to a folder that another user controls.
    int fd = fsti_lockable_open_at(AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
    int failure = errno;
    struct stat stamp;
    if (fd < 0) {
        snprintf(why, why_size, "the folder for shared segments cannot be opened: %s",
                 strerror(failure));
        errno = failure;
        return -1;
    }
    bool is_own = fstat(fd, &stamp) == 0 && stamp.st_uid == geteuid() &&
                  (stamp.st_mode & (S_IRWXG | S_IRWXO)) == 0;
    if (is_own) return fd;
    fsti_lockable_close(fd);
    snprintf(why, why_size,
             "the folder for shared segments is open to other users, or another user owns it");
    errno = EACCES;
    return -1;
}

static bool is_private_file(const struct stat *stamp) {
    return S_ISREG(stamp->st_mode) && stamp->st_uid == geteuid() &&
           (stamp->st_mode & (S_IRWXG | S_IRWXO)) == 0 && stamp->st_nlink == 1;
}

/// Opens the file that is locked, which the user alone can open. -1 with errno.
static int open_lock(int folder_fd) {
    struct stat stamp;
    int fd = fsti_lockable_open_at(folder_fd, lock_name, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK,
                                   S_IRUSR | S_IWUSR);
    if (fd < 0 || (fstat(fd, &stamp) == 0 && is_private_file(&stamp))) return fd;
    fsti_lockable_close(fd);
    errno = EACCES;
    return -1;
}

int fsti_share_folder_lock(int folder_fd, unsigned wait_ms) {
    const struct timespec pause = {.tv_nsec = LOCK_PAUSE_MS * 1000000};
    int fd = open_lock(folder_fd);
    if (fd < 0) return -1;
    for (unsigned waited_ms = 0; waited_ms <= wait_ms; waited_ms += LOCK_PAUSE_MS) {
        if (fsti_share_set_lock(fd, F_WRLCK, 0, 1)) return fd;
        if (errno != EAGAIN && errno != EACCES) break;
        nanosleep(&pause, NULL);
    }
    int failure = errno;
    fsti_lockable_close(fd);
    errno = failure;
    return -1;
}

void fsti_share_folder_unlock(int lock_fd) {
    // Explicitly, because a process that was started without fork() handlers may have a copy.
    (void)fsti_share_set_lock(lock_fd, F_UNLCK, 0, 1);
    fsti_lockable_close(lock_fd);
}

void fsti_share_folder_remove(int folder_fd, const char *name) {
    (void)unlinkat(folder_fd, name, 0);
}

uint64_t fsti_share_memory_of(const struct stat *stamp) { return (uint64_t)stamp->st_blocks * 512; }

bool fsti_share_file_open(int folder_fd, const char *name, share_file *out) {
    *out = (share_file){.fd = -1};
    snprintf(out->name, sizeof out->name, "%s", name);
    // O_NONBLOCK: opening a FIFO or a device must not wait.
    int fd = fsti_lockable_open_at(folder_fd, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK, 0);
    if (fd < 0) return false;
    if (fstat(fd, &out->stamp) != 0 || !is_private_file(&out->stamp)) {
        fsti_lockable_close(fd);
        errno = EACCES;
        return false;
    }
    out->fd = fd;
    out->in_use = !fsti_share_is_unused(fd);
    ssize_t head_bytes = pread(fd, &out->head, sizeof out->head, 0);
    out->has_magic =
        head_bytes >= (ssize_t)sizeof out->head.magic && fsti_share_header_has_magic(&out->head);
    out->is_valid = head_bytes == (ssize_t)sizeof out->head &&
                    fsti_share_header_is_valid(&out->head, (uint64_t)out->stamp.st_size) &&
                    strcmp(out->head.name, name) == 0;
    return true;
}

/// Whether a name has the form of a segment's.
static bool is_segment_name(const char *name) {
    return strlen(name) == SHARE_NAME_BYTES - 1 &&
           strspn(name, "0123456789abcdef") == SHARE_NAME_BYTES - 1;
}

int fsti_share_folder_visit(int folder_fd, share_file_visitor visit, void *context) {
    int fd = fsti_lockable_open_at(folder_fd, ".", O_RDONLY | O_DIRECTORY, 0);
    DIR *folder = fd >= 0 ? fdopendir(fd) : NULL;
    if (folder == NULL) {
        int failure = errno;
        if (fd >= 0) fsti_lockable_close(fd);
        return failure;
    }
    const struct dirent *entry;
    while ((entry = readdir(folder)) != NULL) {
        share_file file;
        if (!is_segment_name(entry->d_name)) continue;
        if (!fsti_share_file_open(folder_fd, entry->d_name, &file)) continue;
        // The user may have named a folder with other files, whose names may look the same.
        if (file.has_magic) visit(context, &file);
        fsti_lockable_close(file.fd);
    }
    fsti_lockable_close_folder(folder);
    return 0;
}

/// One pass over the folder that looks for segments to remove.
typedef struct space_search {
    int folder_fd;
    int64_t now_s;
    uint64_t bytes;                ///< of all segments that stay
    char oldest[SHARE_NAME_BYTES]; ///< the least recently used one without a user, or ""
    int64_t oldest_s;
    uint64_t oldest_bytes;
} space_search;

static void look_at(void *context, const share_file *file) {
    space_search *search = context;
    int64_t used_s = (int64_t)file->head.used_s;
    int64_t age_s = search->now_s - used_s;
    bool is_over = !file->is_valid || (file->head.is_pinned == 0 &&
                                       (age_s < 0 || age_s > (int64_t)file->head.grace_s));
    if (!file->in_use && is_over) {
        fsti_share_folder_remove(search->folder_fd, file->name);
        return;
    }
    // A segment in use counts with its full size, because its users go on to fill it.
    uint64_t bytes = file->in_use && file->is_valid
                         ? file->head.control_bytes + file->head.data_bytes
                         : fsti_share_memory_of(&file->stamp);
    search->bytes += bytes;
    bool is_removable = !file->in_use && file->head.is_pinned == 0;
    if (!is_removable || (search->oldest[0] != '\0' && used_s >= search->oldest_s)) return;
    memcpy(search->oldest, file->name, sizeof search->oldest);
    search->oldest_s = used_s;
    search->oldest_bytes = bytes;
}

bool fsti_share_make_space(int folder_fd, uint64_t bytes, uint64_t bytes_max) {
    for (;;) {
        space_search search = {.folder_fd = folder_fd, .now_s = (int64_t)time(NULL)};
        if (fsti_share_folder_visit(folder_fd, look_at, &search) != 0) return false;
        if (bytes <= bytes_max && search.bytes <= bytes_max - bytes) return true;
        if (search.oldest[0] == '\0') return false;
        fsti_share_folder_remove(folder_fd, search.oldest);
    }
}
