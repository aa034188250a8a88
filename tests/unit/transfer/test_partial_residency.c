// SPDX-License-Identifier: Apache-2.0
/// Files with scattered pages in the page cache: cached pages stay, others are read into it only if
/// requested, and the statistics agree.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "fastsafetensors.h"
#include "fixture.h"
#include "io/io.h"

#define COUNT 6
#define BYTES ((uint64_t)3000001)
#define PAGE_COUNT_MAX 8192

/// Which pages of a file are in the page cache.
typedef struct page_map {
    unsigned char pages[PAGE_COUNT_MAX];
    size_t count;
} page_map;

static page_map look_at(const char *path) {
    static page_map map;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    off_t size = lseek(fd, 0, SEEK_END);
    void *address = mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, fd, 0);
    map.count = ((size_t)size + 4095) / 4096;
    if (fd < 0 || address == MAP_FAILED || map.count > PAGE_COUNT_MAX ||
        mincore(address, (size_t)size, map.pages) != 0)
        abort();
    for (size_t i = 0; i < map.count; i++) map.pages[i] &= 1;
    munmap(address, (size_t)size);
    close(fd);
    return map;
}

static size_t count_pages(const page_map *map) {
    size_t count = 0;
    for (size_t i = 0; i < map->count; i++) count += map->pages[i];
    return count;
}

/// Leaves the file in the page cache except for pages [first, first + count) of every 512.
static void cache_all_but(const char *path, size_t first, size_t count) {
    char byte;
    fixture_evict(path);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    size_t page_count = ((size_t)lseek(fd, 0, SEEK_END) + 4095) / 4096;
    for (size_t i = 0; i < page_count; i++)
        if (i % 512 < first || i % 512 >= first + count)
            if (pread(fd, &byte, 1, (off_t)i * 4096) != 1) abort();
    close(fd);
}

static int load(fst_model *model, const fst_load_options *options, fst_load_stats *stats) {
    fst_loader *loader = NULL;
    int result = 1;
    *stats = (fst_load_stats){.struct_size = sizeof *stats};
    if (fst_loader_open(model, options, &loader, NULL) != FST_OK) return result;
    result = fst_loader_wait(loader, -1, NULL) == FST_OK ? 0 : 2;
    for (size_t i = 0; i < COUNT && result == 0; i++) {
        fst_tensor *tensor = NULL;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        if (fst_loader_tensor_at(loader, i, -1, &tensor, NULL) != FST_OK) return 3;
        if (options->mode == FST_MODE_LOAD && (fst_tensor_view_get(tensor, &view, NULL) != FST_OK ||
                                               !fixture_matches(view.data, i * BYTES, BYTES)))
            result = 4;
        fst_tensor_unref(tensor);
    }
    if (fst_loader_stats_get(loader, stats, NULL) != FST_OK) result = 5;
    fst_loader_close(loader);
    return result;
}

TEST(bypass_keeps_cached_pages_and_adds_none)
{
    static const unsigned hidden[] = {0, FSTI_TEST_NO_DIRECT};
    const char *path = fixture_tensors("parts", COUNT, BYTES);
    for (size_t i = 0; i < 2; i++) {
        fst_load_options options = {
            .struct_size = sizeof options, .mode = FST_MODE_LOAD, .cache = FST_CACHE_BYPASS};
        fst_load_stats stats;
        fst_model *model;
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        cache_all_but(path, 20, 300);
        page_map before = look_at(path);
        fsti_io_test_disable(hidden[i]);
        int result = load(model, &options, &stats);
        fsti_io_test_disable(0);
        fst_model_close(model);
        page_map after = look_at(path);
        if (count_pages(&before) > before.count * 3 / 4) SKIP("this file system does not evict");
        CHECK_INT(result, 0);
        CHECK_INT(stats.cache_bytes, 0);
        if (i == 0 && stats.bytes_direct == 0) SKIP("no direct reads here");
        if (i == 0) CHECK_INT(stats.bytes_direct, stats.bytes_read);
        size_t lost = 0, came = 0;
        for (size_t page = 0; page < before.count; page++) {
            lost += before.pages[page] && !after.pages[page];
            came += !before.pages[page] && after.pages[page];
        }
        CHECK_INT(lost, 0);
        // The kernel may keep some that it was busy with when they were to be dropped, or that it
        // has made one of with pages that are kept.
        CHECK(came <= before.count / 8);
    }
}

/// A load that fills the page cache reports the chunks that were completely cached before.
TEST(missing_pages_are_waited_for)
{
    static const fst_load_mode modes[] = {FST_MODE_MAP, FST_MODE_LOAD};
    const char *path = fixture_tensors("missing", COUNT, BYTES);
    for (size_t i = 0; i < 2; i++) {
        fst_load_options options = {
            .struct_size = sizeof options, .mode = modes[i], .cache = FST_CACHE_KEEP};
        fst_load_stats stats;
        fst_model *model;
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        cache_all_but(path, 20, 100);
        page_map before = look_at(path);
        if (count_pages(&before) == before.count) SKIP("this file system does not evict");
        CHECK_INT(load(model, &options, &stats), 0);
        fst_model_close(model);
        page_map after = look_at(path);
        // The kernel may evict some of them again before the test looks.
        CHECK(count_pages(&after) >= after.count - after.count / 64);
        CHECK_INT(stats.chunks_resident, 0);
        CHECK(stats.cache_bytes > 0);
    }
}

/// With cache="bypass", only the cached pages of views are prefaulted.
TEST(populating_views_reads_nothing)
{
    const char *path = fixture_tensors("present", COUNT, BYTES);
    fst_load_options options = {.struct_size = sizeof options,
                                .mode = FST_MODE_MAP,
                                .cache = FST_CACHE_BYPASS,
                                .tuning = fixture_populate()};
    fst_load_stats stats;
    fst_model *model;
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    cache_all_but(path, 20, 100);
    page_map before = look_at(path);
    if (count_pages(&before) == before.count) SKIP("this file system does not evict");
    CHECK_INT(load(model, &options, &stats), 0);
    fst_model_close(model);
    page_map after = look_at(path);
    CHECK_INT(count_pages(&after), count_pages(&before));
    CHECK_INT(stats.bytes_mapped, 0);
    CHECK_INT(stats.bytes_read, 0);
}

/// Stands for another process that reads the whole file after this one has begun.
static int read_all(void *context, uint64_t bytes_done, uint64_t bytes_total, size_t tensors_done,
                    size_t tensors_total) {
    (void)bytes_done;
    (void)bytes_total;
    (void)tensors_done;
    (void)tensors_total;
    fixture_warm(context);
    return 0;
}

/// Loads views of a cold file whose remaining bytes another process reads meanwhile.
static fst_load_stats load_with_others(char *path, fst_share share) {
    fst_load_options options = {.struct_size = sizeof options,
                                .mode = FST_MODE_MAP,
                                .share = share,
                                .progress = read_all,
                                .progress_context = path,
                                .thread_count = 1};
    fst_load_stats stats = {.bytes_read = 0};
    fst_model *model;
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) return stats;
    fixture_evict(path);
    (void)load(model, &options, &stats);
    fst_model_close(model);
    return stats;
}

/// What the kernel or another process has read meanwhile is not read again. Alone, a process maps
/// it at the end; the processes of a node that load the same model leave that to the program.
TEST(pages_that_others_have_read_are_taken)
{
    char *path = (char *)(uintptr_t)fixture_tensors("others", 12, BYTES);
    fst_load_stats alone = load_with_others(path, FST_SHARE_OFF);
    fst_load_stats shared = load_with_others(path, FST_SHARE_NODE);
    if (alone.chunks_resident > 0) SKIP("this file system does not evict");
    CHECK_INT(alone.bytes_read, 12 * BYTES);
    CHECK_INT(alone.bytes_mapped, 12 * BYTES);
    CHECK_INT(shared.chunks_resident, 0);
    CHECK_INT(shared.bytes_read, 12 * BYTES);
    uint64_t steps = (12 * BYTES) >> 18; // what one stream reads at a time
    CHECK(alone.read_count < steps / 2 && shared.read_count < steps / 2);
    CHECK(shared.bytes_mapped < 12 * BYTES / 2);
}

TEST(range_is_resident_only_with_all_pages)
{
    const char *path = fixture_tensors("ranges", COUNT, BYTES);
    fsti_file *file;
    CHECK_INT(fsti_file_open(path, &file, NULL), FST_OK);
    cache_all_but(path, 4, 500);
    page_map map = look_at(path);
    if (map.pages[4] || map.pages[5]) SKIP("this file system does not evict");
    for (unsigned hidden = 0; hidden < 2; hidden++) {
        uint64_t bytes;
        fsti_io_test_disable(hidden ? FSTI_TEST_NO_CACHESTAT : 0);
        CHECK(fsti_file_resident(file, 3 * 4096, 4 * 4096, &bytes) && bytes == 4096);
        CHECK(fsti_file_resident(file, 3 * 4096 + 9, 3 * 4096 + 99, &bytes) && bytes == 90);
        CHECK(fsti_file_resident(file, 4 * 4096 - 100, 4 * 4096 + 100, &bytes) && bytes < 200);
        CHECK(bytes > 0);
        CHECK(fsti_file_resident(file, 4 * 4096, 6 * 4096, &bytes) && bytes == 0);
        CHECK(fsti_file_is_read(file, 3 * 4096 + 9, 4 * 4096));
        CHECK(!fsti_file_is_read(file, 3 * 4096 + 9, 4 * 4096 + 1));
    }
    fsti_io_test_disable(0);
    fsti_file_unref(file);
}
