// SPDX-License-Identifier: Apache-2.0
/// Loads with faults: short reads, interrupted reads, errors, missing memory. Every run ends with
/// the right bytes or with an error, and nothing leaks.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"
#include "fixture.h"
#include "io/io.h"
#include "memory/memory.h"
#include "transfer/pipeline.h"
#include "transfer/transfer.h"

/// No status: the bytes read are not those that were written.
#define WRONG_BYTES ((fst_status)999)

#define TENSOR_COUNT 40
#define TENSOR_BYTES ((uint64_t)700001)

static const fst_engine engines[] = {FST_ENGINE_PREAD, FST_ENGINE_DIRECT, FST_ENGINE_URING,
                                     FST_ENGINE_MMAP};

static fst_model *open_model(void) {
    static const char *path;
    if (path == NULL) path = strdup(fixture_tensors("model", TENSOR_COUNT, TENSOR_BYTES));
    fst_model *model = NULL;
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) abort();
    return model;
}

/// Tensor `index` of the fixture lies at a known place.
static int tensor_is_right(const fst_tensor *tensor, size_t index) {
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    return fst_tensor_view_get(tensor, &view, NULL) == FST_OK && view.size_bytes == TENSOR_BYTES &&
           fixture_matches(view.data, index * TENSOR_BYTES, TENSOR_BYTES);
}

/// Loads everything; FST_OK only if every byte is right. Wrong bytes give WRONG_BYTES.
static fst_status load_all(const fst_load_options *options, fst_load_stats *stats,
                           fst_error *error) {
    fst_model *model = open_model();
    fst_loader *loader;
    fst_status status = fst_loader_open(model, options, &loader, error);
    fst_model_close(model);
    if (status != FST_OK) return status;
    fst_tensor *tensor;
    for (size_t i = 0; (status = fst_loader_next(loader, -1, &tensor, error)) == FST_OK; i++) {
        int right = tensor_is_right(tensor, i);
        fst_tensor_unref(tensor);
        if (!right) {
            status = WRONG_BYTES;
            break;
        }
    }
    if (status == FST_END) status = FST_OK;
    if (status == FST_OK && stats != NULL) status = fst_loader_stats_get(loader, stats, error);
    fst_loader_close(loader);
    return status;
}

static fst_load_options options_of(fst_engine engine) {
    return (fst_load_options){.struct_size = sizeof(fst_load_options),
                              .mode = FST_MODE_LOAD,
                              .tuning = fixture_engine(engine)};
}

static bool works(fst_engine engine) {
    fst_load_options options = options_of(engine);
    return load_all(&options, NULL, NULL) != FST_E_UNSUPPORTED;
}

/// Whether all memory is freed. A thread that maps cached pages ends soon after the load.
static bool is_settled(long live) {
    for (int i = 0; i < 10000 && fsti_alloc_live() != live; i++) usleep(1000);
    return fsti_alloc_live() == live;
}

TEST(every_engine_reads_every_byte_once)
{
    for (size_t i = 0; i < 4; i++) {
        fst_load_options options = options_of(engines[i]);
        fst_load_stats stats = {.struct_size = sizeof stats};
        if (!works(engines[i])) continue;
        CHECK_INT(load_all(&options, &stats, NULL), FST_OK);
        CHECK_INT(stats.bytes_read, TENSOR_COUNT * TENSOR_BYTES);
        CHECK_INT(stats.bytes_requested, TENSOR_COUNT * TENSOR_BYTES);
        CHECK_TEXT(stats.engine, fsti_io_engine_get(engines[i])->name);
        bool direct = engines[i] == FST_ENGINE_DIRECT || engines[i] == FST_ENGINE_URING;
        CHECK_INT(stats.bytes_direct, direct ? stats.bytes_read : 0);
        CHECK(stats.read_count <= stats.bytes_read / (1 << 20) + 2 * stats.chunk_count);
        // Blocking reads go straight to their place; a mapping is copied from once.
        if (engines[i] != FST_ENGINE_URING)
            CHECK_INT(stats.bytes_copied, engines[i] == FST_ENGINE_MMAP ? stats.bytes_read : 0);
        CHECK(stats.buffer_bytes <= stats.bytes_read + (2 << 20) + 8192);
    }
}

TEST(io_uring_reads_directly_or_through_staging)
{
    if (!works(FST_ENGINE_URING)) SKIP("io_uring or O_DIRECT does not work here");
    for (int ring = FST_RING_PLACE; ring <= FST_RING_SLOTS; ring++) {
        fst_load_options options = options_of(FST_ENGINE_URING);
        fst_load_tuning tuning = *options.tuning;
        tuning.ring = (fst_ring)ring;
        options.tuning = &tuning;
        fst_load_stats stats = {.struct_size = sizeof stats};
        CHECK_INT(load_all(&options, &stats, NULL), FST_OK);
        CHECK_INT(stats.bytes_copied, ring == FST_RING_SLOTS ? stats.bytes_read : 0);
    }
}

TEST(io_uring_placement_is_measured)
{
    char text[128];
    fsti_uring_clear_choices();
    // Both methods are tried on a device alternately, and the faster one is kept.
    for (uint64_t device = 1; device <= 2; device++) {
        int seen[FST_RING_COUNT] = {0};
        for (int i = 0; i < 40; i++) {
            fst_ring way = fsti_uring_choose(device);
            seen[way]++;
            bool slow = (way == FST_RING_SLOTS) == (device == 1);
            fsti_uring_measured(device, way, 8 << 20, slow ? 4000000 : 2000000);
        }
        CHECK(seen[FST_RING_PLACE] >= 3 && seen[FST_RING_SLOTS] >= 3);
        CHECK_INT(fsti_uring_choose(device), device == 1 ? FST_RING_PLACE : FST_RING_SLOTS);
        fsti_uring_explain(device, text, sizeof text);
        CHECK_CONTAINS(text, device == 1 ? "to place measured" : "slots measured");
    }
    fsti_uring_explain(3, text, sizeof text);
    CHECK_TEXT(text, "");
    for (uint64_t device = 10; device < 100; device++) // more devices than are remembered
        CHECK(fsti_uring_choose(device) != FST_RING_AUTO);
    fsti_uring_clear_choices();
}

static atomic_int fault_kind, fault_countdown;
enum { FAULT_NONE, FAULT_SHORT, FAULT_EINTR, FAULT_EIO, FAULT_END, FAULT_SLOW };

static void inject(fsti_io_op *read) {
    int kind = atomic_load(&fault_kind);
    if (kind == FAULT_NONE) return;
    if (kind == FAULT_SLOW) usleep(2000);
    if (kind == FAULT_SLOW || atomic_fetch_sub(&fault_countdown, 1) != 0) return;
    if (kind == FAULT_SHORT && read->result > 1) read->result = read->result / 2 + 1;
    if (kind == FAULT_EINTR) read->result = -EINTR;
    if (kind == FAULT_EIO) read->result = -EIO;
    if (kind == FAULT_END) read->result = 0;
    if (kind == FAULT_SHORT || kind == FAULT_EINTR)
        atomic_store(&fault_countdown, 2); // and again, every third read
}

static void arm(int kind, int countdown) {
    atomic_store(&fault_countdown, countdown);
    atomic_store(&fault_kind, kind);
    fsti_io_fault_hook_set(kind == FAULT_NONE ? NULL : inject);
}

TEST(short_and_interrupted_reads_are_completed)
{
    for (size_t i = 0; i < 4; i++) {
        fst_load_options options = options_of(engines[i]);
        if (!works(engines[i])) continue;
        for (int kind = FAULT_SHORT; kind <= FAULT_EINTR; kind++) {
            arm(kind, 1); // the header is read without a fault
            fst_status status = load_all(&options, NULL, NULL);
            arm(FAULT_NONE, 0);
            CHECK_INT(status, FST_OK);
        }
    }
}

TEST(read_errors_name_file_tensor_and_offset)
{
    long live = fsti_alloc_live();
    for (size_t i = 0; i < 4; i++) {
        fst_load_options options = options_of(engines[i]);
        if (!works(engines[i])) continue;
        for (int kind = FAULT_EIO; kind <= FAULT_END; kind++) {
            for (int at = 1; at < 4; at++) {
                fst_error error = {0};
                arm(kind, at);
                fst_status status = load_all(&options, NULL, &error);
                arm(FAULT_NONE, 0);
                CHECK_INT(status, kind == FAULT_EIO ? FST_E_IO : FST_E_SHORT_READ);
                CHECK_CONTAINS(error.file, "model");
                CHECK(error.tensor[0] == 't');
                CHECK(error.byte_offset < TENSOR_COUNT * TENSOR_BYTES + 8192);
                if (kind == FAULT_EIO) CHECK_INT(error.os_errno, EIO);
            }
        }
    }
    CHECK(is_settled(live));
}

TEST(cancel_at_random_moments)
{
    uint64_t random = 7;
    long live = fsti_alloc_live();
    for (unsigned round = 0; round < CHECK_ROUNDS(1000); round++) {
        fst_load_options options = options_of(engines[round % 4]);
        fst_model *model = open_model();
        fst_loader *loader;
        fst_error error;
        arm(FAULT_SLOW, 0);
        fst_status status = fst_loader_open(model, &options, &loader, &error);
        fst_model_close(model);
        if (status == FST_OK) {
            usleep((unsigned)(fixture_random(&random) % 3000));
            fst_loader_cancel(loader);
            status = fst_loader_wait(loader, -1, &error);
            fst_loader_close(loader);
            CHECK(status == FST_OK || status == FST_E_CANCELLED);
        }
        arm(FAULT_NONE, 0);
    }
    CHECK(is_settled(live));
    CHECK_INT(fixture_live_buffers(), 0);
}

TEST(close_while_reads_are_in_flight)
{
    for (int round = 0; round < 20; round++) {
        fst_load_options options = options_of(engines[round % 4]);
        fst_model *model = open_model();
        fst_loader *loader;
        arm(FAULT_SLOW, 0);
        if (fst_loader_open(model, &options, &loader, NULL) == FST_OK) fst_loader_close(loader);
        fst_model_close(model);
        arm(FAULT_NONE, 0);
    }
    CHECK_INT(fixture_live_buffers(), 0);
}

TEST(file_that_shrinks_while_it_is_loaded)
{
    for (size_t i = 0; i < 4; i++) {
        const char *path = fixture_tensors("shrink", 8, 4 << 20);
        fst_load_options options = options_of(engines[i]);
        fst_model *model;
        fst_loader *loader;
        fst_error error = {0};
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        arm(FAULT_SLOW, 0);
        fst_status status = fst_loader_open(model, &options, &loader, &error);
        CHECK_INT(truncate(path, 5 << 20), 0);
        if (status == FST_OK) {
            status = fst_loader_wait(loader, -1, &error);
            fst_loader_close(loader);
        }
        arm(FAULT_NONE, 0);
        fst_model_close(model);
        if (status == FST_E_UNSUPPORTED) continue;
        CHECK_INT(status, FST_E_FILE_CHANGED);
        CHECK_CONTAINS(error.message, "shrink");
        CHECK(error.tensor[0] == 't'); // file, tensor and offset
        CHECK(error.byte_offset < (8u << 22) + 4096);
    }
}

TEST(every_allocation_may_fail)
{
    long live = fsti_alloc_live();
    for (int mode = 0; mode < 3; mode++) {
        fst_load_options options = options_of(FST_ENGINE_AUTO);
        options.mode = mode == 2 ? FST_MODE_MAP : FST_MODE_LOAD;
        options.budget_bytes = mode == 1 ? 8 << 20 : 0;
        options.thread_count = 2;
        fst_status status = FST_E_NO_MEMORY;
        long n = 0;
        for (int successes = 0; successes < 3 && n < 500; n = check_next(n)) {
            fst_model *model = open_model(); // its own sweep is elsewhere
            fst_loader *loader;
            fsti_alloc_fail_after(n);
            status = fst_loader_open(model, &options, &loader, NULL);
            fst_tensor *tensor;
            size_t i = 0;
            while (status == FST_OK) {
                status = fst_loader_next(loader, -1, &tensor, NULL);
                if (status != FST_OK) break;
                CHECK(tensor_is_right(tensor, i++));
                fst_tensor_unref(tensor);
            }
            fsti_alloc_fail_after(-1);
            if (status == FST_END || status != FST_E_NO_MEMORY || i > 0)
                fst_loader_close(loader);
            else if (loader != NULL)
                fst_loader_close(loader);
            fst_model_close(model);
            CHECK(status == FST_END || status == FST_E_NO_MEMORY || status == FST_E_IO);
            successes += status == FST_END;
            CHECK(is_settled(live));
        }
        CHECK_INT(status, FST_END);
        CHECK(n > 10);
    }
}

TEST(model_open_survives_failing_allocations)
{
    fst_model_close(open_model()); // makes the file
    const char *paths[2];
    paths[0] = strdup(fixture_tensors("m1", 3, 100));
    paths[1] = strdup(
        fixture_model("m2", "{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1));
    long live = fsti_alloc_live(), n = 0;
    fst_status status;
    do {
        fst_model *model;
        fsti_alloc_fail_after(n++);
        status = fst_model_open_files(paths, 2, NULL, &model, NULL);
        fsti_alloc_fail_after(-1);
        CHECK(status == FST_OK || status == FST_E_NO_MEMORY);
        fst_model_close(model);
        CHECK_INT(fsti_alloc_live(), live);
    } while (status != FST_OK);
    CHECK(n > 15);
    free((void *)(uintptr_t)paths[0]);
    free((void *)(uintptr_t)paths[1]);
}

static atomic_uint pages_measured;
static uint64_t count_measure(char *data, bool is_huge) {
    (void)data, (void)is_huge;
    atomic_fetch_add(&pages_measured, 1);
    return 1000;
}

/// How often a load of the model measures what pages cost.
static unsigned measures_of(fst_load_options options) {
    atomic_store(&pages_measured, 0);
    return load_all(&options, NULL, NULL) == FST_OK ? atomic_load(&pages_measured) : UINT_MAX;
}

static void *take_memory(void *context, size_t size_bytes, size_t alignment) {
    (void)context;
    void *memory;
    return posix_memalign(&memory, alignment, size_bytes) == 0 ? memory : NULL;
}

static void give_memory(void *context, void *pointer, size_t size_bytes) {
    (void)context, (void)size_bytes;
    free(pointer);
}

/// Populated memory, and the caller's memory, is left unchanged.
TEST(page_size_of_fresh_load_memory_is_chosen)
{
    fst_allocator allocator = {
        .struct_size = sizeof allocator, .allocate = take_memory, .release = give_memory};
    fst_load_options options = options_of(FST_ENGINE_PREAD), foreign = options;
    fst_load_options views = {.struct_size = sizeof views, .mode = FST_MODE_MAP};
    foreign.allocator = &allocator;
    fst_memory_keep(0);
    fsti_pages_fake(count_measure);
    unsigned fresh = measures_of(options);
    CHECK(fresh >= 3 && fresh < UINT_MAX);
    CHECK_INT(measures_of(options), fresh - 2); // small pages are known by now
    CHECK_INT(measures_of(foreign), 0);
    CHECK_INT(measures_of(views), 0);
    fst_memory_keep(64 << 20);
    CHECK_INT(measures_of(options), fresh - 2);
    CHECK_INT(measures_of(options), 0); // kept
    fst_memory_keep(0);
    fsti_pages_fake(NULL);
}

static uint64_t huge_cost_ns;
static uint64_t tell_cost(char *data, bool is_huge) {
    (void)data;
    return is_huge ? huge_cost_ns : 1000000;
}

/// The middle of the first 64 MiB that a load gives has the flag.
static void check_loaded_memory(uint64_t cost_ns, const char *flag) {
    fst_load_options options = options_of(FST_ENGINE_PREAD);
    fst_model *model = NULL;
    fst_loader *loader = NULL;
    fst_tensor *tensor = NULL;
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    huge_cost_ns = cost_ns;
    CHECK_INT(fst_model_open(fixture_tensors("one", 1, (uint64_t)64 << 20), NULL, &model, NULL),
              FST_OK);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
    CHECK_INT(fst_tensor_view_get(tensor, &view, NULL), FST_OK);
    CHECK(fixture_mapping_has((const char *)view.data + ((size_t)32 << 20), flag));
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    fst_model_close(model);
}

/// What the system gives then is its own affair: it may be short of huge pages.
TEST(load_memory_uses_the_cheaper_page_size)
{
    char *memory = fsti_pages_map((uint64_t)4 << 20);
    int has_huge = fixture_mapping_has(memory, "hg");
    munmap(memory, (size_t)4 << 20);
    if (!has_huge) SKIP("the system has no huge pages");
    fst_memory_keep(0);
    fsti_pages_fake(tell_cost);
    check_loaded_memory(100000, "hg");
    check_loaded_memory(3000000, "nh");
    fsti_pages_fake(NULL);
}

TEST(cached_and_absent_chunks_in_one_file)
{
    fst_model *model = open_model();
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    CHECK_INT(fst_model_file_info(model, 0, &info, NULL), FST_OK);
    fixture_evict(info.path);
    fsti_file *file;
    CHECK_INT(fsti_file_open(info.path, &file, NULL), FST_OK);
    uint64_t resident;
    if (!fsti_file_resident(file, 0, info.size_bytes, &resident) || resident > 0) {
        fsti_file_unref(file);
        fst_model_close(model);
        SKIP("this file system does not evict on request");
    }
    // The second chunk alone, without readahead around it.
    char *part = malloc(8 << 20);
    FILE *stream = fopen(info.path, "re");
    posix_fadvise(fileno(stream), 0, 0, POSIX_FADV_RANDOM);
    CHECK(pread(fileno(stream), part, 8 << 20, 8 << 20) == 8 << 20);
    fclose(stream);
    free(part);
    fsti_file_unref(file);
    fst_model_close(model);
    fst_load_options options = options_of(FST_ENGINE_AUTO);
    options.cache = FST_CACHE_BYPASS;
    fst_load_stats stats = {.struct_size = sizeof stats};
    CHECK_INT(load_all(&options, &stats, NULL), FST_OK);
    CHECK(stats.chunks_resident >= 1 && stats.chunks_resident < stats.chunk_count);
    CHECK(stats.bytes_mapped > 0 && stats.bytes_mapped < stats.bytes_read);
    CHECK_INT(stats.bytes_read, TENSOR_COUNT * TENSOR_BYTES);
}

/// Whoever has read them, the pages are mapped at the end, also for a program that polls.
TEST(views_are_read_in_streams)
{
    enum { COUNT = 48, BYTES = 1 << 20, WAY_COUNT = 2 };
    static const unsigned ways[WAY_COUNT] = {0, FSTI_TEST_NO_DISK};
    const char *path = fixture_tensors("views", COUNT, BYTES);
    fst_load_options options = {.struct_size = sizeof options};
    fst_load_stats stats[WAY_COUNT];
    for (int i = 0; i < WAY_COUNT; i++) {
        fst_model *model;
        fst_loader *loader;
        fixture_evict(path);
        fsti_io_test_disable(ways[i]);
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        fst_status status;
        do status = fst_loader_wait(loader, i == 0 ? 0 : -1, NULL);
        while (status == FST_E_TIMEOUT);
        CHECK_INT(status, FST_OK);
        stats[i] = (fst_load_stats){.struct_size = sizeof stats[i]};
        CHECK_INT(fst_loader_stats_get(loader, &stats[i], NULL), FST_OK);
        fst_loader_close(loader);
        fst_model_close(model);
        fsti_io_test_disable(0);
        CHECK_TEXT(stats[i].mode, "map");
        if (stats[i].chunks_resident > 1) SKIP("this file system does not evict on request");
        CHECK_INT(stats[i].bytes_read, stats[i].cache_bytes);
        CHECK(stats[i].read_count > 0 && stats[i].bytes_mapped >= COUNT * (uint64_t)BYTES);
        CHECK_INT(stats[i].bytes_copied + stats[i].buffer_bytes, 0);
    }
    CHECK_CONTAINS(stats[0].reason, "; in streams of reads");
    CHECK(strstr(stats[1].reason, "; in ") == NULL); // by page faults
    // One read for every 256 KiB. What the kernel reads ahead needs none.
    CHECK(stats[0].read_count <= COUNT * 4 + 64);
    CHECK(stats[1].read_count <= stats[1].chunk_count - stats[1].chunks_resident);
}

/// Loads views of the file's first tensors, which the page cache holds.
static void view_first(const char *path, size_t tensor_count, fst_load_stats *stats) {
    fst_part items[24];
    for (size_t i = 0; i < tensor_count; i++)
        items[i] = (fst_part){.struct_size = sizeof *items, .tensor_index = i};
    fst_load_options options = {.struct_size = sizeof options,
                                .thread_count = 4,
                                .tuning = fixture_populate(),
                                .parts = items,
                                .part_count = tensor_count};
    fst_model *model;
    fst_loader *loader;
    *stats = (fst_load_stats){.struct_size = sizeof *stats};
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    CHECK_INT(fst_loader_stats_get(loader, stats, NULL), FST_OK);
    CHECK_INT(stats->chunks_resident, stats->chunk_count);
    CHECK(stats->chunk_count >= 4);
    fst_loader_close(loader);
    fst_model_close(model);
}

TEST(small_resident_views_need_no_thread)
{
    const char *path = fixture_tensors("few_views", 24, 1 << 20);
    fst_load_stats few, many;
    view_first(path, 8, &few);
    view_first(path, 24, &many);
    CHECK_INT(few.thread_count, 1);
    CHECK_INT(many.thread_count, 4);
}

TEST(copy_is_exact_at_every_alignment)
{
    enum { SIZE = 400000 };
    char *source = malloc(SIZE + 256), *target = malloc(SIZE + 256);
    for (int i = 0; i < SIZE + 256; i++) source[i] = (char)fixture_byte((uint64_t)i);
    for (int from = 0; from < 70; from += 7)
        for (int to = 0; to < 70; to += 9)
            for (size_t size = SIZE - 65; size <= SIZE; size += 13) {
                memset(target, 0x5a, SIZE + 256);
                fsti_copy_bytes(target + to + 1, source + from, size);
                CHECK(memcmp(target + to + 1, source + from, size) == 0);
                CHECK(target[to] == 0x5a && target[to + 1 + (int)size] == 0x5a);
            }
    free(source);
    free(target);
}

static void *load_in_thread(void *argument) {
    fst_load_options options = options_of(engines[(uintptr_t)argument % 4]);
    fst_status status = load_all(&options, NULL, NULL);
    return (void *)(uintptr_t)(status == FST_OK || status == FST_E_UNSUPPORTED);
}

TEST(many_threads_load_at_once)
{
    pthread_t threads[16];
    for (uintptr_t i = 0; i < 16; i++)
        CHECK_INT(pthread_create(&threads[i], NULL, load_in_thread, (void *)i), 0);
    int good = 0;
    for (int i = 0; i < 16; i++) {
        void *result;
        pthread_join(threads[i], &result);
        good += result != NULL;
    }
    CHECK_INT(good, 16);
}
