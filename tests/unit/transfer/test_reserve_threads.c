// SPDX-License-Identifier: Apache-2.0
/// The reserve of threads works when the first threads are slow, and waits while they are fast.
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "fastsafetensors/loader.h"
#include "fixture.h"
#include "io/io.h"
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
    join_reserve(threads); // returns only if the reserve starts without fsti_reserve_wake()
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

/// Whether the page tables have the page of `address`, or -1.
static int is_mapped(const void *address) {
    uint64_t entry = 0;
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    off_t at = (off_t)((uintptr_t)address / fsti_page_bytes() * sizeof entry);
    bool is_read = fd >= 0 && pread(fd, &entry, sizeof entry, at) == (ssize_t)sizeof entry;
    if (fd >= 0) close(fd);
    return is_read ? (int)(entry >> 63) : -1;
}

/// Views of distant files are touched page by page, the last one too, wherever the range begins.
TEST(the_last_page_is_touched)
{
    enum { COUNT = 20, EVERY = 3, TENSOR_BYTES = 65536 * 17 - 44 }; // ranges that begin anywhere
    const char *path = fixture_tensors("last", COUNT * EVERY, TENSOR_BYTES);
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_part parts[COUNT];
    fst_model *model;
    fst_loader *loader;
    fst_tensor *tensor;
    int mapped_count = 0;
    for (size_t i = 0; i < COUNT; i++)
        parts[i] = (fst_part){.struct_size = sizeof *parts, .tensor_index = i * EVERY};
    options.mode = FST_MODE_MAP;
    options.parts = parts;
    options.part_count = COUNT;
    fixture_evict(path);
    fsti_io_hide(FSTI_IO_HIDE_DISK);
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    fsti_io_hide(0);
    while (fst_loader_next(loader, -1, &tensor, NULL) == FST_OK) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        CHECK_INT(fst_tensor_view_get(tensor, &view, NULL), FST_OK);
        mapped_count += is_mapped((const char *)view.data + TENSOR_BYTES - 1);
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    fst_model_close(model);
    if (mapped_count < 0) SKIP("the page tables cannot be read");
    CHECK_INT(mapped_count, COUNT);
}
