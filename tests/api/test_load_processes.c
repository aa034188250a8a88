// SPDX-License-Identifier: Apache-2.0
/// Loads under the conditions of real programs: unprivileged users, fork(), limits, allocators that
/// call back, and tensors requested out of order.
#include <errno.h>
#include <fcntl.h>
#include <fastsafetensors.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "load_fixture.h"

static int load_as_stranger(void *context) {
    fst_model *model;
    fst_loader *loader;
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.cache = FST_CACHE_BYPASS;
    fst_load_stats stats = {.struct_size = sizeof stats};
    if (fst_model_open(context, NULL, &model, NULL) != FST_OK) return 1;
    if (fst_loader_open(model, &options, &loader, NULL) != FST_OK) return 2;
    fst_model_close(model);
    if (fst_loader_wait(loader, -1, NULL) != FST_OK) return 3;
    if (fst_loader_stats_get(loader, &stats, NULL) != FST_OK) return 4;
    fst_loader_close(loader);
    // The pages are not there: nothing may be copied from a mapping that faults them in one by one.
    return stats.chunks_resident == 0 && stats.bytes_mapped == 0 ? 0 : 5;
}

TEST(other_users_cold_files_load_like_own_files)
{
    fst_model_close(open_tensors());
    const char *path = fixture_path("tensors");
    fixture_evict(path);
    int result = fixture_as_other_user(load_as_stranger, (void *)(uintptr_t)path);
    if (result < 0) SKIP("needs root");
    CHECK_INT(result, 0);
}

/// Loads everything, checks every byte, and returns the mode.
static int load_and_report(const fst_load_options *options, fst_load_stats *stats) {
    fst_model *model;
    fst_loader *loader;
    if (fst_model_open(fixture_path("tensors"), NULL, &model, NULL) != FST_OK) return 1;
    if (fst_loader_open(model, options, &loader, NULL) != FST_OK) return 2;
    fst_model_close(model);
    for (size_t i = 0; i < COUNT; i++) {
        fst_tensor *tensor;
        if (fst_loader_next(loader, -1, &tensor, NULL) != FST_OK) return 3;
        int right = is_tensor(tensor, i);
        fst_tensor_unref(tensor);
        if (!right) return 4;
    }
    *stats = (fst_load_stats){.struct_size = sizeof *stats};
    if (fst_loader_stats_get(loader, stats, NULL) != FST_OK) return 5;
    fst_loader_close(loader);
    return 0;
}

TEST(cold_load_fills_the_page_cache)
{
    fst_load_options options = {.struct_size = sizeof options};
    fst_load_stats stats;
    fst_model_close(open_tensors());
    fixture_evict(fixture_path("tensors"));
    CHECK_INT(load_and_report(&options, &stats), 0);
    CHECK_TEXT(stats.mode, "map");
    if (stats.chunks_resident > 0) SKIP("this file system does not evict on request");
    CHECK_INT(stats.cache_bytes, COUNT * BYTES);
    CHECK_INT(stats.bytes_read, COUNT * BYTES);
    CHECK_INT(stats.bytes_direct + stats.bytes_copied + stats.buffer_bytes, 0);
    CHECK(stats.read_count > 0 && stats.read_count < 1000);
    // Callers get the same bytes by different methods.
    CHECK_INT(load_and_report(&options, &stats), 0);
    CHECK_TEXT(stats.mode, "map");
    CHECK_INT(stats.chunks_resident, stats.chunk_count);
    CHECK_INT(stats.bytes_read + stats.cache_bytes + stats.read_count, 0);
}

static int load_own_as_stranger(void *context) {
    fst_load_options options = options_of(FST_MODE_LOAD);
    fst_load_stats stats;
    (void)context;
    int result = load_and_report(&options, &stats);
    if (result != 0) return result;
    return stats.chunks_resident == 0 && stats.cache_bytes == COUNT * BYTES ? 0 : 10;
}

TEST(small_files_of_other_users_become_resident)
{
    fst_model_close(open_tensors());
    fixture_evict(fixture_path("tensors"));
    int result = fixture_as_other_user(load_own_as_stranger, NULL);
    if (result < 0) SKIP("needs root");
    CHECK_INT(result, 0);
}

TEST(owned_load_of_small_files_fills_the_page_cache)
{
    fst_load_options options = {.struct_size = sizeof options, .mode = FST_MODE_LOAD};
    fst_load_stats stats;
    fst_model_close(open_tensors());
    fixture_evict(fixture_path("tensors"));
    CHECK_INT(load_and_report(&options, &stats), 0);
    CHECK_TEXT(stats.mode, "load");
    if (stats.chunks_resident > 0) SKIP("this file system does not evict on request");
    CHECK_CONTAINS(stats.reason, "kept in the page cache: it fits in memory twice");
    CHECK_INT(stats.bytes_direct, 0);
    CHECK_INT(stats.bytes_read, COUNT * BYTES);
    CHECK_INT(stats.cache_bytes, COUNT * BYTES);
    CHECK_INT(load_and_report(&options, &stats), 0);
    CHECK_INT(stats.chunks_resident, stats.chunk_count);
    CHECK_INT(stats.cache_bytes, 0);
}

TEST(bypass_leaves_the_page_cache_unchanged)
{
    fst_load_options options = {.struct_size = sizeof options, .cache = FST_CACHE_BYPASS};
    fst_load_stats stats;
    fst_model_close(open_tensors());
    fixture_evict(fixture_path("tensors"));
    CHECK_INT(load_and_report(&options, &stats), 0);
    CHECK_TEXT(stats.mode, "load");
    if (stats.bytes_direct == 0) SKIP("no direct reads here");
    CHECK_INT(stats.cache_bytes, 0);
    CHECK_INT(load_and_report(&options, &stats), 0);
    CHECK_INT(stats.chunks_resident, 0); // still not in the page cache
    options.cache = FST_CACHE_KEEP;
    options.mode = FST_MODE_LOAD;
    CHECK_INT(load_and_report(&options, &stats), 0);
    CHECK_INT(stats.cache_bytes, COUNT * BYTES);
    CHECK_INT(load_and_report(&options, &stats), 0);
    CHECK_INT(stats.chunks_resident, stats.chunk_count); // now all of it is cached
    CHECK_INT(stats.cache_bytes, 0);
    fst_loader *loader;
    fst_model *model = open_tensors();
    options.tuning = fixture_engine(FST_ENGINE_URING);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_E_ARGUMENT);
    options.tuning = fixture_engine(FST_ENGINE_PREAD);
    options.cache = FST_CACHE_BYPASS;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_E_ARGUMENT);
    fst_model_close(model);
}

static int map_as_stranger(void *context) {
    fst_load_options options = {.struct_size = sizeof options};
    fst_load_stats stats;
    (void)context;
    int result = load_and_report(&options, &stats);
    if (result != 0) return result;
    return stats.chunks_resident == 0 && stats.cache_bytes == COUNT * BYTES ? 0 : 10;
}

/// The second load reads nothing, although the kernel does not report cached pages.
static int map_again_as_stranger(void *context) {
    fst_load_options options = {.struct_size = sizeof options};
    fst_load_stats stats;
    (void)context;
    int result = load_and_report(&options, &stats);
    if (result != 0) return result;
    if (stats.chunks_resident != stats.chunk_count) return 11;
    return stats.bytes_read + stats.read_count == 0 ? 0 : 12;
}

/// Whether the file system supports reads that fail instead of waiting (RWF_NOWAIT).
static bool answers_at_once(const char *path) {
    char byte;
    struct iovec room = {&byte, 1};
    int fd = open(path, O_RDONLY);
    bool answers = preadv2(fd, &room, 1, 0, RWF_NOWAIT) == 1;
    close(fd);
    return answers;
}

/// Both loads, from a page cache without the file; 0 when they do what they should.
static int map_twice_as_stranger(void) {
    fixture_evict(fixture_path("tensors"));
    int result = fixture_as_other_user(map_as_stranger, NULL);
    return result == 0 ? fixture_as_other_user(map_again_as_stranger, NULL) : result;
}

TEST(views_of_other_users_files_are_paged_in)
{
    fst_model_close(open_tensors());
    if (!answers_at_once(fixture_path("tensors"))) SKIP("no RWF_NOWAIT here");
    int result = map_twice_as_stranger();
    if (result < 0) SKIP("needs root");
    // A kernel that is short of memory drops pages between the loads, or keeps some of the file's.
    for (int i = 0; i < 5 && result != 0; i++) result = map_twice_as_stranger();
    CHECK_INT(result, 0);
}

/// A load that can't be finished: its budget holds four of the tensors.
static fst_loader *open_limited(const fst_load_options *more) {
    fst_model *model = open_tensors();
    fst_load_options options = more == NULL ? options_of(FST_MODE_LOAD) : *more;
    options.budget_bytes = 4 * BYTES;
    options.thread_count = 3;
    fst_loader *loader = NULL;
    if (fst_loader_open(model, &options, &loader, NULL) != FST_OK) abort();
    fst_model_close(model);
    return loader;
}

/// Checks the loads in a forked child. 0 if all checks pass, otherwise the number of a check.
static int use_in_child(fst_loader *loader, fst_tensor *held) {
    fst_tensor *tensor;
    fst_error error;
    fst_load_stats stats = {.struct_size = sizeof stats};
    alarm(250); // ends the test after a deadlock in the child
    if (fst_loader_next(loader, -1, &tensor, &error) != FST_E_UNSUPPORTED) return 1;
    if (strstr(error.message, "fork") == NULL) return 2;
    if (fst_loader_tensor_at(loader, 31, -1, &tensor, NULL) != FST_E_UNSUPPORTED) return 3;
    if (fst_loader_tensor(loader, "t3", SIZE_MAX, -1, &tensor, NULL) != FST_E_UNSUPPORTED) return 4;
    if (fst_loader_wait(loader, -1, NULL) == FST_OK) return 5;
    if (fst_loader_stats_get(loader, &stats, NULL) != FST_E_UNSUPPORTED) return 6;
    fst_loader_cancel(loader);
    fst_loader_close(loader);
    if (!is_tensor(held, 0)) return 7; // tensors are memory
    fst_tensor_unref(held);
    fst_model *model;
    fst_load_options options = options_of(FST_MODE_LOAD);
    if (fst_model_open(fixture_path("tensors"), NULL, &model, NULL) != FST_OK) return 8;
    if (fst_loader_open(model, &options, &loader, NULL) != FST_OK) return 9;
    if (fst_loader_wait(loader, -1, NULL) != FST_OK) return 10;
    fst_loader_close(loader);
    fst_model_close(model);
    return 0;
}

TEST(fork_during_a_load)
{
#ifdef __SANITIZE_THREAD__
    SKIP("the thread sanitizer does not follow threads of a fork");
#endif
    fst_loader *loader = open_limited(NULL);
    fst_tensor *held;
    int status = 0;
    CHECK_INT(fst_loader_next(loader, -1, &held, NULL), FST_OK);
    usleep(20000); // its threads sleep, waiting for memory
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) _exit(use_in_child(loader, held));
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK_INT(WEXITSTATUS(status), 0);
    fst_tensor_unref(held);
    for (size_t i = 1; i < COUNT; i++) { // the parent's load continues
        CHECK_INT(fst_loader_next(loader, -1, &held, NULL), FST_OK);
        CHECK(is_tensor(held, i));
        fst_tensor_unref(held);
    }
    fst_loader_close(loader);
}

static fst_loader *asked_loader;
static int allocations, answers, refusals;

/// Calls that wait: the load would wait for its own allocator.
static void ask_to_wait(fst_loader *loader) {
    fst_tensor *tensor = NULL;
    refusals += fst_loader_tensor_at(loader, COUNT - 1, 200, &tensor, NULL) == FST_E_ARGUMENT &&
                fst_loader_next(loader, 0, &tensor, NULL) == FST_E_ARGUMENT &&
                fst_loader_wait(loader, 0, NULL) == FST_E_ARGUMENT;
}

static void *ask_and_allocate(void *context, size_t size_bytes, size_t alignment) {
    (void)context;
    fst_load_stats stats = {.struct_size = sizeof stats};
    allocations++;
    // The first call happens before the program has the handle.
    if (asked_loader != NULL && fst_loader_stats_get(asked_loader, &stats, NULL) == FST_OK)
        answers++;
    if (asked_loader != NULL) ask_to_wait(asked_loader);
    void *memory = NULL;
    return posix_memalign(&memory, alignment, size_bytes) == 0 ? memory : NULL;
}

static void release_memory(void *context, void *memory, size_t size_bytes) {
    (void)context;
    (void)size_bytes;
    free(memory);
}

TEST(allocator_may_call_the_loader)
{
    fst_allocator allocator = {
        .struct_size = sizeof allocator, .allocate = ask_and_allocate, .release = release_memory};
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.allocator = &allocator;
    alarm(250); // ends the test after a deadlock
    asked_loader = NULL;
    fst_loader *loader = asked_loader = open_limited(&options);
    for (size_t i = 0; i < COUNT; i++) {
        fst_tensor *tensor;
        CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
        CHECK(is_tensor(tensor, i));
        fst_tensor_unref(tensor);
    }
    alarm(0);
    fst_loader_close(loader);
    CHECK(allocations > 4 && answers > 0);
    CHECK_INT(refusals, answers);
}

#define STACK_BYTES ((size_t)1 << 20)

/// A load that a coroutine begins. Its first allocation switches to the test.
typedef struct coroutine {
    ucontext_t context, test;
    void *stack;
    fst_model *model;
    fst_loader *loader;
    int allocations;
} coroutine;
static coroutine *started;

static void *switch_and_allocate(void *context, size_t size_bytes, size_t alignment) {
    coroutine *one = context;
    if (one->allocations++ == 0) swapcontext(&one->context, &one->test);
    void *memory = NULL;
    return posix_memalign(&memory, alignment, size_bytes) == 0 ? memory : NULL;
}

static void begin_load(void) {
    coroutine *one = started;
    fst_allocator allocator = {.struct_size = sizeof allocator,
                               .context = one,
                               .allocate = switch_and_allocate,
                               .release = release_memory};
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.allocator = &allocator;
    if (fst_loader_open(one->model, &options, &one->loader, NULL) != FST_OK) abort();
}

static void start_coroutine(coroutine *one, fst_model *model) {
    *one = (coroutine){.model = model};
    one->stack =
        mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (one->stack == MAP_FAILED || getcontext(&one->context) != 0) abort();
    one->context.uc_stack.ss_sp = one->stack;
    one->context.uc_stack.ss_size = STACK_BYTES;
    one->context.uc_link = &one->test;
    started = one;
    makecontext(&one->context, begin_load, 0);
    swapcontext(&one->test, &one->context);
}

TEST(coroutines_in_allocators)
{
#if defined __SANITIZE_THREAD__ || defined __SANITIZE_ADDRESS__
    SKIP("the sanitizers do not follow coroutines");
#endif
    fst_model *model = open_tensors();
    fst_load_options options = options_of(FST_MODE_LOAD);
    fst_loader *loader;
    coroutine both[2];
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    for (int i = 0; i < 2; i++) start_coroutine(&both[i], model);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    for (int i = 0; i < 2; i++) { // the first one began first and ends first
        swapcontext(&both[i].test, &both[i].context);
        munmap(both[i].stack, STACK_BYTES);
    }
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    fst_loader_close(loader);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(fst_loader_wait(both[i].loader, -1, NULL), FST_OK);
        fst_loader_close(both[i].loader);
    }
    fst_model_close(model);
}

static atomic_bool is_armed, is_allocating;

static void *allocate_slowly(void *context, size_t size_bytes, size_t alignment) {
    (void)context;
    if (atomic_load(&is_armed)) {
        atomic_store(&is_allocating, true);
        usleep(100000);
        return NULL; // refuses to allocate
    }
    void *memory = NULL;
    return posix_memalign(&memory, alignment, size_bytes) == 0 ? memory : NULL;
}

TEST(close_during_allocation)
{
    fst_allocator allocator = {
        .struct_size = sizeof allocator, .allocate = allocate_slowly, .release = release_memory};
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.allocator = &allocator;
    alarm(250); // the allocating thread would never return
    for (int round = 0; round < 5; round++) {
        atomic_store(&is_allocating, false);
        fst_loader *loader = open_limited(&options);
        atomic_store(&is_armed, true);
        for (int i = 0; i < 1000 && !atomic_load(&is_allocating); i++) {
            fst_tensor *tensor;
            if (fst_loader_next(loader, -1, &tensor, NULL) != FST_OK) break;
            fst_tensor_unref(tensor);
            usleep(1000);
        }
        CHECK(atomic_load(&is_allocating));
        fst_loader_close(loader);
        atomic_store(&is_armed, false);
    }
    alarm(0);
}

TEST(destinations_are_filled_once)
{
    // What a caller has changed at a destination stays, before and after the stream reaches it. The
    // other items need memory, so that most batches wait for the budget.
    static char first[BYTES], last[BYTES];
    fst_part items[COUNT];
    for (size_t i = 0; i < COUNT; i++)
        items[i] = (fst_part){.struct_size = sizeof(fst_part), .tensor_index = i};
    items[0].destination = first;
    items[COUNT - 1].destination = last;
    items[0].destination_bytes = items[COUNT - 1].destination_bytes = BYTES;
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.parts = items;
    options.part_count = COUNT;
    fst_loader *loader = open_limited(&options);
    fst_tensor *tensor;
    CHECK_INT(fst_loader_tensor_at(loader, COUNT - 1, -1, &tensor, NULL), FST_OK);
    CHECK(is_tensor(tensor, COUNT - 1));
    fst_tensor_unref(tensor);
    memset(last, 7, BYTES);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
        if (i < COUNT - 1) CHECK(is_tensor(tensor, i));
        fst_tensor_unref(tensor);
    }
    CHECK(last[0] == 7 && last[BYTES - 1] == 7);
    memset(first, 9, BYTES);
    CHECK_INT(fst_loader_tensor_at(loader, 0, -1, &tensor, NULL), FST_OK);
    CHECK(first[0] == 9 && first[BYTES - 1] == 9); // the tensor is ready, with the caller's change
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
}

TEST(refused_mapping_becomes_a_copy)
{
    if (CHECK_SANITIZED) SKIP("a sanitizer's own memory is beyond any limit");
    fst_model *model = open_tensors();
    fixture_warm(fixture_path("tensors"));
    fst_load_options options = {.struct_size = sizeof options};
    options.thread_count = 1;
    fst_loader *loader = NULL;
    fst_load_stats stats = {.struct_size = sizeof stats};
    struct rlimit before, tight;
    FILE *stream = fopen("/proc/self/statm", "re");
    unsigned long long pages = 0;
    CHECK(stream != NULL && fscanf(stream, "%llu", &pages) == 1);
    fclose(stream);
    getrlimit(RLIMIT_AS, &before);
    // The file does not fit the address space that is left, one of its tensors does.
    tight = (struct rlimit){pages * (unsigned long long)getpagesize() + COUNT * BYTES * 3 / 4,
                            before.rlim_max};
    fst_part item = {.struct_size = sizeof item, .tensor_index = 3};
    options.parts = &item;
    options.part_count = 1;
    CHECK_INT(setrlimit(RLIMIT_AS, &tight), 0);
    fst_status status = fst_loader_open(model, &options, &loader, NULL);
    fst_tensor *tensor = NULL;
    if (status == FST_OK) status = fst_loader_next(loader, -1, &tensor, NULL);
    CHECK_INT(setrlimit(RLIMIT_AS, &before), 0);
    fst_model_close(model);
    CHECK_INT(status, FST_OK);
    CHECK(is_tensor(tensor, 3));
    CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
    CHECK_TEXT(stats.mode, "load");
    CHECK_CONTAINS(stats.reason, "the file cannot be memory-mapped");
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
}

/// Lets the address space of this process grow by this many bytes.
static bool limit_growth(uint64_t address_bytes) {
    unsigned long long pages = 0;
    FILE *stream = fopen("/proc/self/statm", "re");
    if (stream == NULL || fscanf(stream, "%llu", &pages) != 1) return false;
    fclose(stream);
    uint64_t bytes = pages * (unsigned long long)getpagesize() + address_bytes;
    struct rlimit limit = {bytes, bytes};
    return setrlimit(RLIMIT_AS, &limit) == 0;
}

/// A child whose address space may grow by this many bytes loads the file with the given options.
/// Returns its exit status, or -1.
static int load_within(uint64_t address_bytes, const fst_load_options *ways, size_t way_count) {
    pid_t child = fork();
    int status;
    if (child == 0) {
        int result = limit_growth(address_bytes) ? 0 : 90;
        fst_load_stats stats;
        for (size_t i = 0; i < way_count && result == 0; i++)
            result = load_and_report(&ways[i], &stats);
        _exit(result);
    }
    if (child < 0 || waitpid(child, &status, 0) != child) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(address_space_limit_covers_mappings_and_buffers)
{
    if (CHECK_SANITIZED) SKIP("a sanitizer's own memory is beyond any limit");
    fst_model_close(open_tensors());
    fst_load_options ways[] = {options_of(FST_MODE_AUTO), options_of(FST_MODE_LOAD)};
    ways[1].budget_bytes = 8 << 20;
    // A load that maps the file leaves address space for buffers and for the stacks of threads.
    for (uint64_t mib = 20; mib <= 240; mib += 20) {
        fixture_evict(fixture_path("tensors"));
        CHECK_INT(load_within(mib << 20, ways, 2), 0);
    }
}

TEST(mapping_leaves_address_space_for_buffers)
{
    if (CHECK_SANITIZED) SKIP("a sanitizer's own memory is beyond any limit");
    fst_model_close(open_tensors());
    fst_load_options by_calls = options_of(FST_MODE_LOAD), usual = options_of(FST_MODE_LOAD);
    by_calls.tuning = fixture_engine(FST_ENGINE_PREAD);
    by_calls.thread_count = usual.thread_count = 1;
    size_t fitting = 0;
    for (uint64_t mib = 10; mib <= 80; mib += 2)
        if (load_within(mib << 20, &by_calls, 1) == 0) {
            fitting++;
            CHECK_INT(load_within(mib << 20, &usual, 1), 0);
        }
    CHECK(fitting > 20);
}
