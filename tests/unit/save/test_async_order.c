// SPDX-License-Identifier: Apache-2.0
/// The order of asynchronous saves: of the same file, of the same staging pool, or of a sharded
/// model in the same folder.
#include <stdatomic.h>
#include <unistd.h>

#include "async_fixture.h"
#include "check.h"
#include "fixture.h"

static atomic_bool may_write;
/// Holds the writing thread up.
static int wait_to_write(void *context, uint64_t done, uint64_t total, size_t tensors_done,
                         size_t tensors_total) {
    (void)context, (void)done, (void)total, (void)tensors_done, (void)tensors_total;
    while (!atomic_load(&may_write)) usleep(1000);
    return 0;
}

TEST(a_later_save_waits_for_an_earlier_one)
{
    fst_async_save *first, *second;
    fst_save_options held = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    held.progress = wait_to_write;
    options.save = &held;
    atomic_store(&may_write, false);
    async_fill('1');
    CHECK_INT(async_start(fixture_path("later"), &options, &first), FST_OK);
    options.save = NULL;
    async_fill('2');
    CHECK_INT(async_start(fixture_path("later"), &options, &second), FST_OK);
    fst_status early = fst_async_save_wait(second, 200, NULL);
    atomic_store(&may_write, true);
    CHECK_INT(early, FST_E_TIMEOUT);
    CHECK_INT(fst_async_save_wait(second, -1, NULL), FST_OK);
    CHECK_INT(fst_async_save_wait(first, 0, NULL), FST_OK);
    CHECK_INT(async_value_at(fixture_path("later")), '2');
    fst_async_save_close(first);
    fst_async_save_close(second);
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
    held.progress = wait_to_write;
    atomic_store(&may_write, false);
    for (int i = 0; i < 3; i++) {
        fst_async_options options = async_options_of(FST_STAGE_COPY);
        options.pool = pools[i > 0];
        if (i == 0) options.save = &held;
        async_fill((unsigned char)('0' + i));
        CHECK_INT(async_start(paths[i], &options, &saves[i]), FST_OK);
    }
    CHECK_INT(fst_async_save_wait(saves[1], -1, NULL), FST_OK);
    fst_status early = fst_async_save_wait(saves[2], 200, NULL);
    atomic_store(&may_write, true);
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
    held.progress = wait_to_write;
    options.save = &held;
    atomic_store(&may_write, false);
    async_fill('1');
    CHECK_INT(async_start(fixture_path("linked"), &options, &first), FST_OK);
    options.save = NULL;
    async_fill('2');
    CHECK_INT(async_start(link, &options, &second), FST_OK);
    fst_status early = fst_async_save_wait(second, 200, NULL);
    atomic_store(&may_write, true);
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
    held.progress = wait_to_write;
    options.thread_count = 1;
    atomic_store(&may_write, false);
    size_t count = 0;
    for (; count < COUNT; count++) {
        options.save = count == 0 ? &held : NULL;
        if (fst_async_save_start(path, &tensor, 1, &options, &saves[count], NULL) != FST_OK) break;
    }
    fst_status staged = fst_async_save_stage(saves[count - 1], -1, NULL);
    atomic_store(&may_write, true);
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
