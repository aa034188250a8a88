// SPDX-License-Identifier: Apache-2.0
/// Locks across fork(). A child finds the library's mutexes unlocked, although the threads that
/// held them do not exist there, and does not share its parent's locks of files.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sys/file.h>
#include <unistd.h>

#include "primitives.h"

/// More than the library has. A lock beyond the limit would not be registered.
#define LOCK_COUNT_MAX 24
#define LAST_LOCK_COUNT_MAX 4

static pthread_mutex_t *locks[LOCK_COUNT_MAX];
static size_t lock_count;
static pthread_mutex_t *last_locks[LAST_LOCK_COUNT_MAX]; ///< taken after the others
static size_t last_lock_count;
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t files_lock = PTHREAD_MUTEX_INITIALIZER; ///< taken after all others
static int *locked_files;                                      ///< descriptors
static size_t locked_file_count, locked_file_capacity;
static uint64_t fork_count;

static void take_locks(void) {
    pthread_mutex_lock(&list_lock);
    for (size_t i = 0; i < lock_count; i++) pthread_mutex_lock(locks[i]);
    for (size_t i = 0; i < last_lock_count; i++) pthread_mutex_lock(last_locks[i]);
    pthread_mutex_lock(&files_lock);
    fsti_library_before_fork();
    fsti_library_start_before_fork();
}

static void release_locks(void) {
    fsti_library_start_after_fork();
    fsti_library_after_fork();
    pthread_mutex_unlock(&files_lock);
    for (size_t i = last_lock_count; i-- > 0;) pthread_mutex_unlock(last_locks[i]);
    for (size_t i = lock_count; i-- > 0;) pthread_mutex_unlock(locks[i]);
    pthread_mutex_unlock(&list_lock);
}

/// Called by fork() before it copies the process. All locks are held during the copy, so the data
/// that they protect is consistent in the child.
///
/// Locks are taken in the order of their registration. Code that takes a registered lock while it
/// holds another one must have registered them in that order; the disk cache does (its own lock,
/// then that of its thread pool). And it must not register a lock while it holds one, because
/// list_lock is taken first here.
///
/// A driver may call fork() to start a program while it is being loaded. That thread holds the lock
/// of library.c, for which another fork() may be waiting with all other locks, so it takes none.
///
/// A driver that starts is awaited without locks, because loads to the CPU do not wait for it.
static void lock_all(void) {
    if (fsti_library_is_loading()) return;
    for (bool starts = true; starts;) {
        fsti_library_start_wait();
        take_locks();
        starts = fsti_library_start_is_running(); // one has begun meanwhile
        if (starts) release_locks();
    }
    fork_count++;
}

/// Called after fork(), in the parent and in the child. The thread that called fork() owns the
/// locks in both.
static void unlock_all(void) {
    if (!fsti_library_is_loading()) release_locks();
}

static void free_file_list(void) {
    fsti_free(locked_files);
    locked_files = NULL;
    locked_file_count = locked_file_capacity = 0;
}

/// A lock belongs to the open file (flock(2)), which the child shares: it would keep the lock when
/// this process is killed.
static void unlock_in_child(void) {
    if (fsti_library_is_loading()) return; // that child runs a program, which closes them
    for (size_t i = 0; i < locked_file_count; i++) close(locked_files[i]);
    free_file_list();
    unlock_all();
}

/// When the library is loaded, before a program's own constructors use it: a fork must also find
/// the lock of library.c, which is not registered.
///
/// The allocation is for allocators that register their own handlers on first use (jemalloc): those
/// must be older than this library's. fork() takes the locks of older handlers later, and threads
/// allocate while they hold locks of this library.
__attribute__((constructor(101))) static void register_handlers(void) {
    fsti_free(fsti_alloc_zeroed(1, 1));
    pthread_atfork(lock_all, unlock_all, unlock_in_child);
}

void fsti_fork_lock(void *mutex) {
    pthread_mutex_lock(&list_lock);
    size_t i = 0;
    while (i < lock_count && locks[i] != mutex) i++;
    if (i == lock_count && lock_count < LOCK_COUNT_MAX) locks[lock_count++] = mutex;
    pthread_mutex_unlock(&list_lock);
}

void fsti_fork_last_lock(void *mutex) {
    pthread_mutex_lock(&list_lock);
    if (last_lock_count < LAST_LOCK_COUNT_MAX) last_locks[last_lock_count++] = mutex;
    pthread_mutex_unlock(&list_lock);
}

/// How often the process has forked.
static uint64_t count_forks(void) {
    pthread_mutex_lock(&files_lock);
    uint64_t count = fork_count;
    pthread_mutex_unlock(&files_lock);
    return count;
}

/// Adds a descriptor. The caller has the lock. Returns 0 or ENOMEM.
static int list_file(int fd) {
    void *files = locked_files;
    bool has_room = fsti_array_reserve(&files, &locked_file_capacity, locked_file_count,
                                       sizeof *locked_files, INT_MAX);
    locked_files = files;
    if (has_room) locked_files[locked_file_count++] = fd;
    return has_room ? 0 : ENOMEM;
}

int fsti_lockable_open(const char *path, int flags) {
    for (;;) {
        uint64_t forks = count_forks();
        int fd = open(path, flags | O_CLOEXEC, 0666);
        if (fd < 0) return -1;
        pthread_mutex_lock(&files_lock);
        // A child that was forked meanwhile has it, too.
        int failure = fork_count != forks ? EAGAIN : list_file(fd);
        pthread_mutex_unlock(&files_lock);
        if (failure == 0) return fd;
        close(fd);
        errno = failure;
        if (failure != EAGAIN) return -1;
    }
}

/// Lists a descriptor that the caller has opened under the lock; -1: that failed. Returns it, or
/// closes it and returns -1 with errno.
static int list_opened(int fd) {
    int failure = fd < 0 ? errno : list_file(fd);
    if (fd >= 0 && failure != 0) close(fd);
    errno = failure;
    return failure == 0 ? fd : -1;
}

int fsti_lockable_open_at(int folder_fd, const char *name, int flags, mode_t mode) {
    pthread_mutex_lock(&files_lock);
    int fd = list_opened(openat(folder_fd, name, flags | O_CLOEXEC, mode));
    pthread_mutex_unlock(&files_lock);
    return fd;
}

int fsti_unforked_open(int (*open_file)(void)) {
    pthread_mutex_lock(&files_lock);
    int fd = list_opened(open_file());
    pthread_mutex_unlock(&files_lock);
    return fd;
}

int fsti_lockable_lock(int fd) { return flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno; }

/// The place of a descriptor in the list. The caller has the lock.
static size_t find_file(int fd) {
    size_t i = 0;
    while (i < locked_file_count && locked_files[i] != fd) i++;
    return i;
}

/// The caller has the lock.
static void unlist_file(int fd) {
    size_t i = find_file(fd);
    if (i == locked_file_count) return;
    locked_files[i] = locked_files[--locked_file_count];
    if (locked_file_count == 0) free_file_list();
}

void fsti_lockable_close(int fd) {
    pthread_mutex_lock(&files_lock);
    bool is_listed = find_file(fd) < locked_file_count;
    pthread_mutex_unlock(&files_lock);
    if (!is_listed) return;   // in a child: it is closed, and its number may be another file's
    (void)flock(fd, LOCK_UN); // explicitly, for copies that were made by other means than fork()
    // Closed under the lock, so that no child that is forked meanwhile keeps the descriptor.
    pthread_mutex_lock(&files_lock);
    unlist_file(fd);
    close(fd);
    pthread_mutex_unlock(&files_lock);
}

void fsti_lockable_close_folder(DIR *folder) {
    pthread_mutex_lock(&files_lock);
    unlist_file(dirfd(folder));
    closedir(folder);
    pthread_mutex_unlock(&files_lock);
}
