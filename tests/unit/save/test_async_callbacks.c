// SPDX-License-Identifier: Apache-2.0
/// Callbacks of a save that start, stage and close other asynchronous saves. The kernel refuses
/// guarded copies here, so a read of memory that was freed too early ends the program.
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include "async_fixture.h"
#include "check.h"
#include "fixture.h"

#define LARGE_BYTES (96 * MIB)

// It has more parameters, which are not read here.
ssize_t __wrap_process_vm_readv(pid_t process, ...);
ssize_t __wrap_process_vm_readv(pid_t process, ...) {
    (void)process;
    errno = EPERM;
    return -1;
}

static char paths[4][4096];
static unsigned char large[LARGE_BYTES];
static fst_async_save *saves[2];
static fst_status status_in_callback;
static uint64_t memory_in_callback;

static void make_paths(const char *name) {
    async_fill('1');
    for (int i = 0; i < 4; i++) snprintf(paths[i], sizeof paths[i], "%s-%d", fixture_path(name), i);
}

static fst_status start_large(const char *path, const void *data, const fst_async_options *options,
                              fst_async_save **out) {
    static const uint64_t shape[] = {LARGE_BYTES};
    fst_save_tensor tensor = {.struct_size = sizeof tensor,
                              .name = "large",
                              .name_size = SIZE_MAX,
                              .dtype = FST_DTYPE_U8,
                              .rank = 1,
                              .shape = shape,
                              .data = data};
    return fst_async_save_start(path, &tensor, 1, options, out, NULL);
}

/// Saves with a callback, and waits for the end.
static fst_status save_with_callback(const char *path, int (*callback)(void *context)) {
    fst_async_save *save;
    fst_async_options options = async_options_of(FST_STAGE_LAZY);
    options.is_unchanged = callback;
    fst_status status = async_start(path, &options, &save);
    if (status != FST_OK) return status;
    alarm(120); // a wait without end
    status = fst_async_save_wait(save, -1, NULL);
    fst_async_save_close(save);
    alarm(0);
    return status;
}

static int stage_later_one(void *context) {
    (void)context;
    status_in_callback = fst_async_save_stage(saves[1], -1, NULL);
    return 1;
}

/// Both are older than the save with the callback. The second one must not take the pool's memory
/// before the first is copied.
TEST(a_callback_may_stage_saves_before_its_own)
{
    fst_staging_pool *pool;
    fst_async_options options = async_options_of(FST_STAGE_LAZY);
    make_paths("stages");
    CHECK_INT(fst_staging_open(32 * MIB, 0, &pool, NULL), FST_OK);
    options.pool = pool;
    for (int i = 0; i < 2; i++)
        CHECK_INT(start_large(paths[i], large, &options, &saves[i]), FST_OK);
    CHECK_INT(save_with_callback(paths[2], stage_later_one), FST_OK);
    CHECK_INT(status_in_callback, FST_OK);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(fst_async_save_wait(saves[i], -1, NULL), FST_OK);
        fst_async_save_close(saves[i]);
    }
    fst_staging_close(pool);
}

static fst_staging_pool *shared_pool;
static atomic_bool is_later_started;

static int stage_blocked_one(void *context) {
    (void)context;
    while (!atomic_load(&is_later_started)) usleep(1000);
    status_in_callback = fst_async_save_stage(saves[1], -1, NULL);
    fst_async_save_close(saves[1]);
    return 1;
}

static fst_status start_small(const char *path, fst_stage stage, fst_async_save **out) {
    fst_async_options options = async_options_of(stage);
    return async_start(path, &options, out);
}

/// Closes a later save, whose tensors its own thread has copied.
static int close_staged_one(void *context) {
    (void)context;
    while (!atomic_load(&is_later_started)) usleep(1000);
    while (async_stats_of(saves[1]).state == FST_ASYNC_STAGING) usleep(1000);
    status_in_callback = fst_async_save_stage(saves[1], -1, NULL);
    fst_async_save_close(saves[1]);
    return 1;
}

TEST(a_callback_may_close_a_later_save_that_is_staged)
{
    fst_async_options options = async_options_of(FST_STAGE_LAZY);
    make_paths("staged");
    options.is_unchanged = close_staged_one;
    atomic_store(&is_later_started, false);
    CHECK_INT(async_start(paths[0], &options, &saves[0]), FST_OK);
    CHECK_INT(start_small(paths[1], FST_STAGE_LAZY, &saves[1]), FST_OK);
    atomic_store(&is_later_started, true);
    CHECK_INT(fst_async_save_wait(saves[0], -1, NULL), FST_OK);
    CHECK_INT(status_in_callback, FST_OK);
    for (int i = 0; i < 1000 && access(paths[1], F_OK) != 0; i++) usleep(10000);
    CHECK_INT(access(paths[1], F_OK), 0);
    fst_async_save_close(saves[0]);
}

/// Saves to another file twice: the second time at once.
static int save_twice(void *context) {
    (void)context;
    status_in_callback = start_small(paths[1], FST_STAGE_COPY, &saves[0]);
    if (status_in_callback != FST_OK) return 1;
    status_in_callback = async_save_sync(paths[1]);
    if (status_in_callback == FST_OK) status_in_callback = fst_async_save_wait(saves[0], 0, NULL);
    return 1;
}

TEST(saves_of_a_callback_keep_their_order)
{
    make_paths("twice");
    CHECK_INT(save_with_callback(paths[0], save_twice), FST_OK);
    CHECK_INT(status_in_callback, FST_OK); // the first one had ended
    fst_async_save_close(saves[0]);
}

/// A later save of the same pool can't be copied before the callback returns.
TEST(a_callback_does_not_wait_for_the_tensors_of_a_save_after_its_own)
{
    fst_async_options options = async_options_of(FST_STAGE_LAZY);
    make_paths("blocked");
    CHECK_INT(fst_staging_open(32 * MIB, 0, &shared_pool, NULL), FST_OK);
    options.pool = shared_pool;
    options.is_unchanged = stage_blocked_one;
    atomic_store(&is_later_started, false);
    CHECK_INT(start_large(paths[0], large, &options, &saves[0]), FST_OK);
    options.is_unchanged = NULL;
    CHECK_INT(start_large(paths[1], large, &options, &saves[1]), FST_OK);
    atomic_store(&is_later_started, true);
    alarm(120);
    CHECK_INT(fst_async_save_wait(saves[0], -1, NULL), FST_OK);
    alarm(0);
    CHECK_INT(status_in_callback, FST_E_TIMEOUT);
    CHECK(access(paths[1], F_OK) != 0); // closing it cancelled it
    fst_async_save_close(saves[0]);
    fst_staging_close(shared_pool);
}

/// Starts a save of the same file, which is older than the one that calls.
static int start_with_little_memory(void *context) {
    (void)context;
    fst_async_options options = async_options_of(FST_STAGE_LAZY);
    options.memory_bytes = 32 * MIB;
    status_in_callback = start_large(paths[0], large, &options, &saves[0]);
    if (status_in_callback != FST_OK) return 1;
    status_in_callback = fst_async_save_stage(saves[0], -1, NULL);
    memory_in_callback = async_stats_of(saves[0]).memory_limit_bytes;
    return 1;
}

TEST(a_save_in_a_callback_has_memory_of_its_own)
{
    make_paths("own");
    CHECK_INT(save_with_callback(paths[0], start_with_little_memory), FST_OK);
    CHECK_INT(status_in_callback, FST_OK);
    CHECK(memory_in_callback >= LARGE_BYTES);
    CHECK_INT(fst_async_save_wait(saves[0], -1, NULL), FST_OK);
    fst_async_save_close(saves[0]);
}

static int close_cancelled_saves(void *context) {
    (void)context;
    for (unsigned round = 0; round < 40; round++) {
        fst_async_options options = async_options_of(FST_STAGE_LAZY);
        fst_async_save *save;
        options.thread_count = 4;
        void *data =
            mmap(NULL, LARGE_BYTES, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (data == MAP_FAILED || start_large(paths[1], data, &options, &save) != FST_OK) return 1;
        usleep(500 * (round % 10));
        fst_async_save_cancel(save);
        usleep(100 * (round % 3));
        fst_async_save_close(save);
        munmap(data, LARGE_BYTES); // a later read would crash
    }
    status_in_callback = FST_OK;
    return 1;
}

TEST(a_save_that_was_closed_in_a_callback_reads_no_tensors)
{
    make_paths("reads");
    status_in_callback = FST_E_IO;
    CHECK_INT(save_with_callback(paths[0], close_cancelled_saves), FST_OK);
    CHECK_INT(status_in_callback, FST_OK);
}
