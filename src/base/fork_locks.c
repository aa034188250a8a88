// SPDX-License-Identifier: Apache-2.0
/// Process-wide locks across fork(). Without this, a child could inherit a lock whose owner thread
/// does not exist there.
#include <pthread.h>

#include "primitives.h"

#define LOCK_COUNT_MAX 16

static pthread_mutex_t *locks[LOCK_COUNT_MAX];
static size_t lock_count;
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t register_once = PTHREAD_ONCE_INIT;

static void lock_all(void) {
    pthread_mutex_lock(&list_lock);
    for (size_t i = 0; i < lock_count; i++) pthread_mutex_lock(locks[i]);
}

static void unlock_all(void) {
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
