// SPDX-License-Identifier: Apache-2.0
/// Starts threads that take tasks from a shared counter until all tasks are done or one fails.
#include "delta_private.h"

uint32_t fsti_pool_threads(uint32_t wanted, size_t decoders) {
    uint64_t fitting = DELTA_DECODER_BUDGET / (DELTA_DECODER_BYTES * (decoders + 1));
    uint64_t count = wanted == 0 ? fsti_cpu_count() : wanted;
    count = fsti_min(fsti_min(count, fitting), DELTA_THREADS_MAX);
    return (uint32_t)fsti_max(count, 1);
}

bool fsti_pool_take(delta_pool *pool, size_t *task) {
    if (atomic_load(&pool->is_failed)) return false;
    *task = atomic_fetch_add(&pool->next, 1);
    return *task < pool->task_count;
}

typedef struct pool_thread {
    delta_pool *pool;
    uint32_t number;
    pthread_t thread;
} pool_thread;

static void *run_thread(void *context) {
    pool_thread *own = context;
    delta_pool *pool = own->pool;
    fst_error error;
    fst_status status = pool->run(pool, own->number, &error);
    if (status == FST_OK) return NULL;
    atomic_store(&pool->is_failed, true);
    pthread_mutex_lock(&pool->lock);
    if (pool->status == FST_OK) {
        pool->status = status;
        pool->error = error;
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

fst_status fsti_pool_run(delta_pool *pool, fst_error *error) {
    pool_thread threads[DELTA_THREADS_MAX];
    uint32_t started = 1;
    uint32_t wanted = (uint32_t)fsti_min(pool->thread_count, fsti_max(pool->task_count, 1));
    atomic_store(&pool->next, 0);
    atomic_store(&pool->is_failed, false);
    pool->status = FST_OK;
    pthread_mutex_init(&pool->lock, NULL);
    for (uint32_t i = 0; i < DELTA_THREADS_MAX; i++)
        threads[i] = (pool_thread){.pool = pool, .number = i};
    // The calling thread is number 0 and can do all of the work alone.
    while (started < wanted &&
           fsti_thread_start(&threads[started].thread, run_thread, &threads[started]) == 0)
        started++;
    run_thread(&threads[0]);
    for (uint32_t i = 1; i < started; i++) pthread_join(threads[i].thread, NULL);
    pthread_mutex_destroy(&pool->lock);
    if (pool->status != FST_OK && error != NULL) *error = pool->error;
    return pool->status;
}
