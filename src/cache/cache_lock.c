// SPDX-License-Identifier: Apache-2.0
/// The lock for the claims of this process in all cache entries.
#include "cache_private.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void fsti_cache_lock(void) {
    fsti_fork_lock(&lock);
    pthread_mutex_lock(&lock);
}

void fsti_cache_unlock(void) { pthread_mutex_unlock(&lock); }
