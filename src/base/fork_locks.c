// SPDX-License-Identifier: Apache-2.0
/// Process-wide locks across fork(). Without this, a child could inherit a lock whose owner thread
/// does not exist there.
#include <pthread.h>

#include "primitives.h"

/// More than the library has. A lock beyond the limit would not be registered.
#define LOCK_COUNT_MAX 16
#define LAST_LOCK_COUNT_MAX 4

static pthread_mutex_t *locks[LOCK_COUNT_MAX];
static size_t lock_count;
static pthread_mutex_t *last_locks[LAST_LOCK_COUNT_MAX]; ///< taken after the others
static size_t last_lock_count;
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t register_once = PTHREAD_ONCE_INIT;

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
static void lock_all(void) {
    if (fsti_library_is_loading()) return;
    pthread_mutex_lock(&list_lock);
    for (size_t i = 0; i < lock_count; i++) pthread_mutex_lock(locks[i]);
    for (size_t i = 0; i < last_lock_count; i++) pthread_mutex_lock(last_locks[i]);
    fsti_library_before_fork();
    fsti_library_start_before_fork();
}

/// Called after fork(), in the parent and in the child. The thread that called fork() owns the
/// locks in both.
static void unlock_all(void) {
    if (fsti_library_is_loading()) return;
    fsti_library_start_after_fork();
    fsti_library_after_fork();
    for (size_t i = last_lock_count; i-- > 0;) pthread_mutex_unlock(last_locks[i]);
    for (size_t i = lock_count; i-- > 0;) pthread_mutex_unlock(locks[i]);
    pthread_mutex_unlock(&list_lock);
}

static void register_handlers(void) { pthread_atfork(lock_all, unlock_all, unlock_all); }

void fsti_fork_lock(void *mutex) {
    pthread_once(&register_once, register_handlers);
    pthread_mutex_lock(&list_lock);
    size_t i = 0;
    while (i < lock_count && locks[i] != mutex) i++;
    if (i == lock_count && lock_count < LOCK_COUNT_MAX) locks[lock_count++] = mutex;
    pthread_mutex_unlock(&list_lock);
}

void fsti_fork_last_lock(void *mutex) {
    pthread_once(&register_once, register_handlers);
    pthread_mutex_lock(&list_lock);
    if (last_lock_count < LAST_LOCK_COUNT_MAX) last_locks[last_lock_count++] = mutex;
    pthread_mutex_unlock(&list_lock);
}
