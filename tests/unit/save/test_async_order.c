// SPDX-License-Identifier: Apache-2.0
/// The order of asynchronous saves: of the same file, of the same staging pool, or of a sharded
/// model in the same folder.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "async_fixture.h"
#include "check.h"
#include "fixture.h"

TEST(a_later_save_waits_for_an_earlier_one)
{
    fst_async_save *first, *second;
    fst_save_options held = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    held.progress = async_hold;
    options.save = &held;
    atomic_store(&async_may_write, false);
    async_fill('1');
    CHECK_INT(async_start(fixture_path("later"), &options, &first), FST_OK);
    options.save = NULL;
    async_fill('2');
    CHECK_INT(async_start(fixture_path("later"), &options, &second), FST_OK);
    fst_status early = fst_async_save_wait(second, 200, NULL);
    atomic_store(&async_may_write, true);
    CHECK_INT(early, FST_E_TIMEOUT);
    CHECK_INT(fst_async_save_wait(second, -1, NULL), FST_OK);
    CHECK_INT(fst_async_save_wait(first, 0, NULL), FST_OK);
    CHECK_INT(async_value_at(fixture_path("later")), '2');
    fst_async_save_close(first);
    fst_async_save_close(second);
}

static void *save_sync_in_thread(void *path) {
    fst_save_tensor tensors[TENSOR_COUNT];
    fst_writer *writer;
    async_make_tensors(tensors);
    if (fst_writer_open(path, tensors, TENSOR_COUNT, NULL, &writer, NULL) != FST_OK) return NULL;
    fst_status status = fst_writer_commit(writer, NULL);
    fst_writer_close(writer);
    return status == FST_OK ? path : NULL;
}

TEST(a_synchronous_save_comes_after_earlier_ones_of_its_file)
{
    fst_async_save *first;
    fst_save_options held = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    static char path[4096], other[4096];
    pthread_t thread;
    void *done;
    snprintf(path, sizeof path, "%s", fixture_path("both"));
    snprintf(other, sizeof other, "%s", fixture_path("other"));
    held.progress = async_hold;
    options.save = &held;
    atomic_store(&async_may_write, false);
    async_fill('1');
    CHECK_INT(async_start(path, &options, &first), FST_OK);
    async_fill('2');
    CHECK(save_sync_in_thread(other) == other); // another file does not wait
    CHECK(pthread_create(&thread, NULL, save_sync_in_thread, path) == 0);
    usleep(50000);
    CHECK_INT(async_value_at(path), -1); // it waits
    atomic_store(&async_may_write, true);
    CHECK(pthread_join(thread, &done) == 0);
    CHECK(done == path);
    CHECK_INT(async_value_at(path), '2');
    CHECK_INT(fst_async_save_wait(first, -1, NULL), FST_OK);
    CHECK_INT(async_value_at(path), '2');
    fst_async_save_close(first);
}

static uint64_t stop_at_ms;
static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static int stop_later(void *context, uint64_t done, uint64_t total, size_t tensors_done,
                      size_t tensors_total) {
    (void)context, (void)done, (void)total, (void)tensors_done, (void)tensors_total;
    return now_ms() > stop_at_ms;
}

/// Ctrl-C in Python is such a callback, too.
TEST(a_progress_callback_ends_the_wait_for_an_earlier_save)
{
    fst_async_save *first;
    fst_save_options held = async_save_options(), stopped = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    fst_save_tensor tensors[TENSOR_COUNT];
    fst_writer *writer;
    held.progress = async_hold;
    options.save = &held;
    atomic_store(&async_may_write, false);
    async_fill('1');
    CHECK_INT(async_start(fixture_path("stopped"), &options, &first), FST_OK);
    async_make_tensors(tensors);
    stopped.progress = stop_later;
    stop_at_ms = now_ms() + 200;
    CHECK_INT(
        fst_writer_open(fixture_path("stopped"), tensors, TENSOR_COUNT, &stopped, &writer, NULL),
        FST_OK);
    CHECK_INT(fst_writer_commit(writer, NULL), FST_E_CANCELLED);
    fst_writer_close(writer);
    atomic_store(&async_may_write, true);
    CHECK_INT(fst_async_save_wait(first, -1, NULL), FST_OK);
    CHECK_INT(async_value_at(fixture_path("stopped")), '1');
    fst_async_save_close(first);
}

/// A signal handler may save in the middle of a call that starts a save.
TEST(a_synchronous_save_copies_what_only_its_thread_would)
{
    static unsigned char big[80 * MIB];
    static const uint64_t shape[] = {sizeof big};
    fst_save_tensor tensor = {.struct_size = sizeof tensor, .name = "big", .name_size = SIZE_MAX};
    tensor.dtype = FST_DTYPE_U8, tensor.rank = 1, tensor.shape = shape, tensor.data = big;
    fst_async_save *first;
    fst_writer *writer;
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    options.thread_count = 1; // the caller
    options.start_timeout_ms = 1;
    memset(big, '1', sizeof big);
    CHECK_INT(fst_async_save_start(fixture_path("alone"), &tensor, 1, &options, &first, NULL),
              FST_OK);
    CHECK_INT(fst_writer_open(fixture_path("alone"), &tensor, 1, NULL, &writer, NULL), FST_OK);
    CHECK_INT(fst_writer_commit(writer, NULL), FST_OK);
    fst_writer_close(writer);
    CHECK_INT(fst_async_save_wait(first, 0, NULL), FST_OK);
    fst_async_save_close(first);
}

static fst_status edit(const char *path, fst_progress_callback progress) {
    fst_metadata_entry entry = {.key = "edited", .key_size = SIZE_MAX};
    entry.value = "yes", entry.value_size = SIZE_MAX;
    fst_edit_options options = FST_STRUCT_INIT(fst_edit_options);
    options.metadata = &entry;
    options.metadata_count = 1;
    options.progress = progress;
    return fst_header_edit(path, NULL, &options, NULL, NULL);
}

static fst_status compress(const char *path, fst_progress_callback progress) {
    fst_pack_options options = FST_STRUCT_INIT(fst_pack_options);
    options.progress = progress;
    return fst_file_compress(path, path, &options, NULL, NULL);
}

static fst_status decompress(const char *path, fst_progress_callback progress) {
    fst_pack_options options = FST_STRUCT_INIT(fst_pack_options);
    options.progress = progress;
    return fst_file_decompress(path, path, &options, NULL, NULL);
}

typedef fst_status change_file(const char *path, fst_progress_callback progress);
static change_file *const changes[] = {edit, compress, decompress};
static char changed_path[4096];

static void *change_in_thread(void *change) {
    fst_status status = (*(change_file *const *)change)(changed_path, NULL);
    return status == FST_OK ? change : NULL;
}

/// Starts a save that is not written before `async_may_write`.
static fst_async_save *start_held(const char *path) {
    fst_async_save *save = NULL;
    fst_save_options held = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    held.progress = async_hold;
    options.save = &held;
    atomic_store(&async_may_write, false);
    return async_start(path, &options, &save) == FST_OK ? save : NULL;
}

TEST(a_change_of_a_file_begins_after_earlier_saves_of_it)
{
    snprintf(changed_path, sizeof changed_path, "%s", fixture_path("changed"));
    async_fill('0');
    CHECK_INT(async_save_sync(changed_path), FST_OK);
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        pthread_t thread;
        void *done;
        async_fill((unsigned char)('1' + i));
        fst_async_save *first = start_held(changed_path);
        CHECK(first != NULL);
        CHECK(pthread_create(&thread, NULL, change_in_thread, (void *)&changes[i]) == 0);
        usleep(50000);
        atomic_store(&async_may_write, true);
        CHECK(pthread_join(thread, &done) == 0);
        CHECK(done == &changes[i]);
        CHECK_INT(async_value_at(changed_path), '1' + (int)i);
        CHECK_INT(fst_async_save_wait(first, 0, NULL), FST_OK);
        fst_async_save_close(first);
    }
}

TEST(a_change_that_waits_can_be_interrupted)
{
    const char *path = fixture_path("kept");
    async_fill('0');
    CHECK_INT(async_save_sync(path), FST_OK);
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        async_fill((unsigned char)('1' + i));
        fst_async_save *first = start_held(path);
        CHECK(first != NULL);
        stop_at_ms = now_ms() + 100;
        CHECK_INT(changes[i](path, stop_later), FST_E_CANCELLED);
        CHECK_INT(async_value_at(path), '0' + (int)i);
        atomic_store(&async_may_write, true);
        CHECK_INT(fst_async_save_wait(first, -1, NULL), FST_OK);
        fst_async_save_close(first);
    }
}

/// Of another pool and another file, which only the superseded save came after.
TEST(a_save_supersedes_no_other_ones)
{
    fst_staging_pool *pools[2];
    fst_async_save *saves[3];
    fst_save_options held = async_save_options();
    char paths[3][4096];
    for (int i = 0; i < 2; i++) // enough for the first two
        CHECK_INT(fst_staging_open(0, 256 * MIB, &pools[i], NULL), FST_OK);
    for (int i = 0; i < 3; i++)
        snprintf(paths[i], sizeof paths[i], "%s", fixture_path(i == 0 ? "unrelated" : "latest"));
    held.progress = async_hold;
    atomic_store(&async_may_write, false);
    for (int i = 0; i < 3; i++) {
        fst_async_options options = async_options_of(FST_STAGE_COPY);
        options.pool = pools[i == 2];
        options.overlap = i == 2 ? FST_OVERLAP_SUPERSEDE : FST_OVERLAP_ORDER;
        if (i == 0) options.save = &held;
        async_fill((unsigned char)('0' + i));
        CHECK_INT(async_start(paths[i], &options, &saves[i]), FST_OK);
    }
    CHECK_INT(fst_async_save_wait(saves[2], -1, NULL), FST_OK); // it does not wait for the first
    atomic_store(&async_may_write, true);
    CHECK_INT(fst_async_save_wait(saves[0], -1, NULL), FST_OK);
    CHECK_INT(fst_async_save_wait(saves[1], -1, NULL), FST_E_CANCELLED);
    CHECK_INT(async_value_at(paths[0]), '0');
    CHECK_INT(async_value_at(paths[2]), '2');
    for (int i = 0; i < 3; i++) fst_async_save_close(saves[i]);
    for (int i = 0; i < 2; i++) fst_staging_close(pools[i]);
}

TEST(a_save_waits_for_each_earlier_one_of_its_file_or_its_pool)
{
    fst_staging_pool *pools[2];
    fst_async_save *saves[3];
    fst_save_options held = async_save_options();
    char path[4096];
    for (int i = 0; i < 2; i++) CHECK_INT(fst_staging_open(0, 0, &pools[i], NULL), FST_OK);
    // The same file by another name, from another pool; the pool's latest save is of another file.
    snprintf(path, sizeof path, "%s", fixture_path("./x"));
    const char *paths[] = {fixture_path("x"), fixture_path("y"), path};
    held.progress = async_hold;
    atomic_store(&async_may_write, false);
    for (int i = 0; i < 3; i++) {
        fst_async_options options = async_options_of(FST_STAGE_COPY);
        options.pool = pools[i > 0];
        if (i == 0) options.save = &held;
        async_fill((unsigned char)('0' + i));
        CHECK_INT(async_start(paths[i], &options, &saves[i]), FST_OK);
    }
    CHECK_INT(fst_async_save_wait(saves[1], -1, NULL), FST_OK);
    fst_status early = fst_async_save_wait(saves[2], 200, NULL);
    atomic_store(&async_may_write, true);
    CHECK_INT(early, FST_E_TIMEOUT);
    CHECK_INT(fst_async_save_wait(saves[2], -1, NULL), FST_OK);
    CHECK_INT(async_value_at(path), '2');
    for (int i = 0; i < 3; i++) fst_async_save_close(saves[i]);
    for (int i = 0; i < 2; i++) fst_staging_close(pools[i]);
}

TEST(a_save_waits_for_an_earlier_one_of_its_links_target)
{
    fst_async_save *first, *second;
    fst_save_options held = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    char link[4096];
    snprintf(link, sizeof link, "%s", fixture_path("link"));
    CHECK_INT(async_save_sync(fixture_path("linked")), FST_OK);
    CHECK(symlink("linked", link) == 0);
    held.progress = async_hold;
    options.save = &held;
    atomic_store(&async_may_write, false);
    async_fill('1');
    CHECK_INT(async_start(fixture_path("linked"), &options, &first), FST_OK);
    options.save = NULL;
    async_fill('2');
    CHECK_INT(async_start(link, &options, &second), FST_OK);
    fst_status early = fst_async_save_wait(second, 200, NULL);
    atomic_store(&async_may_write, true);
    CHECK_INT(early, FST_E_TIMEOUT);
    CHECK_INT(fst_async_save_wait(second, -1, NULL), FST_OK);
    CHECK_INT(async_value_at(fixture_path("linked")), '2');
    fst_async_save_close(first);
    fst_async_save_close(second);
}

/// A loop over the saves, not a recursion: a thread's stack ends after about a thousand.
TEST(many_saves_may_wait_for_one)
{
    enum { COUNT = 1500 };
    static fst_async_save *saves[COUNT];
    if (CHECK_SANITIZED) SKIP("a sanitizer's threads need too much memory");
    fst_save_options held = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    char path[4096], byte = 'x';
    uint64_t shape[] = {1};
    fst_save_tensor tensor = {.struct_size = sizeof tensor};
    snprintf(path, sizeof path, "%s", fixture_path("queue"));
    tensor.name = "t";
    tensor.dtype = FST_DTYPE_U8;
    tensor.rank = 1;
    tensor.shape = shape;
    tensor.data = &byte;
    held.progress = async_hold;
    options.thread_count = 1;
    atomic_store(&async_may_write, false);
    size_t count = 0;
    for (; count < COUNT; count++) {
        options.save = count == 0 ? &held : NULL;
        if (fst_async_save_start(path, &tensor, 1, &options, &saves[count], NULL) != FST_OK) break;
    }
    fst_status staged = fst_async_save_stage(saves[count - 1], -1, NULL);
    atomic_store(&async_may_write, true);
    CHECK(count > 0);
    CHECK_INT(staged, FST_OK);
    CHECK_INT(fst_async_save_wait(saves[count - 1], -1, NULL), FST_OK);
    for (size_t i = 0; i < count; i++) fst_async_save_close(saves[i]);
}

TEST(saves_of_a_pool_are_ordered)
{
    fst_staging_pool *pool;
    fst_async_save *saves[8];
    CHECK_INT(fst_staging_open(32 * MIB, 0, &pool, NULL), FST_OK);
    for (int i = 0; i < 8; i++) {
        fst_async_options options = async_options_of(FST_STAGE_COPY);
        options.pool = pool;
        async_fill((unsigned char)('0' + i));
        CHECK_INT(async_start(fixture_path("ordered"), &options, &saves[i]), FST_OK);
    }
    fst_staging_close(pool); // the saves have their own references
    for (int i = 7; i >= 0; i--) CHECK_INT(fst_async_save_wait(saves[i], -1, NULL), FST_OK);
    CHECK_INT(async_value_at(fixture_path("ordered")), '7');
    for (int i = 0; i < 8; i++) fst_async_save_close(saves[i]);
}

static uint64_t anonymous_bytes(void) {
    unsigned long long kib = 0;
    char line[256];
    FILE *status = fopen("/proc/self/status", "r");
    while (status != NULL && fgets(line, sizeof line, status) != NULL)
        if (sscanf(line, "RssAnon: %llu", &kib) == 1) break;
    if (status != NULL) fclose(status);
    return kib * 1024;
}

TEST(a_closed_pool_frees_its_memory_when_its_save_has_ended)
{
    if (CHECK_SANITIZED) SKIP("the sanitizers keep freed memory for a while");
    static unsigned char big[80 * MIB];
    static const uint64_t shape[] = {sizeof big};
    fst_save_tensor tensor = {.struct_size = sizeof tensor, .name = "big", .name_size = SIZE_MAX};
    tensor.dtype = FST_DTYPE_U8, tensor.rank = 1, tensor.shape = shape, tensor.data = big;
    memset(big, 'p', sizeof big);
    fst_staging_pool *pool;
    fst_async_save *save;
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    uint64_t before = anonymous_bytes();
    CHECK_INT(fst_staging_open(0, 0, &pool, NULL), FST_OK);
    options.pool = pool;
    CHECK_INT(fst_async_save_start(fixture_path("freed"), &tensor, 1, &options, &save, NULL),
              FST_OK);
    CHECK_INT(fst_async_save_wait(save, -1, NULL), FST_OK);
    CHECK(anonymous_bytes() > before + 60 * MIB);
    fst_staging_close(pool);
    CHECK(anonymous_bytes() < before + 20 * MIB);
    fst_async_save_close(save);
}

TEST(a_later_save_supersedes_an_earlier_one)
{
    fst_async_save *first, *second;
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    options.overlap = FST_OVERLAP_SUPERSEDE;
    async_fill('1');
    CHECK_INT(async_start(fixture_path("superseded"), &options, &first), FST_OK);
    async_fill('2');
    CHECK_INT(async_start(fixture_path("superseded"), &options, &second), FST_OK);
    CHECK_INT(fst_async_save_wait(second, -1, NULL), FST_OK);
    fst_status status = fst_async_save_wait(first, -1, NULL);
    CHECK(status == FST_OK || status == FST_E_CANCELLED);
    CHECK_INT(async_value_at(fixture_path("superseded")), '2');
    fst_async_save_close(first);
    fst_async_save_close(second);
}

/// The folder of a sharded model is created by the first save, so links in it can't be resolved
/// yet.
TEST(saves_to_a_folder_that_does_not_exist_are_ordered)
{
    static const char *const spellings[][2] = {{"absent1", "absent1"},
                                               {"absent2/./x", "absent2/x"},
                                               {"absent3//x", "absent3/x/"},
                                               {"absent4/../absent5", "absent5"}};
    for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
        fst_async_save *saves[2];
        fst_save_options options = async_save_options();
        atomic_store(&async_may_write, false);
        for (int k = 0; k < 2; k++) {
            fst_async_options start = async_options_of(FST_STAGE_COPY);
            char path[4096];
            fst_staging_pool *pool;
            CHECK_INT(fst_staging_open(0, 0, &pool, NULL), FST_OK);
            options.file_count = k == 0 ? 2 : 3;
            options.progress = k == 0 ? async_hold : NULL;
            start.save = &options;
            start.pool = pool;
            snprintf(path, sizeof path, "%s", fixture_path(spellings[i][k]));
            async_fill((unsigned char)('1' + k));
            CHECK_INT(async_start(path, &start, &saves[k]), FST_OK);
            fst_staging_close(pool);
        }
        fst_status early = fst_async_save_wait(saves[1], 100, NULL);
        atomic_store(&async_may_write, true);
        CHECK_INT(early, FST_E_TIMEOUT);
        for (int k = 0; k < 2; k++) {
            CHECK_INT(fst_async_save_wait(saves[k], -1, NULL), FST_OK);
            fst_async_save_close(saves[k]);
        }
        CHECK_INT(async_value_at(fixture_path(spellings[i][1])), '2');
    }
}

static unsigned char large[96 * MIB];

static fst_status start_large(const char *path, fst_staging_pool *pool, fst_stage stage,
                              uint64_t size, fst_async_save **out) {
    fst_async_options options = async_options_of(stage);
    fst_save_tensor tensor = {.struct_size = sizeof tensor,
                              .name = "large",
                              .name_size = SIZE_MAX,
                              .dtype = FST_DTYPE_U8,
                              .rank = 1,
                              .shape = &size,
                              .data = large};
    options.pool = pool;
    return fst_async_save_start(path, &tensor, 1, &options, out, NULL);
}

/// The third save comes after the first by its pool and after the second by its file. It must not
/// take the pool's memory before the first is copied.
TEST(a_pool_is_left_to_its_earlier_save)
{
    fst_staging_pool *small, *other;
    fst_async_save *saves[3];
    char paths[2][4096];
    for (int i = 0; i < 2; i++)
        snprintf(paths[i], sizeof paths[i], "%s", fixture_path(i == 0 ? "w" : "z"));
    CHECK_INT(fst_staging_open(32 * MIB, 0, &small, NULL), FST_OK);
    CHECK_INT(fst_staging_open(0, 0, &other, NULL), FST_OK);
    CHECK_INT(start_large(paths[0], small, FST_STAGE_LAZY, 96 * MIB, &saves[0]), FST_OK);
    CHECK_INT(start_large(paths[1], other, FST_STAGE_COPY, 96 * MIB, &saves[1]), FST_OK);
    CHECK_INT(start_large(paths[1], small, FST_STAGE_LAZY, 64 * MIB, &saves[2]), FST_OK);
    alarm(120); // a wait without end
    CHECK_INT(fst_async_save_stage(saves[2], -1, NULL), FST_OK);
    for (int i = 2; i >= 0; i--) {
        CHECK_INT(fst_async_save_wait(saves[i], -1, NULL), FST_OK);
        fst_async_save_close(saves[i]);
    }
    alarm(0);
    fst_staging_close(small);
    fst_staging_close(other);
}
