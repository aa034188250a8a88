// SPDX-License-Identifier: Apache-2.0
/// The reserve of threads works when the first threads are slow, and waits while they are fast.
#include <string.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "transfer/pipeline.h"

#define RESERVE_COUNT 3

static fsti_pipeline pipeline;
static atomic_uint released;

static void open_pipeline(uint64_t view_bytes) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    memset(&pipeline, 0, sizeof pipeline);
    pthread_mutex_init(&pipeline.lock, NULL);
    pthread_cond_init(&pipeline.reserve_wanted, &attributes);
    pthread_condattr_destroy(&attributes);
    pipeline.first_count = 2;
    atomic_store(&pipeline.view_bytes, view_bytes);
    atomic_store(&released, 0);
}

static void *wait_in_reserve(void *index) {
    fsti_reserve_wait(&pipeline, (uint32_t)(uintptr_t)index);
    atomic_fetch_add(&released, 1);
    return NULL;
}

static void start_reserve(pthread_t *threads) {
    for (uintptr_t i = 0; i < RESERVE_COUNT; i++)
        CHECK_INT(
            pthread_create(&threads[i], NULL, wait_in_reserve, (void *)(pipeline.first_count + i)),
            0);
}

static void join_reserve(pthread_t *threads) {
    for (unsigned i = 0; i < RESERVE_COUNT; i++) pthread_join(threads[i], NULL);
    pthread_cond_destroy(&pipeline.reserve_wanted);
    pthread_mutex_destroy(&pipeline.lock);
}

TEST(first_threads_do_not_wait)
{
    open_pipeline(0);
    for (uint32_t i = 0; i < pipeline.first_count; i++) fsti_reserve_wait(&pipeline, i);
    CHECK(!pipeline.needs_reserve);
}

TEST(slow_reads_call_the_reserve)
{
    pthread_t threads[RESERVE_COUNT];
    open_pipeline(0);
    start_reserve(threads);
    join_reserve(threads); // nobody else wakes them
    CHECK(pipeline.needs_reserve);
    CHECK_INT(atomic_load(&released), RESERVE_COUNT);
}

TEST(fast_reads_leave_it_asleep)
{
    pthread_t threads[RESERVE_COUNT];
    open_pipeline(UINT64_MAX / 2);
    start_reserve(threads);
    usleep(40000); // several looks at the speed
    CHECK_INT(atomic_load(&released), 0);
    fsti_reserve_wake(&pipeline);
    join_reserve(threads);
    CHECK_INT(atomic_load(&released), RESERVE_COUNT);
}

TEST(it_is_called_when_reads_become_slow)
{
    pthread_t threads[RESERVE_COUNT];
    open_pipeline(UINT64_MAX / 2);
    start_reserve(threads);
    usleep(10000);
    CHECK_INT(atomic_load(&released), 0);
    atomic_store(&pipeline.view_bytes, 0);
    join_reserve(threads);
    CHECK_INT(atomic_load(&released), RESERVE_COUNT);
}
