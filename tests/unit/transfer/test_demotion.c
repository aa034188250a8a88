// SPDX-License-Identifier: Apache-2.0
/// I/O methods that fail during a load: the load continues with the next method unless the failed
/// one was requested, and ends if all fail.
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "fastsafetensors.h"
#include "fixture.h"
#include "io/io.h"

#define TENSOR_COUNT 24
#define TENSOR_BYTES ((uint64_t)700001)

static const char *make_model(void) {
    const char *path = fixture_tensors("model", TENSOR_COUNT, TENSOR_BYTES);
    fixture_evict(path);
    return path;
}

/// Loads everything; 9999 for a wrong byte.
static fst_status load_all(fst_engine engine, fst_load_stats *stats, fst_error *error) {
    // Bytes that fit would be read through the page cache.
    fst_load_options options = {.struct_size = sizeof options,
                                .mode = FST_MODE_LOAD,
                                .cache =
                                    engine == FST_ENGINE_AUTO ? FST_CACHE_BYPASS : FST_CACHE_AUTO,
                                .tuning = fixture_engine(engine)};
    fst_model *model;
    fst_loader *loader = NULL;
    fst_tensor *tensor;
    fst_status status = fst_model_open(make_model(), NULL, &model, error);
    if (status == FST_OK) status = fst_loader_open(model, &options, &loader, error);
    for (size_t i = 0; status == FST_OK; i++) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        status = fst_loader_next(loader, -1, &tensor, error);
        if (status != FST_OK) break;
        if (fst_tensor_view_get(tensor, &view, NULL) != FST_OK ||
            !fixture_matches(view.data, i * TENSOR_BYTES, TENSOR_BYTES))
            status = (fst_status)9999;
        fst_tensor_unref(tensor);
    }
    if (status == FST_END) status = fst_loader_stats_get(loader, stats, error);
    fst_loader_close(loader);
    fst_model_close(model);
    return status;
}

static atomic_int refusal; ///< the errno that direct reads fail with, after `good_reads` of them
static atomic_int good_reads, refused_reads;
static bool refuses_all;

static void refuse_direct(fsti_io_op *op) {
    bool is_direct = op->engine == FST_ENGINE_DIRECT || op->engine == FST_ENGINE_URING;
    if (!is_direct && !(refuses_all && op->engine != FST_ENGINE_AUTO)) return;
    if (atomic_fetch_sub(&good_reads, 1) > 0) return;
    atomic_fetch_add(&refused_reads, 1);
    op->result = -atomic_load(&refusal);
}

static void begin_refusing(int os_errno, int after) {
    atomic_store(&refusal, os_errno);
    atomic_store(&good_reads, after);
    atomic_store(&refused_reads, 0);
    fsti_io_fault_hook_set(refuse_direct);
}

TEST(a_refused_direct_read_is_read_through_the_cache)
{
    static const int causes[] = {EINVAL, EOPNOTSUPP, EIO, EAGAIN};
    for (size_t i = 0; i < sizeof causes / sizeof *causes; i++) {
        for (int after = 0; after < 8; after += 5) {
            for (unsigned hidden = 0; hidden < 2; hidden++) {
                fst_load_stats stats = {.struct_size = sizeof stats};
                fst_error error = {0};
                fsti_io_test_disable(hidden ? FSTI_TEST_NO_URING : 0);
                begin_refusing(causes[i], after);
                fst_status status = load_all(FST_ENGINE_AUTO, &stats, &error);
                fsti_io_fault_hook_set(NULL);
                fsti_io_test_disable(0);
                if (atomic_load(&refused_reads) == 0) SKIP("no direct reads here");
                CHECK_INT(status, FST_OK);
                CHECK_CONTAINS(stats.engine, "pread");
                CHECK_CONTAINS(stats.reason, "because a direct read failed");
                CHECK_INT(stats.bytes_read, TENSOR_COUNT * TENSOR_BYTES);
                CHECK(stats.bytes_direct < stats.bytes_read);
                // Stopped for the whole file: only reads in flight and a few more.
                CHECK(causes[i] == EAGAIN || atomic_load(&refused_reads) <= 64);
            }
        }
    }
}

static atomic_int warning_count;
static char last_warning[1024];

static void take_warning(void *context, fst_log_level level, const char *text) {
    (void)context;
    if (level != FST_LOG_WARNING) return;
    atomic_fetch_add(&warning_count, 1);
    snprintf(last_warning, sizeof last_warning, "%s", text);
}

TEST(abandoned_route_is_logged_once)
{
    fst_load_stats stats = {.struct_size = sizeof stats};
    fst_error error = {0};
    fsti_io_test_disable(FSTI_TEST_NO_URING);
    begin_refusing(EOPNOTSUPP, 0);
    fst_log_set(take_warning, NULL, FST_LOG_WARNING);
    fst_status status = load_all(FST_ENGINE_AUTO, &stats, &error);
    fst_log_set(NULL, NULL, FST_LOG_WARNING);
    fsti_io_fault_hook_set(NULL);
    fsti_io_test_disable(0);
    if (atomic_load(&refused_reads) == 0) SKIP("no direct reads here");
    CHECK_INT(status, FST_OK);
    CHECK_INT(atomic_load(&warning_count), 1);
    CHECK_CONTAINS(last_warning, "model: direct reads failed (Operation not supported)");
    CHECK_CONTAINS(last_warning, "continuing with reads through the page cache");
}

/// Direct reads that stop within a page before their end, as a signal or a server may have it.
static void stop_within_a_page(fsti_io_op *op) {
    bool is_direct = op->engine == FST_ENGINE_DIRECT || op->engine == FST_ENGINE_URING;
    if (!is_direct || op->result <= 8192 || atomic_fetch_sub(&good_reads, 1) > 0) return;
    atomic_fetch_add(&refused_reads, 1);
    op->result = 512;
}

TEST(partial_direct_read_continues_buffered)
{
    static const fst_engine engines[] = {FST_ENGINE_AUTO, FST_ENGINE_AUTO, FST_ENGINE_DIRECT};
    for (size_t i = 0; i < 3; i++) {
        fst_load_stats stats = {.struct_size = sizeof stats};
        fst_error error = {0};
        fsti_io_test_disable(i == 1 ? FSTI_TEST_NO_URING : 0);
        atomic_store(&good_reads, 3);
        atomic_store(&refused_reads, 0);
        fsti_io_fault_hook_set(stop_within_a_page);
        fst_status status = load_all(engines[i], &stats, &error);
        fsti_io_fault_hook_set(NULL);
        fsti_io_test_disable(0);
        if (atomic_load(&refused_reads) == 0) SKIP("no direct reads here");
        CHECK_INT(status, engines[i] == FST_ENGINE_AUTO ? FST_OK : FST_E_SHORT_READ);
        if (status != FST_OK) continue;
        CHECK_CONTAINS(stats.engine, "pread");
        CHECK_CONTAINS(stats.reason, "because a direct read failed");
        CHECK_INT(stats.bytes_read, TENSOR_COUNT * TENSOR_BYTES);
    }
}

static uint64_t cached_bytes(const char *path) {
    fsti_file *file = NULL;
    uint64_t bytes = UINT64_MAX;
    if (fsti_file_open(path, &file, NULL) != FST_OK) abort();
    if (!fsti_file_resident(file, 0, fsti_file_size(file), &bytes)) bytes = UINT64_MAX;
    fsti_file_unref(file);
    return bytes;
}

TEST(every_route_respects_cache_bypass)
{
    enum { COUNT = 24, TENSOR_PAGES = 200 };
    static const unsigned hidden[] = {0, FSTI_TEST_NO_PROC, FSTI_TEST_NO_DIRECT};
    static const uint64_t sizes[] = {TENSOR_PAGES * 4096, 4096}; // by threads, and by the caller
    for (size_t i = 0; i < 6; i++) {
        fst_load_options options = {.struct_size = sizeof options, .cache = FST_CACHE_BYPASS};
        fst_load_stats stats = {.struct_size = sizeof stats};
        const char *path = fixture_tensors("bypassed", COUNT, sizes[i / 3]);
        fst_model *model;
        fst_loader *loader;
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        fixture_evict(path); // pages read by opening, with the kernel's readahead
        uint64_t before = cached_bytes(path);
        fsti_io_test_disable(hidden[i % 3]);
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
        CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
        fsti_io_test_disable(0);
        fst_loader_close(loader);
        fst_model_close(model);
        if (before > COUNT * sizes[i / 3] / 2 && i < 3) SKIP("this file system does not evict");
        bool has_direct = stats.bytes_direct > 0;
        if (i == 0 && !has_direct) SKIP("no direct reads here");
        CHECK_INT(has_direct, i % 3 < 2); // however small
        CHECK_INT(stats.cache_bytes, 0);
        CHECK(cached_bytes(path) <= before);
        if (i == 2) CHECK_CONTAINS(stats.reason, "then dropped from the page cache");
    }
}

static atomic_int populate_calls, populate_errno;

int __real_madvise(void *address, size_t size, int advice);
int __wrap_madvise(void *address, size_t size, int advice);
int __wrap_madvise(void *address, size_t size, int advice) {
    enum { POPULATE_READ = 22 };
    if (advice != POPULATE_READ || atomic_load(&populate_errno) == 0)
        return __real_madvise(address, size, advice);
    atomic_fetch_add(&populate_calls, 1);
    errno = atomic_load(&populate_errno);
    return -1;
}

TEST(unpopulated_views_are_read)
{
    static const int causes[] = {EAGAIN, EINVAL, ENOMEM};
    for (size_t i = 0; i < sizeof causes / sizeof *causes; i++) {
        // Without the guard, pages are not mapped by accesses to them.
        fst_load_tuning tuning = {.struct_size = sizeof tuning, .keep_sigbus_handler = 1};
        fst_load_options options = {
            .struct_size = sizeof options, .cache = FST_CACHE_KEEP, .tuning = &tuning};
        fst_load_stats stats = {.struct_size = sizeof stats};
        fst_model *model;
        fst_loader *loader;
        CHECK_INT(fst_model_open(make_model(), NULL, &model, NULL), FST_OK);
        atomic_store(&populate_calls, 0);
        atomic_store(&populate_errno, causes[i]);
        fst_status status = fst_loader_open(model, &options, &loader, NULL);
        if (status == FST_OK) status = fst_loader_wait(loader, 20000, NULL);
        atomic_store(&populate_errno, 0);
        CHECK_INT(status, FST_OK);
        CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
        fst_loader_close(loader);
        fst_model_close(model);
        CHECK_TEXT(stats.mode, "map");
        if (stats.chunks_resident == stats.chunk_count) SKIP("this file system does not evict");
        CHECK(atomic_load(&populate_calls) > 0 && atomic_load(&populate_calls) < 1000);
    }
}

TEST(forced_engine_reports_its_error)
{
    static const fst_engine forced[] = {FST_ENGINE_DIRECT, FST_ENGINE_URING};
    for (size_t i = 0; i < 2; i++) {
        fst_load_stats stats = {.struct_size = sizeof stats};
        fst_error error = {0};
        begin_refusing(EINVAL, 3);
        fst_status status = load_all(forced[i], &stats, &error);
        fsti_io_fault_hook_set(NULL);
        if (status == FST_E_UNSUPPORTED) SKIP("no direct reads here");
        CHECK_INT(status, FST_E_IO);
        CHECK_INT(error.os_errno, EINVAL);
    }
}

TEST(endless_device_timeout_ends_the_load)
{
    for (size_t i = FST_ENGINE_PREAD; i <= FST_ENGINE_MMAP; i++) {
        fst_load_stats stats = {.struct_size = sizeof stats};
        fst_error error = {0};
        refuses_all = true;
        begin_refusing(EAGAIN, 3);
        fst_status status = load_all((fst_engine)i, &stats, &error);
        fsti_io_fault_hook_set(NULL);
        refuses_all = false;
        CHECK(status == FST_E_IO || status == FST_E_UNSUPPORTED);
        CHECK(atomic_load(&refused_reads) < 50000);
    }
}

static atomic_bool ring_is_refused, direct_is_denied;

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...) {
    long values[6];
    va_list arguments;
    va_start(arguments, number);
    fixture_syscall_arguments(number, arguments, values);
    va_end(arguments);
    // The ring of the probe can be created, the one for reading can't: pinned memory is used up.
    if (number == SYS_io_uring_setup && values[0] > 2 && atomic_load(&ring_is_refused)) {
        errno = ENOMEM;
        return -1;
    }
    if (number == SYS_statx && atomic_load(&direct_is_denied)) {
        memset((void *)values[4], 0, 256);
        *(uint32_t *)values[4] = (uint32_t)values[3]; // all requested values are reported as 0
        return 0;
    }
    return __real_syscall(number, values[0], values[1], values[2], values[3], values[4], values[5]);
}

/// ext4 with data journaling opens files with O_DIRECT, and reads them through the page cache.
TEST(fake_direct_reads_are_rejected)
{
    fst_load_stats stats = {.struct_size = sizeof stats};
    fst_error error = {0};
    atomic_store(&direct_is_denied, true);
    fst_status status = load_all(FST_ENGINE_AUTO, &stats, &error);
    fst_status forced = load_all(FST_ENGINE_DIRECT, NULL, &error);
    atomic_store(&direct_is_denied, false);
    CHECK_INT(status, FST_OK);
    CHECK_INT(stats.bytes_direct, 0);
    CHECK_INT(forced, FST_E_UNSUPPORTED);
}

TEST(io_uring_is_optional)
{
    fst_load_stats stats = {.struct_size = sizeof stats};
    fst_error error = {0};
    CHECK_INT(load_all(FST_ENGINE_AUTO, &stats, &error), FST_OK);
    if (strstr(stats.engine, "uring") == NULL) SKIP("no io_uring here");
    atomic_store(&ring_is_refused, true);
    fst_status status = load_all(FST_ENGINE_AUTO, &stats, &error);
    fst_status forced = load_all(FST_ENGINE_URING, &stats, &error);
    atomic_store(&ring_is_refused, false);
    CHECK_INT(status, FST_OK);
    CHECK_INT(forced, FST_E_NO_MEMORY);
    CHECK_CONTAINS(error.message, "io_uring_setup");
}

static atomic_bool holds_reads;
static atomic_int reads_held;
static _Thread_local bool is_waiter;
static atomic_bool is_read_by_waiter; ///< then the call ends when its read does

static void hold(fsti_io_op *op) {
    if (op->engine == FST_ENGINE_AUTO) return;
    if (is_waiter) atomic_store(&is_read_by_waiter, true);
    atomic_fetch_add(&reads_held, 1);
    for (int i = 0; i < 100000 && atomic_load(&holds_reads); i++) usleep(1000);
}

typedef struct late_item {
    fst_loader *loader;
    fst_status status;
} late_item;

static void *ask_late(void *context) {
    late_item *item = context;
    fst_tensor *tensor;
    is_waiter = true;
    item->status = fst_loader_tensor_at(item->loader, TENSOR_COUNT - 1, -1, &tensor, NULL);
    fst_tensor_unref(tensor);
    return NULL;
}

/// Waits until the load has read nothing for a fifth of a second.
static void wait_until_idle(fst_loader *loader) {
    uint64_t before = UINT64_MAX;
    for (int i = 0; i < 300; i++) {
        fst_load_stats stats = FST_STRUCT_INIT(fst_load_stats);
        if (fst_loader_stats_get(loader, &stats, NULL) != FST_OK || stats.bytes_read == before)
            return;
        before = stats.bytes_read;
        usleep(200000);
    }
}

TEST(cancel_ends_a_retried_read)
{
    fst_load_options options = {.struct_size = sizeof options,
                                .mode = FST_MODE_LOAD,
                                .budget_bytes = 4 * TENSOR_BYTES,
                                .thread_count = 2};
    fst_model *model;
    late_item item = {0};
    pthread_t thread;
    fst_tensor *tensor;
    CHECK_INT(fst_model_open(make_model(), NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_loader_open(model, &options, &item.loader, NULL), FST_OK);
    fst_model_close(model);
    for (int i = 0; i < 3; i++) { // its own reads are done: it waits for memory
        CHECK_INT(fst_loader_next(item.loader, -1, &tensor, NULL), FST_OK);
        fst_tensor_unref(tensor);
    }
    wait_until_idle(item.loader);
    atomic_store(&reads_held, 0);
    atomic_store(&holds_reads, true);
    fsti_io_fault_hook_set(hold);
    CHECK_INT(pthread_create(&thread, NULL, ask_late, &item), 0);
    for (int i = 0; i < 60000 && atomic_load(&reads_held) == 0; i++) usleep(1000);
    bool began = atomic_load(&reads_held) > 0;
    fst_loader_cancel(item.loader);
    usleep(1000000); // a waiter that wakes after the read has ended would find the item complete
    atomic_store(&holds_reads, false);
    pthread_join(thread, NULL);
    fsti_io_fault_hook_set(NULL);
    fst_loader_close(item.loader);
    CHECK(began);
    if (!atomic_load(&is_read_by_waiter)) CHECK_INT(item.status, FST_E_CANCELLED);
}

static int entries_left = -1;

struct dirent *__real_readdir64(DIR *folder);
struct dirent *__wrap_readdir64(DIR *folder);
struct dirent *__wrap_readdir64(DIR *folder) {
    if (entries_left == 0) {
        errno = EIO;
        return NULL;
    }
    if (entries_left > 0) entries_left--;
    return __real_readdir64(folder);
}

TEST(unlistable_folder_is_an_error)
{
    make_model();
    fixture_tensors("a.safetensors", 2, 10);
    fixture_tensors("b.safetensors", 2, 10);
    for (int count = 0; count < 20; count++) {
        fst_model *model = NULL;
        fst_error error;
        entries_left = count;
        fst_status status = fst_model_open(fixture_path("."), NULL, &model, &error);
        entries_left = -1;
        fst_model_close(model);
        // Either all was listed (with duplicate names), or the failure is reported.
        CHECK(status == FST_E_DUPLICATE_TENSOR || status == FST_E_IO);
        if (count == 0) CHECK_INT(status, FST_E_IO);
    }
}
