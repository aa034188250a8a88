// SPDX-License-Identifier: Apache-2.0
/// Loads into shared memory when something is in the way: a full file system, a memory limit, a
/// process that stops or fails while it reads, no threads, and programs that write to tensors
/// early.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "fastsafetensors/loader.h"
#include "fixture.h"
#include "io/io.h"
#include "share/share.h"

#define COUNT 24
#define BYTES ((uint64_t)1000000) ///< not whole pages: neighbours share some

// ---- what fails ----

static long reserves_left = -1; ///< calls of fallocate() that succeed; -1: all
static bool has_threads = true;

int __real_fallocate64(int fd, int mode, off64_t offset, off64_t size);
int __wrap_fallocate64(int fd, int mode, off64_t offset, off64_t size);
int __real_pthread_create(pthread_t *out, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *context);
int __wrap_pthread_create(pthread_t *out, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *context);

int __wrap_fallocate64(int fd, int mode, off64_t offset, off64_t size) {
    if (reserves_left == 0) {
        errno = ENOSPC;
        return -1;
    }
    if (reserves_left > 0) reserves_left--;
    return __real_fallocate64(fd, mode, offset, size);
}

int __wrap_pthread_create(pthread_t *out, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *context) {
    return has_threads ? __real_pthread_create(out, attributes, run, context) : EAGAIN;
}

static long maps_left = -1; ///< mappings of files to make; -1: all

void *__real_mmap64(void *at, size_t size, int rights, int flags, int fd, off64_t offset);
void *__wrap_mmap64(void *at, size_t size, int rights, int flags, ...);

void *__wrap_mmap64(void *at, size_t size, int rights, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int fd = va_arg(more, int);
    off64_t offset = va_arg(more, off64_t);
    va_end(more);
    if (fd >= 0 && maps_left == 0) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    if (fd >= 0 && maps_left > 0) maps_left--;
    return __real_mmap64(at, size, rights, flags, fd, offset);
}

// ---- loads ----

static void use_folder(const char *name) {
    setenv("FASTSAFETENSORS_SHARE_DIR", fixture_path(name), 1);
    if (access(fixture_path("model"), F_OK) != 0) fixture_tensors("model", COUNT, BYTES);
}

static fst_load_options shared_options(void) {
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    options.mode = FST_MODE_LOAD;
    options.tuning = fixture_engine(FST_ENGINE_PREAD);
    options.share = FST_SHARE_NODE;
    return options;
}

static fst_loader *open_loader_of(const char *name, const fst_load_options *options) {
    fst_model *model;
    fst_loader *loader;
    if (fst_model_open(fixture_path(name), NULL, &model, NULL) != FST_OK) abort();
    if (fst_loader_open(model, options, &loader, NULL) != FST_OK) abort();
    fst_model_close(model);
    return loader;
}

static fst_loader *open_loader(const fst_load_options *options) {
    return open_loader_of("model", options);
}

/// Reads the stream to its end; the number of tensors with the right bytes.
static size_t count_right(fst_loader *loader, fst_status *status, fst_error *error) {
    fst_tensor *tensor;
    size_t right = 0, index = 0;
    while ((*status = fst_loader_next(loader, 60000, &tensor, error)) == FST_OK) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        if (fst_tensor_view_get(tensor, &view, NULL) == FST_OK)
            right += fixture_matches(view.data, index * BYTES, BYTES) != 0;
        index++;
        fst_tensor_unref(tensor);
    }
    return right;
}

/// Loads everything: COUNT if all is right.
static size_t load_right(fst_load_stats *stats) {
    const fst_load_options options = shared_options();
    fst_loader *loader = open_loader(&options);
    fst_status status;
    size_t right = count_right(loader, &status, NULL);
    *stats = FST_STRUCT_INIT(fst_load_stats);
    if (fst_loader_stats_get(loader, stats, NULL) != FST_OK || status != FST_END) right = 0;
    fst_loader_close(loader);
    return right;
}

TEST(a_full_file_system_leaves_loads_right_at_every_reservation)
{
    fst_load_stats stats;
    use_folder("full");
    for (long i = 0; i < 4; i++) {
        reserves_left = i;
        size_t right = load_right(&stats);
        bool was_full = reserves_left == 0;
        reserves_left = -1;
        CHECK_INT(right, COUNT);
        if (i == 0) CHECK_CONTAINS(stats.reason, "no shared segment can be made: No space left");
        if (i == 1) CHECK_CONTAINS(stats.reason, "partly in memory of this process: No space left");
        CHECK(was_full || i > 1);
    }
    CHECK(strstr(stats.reason, "partly") == NULL);
}

TEST(refused_mappings_leave_loads_right)
{
    fst_load_stats stats;
    use_folder("maps");
    for (long i = 0; i < 4; i++) {
        maps_left = i;
        size_t right = load_right(&stats);
        maps_left = -1;
        CHECK_INT(right, COUNT);
        if (i == 0) CHECK_CONTAINS(stats.reason, "made: Cannot allocate memory");
        if (i == 1 || i == 2)
            CHECK_CONTAINS(stats.reason, "partly in memory of this process: Cannot allocate");
    }
    CHECK(strstr(stats.reason, "partly") == NULL);
    // A segment that this process cannot map stays for others.
    const fst_load_options options = shared_options();
    fst_loader *other = open_loader(&options);
    CHECK_INT(fst_loader_wait(other, 60000, NULL), FST_OK);
    maps_left = 0;
    size_t right = load_right(&stats);
    maps_left = -1;
    CHECK_INT(right, COUNT);
    CHECK_CONTAINS(stats.reason, "the shared segment cannot be used: Cannot allocate memory");
    CHECK_INT(load_right(&stats), COUNT);
    CHECK_INT(stats.bytes_read, 0);
    fst_loader_close(other);
}

TEST(failed_allocations_are_errors_or_leave_loads_right)
{
    fst_load_stats stats;
    use_folder("allocations");
    const fst_load_options options = shared_options();
    fst_status status = FST_E_NO_MEMORY;
    for (long i = 0; status != FST_END; i = check_next(i)) {
        fst_model *model;
        fst_loader *loader;
        size_t right = 0;
        CHECK_INT(fst_model_open(fixture_path("model"), NULL, &model, NULL), FST_OK);
        fsti_alloc_fail_after(i);
        status = fst_loader_open(model, &options, &loader, NULL);
        bool is_open = status == FST_OK;
        if (is_open) right = count_right(loader, &status, NULL);
        fsti_alloc_fail_after(-1);
        if (is_open) fst_loader_close(loader);
        fst_model_close(model);
        CHECK(status == FST_E_NO_MEMORY || (status == FST_END && right == COUNT));
    }
    CHECK_INT(load_right(&stats), COUNT);
    CHECK_INT(stats.bytes_read, COUNT * BYTES);
}

TEST(a_memory_limit_is_an_error_as_without_shared_memory)
{
    use_folder("group");
    static char root[512], self[512];
    const fst_load_options options = shared_options();
    fst_error error;
    fst_status status;
    mkdir(fixture_path("job"), 0700);
    snprintf(root, sizeof root, "%s", fixture_path("."));
    snprintf(self, sizeof self, "%s", fixture_file("self", "0::/job\n", 8));
    fixture_file("job/memory.max", "3000000\n", 8);
    fixture_file("job/memory.current", "0\n", 2);
    fsti_cgroup_fake(root, self);
    fst_model *model;
    fst_loader *loader;
    CHECK_INT(fst_model_open(fixture_path("model"), NULL, &model, NULL), FST_OK);
    status = fst_loader_open(model, &options, &loader, &error);
    fst_model_close(model);
    fsti_cgroup_fake(NULL, NULL);
    CHECK_INT(status, FST_E_NO_MEMORY);
    CHECK_CONTAINS(error.message, "the cgroup's limit leaves");
}

TEST(loads_without_threads_share)
{
    fst_load_stats stats;
    use_folder("threads");
    const fst_load_options options = shared_options();
    has_threads = false;
    fst_loader *first = open_loader(&options);
    fst_status status;
    size_t right = count_right(first, &status, NULL);
    size_t again = load_right(&stats);
    fst_loader_close(first);
    has_threads = true;
    CHECK_INT(right, COUNT);
    CHECK_INT(again, COUNT);
    CHECK_INT(stats.bytes_read, 0);
}

#define LARGE_COUNT 12u
#define LARGE_BYTES ((uint64_t)8 << 20)

/// Writes a sparse model of two batches.
static void write_large_model(void) {
    char json[LARGE_COUNT * 100], *end = json;
    uint64_t size;
    for (unsigned i = 0; i < LARGE_COUNT; i++)
        end += snprintf(
            end, 100, "%c\"%u\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}",
            i == 0 ? '{' : ',', i, (unsigned long long)LARGE_BYTES,
            (unsigned long long)(i * LARGE_BYTES), (unsigned long long)((i + 1) * LARGE_BYTES));
    *end++ = '}';
    *end = '\0';
    size = 8 + (uint64_t)(end - json) + LARGE_COUNT * LARGE_BYTES;
    if (truncate(fixture_model("large", json, 0), (off_t)size) != 0) abort();
}

TEST(a_tensor_of_a_later_batch_is_not_read_twice)
{
    use_folder("later");
    write_large_model();
    const fst_load_options options = shared_options();
    fst_load_stats stats = FST_STRUCT_INIT(fst_load_stats);
    fst_model *model;
    fst_loader *loader;
    fst_tensor *tensor;
    CHECK_INT(fst_model_open(fixture_path("large"), NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    fst_model_close(model);
    CHECK_INT(fst_loader_tensor_at(loader, LARGE_COUNT - 1, 60000, &tensor, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, 60000, NULL), FST_OK);
    CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
    CHECK_INT(stats.bytes_read, LARGE_COUNT * LARGE_BYTES);
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
}

// ---- another process ----

static void fail_self(fsti_io_op *op) {
    if (op->offset > 4 * BYTES && op->engine == FST_ENGINE_PREAD) op->result = -EIO;
}

/// Starts a child that loads with a hook in its reads.
static pid_t start_child_of(const char *name, fsti_io_fault_hook hook) {
    pid_t child = fork();
    if (child != 0) return child;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL); // also if a check fails while the child is stopped
    fst_load_options options = shared_options();
    options.thread_count = 1;
    fsti_io_fault_hook_set(hook);
    fst_loader *loader = open_loader_of(name, &options);
    fst_status status = fst_loader_wait(loader, -1, NULL);
    fst_loader_close(loader);
    _exit(status == FST_E_IO ? 3 : 4);
}

static pid_t start_child(fsti_io_fault_hook hook) { return start_child_of("model", hook); }

/// Takes all tensors of the stream and keeps them. The number with the right bytes.
static size_t keep_right(fst_loader *loader, fst_tensor *kept[COUNT]) {
    size_t right = 0;
    for (size_t i = 0; i < COUNT; i++) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        if (fst_loader_next(loader, 60000, &kept[i], NULL) != FST_OK) return right;
        if (fst_tensor_view_get(kept[i], &view, NULL) == FST_OK)
            right += fixture_matches(view.data, i * BYTES, BYTES) != 0;
    }
    return right;
}

static size_t count_kept(fst_tensor *kept[COUNT]) {
    size_t right = 0;
    for (size_t i = 0; i < COUNT; i++) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        if (fst_tensor_view_get(kept[i], &view, NULL) == FST_OK)
            right += fixture_matches(view.data, i * BYTES, BYTES) != 0;
    }
    return right;
}

/// Overwrites the tensors of a model in place.
static void overwrite_model(const char *name) {
    static char other[BYTES];
    struct stat stamp;
    int fd = open(fixture_path(name), O_RDWR);
    memset(other, 0xee, sizeof other);
    if (fd < 0 || fstat(fd, &stamp) != 0) abort();
    for (uint64_t i = 1; i <= COUNT; i++)
        if (pwrite(fd, other, BYTES, stamp.st_size - (off_t)(i * BYTES)) != (ssize_t)BYTES) abort();
    close(fd);
}

static uint64_t stop_at;

/// Stops at reads from `stop_at` on. The hook runs after the read, so it repeats the read when the
/// process continues, as one that was stopped before it would do.
static void stop_before_read(fsti_io_op *op) {
    if (op->offset < stop_at || op->engine != FST_ENGINE_PREAD) return;
    raise(SIGSTOP);
    int fd = open(fixture_path("late_model"), O_RDONLY);
    (void)!pread(fd, op->buffer, op->size, (off_t)op->offset);
    close(fd);
}

/// A process stops before a read into the segment and goes on after another process has returned
/// its tensors and the file was overwritten.
static void check_late_owner(const char *name) {
    int state;
    fst_load_stats stats = FST_STRUCT_INIT(fst_load_stats);
    fst_load_options options = shared_options();
    fst_tensor *kept[COUNT];
    fixture_tensors(name, COUNT, BYTES);
    pid_t child = start_child_of(name, stop_before_read);
    CHECK_INT(waitpid(child, &state, WUNTRACED), child);
    CHECK(WIFSTOPPED(state));
    fst_loader *loader = open_loader_of(name, &options);
    fst_status waited = fst_loader_wait(loader, 200, NULL);
    fsti_share_stall_time(1);
    size_t right = keep_right(loader, kept);
    fsti_share_stall_time(0);
    CHECK_INT(waited, FST_E_TIMEOUT);
    CHECK_INT(right, COUNT);
    overwrite_model(name);
    // It fails, because the file was changed, but reads into the segment first.
    while (!WIFEXITED(state)) {
        kill(child, SIGCONT);
        CHECK_INT(waitpid(child, &state, WUNTRACED), child);
    }
    CHECK_INT(WEXITSTATUS(state), 4);
    CHECK_INT(count_kept(kept), COUNT);
    CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
    CHECK_CONTAINS(stats.reason, "partly in memory of this process: the process that reads it is");
    for (size_t i = 0; i < COUNT; i++) fst_tensor_unref(kept[i]);
    fst_loader_close(loader);
}

TEST(a_process_that_continues_late_changes_no_tensor_of_another)
{
    use_folder("late");
    for (stop_at = 0; stop_at < COUNT * BYTES; stop_at += COUNT * BYTES / 4)
        check_late_owner("late_model");
}

TEST(a_failed_load_leaves_its_chunks_to_others)
{
    fst_load_stats stats;
    use_folder("failed");
    int state;
    pid_t child = start_child(fail_self);
    CHECK_INT(load_right(&stats), COUNT);
    CHECK_INT(waitpid(child, &state, 0), child);
    CHECK(WIFEXITED(state));
    // It does not fail if this process has read the chunks whose reads fail there.
    CHECK(WEXITSTATUS(state) == 3 || stats.bytes_read > 0);
}

// ---- stores to tensors while the load goes on ----

/// The first tensor ends this much before a chunk does. After conversion, the rest of its last page
/// belongs to the second tensor, partly in the next chunk.
#define EDGE_AT ((uint64_t)12 << 20)
#define EDGE_BYTES 100u
#define SECOND_BYTES ((uint64_t)6 << 20)

static atomic_bool may_read;

/// Holds reads after the edge back.
static void hold_back(fsti_io_op *op) {
    if (op->engine != FST_ENGINE_PREAD || op->offset < EDGE_AT) return;
    for (int i = 0; i < 20000 && !atomic_load(&may_read); i++) usleep(1000);
}

/// Writes the model and returns the size of the first tensor.
static uint64_t write_edge_model(void) {
    char json[256];
    uint64_t first = EDGE_AT - 1000;
    // The numbers have the same length in both rounds, and so has the header.
    for (int round = 0; round < 2; round++) {
        static const char text[] =
            "{\"a\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[0,%llu]},"
            "\"b\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}}";
        unsigned long long end = first, second = SECOND_BYTES;
        int size = snprintf(json, sizeof json, text, end, end, second, end, end + second);
        first = EDGE_AT - EDGE_BYTES - 8 - (uint64_t)size;
    }
    fixture_model("edge", json, first + SECOND_BYTES);
    return first;
}

/// The number of elements that differ from the file's.
static uint64_t count_wrong(const fst_tensor_view *view, uint64_t at) {
    const uint16_t *numbers = view->data;
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < view->size_bytes / 2; i++) wrong += numbers[i] != fixture_byte(at + i);
    return wrong;
}

TEST(stores_to_a_tensor_leave_its_neighbour_right)
{
    use_folder("stores");
    fst_load_options options = shared_options();
    options.convert = 1;
    options.dtype = FST_DTYPE_U16;
    fst_model *model;
    fst_loader *loader;
    fst_tensor *first, *second;
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    fst_error error = {.message = ""};
    uint64_t first_bytes = write_edge_model();
    CHECK_INT(fst_model_open(fixture_path("edge"), NULL, &model, &error), FST_OK);
    atomic_store(&may_read, false);
    fsti_io_fault_hook_set(hold_back);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    fst_model_close(model);
    fst_status status = fst_loader_next(loader, 200, &first, NULL);
    if (status == FST_OK) { // too early: a store to it copies the page of both
        CHECK_INT(fst_tensor_view_get(first, &view, NULL), FST_OK);
        memset(view.data, 0xff, view.size_bytes);
        fst_tensor_unref(first);
    }
    atomic_store(&may_read, true);
    if (status == FST_E_TIMEOUT) {
        CHECK_INT(fst_loader_next(loader, 60000, &first, NULL), FST_OK);
        CHECK_INT(fst_tensor_view_get(first, &view, NULL), FST_OK);
        CHECK_INT(count_wrong(&view, 0), 0);
        memset(view.data, 0xff, view.size_bytes);
        fst_tensor_unref(first);
    }
    CHECK_INT(fst_loader_next(loader, 60000, &second, NULL), FST_OK);
    fsti_io_fault_hook_set(NULL);
    CHECK_INT(fst_tensor_view_get(second, &view, NULL), FST_OK);
    CHECK_INT(view.size_bytes, 2 * SECOND_BYTES);
    CHECK_INT(count_wrong(&view, first_bytes), 0);
    fst_tensor_unref(second);
    fst_loader_close(loader);
}
