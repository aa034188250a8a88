// SPDX-License-Identifier: Apache-2.0
/// Asynchronous saves that share staging memory, and those that supersede others.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "async_fixture.h"
#include "check.h"
#include "fixture.h"

#define BIG_BYTES (40 * MIB)
#define LARGER_BYTES (96 * MIB)
#define THREAD_COUNT 3

static unsigned char big[BIG_BYTES];
static const uint64_t big_shape[] = {BIG_BYTES};
static fst_staging_pool *pool;

static fst_save_tensor big_tensor(void) {
    fst_save_tensor tensor = {.struct_size = sizeof tensor, .name = "big", .name_size = SIZE_MAX};
    tensor.dtype = FST_DTYPE_U8, tensor.rank = 1, tensor.shape = big_shape, tensor.data = big;
    return tensor;
}

static fst_status start_big(const char *path, fst_async_options *options, fst_async_save **out) {
    fst_save_tensor tensor = big_tensor();
    return fst_async_save_start(path, &tensor, 1, options, out, NULL);
}

static pthread_barrier_t barrier;

static void *save_big(void *path) {
    fst_async_save *save;
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    options.pool = pool;
    pthread_barrier_wait(&barrier);
    if (start_big(path, &options, &save) != FST_OK) return NULL;
    fst_status status = fst_async_save_wait(save, -1, NULL);
    fst_async_save_close(save);
    return status == FST_OK ? path : NULL;
}

TEST(saves_that_start_at_once_keep_the_limit_of_their_pool)
{
    static char paths[THREAD_COUNT][4096];
    for (int round = 0; round < 5; round++) {
        pthread_t threads[THREAD_COUNT];
        void *done;
        CHECK_INT(fst_staging_open(BIG_BYTES, 0, &pool, NULL), FST_OK);
        pthread_barrier_init(&barrier, NULL, THREAD_COUNT);
        for (int i = 0; i < THREAD_COUNT; i++) {
            snprintf(paths[i], sizeof paths[i], "%s-%d", fixture_path("at-once"), i);
            CHECK(pthread_create(&threads[i], NULL, save_big, paths[i]) == 0);
        }
        for (int i = 0; i < THREAD_COUNT; i++) {
            CHECK(pthread_join(threads[i], &done) == 0);
            CHECK(done == paths[i]);
        }
        CHECK(fst_staging_bytes(pool) <= BIG_BYTES);
        pthread_barrier_destroy(&barrier);
        fst_staging_close(pool);
    }
}

TEST(a_start_with_a_time_limit_leaves_the_rest_to_a_thread)
{
    fst_async_save *save;
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    options.thread_count = 1;
    options.start_timeout_ms = 1;
    CHECK_INT(start_big(fixture_path("rest"), &options, &save), FST_OK);
    CHECK_INT(fst_async_save_wait(save, 20000, NULL), FST_OK);
    fst_async_save_close(save);
}

/// The new save would wait for the memory that the old one holds.
TEST(a_superseded_save_is_not_written_first)
{
    fst_async_save *old, *new;
    fst_save_options held = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    pthread_t thread;
    held.progress = async_hold;
    CHECK_INT(fst_staging_open(0, 0, &pool, NULL), FST_OK);
    options.pool = pool;
    options.save = &held;
    atomic_store(&async_may_write, false);
    CHECK_INT(start_big(fixture_path("superseded"), &options, &old), FST_OK);
    CHECK(pthread_create(&thread, NULL, async_release_soon, NULL) == 0);
    options.save = NULL;
    options.overlap = FST_OVERLAP_SUPERSEDE;
    CHECK_INT(start_big(fixture_path("superseded"), &options, &new), FST_OK);
    CHECK_INT(fst_async_save_wait(old, -1, NULL), FST_E_CANCELLED);
    CHECK(async_stats_of(old).bytes_written < BIG_BYTES);
    CHECK_INT(fst_async_save_wait(new, -1, NULL), FST_OK);
    pthread_join(thread, NULL);
    fst_async_save_close(old);
    fst_async_save_close(new);
    fst_staging_close(pool);
}

/// One has the same pool, and one the same path.
TEST(a_save_supersedes_all_earlier_ones_of_its_pool_and_path)
{
    fst_async_save *by_path, *by_pool, *last;
    fst_save_options held = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    atomic_bool may_go_on = false;
    held.progress = async_hold;
    options.save = &held;
    CHECK_INT(fst_staging_open(0, 2 * BIG_BYTES + 8 * MIB, &pool, NULL), FST_OK);
    atomic_store(&async_may_write, false);
    CHECK_INT(start_big(fixture_path("one"), &options, &by_path), FST_OK);
    options.pool = pool;
    held.progress_context = &may_go_on;
    CHECK_INT(start_big(fixture_path("two"), &options, &by_pool), FST_OK);
    options.save = NULL;
    options.overlap = FST_OVERLAP_SUPERSEDE;
    CHECK_INT(start_big(fixture_path("one"), &options, &last), FST_OK);
    atomic_store(&async_may_write, true);
    CHECK_INT(fst_async_save_wait(by_path, -1, NULL), FST_E_CANCELLED);
    atomic_store(&may_go_on, true);
    CHECK_INT(fst_async_save_wait(last, -1, NULL), FST_OK);
    CHECK_INT(fst_async_save_wait(by_pool, -1, NULL), FST_E_CANCELLED);
    fst_async_save_close(by_path);
    fst_async_save_close(by_pool);
    fst_async_save_close(last);
    fst_staging_close(pool);
}

/// As the pool may have memory for both.
TEST(a_save_does_not_wait_for_memory_below_the_limit_of_its_pool)
{
    fst_async_save *first, *second;
    fst_save_options held = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    pthread_t thread;
    held.progress = async_hold;
    CHECK_INT(fst_staging_open(3 * BIG_BYTES, 0, &pool, NULL), FST_OK);
    options.pool = pool;
    options.save = &held;
    atomic_store(&async_may_write, false);
    CHECK_INT(start_big(fixture_path("first"), &options, &first), FST_OK);
    CHECK(pthread_create(&thread, NULL, async_release_soon, NULL) == 0);
    CHECK_INT(start_big(fixture_path("second"), &options, &second), FST_OK);
    CHECK_INT(async_stats_of(second).memory_wait_count, 0);
    pthread_join(thread, NULL);
    CHECK_INT(fst_async_save_wait(second, -1, NULL), FST_OK);
    fst_async_save_close(first);
    fst_async_save_close(second);
    fst_staging_close(pool);
}

static void *stage(void *save) {
    return fst_async_save_stage(save, -1, NULL) == FST_E_CANCELLED ? save : NULL;
}

/// It would wait for the tensors of an earlier one.
TEST(a_cancelled_save_is_not_staged)
{
    fst_async_save *first, *second;
    fst_save_options held = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_NONE);
    pthread_t thread;
    void *staged = NULL;
    held.progress = async_hold;
    CHECK_INT(fst_staging_open(32 * MIB, 0, &pool, NULL), FST_OK);
    options.pool = pool;
    options.save = &held;
    atomic_store(&async_may_write, false);
    CHECK_INT(start_big(fixture_path("held"), &options, &first), FST_OK);
    CHECK_INT(start_big(fixture_path("cancelled"), &options, &second), FST_OK);
    CHECK(pthread_create(&thread, NULL, stage, second) == 0);
    usleep(20000); // perhaps it waits by then
    fst_async_save_cancel(second);
    alarm(120);
    CHECK(pthread_join(thread, &staged) == 0);
    alarm(0);
    CHECK(staged == second);
    atomic_store(&async_may_write, true);
    CHECK_INT(fst_async_save_wait(first, -1, NULL), FST_OK);
    fst_async_save_close(first);
    fst_async_save_close(second);
    fst_staging_close(pool);
}

static atomic_int asked_count;
static int count_questions(void *context) {
    (void)context;
    atomic_fetch_add(&asked_count, 1);
    return 1;
}

/// Its folder is missing, so it fails while the tensor is copied.
TEST(a_failed_save_has_stopped_reading_when_its_calls_return)
{
    static const uint64_t larger_shape[] = {LARGER_BYTES};
    char path[4096];
    snprintf(path, sizeof path, "%s/missing/model.safetensors", fixture_path("failed"));
    for (int round = 0; round < 100; round++) {
        fst_async_save *save;
        fst_save_tensor tensor = big_tensor();
        tensor.shape = larger_shape;
        fst_async_options options = async_options_of(FST_STAGE_COPY);
        options.memory_bytes = 32 * MIB;
        options.thread_count = 2;
        tensor.data =
            mmap(NULL, LARGER_BYTES, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        CHECK(tensor.data != MAP_FAILED);
        CHECK_INT(fst_async_save_start(path, &tensor, 1, &options, &save, NULL), FST_OK);
        CHECK(munmap((void *)(uintptr_t)tensor.data, LARGER_BYTES) ==
              0); // a later read would crash
        CHECK(fst_async_save_wait(save, -1, NULL) != FST_OK);
        fst_async_save_close(save);
    }
}

TEST(a_cancelled_save_asks_nothing_after_its_close)
{
    for (int round = 0; round < 400; round++) {
        fst_async_save *save;
        fst_async_options options = async_options_of(FST_STAGE_LAZY);
        options.is_unchanged = count_questions;
        CHECK_INT(start_big(fixture_path("asks"), &options, &save), FST_OK);
        fst_async_save_cancel(save);
        fst_async_save_close(save);
        int asked = atomic_load(&asked_count);
        memset(big, round, sizeof big); // a change, which would be asked about
        CHECK_INT(atomic_load(&asked_count), asked);
    }
}
