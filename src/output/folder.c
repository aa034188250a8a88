// SPDX-License-Identifier: Apache-2.0
/// Folders in which files are published.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "io/io.h"
#include "output.h"

#define LOCK_WAIT_NS ((uint64_t)30 * 1000000000)
#define LOCK_PAUSE_NS 5000000
#define MAKE_TRIES_MAX 100u

fst_status fsti_folder_sync(const char *folder, fst_error *error) {
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return fsti_error_errno(error, errno, folder, "opening the folder to sync it");
    fst_status status = FST_OK;
    int result, failure = 0;
    while ((result = fsync(fd)) != 0 && errno == EINTR) continue;
    if (result != 0) failure = errno;
    // Some file systems need no sync for folders and return EINVAL.
    if (failure != 0 && failure != EINVAL)
        status = fsti_error_errno(error, failure, folder, "syncing the folder");
    close(fd);
    return status;
}

/// Length of the folder part of `path` (`size` bytes); 0: the current folder.
static size_t parent_size(const char *path, size_t size) {
    while (size > 0 && path[size - 1] == '/') size--;
    while (size > 0 && path[size - 1] != '/') size--;
    while (size > 1 && path[size - 1] == '/') size--;
    return size;
}

static fst_status sync_parent(const char *path, fst_error *error) {
    size_t size = parent_size(path, strlen(path));
    char *parent = size == 0 ? fsti_string_copy(".", 1) : fsti_string_copy(path, size);
    if (parent == NULL) return fsti_error_memory(error, size);
    fst_status status = fsti_folder_sync(parent, error);
    fsti_free(parent);
    return status;
}

static fst_status make_one(const char *folder, bool durable, unsigned *made_count,
                           fst_error *error) {
    struct stat info;
    if (mkdir(folder, 0777) == 0) {
        ++*made_count;
        return durable ? sync_parent(folder, error) : FST_OK;
    }
    int failure = errno;
    if (stat(folder, &info) == 0 && S_ISDIR(info.st_mode)) return FST_OK;
    return fsti_error_errno(error, failure == EEXIST ? ENOTDIR : failure, folder,
                            "creating the folder");
}

static fst_status make_all(const char *folder, bool durable, unsigned *made_count,
                           fst_error *error) {
    char *path = fsti_string_copy(folder, strlen(folder));
    if (path == NULL) return fsti_error_memory(error, strlen(folder));
    fst_status status = FST_OK;
    for (char *at = path + 1; path[0] != '\0' && *at != '\0' && status == FST_OK; at++) {
        if (*at != '/' || at[-1] == '/') continue;
        *at = '\0';
        status = make_one(path, durable, made_count, error);
        *at = '/';
    }
    if (status == FST_OK) status = make_one(path, durable, made_count, error);
    fsti_free(path);
    return status;
}

// ---- folders in use ----

/// Folders that saves of this process use. They may look empty, because new files have no names.
static struct {
    pthread_mutex_t lock;
    fsti_folder_use *first;
    pid_t owner;
} used = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t used_once = PTHREAD_ONCE_INIT;
static void register_used(void) { fsti_fork_lock(&used.lock); }

static void lock_used(void) {
    pthread_once(&used_once, register_used);
    pthread_mutex_lock(&used.lock);
    if (used.owner == getpid()) return;
    used.owner = getpid(); // those of a fork's parent are not here
    used.first = NULL;
}

/// Lists the folder that is at the path now.
static fst_status begin_use(const char *folder, fsti_folder_use *use, fst_error *error) {
    struct stat info = {0};
    use->path = fsti_string_copy(folder, strlen(folder));
    if (use->path == NULL) return fsti_error_memory(error, strlen(folder));
    if (stat(folder, &info) == 0) {
        use->device = info.st_dev;
        use->inode = info.st_ino;
    }
    lock_used();
    use->next = used.first;
    used.first = use;
    pthread_mutex_unlock(&used.lock);
    return FST_OK;
}

static void end_use(fsti_folder_use *use) {
    lock_used();
    fsti_folder_use **at = &used.first;
    while (*at != NULL && *at != use) at = &(*at)->next;
    if (*at != NULL) *at = use->next;
    pthread_mutex_unlock(&used.lock);
    fsti_free(use->path);
    use->path = NULL;
}

/// Removes a folder unless it is in use: then the use gets the count. Under the lock, because a use
/// that is listed afterwards finds the folder gone. Returns whether its parent comes next.
static bool remove_unused(const char *folder, unsigned *made_count) {
    struct stat info;
    if (stat(folder, &info) != 0) return errno == ENOENT;
    lock_used();
    fsti_folder_use *other = used.first;
    while (other != NULL && (other->device != info.st_dev || other->inode != info.st_ino))
        other = other->next;
    bool is_removed = other == NULL && rmdir(folder) == 0;
    if (other != NULL && !other->is_kept && other->made_count < *made_count)
        other->made_count = *made_count;
    pthread_mutex_unlock(&used.lock);
    *made_count -= is_removed;
    return is_removed;
}

/// Removes created folders, from the deepest one upwards. Missing folders and non-empty ones are
/// kept.
static void unmake(const char *folder, unsigned made_count) {
    char *path = made_count == 0 ? NULL : fsti_string_copy(folder, strlen(folder));
    if (path == NULL) return;
    for (size_t size = strlen(path); made_count > 0 && size > 0; size = parent_size(path, size)) {
        path[size] = '\0';
        if (!remove_unused(path, &made_count)) break;
    }
    fsti_free(path);
}

/// Whether the folder is still the one that was listed.
static bool is_there(const fsti_folder_use *use) {
    struct stat info;
    return stat(use->path, &info) == 0 && info.st_dev == use->device && info.st_ino == use->inode;
}

fst_status fsti_folder_make(const char *folder, bool durable, fsti_folder_use *use,
                            fst_error *error) {
    unsigned made_count = 0;
    fst_status status = FST_OK;
    // A save that fails may remove the folder until it is listed.
    for (unsigned tries = 0; tries < MAKE_TRIES_MAX && status == FST_OK; tries++) {
        unsigned made_now = 0;
        *use = (fsti_folder_use){0};
        status = make_all(folder, durable, &made_now, error);
        made_count = made_count > made_now ? made_count : made_now;
        if (status == FST_OK) status = begin_use(folder, use, error);
        if (status != FST_OK) break;
        use->made_count = made_count;
        if (is_there(use)) return FST_OK;
        end_use(use);
    }
    unmake(folder, made_count);
    return status != FST_OK ? status
                            : fsti_error_errno(error, ENOENT, folder, "creating the folder");
}

fst_status fsti_folder_use_existing(const char *folder, fsti_folder_use *use, fst_error *error) {
    *use = (fsti_folder_use){0};
    return begin_use(folder, use, error);
}

void fsti_folder_keep(fsti_folder_use *use) {
    lock_used();
    use->is_kept = true;
    pthread_mutex_unlock(&used.lock);
}

void fsti_folder_leave(fsti_folder_use *use, bool removes) {
    if (use->path == NULL) return;
    char *path = use->path;
    use->path = NULL;
    end_use(use);
    // It is no longer in the list, so no other save changes the count.
    if (removes && !use->is_kept) unmake(path, use->made_count);
    fsti_free(path);
}

fst_status fsti_folder_lock(const char *folder, int *lock, fst_error *error) {
    *lock = fsti_lockable_open(folder, O_RDONLY | O_DIRECTORY);
    if (*lock < 0) return fsti_error_errno(error, errno, folder, "opening the folder");
    uint64_t end_ns = fsti_now_ns();
    if (!fsti_io_test_disables(FSTI_TEST_NO_LOCK_WAIT)) end_ns += LOCK_WAIT_NS;
    for (int failure; (failure = fsti_lockable_lock(*lock)) != 0;) {
        bool is_held = failure == EWOULDBLOCK;
        if (is_held && fsti_now_ns() < end_ns) {
            nanosleep(&(struct timespec){.tv_nsec = LOCK_PAUSE_NS}, NULL);
            continue;
        }
        if (failure == EINTR) continue;
        fsti_lockable_close(*lock);
        *lock = -1;
        fsti_error_location location = FSTI_NO_LOCATION;
        location.file = folder;
        return is_held ? fsti_error_set(error, FST_E_TIMEOUT, location,
                                        "another save to this folder is being published")
                       : FST_OK;
    }
    return FST_OK;
}

void fsti_folder_unlock(int lock) {
    if (lock >= 0) fsti_lockable_close(lock);
}
