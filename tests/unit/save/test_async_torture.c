// SPDX-License-Identifier: Apache-2.0
/// Asynchronous saves again and again, while the tensors change behind the barrier, and by many
/// threads at once.
#include <pthread.h>

#include "async_fixture.h"
#include "check.h"
#include "fixture.h"

/// A save whose tensors change right behind the barrier, again and again.
static void torture(fst_stage stage, unsigned rounds) {
    fst_staging_pool *pool;
    uint64_t random = 42;
    CHECK_INT(fst_staging_open(32 * MIB, 0, &pool, NULL), FST_OK);
    async_fill(0);
    for (unsigned round = 1; round <= rounds; round++) {
        fst_async_save *save;
        fst_async_options options = async_options_of(stage);
        options.pool = pool;
        options.thread_count = 1 + (uint32_t)(fixture_random(&random) % 3);
        CHECK_INT(async_start(fixture_path("torture"), &options, &save), FST_OK);
        if (stage != FST_STAGE_COPY) CHECK_INT(fst_async_save_stage(save, -1, NULL), FST_OK);
        async_fill((unsigned char)round);
        CHECK_INT(fst_async_save_wait(save, -1, NULL), FST_OK);
        CHECK_INT(async_value_at(fixture_path("torture")), (unsigned char)(round - 1));
        fst_async_save_close(save);
    }
    fst_staging_close(pool);
}

TEST(torture_copy)
{
    torture(FST_STAGE_COPY, CHECK_ROUNDS(500));
}
TEST(torture_lazy)
{
    torture(FST_STAGE_LAZY, CHECK_ROUNDS(500));
}

typedef struct worker {
    pthread_t thread;
    char path[300];
    fst_staging_pool *pool;
    int failures;
} worker;

static void *save_often(void *context) {
    worker *own = context;
    for (int i = 0; i < 10; i++) {
        fst_async_save *save;
        fst_async_options options = async_options_of((fst_stage)(i % 2));
        options.pool = own->pool;
        if (async_start(own->path, &options, &save) != FST_OK) {
            own->failures++;
            continue;
        }
        if (i % 3 == 0) fst_async_save_cancel(save);
        fst_status status = fst_async_save_wait(save, -1, NULL);
        own->failures += status != FST_OK && status != FST_E_CANCELLED;
        own->failures += async_stats_of(save).bytes_total == UINT64_MAX;
        fst_async_save_close(save);
    }
    return NULL;
}

TEST(many_threads_share_a_pool)
{
    worker workers[8] = {0};
    fst_staging_pool *pool;
    async_fill('m');
    CHECK_INT(fst_staging_open(48 * MIB, 0, &pool, NULL), FST_OK);
    for (int i = 0; i < 8; i++) {
        snprintf(workers[i].path, sizeof workers[i].path, "%s.%d", fixture_path("many"), i % 5);
        workers[i].pool = pool;
        CHECK_INT(pthread_create(&workers[i].thread, NULL, save_often, &workers[i]), 0);
    }
    for (int i = 0; i < 8; i++) {
        pthread_join(workers[i].thread, NULL);
        CHECK_INT(workers[i].failures, 0);
    }
    fst_staging_close(pool);
}
