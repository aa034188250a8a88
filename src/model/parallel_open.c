// SPDX-License-Identifier: Apache-2.0
/// Opens remote files in parallel, because each takes one or two round trips.
#include <string.h>

#include "open_model.h"
#include "location/location.h"

/// Maximum of parallel opens, with one blocked thread each.
#define OPENER_COUNT_MAX 16u

typedef struct open_pool {
    fst_model *model;
    const char *const *paths;
    size_t count;
    uint32_t flags;
    atomic_size_t next;
    pthread_mutex_t lock; ///< protects the fields below
    size_t failed;        ///< the first file that could not be opened; `count`: none
    fst_status status;
    fst_error error;
} open_pool;

/// Keeps the failure of the first file in the list's order, which a sequential open would report.
static void note_failure(open_pool *pool, size_t i, fst_status status, const fst_error *error) {
    pthread_mutex_lock(&pool->lock);
    if (i < pool->failed) {
        pool->failed = i;
        pool->status = status;
        pool->error = *error;
    }
    pthread_mutex_unlock(&pool->lock);
}

/// Whether an earlier file has failed, so that this one is not needed.
static bool is_superseded(open_pool *pool, size_t i) {
    pthread_mutex_lock(&pool->lock);
    bool superseded = i > pool->failed;
    pthread_mutex_unlock(&pool->lock);
    return superseded;
}

static void *open_some(void *context) {
    open_pool *pool = context;
    size_t i;
    while ((i = atomic_fetch_add(&pool->next, 1)) < pool->count && !is_superseded(pool, i)) {
        fst_error error = {0};
        fst_status status = fsti_model_file_open(pool->model, pool->paths[i], pool->flags,
                                                 &pool->model->files[i], &error);
        if (status != FST_OK) note_failure(pool, i, status, &error);
    }
    return NULL;
}

bool fsti_model_opens_parallel(const char *const *paths, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!fsti_location_is_url(paths[i])) return false;
    return count > 1;
}

fst_status fsti_model_open_parallel(fst_model *model, const char *const *paths, size_t count,
                                    uint32_t flags, fst_error *error) {
    pthread_t threads[OPENER_COUNT_MAX - 1];
    size_t started = 0, wanted = (size_t)fsti_min(count, OPENER_COUNT_MAX) - 1;
    open_pool pool = {
        .model = model, .paths = paths, .count = count, .flags = flags, .failed = count};
    pthread_mutex_init(&pool.lock, NULL);
    while (started < wanted && fsti_thread_start(&threads[started], open_some, &pool) == 0)
        started++;
    open_some(&pool); // works even if no thread can be started
    for (size_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&pool.lock);
    model->file_count = count; // unopened ones are empty
    if (pool.status != FST_OK && error != NULL) *error = pool.error;
    return pool.status;
}
