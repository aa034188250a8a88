// SPDX-License-Identifier: Apache-2.0
/// Random faults from a seed: short, interrupted, slow, reordered or failing reads and writes;
/// files that shrink, change or are replaced; no descriptors, no threads, a failing ring. Each run
/// ends with the right bytes or an error, and without leftovers.
#include <dirent.h>
#include <errno.h>
#include <fastsafetensors.h>
#include <fastsafetensors/experimental.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "fixture.h"
#include "io/io.h"

#define COUNT 12
#define BYTES ((uint64_t)700001)

/// Probabilities of the faults in the current run, in 1024ths.
typedef struct fault_rates {
    uint32_t shorter, interrupted, failing, full, slow;
} fault_rates;

static fault_rates rates;
static _Atomic uint64_t random_state;
static atomic_long faults_done;

static uint32_t next_random(void) {
    uint64_t value = atomic_fetch_add(&random_state, 0x9e3779b97f4a7c15u);
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    value = (value ^ value >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(value >> 32);
}

static bool happens(uint32_t rate) { return next_random() % 1024 < rate; }

static void inject(fsti_io_op *op) {
    bool writes = op->is_write;
    if (op->result <= 0) return;
    int64_t before = op->result;
    if (happens(rates.slow)) usleep(next_random() % 300);
    if (happens(rates.shorter)) op->result = 1 + next_random() % op->result;
    if (happens(rates.interrupted)) op->result = next_random() % 2 ? -EINTR : -EAGAIN;
    if (happens(rates.failing)) op->result = -EIO;
    if (writes && happens(rates.full)) op->result = -ENOSPC;
    if (op->result != before) atomic_fetch_add(&faults_done, 1);
}

static void begin_faults(uint64_t seed) {
    static const fault_rates kinds[] = {
        {400, 0, 0, 0, 0},    {0, 400, 0, 0, 100},    {0, 0, 60, 0, 0}, {0, 0, 0, 100, 0},
        {250, 250, 0, 0, 50}, {200, 200, 20, 20, 50}, {0, 0, 0, 0, 500}};
    rates = kinds[seed % (sizeof kinds / sizeof *kinds)];
    atomic_store(&random_state, seed * 77);
    fsti_io_fault_hook_set(inject);
}

static int open_descriptors(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder != NULL && readdir(folder) != NULL) count++;
    if (folder != NULL) closedir(folder);
    return count;
}

static bool nothing_left(int descriptors) {
    return fixture_live_buffers() == 0 && open_descriptors() == descriptors;
}

/// The statuses that a run may return if reads or writes fail.
static bool is_expected(fst_status status) {
    return status == FST_OK || status == FST_END || status == FST_E_IO ||
           status == FST_E_SHORT_READ || status == FST_E_NO_SPACE || status == FST_E_FILE_CHANGED;
}

/// True when the view holds tensor `index`, or, converted, its bytes as 16-bit integers.
static bool is_tensor(const fst_tensor_view *view, size_t index) {
    if (view->dtype == FST_DTYPE_U8)
        return view->size_bytes == BYTES && fixture_matches(view->data, index * BYTES, BYTES);
    const int16_t *values = view->data;
    if (view->dtype != FST_DTYPE_I16 || view->size_bytes != 2 * BYTES) return false;
    for (uint64_t i = 0; i < BYTES; i++)
        if (values[i] != fixture_byte(index * BYTES + i)) return false;
    return true;
}

/// True when no tensor of the stream has a wrong byte. *status: how it ended.
static bool stream_is_right(fst_model *model, const fst_load_options *options, fst_status *status) {
    fst_loader *loader = NULL;
    fst_tensor *tensor;
    *status = fst_loader_open(model, options, &loader, NULL);
    bool right = true;
    for (size_t i = 0; *status == FST_OK; i++) {
        *status = fst_loader_next(loader, -1, &tensor, NULL);
        if (*status != FST_OK) break;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        right = right && fst_tensor_view_get(tensor, &view, NULL) == FST_OK && is_tensor(&view, i);
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    return right;
}

static fst_load_options chosen_options(uint64_t seed) {
    fst_load_options options = {.struct_size = sizeof options, .mode = FST_MODE_LOAD};
    options.thread_count = (uint32_t)(seed % 5);
    options.budget_bytes = seed % 3 == 0 ? 4 << 20 : 0;
    static fst_load_tuning tuning = FST_STRUCT_INIT(fst_load_tuning);
    tuning.engine = (fst_engine)(seed / 7 % FST_ENGINE_COUNT);
    bool may_ring = tuning.engine == FST_ENGINE_AUTO || tuning.engine == FST_ENGINE_URING;
    tuning.ring = may_ring ? (fst_ring)(seed % FST_RING_COUNT) : FST_RING_AUTO;
    options.tuning = &tuning;
    options.convert = seed % 4 == 1; // bytes to 16-bit integers, while loading
    options.dtype = FST_DTYPE_I16;
    return options;
}

TEST(loads_with_random_faults)
{
    const char *path = fixture_tensors("sweep", COUNT, BYTES);
    size_t good = 0, failed = 0, refused = 0;
    for (uint64_t seed = 0; seed < CHECK_ROUNDS(210); seed++) {
        int descriptors = open_descriptors();
        fst_model *model;
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        fst_load_options options = chosen_options(seed);
        if (seed % 2 == 0) fixture_evict(path);
        begin_faults(seed);
        fst_status status;
        bool right = stream_is_right(model, &options, &status);
        fsti_io_fault_hook_set(NULL);
        fst_model_close(model);
        CHECK(right);
        refused += status == FST_E_UNSUPPORTED; // no O_DIRECT here, or no io_uring
        if (status == FST_E_UNSUPPORTED) continue;
        CHECK(is_expected(status));
        good += status == FST_END;
        failed += status != FST_END;
        CHECK(nothing_left(descriptors));
    }
    printf("# %zu right, %zu failed, %ld faults\n", good, failed, atomic_load(&faults_done));
    CHECK(good > 0 && atomic_load(&faults_done) > 0);
    if (refused > 0) SKIP("few faults: files that are read by way of memory alone");
    CHECK(good > CHECK_ROUNDS(60) && failed > 0 && atomic_load(&faults_done) > CHECK_ROUNDS(200));
}

/// Saves what a load gave, perhaps converted, as the convert command does.
static fst_status save_copy(fst_model *model, const char *path, uint64_t seed) {
    fst_load_options options = {.struct_size = sizeof options, .mode = FST_MODE_LOAD};
    fst_save_tensor rows[COUNT];
    fst_tensor *held[COUNT] = {0};
    fst_loader *loader = NULL;
    fst_writer *writer = NULL;
    size_t count = 0;
    fst_status status = fst_loader_open(model, &options, &loader, NULL);
    for (; status == FST_OK && count < COUNT; count++) {
        status = fst_loader_next(loader, -1, &held[count], NULL);
        if (status != FST_OK) break;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        status = fst_tensor_view_get(held[count], &view, NULL);
        rows[count] = (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                                        .name = view.name,
                                        .name_size = view.name_size,
                                        .dtype = view.dtype,
                                        .rank = view.rank,
                                        .shape = view.shape,
                                        .data = view.data};
    }
    fst_save_options save = {.struct_size = sizeof save,
                             .promise = (fst_save_promise)(seed % 2),
                             .engine = (fst_save_engine)(seed / 2 % FST_SAVE_ENGINE_COUNT),
                             .order = FST_SAVE_ORDER_GIVEN};
    if (status == FST_OK) status = fst_writer_open(path, rows, count, &save, &writer, NULL);
    if (status == FST_OK) status = fst_writer_commit(writer, NULL);
    fst_writer_close(writer);
    for (size_t i = 0; i < COUNT; i++) fst_tensor_unref(held[i]);
    fst_loader_close(loader);
    return status;
}

TEST(saves_with_random_faults)
{
    const char *path = fixture_tensors("sweep", COUNT, BYTES);
    char copy[256];
    snprintf(copy, sizeof copy, "%s", fixture_path("copy"));
    size_t good = 0, failed = 0, refused = 0;
    for (uint64_t seed = 0; seed < CHECK_ROUNDS(140); seed++) {
        int descriptors = open_descriptors();
        fst_model *model;
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        bool was_there = access(copy, F_OK) == 0;
        begin_faults(seed);
        fst_status status = save_copy(model, copy, seed);
        fsti_io_fault_hook_set(NULL);
        fst_model_close(model);
        refused += status == FST_E_UNSUPPORTED;
        if (status == FST_E_UNSUPPORTED) continue;
        CHECK(is_expected(status));
        good += status == FST_OK;
        failed += status != FST_OK;
        // A complete file, of this save or an earlier one, or no file.
        CHECK((access(copy, F_OK) == 0) == (was_there || status == FST_OK));
        if (access(copy, F_OK) == 0) {
            fst_load_options options = {.struct_size = sizeof options, .mode = FST_MODE_LOAD};
            CHECK_INT(fst_model_open(copy, NULL, &model, NULL), FST_OK);
            CHECK(stream_is_right(model, &options, &status) && status == FST_END);
            fst_model_close(model);
        }
        if (seed % 16 == 0) unlink(copy);
        CHECK(nothing_left(descriptors));
    }
    CHECK(good > 0);
    if (refused > 0) SKIP("few faults: files that are read by way of memory alone");
    CHECK(good > CHECK_ROUNDS(40) && failed > 0);
}

/// Does something to the file when the load has begun.
static void disturb(const char *path, uint64_t seed) {
    char other[256];
    snprintf(other, sizeof other, "%s", fixture_path("other"));
    usleep((useconds_t)(seed * 37 % 2500));
    if (seed % 3 == 0) {
        if (truncate(path, (off_t)(seed * 7919 % (COUNT * BYTES))) != 0) abort();
    } else if (seed % 3 == 1) {
        if (rename(other, path) != 0) abort(); // another file of that name
    } else {
        int fd = open(path, O_WRONLY | O_CLOEXEC);
        if (fd < 0 || pwrite(fd, "changed", 7, (off_t)(COUNT * BYTES / 2)) != 7) abort();
        close(fd);
    }
}

static atomic_bool is_disturbed;
static atomic_long reads_held;

/// Delays each read until the file has been changed.
static void hold_until_disturbed(fsti_io_op *op) {
    if (op->engine == FST_ENGINE_AUTO) return; // of a header
    atomic_fetch_add(&reads_held, 1);
    for (int i = 0; i < 60000 && !atomic_load(&is_disturbed); i++) usleep(1000);
}

TEST(shrinking_changed_and_replaced_files)
{
    size_t good = 0, failed = 0;
    for (uint64_t seed = 0; seed < CHECK_ROUNDS(60); seed++) {
        const char *path = fixture_tensors("sweep", COUNT, BYTES);
        fixture_tensors("other", COUNT, BYTES + 1);
        int descriptors = open_descriptors();
        fst_model *model;
        fst_loader *loader = NULL;
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        fst_load_options options = chosen_options(seed);
        options.budget_bytes = 0;
        options.convert = 0;
        atomic_store(&is_disturbed, false);
        if (seed % 2 == 0) fixture_evict(path);
        fsti_io_fault_hook_set(seed % 2 == 0 ? hold_until_disturbed : NULL);
        fst_status status = fst_loader_open(model, &options, &loader, NULL);
        disturb(path, seed);
        atomic_store(&is_disturbed, true);
        if (status == FST_OK) status = fst_loader_wait(loader, -1, NULL);
        // A file of the same name is another file: the one that was opened is read.
        bool right = status != FST_OK || seed % 3 != 1;
        for (size_t i = 0; status == FST_OK && i < COUNT && seed % 3 == 1; i++) {
            fst_tensor *tensor;
            fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
            right = fst_loader_tensor_at(loader, i, -1, &tensor, NULL) == FST_OK &&
                    fst_tensor_view_get(tensor, &view, NULL) == FST_OK &&
                    fixture_matches(view.data, i * BYTES, BYTES);
            fst_tensor_unref(tensor);
            if (!right) break;
        }
        fst_loader_close(loader);
        fst_model_close(model);
        fsti_io_fault_hook_set(NULL);
        CHECK(right);
        CHECK(is_expected(status) || status == FST_E_UNSUPPORTED);
        good += status == FST_OK;
        failed += status != FST_OK;
        CHECK(nothing_left(descriptors));
    }
    printf("# %zu right, %zu failed, %ld reads held\n", good, failed, atomic_load(&reads_held));
    CHECK(good > 0 && (failed > 0 || atomic_load(&reads_held) == 0));
}

TEST(out_of_descriptors)
{
    const char *path = fixture_tensors("sweep", COUNT, BYTES);
    char copy[256];
    snprintf(copy, sizeof copy, "%s", fixture_path("copy"));
    struct rlimit limit, tight;
    getrlimit(RLIMIT_NOFILE, &limit);
    int descriptors = open_descriptors();
    bool succeeded = false;
    size_t failed = 0;
    for (int more = 0; more < 12; more++) {
        tight = (struct rlimit){(rlim_t)(descriptors - 3 + more), limit.rlim_max};
        CHECK_INT(setrlimit(RLIMIT_NOFILE, &tight), 0);
        fst_model *model = NULL;
        fst_error error = {0};
        fst_status status = fst_model_open(path, NULL, &model, &error);
        if (status == FST_OK) status = save_copy(model, copy, (uint64_t)more);
        fst_model_close(model);
        CHECK_INT(setrlimit(RLIMIT_NOFILE, &limit), 0);
        succeeded = status == FST_OK;
        failed += !succeeded;
        CHECK(succeeded || status == FST_E_IO || status == FST_E_NOT_FOUND ||
              status == FST_E_UNSUPPORTED);
        CHECK(nothing_left(descriptors));
    }
    CHECK(succeeded && failed > 0);
}

// ---- threads that do not start, a ring that dies: by the linker's --wrap ----

static atomic_long threads_left = -1, ring_calls_left = -1;
static atomic_int ring_errno = EBADFD;

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument) {
    if (atomic_load(&threads_left) == 0) return EAGAIN;
    if (atomic_load(&threads_left) > 0) atomic_fetch_sub(&threads_left, 1);
    return __real_pthread_create(thread, attributes, run, argument);
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...) {
    long values[6]; // as many as a system call may have
    va_list arguments;
    va_start(arguments, number);
    fixture_syscall_arguments(number, arguments, values);
    va_end(arguments);
    if (number == SYS_io_uring_enter && atomic_load(&ring_calls_left) >= 0 &&
        atomic_fetch_sub(&ring_calls_left, 1) <= 0) {
        atomic_store(&ring_calls_left, 0);
        // Waiting for submitted reads still works: the kernel has them.
        if (values[1] > 0) {
            errno = atomic_load(&ring_errno);
            return -1;
        }
    }
    return __real_syscall(number, values[0], values[1], values[2], values[3], values[4], values[5]);
}

TEST(threads_that_do_not_start)
{
    const char *path = fixture_tensors("sweep", COUNT, BYTES);
    for (long count = 0; count < 6; count++) {
        int descriptors = open_descriptors();
        fst_model *model;
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        fst_load_options options = chosen_options(0);
        options.thread_count = 5;
        atomic_store(&threads_left, count);
        fst_status status;
        bool right = stream_is_right(model, &options, &status);
        atomic_store(&threads_left, -1);
        fst_model_close(model);
        CHECK(right);
        // One thread does the work of all; without any, the waiting thread does.
        CHECK_INT(status, FST_END);
        CHECK(nothing_left(descriptors));
    }
}

/// A caller that polls without waiting also gets to the end.
static bool is_polled_to_its_end(fst_loader *loader) {
    fst_status status = FST_E_TIMEOUT;
    for (int i = 0; i < 1000 && status == FST_E_TIMEOUT; i++)
        status = fst_loader_wait(loader, 0, NULL);
    return status == FST_OK;
}

/// A limit whose nanoseconds overflow means no limit.
TEST(timeouts_beyond_clock_range)
{
    const int64_t beyond_ms = INT64_C(18446744073710); // 2^64 ns and 0.4 ms
    fst_model *model;
    fst_loader *loader = NULL;
    fst_load_options options = {.struct_size = sizeof options, .mode = FST_MODE_LOAD};
    CHECK_INT(fst_model_open(fixture_tensors("sweep", COUNT, BYTES), NULL, &model, NULL), FST_OK);
    atomic_store(&threads_left, 0); // the waiting thread checks the time itself
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    fst_status status = fst_loader_wait(loader, beyond_ms, NULL);
    atomic_store(&threads_left, -1);
    CHECK_INT(status, FST_OK);
    fst_loader_close(loader);
    fst_model_close(model);
}

TEST(loads_without_threads)
{
    const char *path = fixture_tensors("sweep", COUNT, BYTES);
    for (int views = 0; views < 2; views++) {
        fst_model *model;
        fst_loader *loader = NULL;
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        fst_load_options options = {.struct_size = sizeof options,
                                    .mode = views != 0 ? FST_MODE_MAP : FST_MODE_LOAD,
                                    .tuning = views != 0 ? fixture_populate() : NULL};
        fixture_evict(path);
        atomic_store(&threads_left, 0);
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        bool good = is_polled_to_its_end(loader);
        atomic_store(&threads_left, -1);
        CHECK(good);
        for (size_t i = 0; i < COUNT; i++) {
            fst_tensor *tensor;
            fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
            CHECK_INT(fst_loader_tensor_at(loader, i, 0, &tensor, NULL), FST_OK);
            CHECK_INT(fst_tensor_view_get(tensor, &view, NULL), FST_OK);
            CHECK(is_tensor(&view, i));
            fst_tensor_unref(tensor);
        }
        fst_load_stats stats = {.struct_size = sizeof stats};
        CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
        // The caller creates views of cached tensors in any case.
        if (views == 0 || stats.chunks_resident < stats.chunk_count)
            CHECK_CONTAINS(stats.reason, "no thread can be started");
        if (views != 0) CHECK_INT(stats.bytes_mapped, COUNT * BYTES);
        CHECK_INT(stats.thread_count, 1);
        fst_loader_close(loader);
        fst_model_close(model);
    }
}

typedef struct waiter {
    fst_loader *loader;
    size_t first; ///< of every other tensor
    bool good;
} waiter;

static void *wait_for_half(void *context) {
    waiter *self = context;
    self->good = true;
    for (size_t i = self->first; i < COUNT; i += 2) {
        fst_tensor *tensor = NULL;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        self->good &= fst_loader_tensor_at(self->loader, i, -1, &tensor, NULL) == FST_OK &&
                      fst_tensor_view_get(tensor, &view, NULL) == FST_OK && is_tensor(&view, i);
        fst_tensor_unref(tensor);
    }
    return NULL;
}

TEST(two_waiters_share_the_work)
{
    const char *path = fixture_tensors("sweep", COUNT, BYTES);
    fst_model *model;
    fst_loader *loader = NULL;
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    fst_load_options options = {.struct_size = sizeof options, .mode = FST_MODE_LOAD};
    fixture_evict(path);
    atomic_store(&threads_left, 0);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    atomic_store(&threads_left, -1);
    waiter halves[2] = {{loader, 0, false}, {loader, 1, false}};
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, wait_for_half, &halves[1]), 0);
    wait_for_half(&halves[0]);
    pthread_join(thread, NULL);
    CHECK(halves[0].good && halves[1].good);
    fst_loader_close(loader);
    fst_model_close(model);
}

/// A ring that always returns EAGAIN: a load continues without it. If io_uring is forced, it fails.
TEST(io_uring_always_full)
{
    const char *path = fixture_tensors("sweep", COUNT, BYTES);
    for (long calls = 0; calls < 4; calls++) {
        bool is_forced = calls % 2 == 1;
        fst_model *model;
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        fst_load_options options = {
            .struct_size = sizeof options, .mode = FST_MODE_LOAD, .cache = FST_CACHE_BYPASS};
        if (is_forced) options.tuning = fixture_engine(FST_ENGINE_URING);
        fixture_evict(path);
        atomic_store(&ring_errno, EAGAIN);
        atomic_store(&ring_calls_left, calls / 2 * 3);
        fst_status status;
        bool right = stream_is_right(model, &options, &status);
        atomic_store(&ring_calls_left, -1);
        atomic_store(&ring_errno, EBADFD);
        fst_model_close(model);
        CHECK(right);
        if (status == FST_E_UNSUPPORTED) SKIP("no io_uring, or no O_DIRECT");
        // A load of few calls may have ended by then.
        CHECK(status == FST_END || (is_forced && status == FST_E_IO));
    }
}

TEST(io_uring_fails_midway)
{
    const char *path = fixture_tensors("sweep", COUNT, BYTES);
    size_t failed = 0;
    for (long calls = 0; calls < 40; calls++) {
        int descriptors = open_descriptors();
        fst_model *model;
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        fst_load_options options = {.struct_size = sizeof options,
                                    .mode = FST_MODE_LOAD,
                                    .tuning = fixture_engine(FST_ENGINE_URING)};
        atomic_store(&ring_calls_left, calls);
        fst_status status;
        bool right = stream_is_right(model, &options, &status);
        atomic_store(&ring_calls_left, -1);
        fst_model_close(model);
        CHECK(right);
        if (status == FST_E_UNSUPPORTED) {
            check_skip_reason = "no io_uring, or no O_DIRECT";
            return;
        }
        CHECK(is_expected(status));
        failed += status != FST_END;
        CHECK(nothing_left(descriptors));
    }
    CHECK(failed > 0);
}
