// SPDX-License-Identifier: Apache-2.0
/// Cached pages of views are mapped in the background, and the load does not depend on it.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "fastsafetensors/loader.h"
#include "fixture.h"
#include "io/io.h"

#define COUNT 16
#define BYTES ((uint64_t)2000000) ///< not whole pages: neighbours share some

static int threads_left = -1; ///< threads that can be started; -1: all
static int threads_started;
static atomic_bool looks_evicted;
static atomic_int calls_left = -1; ///< of getrusage(2), before the thread waits; -1: all
static atomic_int calls_made;

int __real_pthread_create(pthread_t *out, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *context);
int __wrap_pthread_create(pthread_t *out, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *context);

int __wrap_pthread_create(pthread_t *out, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *context) {
    if (threads_left == 0) return EAGAIN;
    if (threads_left > 0) threads_left--;
    threads_started++;
    return __real_pthread_create(out, attributes, run, context);
}

static void pause_shortly(void) {
    const struct timespec pause = {.tv_nsec = 2000000};
    nanosleep(&pause, NULL);
}

int __real_getrusage(int who, struct rusage *usage);
int __wrap_getrusage(int who, struct rusage *usage);

/// The thread asks before and after each step.
int __wrap_getrusage(int who, struct rusage *usage) {
    static atomic_int call_count;
    if (atomic_load(&calls_left) >= 0) {
        while (atomic_load(&calls_left) == 0) pause_shortly();
        atomic_fetch_sub(&calls_left, 1);
        atomic_fetch_add(&calls_made, 1);
    }
    int result = __real_getrusage(who, usage);
    usage->ru_majflt = atomic_load(&looks_evicted) ? atomic_fetch_add(&call_count, 1) : 0;
    return result;
}

static int event_count, first_allocation, first_handlers; ///< when they were, before main()

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);

void *__wrap_calloc(size_t count, size_t size) {
    if (first_allocation == 0) first_allocation = ++event_count;
    return __real_calloc(count, size);
}

int __real_pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void));
int __wrap_pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void));

int __wrap_pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void)) {
    if (first_handlers == 0) first_handlers = ++event_count;
    return __real_pthread_atfork(prepare, parent, child);
}

/// Whether the threads in the background have freed what they hold, within 20 seconds.
static bool is_settled(long live) {
    for (int i = 0; i < 10000 && fsti_alloc_live() != live; i++) pause_shortly();
    return fsti_alloc_live() == live;
}

typedef struct loaded {
    fst_model *model;
    fst_loader *loader;
    fst_tensor *tensor; ///< the first one
    const char *data;
    fst_load_stats stats;
} loaded;

/// Loads views of a cached file of `count` tensors. *is_cached: it was in the page cache, as the
/// test needs it. Returns the status of the first call that failed.
static fst_status load_views(size_t count, fst_load_options options, loaded *out, bool *is_cached) {
    const char *path = fixture_tensors("cached", count, BYTES);
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    options.struct_size = sizeof options;
    options.mode = FST_MODE_MAP;
    out->stats = FST_STRUCT_INIT(fst_load_stats);
    fixture_warm(path);
    threads_started = 0;
    FST_TRY(fst_model_open(path, NULL, &out->model, NULL));
    FST_TRY(fst_loader_open(out->model, &options, &out->loader, NULL));
    FST_TRY(fst_loader_wait(out->loader, -1, NULL));
    FST_TRY(fst_loader_tensor_at(out->loader, 0, -1, &out->tensor, NULL));
    FST_TRY(fst_tensor_view_get(out->tensor, &view, NULL));
    FST_TRY(fst_loader_stats_get(out->loader, &out->stats, NULL));
    out->data = view.data;
    *is_cached = out->stats.chunks_resident == out->stats.chunk_count;
    return FST_OK;
}

static void unload(loaded *load) {
    fst_tensor_unref(load->tensor);
    fst_loader_close(load->loader);
    fst_model_close(load->model);
}

static pthread_mutex_t program_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool loads_on;

static void lock_program(void) { pthread_mutex_lock(&program_lock); }
static void unlock_program(void) { pthread_mutex_unlock(&program_lock); }

static void *load_again_and_again(void *failed) {
    while (atomic_load(&loads_on)) {
        loaded load;
        bool is_cached;
        lock_program();
        if (load_views(COUNT, (fst_load_options){0}, &load, &is_cached) == FST_OK)
            unload(&load);
        else
            atomic_store((atomic_bool *)failed, true);
        unlock_program();
        pause_shortly(); // locks are not fair
    }
    return NULL;
}

/// A program whose own fork handler takes the lock under which it loads. This test is the first
/// one, because handlers run in the order of their registration.
TEST(forks_do_not_wait_for_a_load_that_waits_for_them)
{
    atomic_bool failed = false;
    pthread_t thread;
    long live = fsti_alloc_live();
    CHECK_INT(pthread_atfork(lock_program, unlock_program, unlock_program), 0);
    atomic_store(&loads_on, true);
    CHECK_INT(pthread_create(&thread, NULL, load_again_and_again, &failed), 0);
    for (int i = 0; i < 50; i++) {
        int status = 0;
        pid_t child = fork();
        if (child == 0) _exit(0);
        CHECK_INT(waitpid(child, &status, 0), child);
    }
    atomic_store(&loads_on, false);
    pthread_join(thread, NULL);
    CHECK(!atomic_load(&failed));
    CHECK(is_settled(live));
}

TEST(cached_pages_are_mapped_in_the_background)
{
    loaded load;
    long live = fsti_alloc_live();
    bool is_cached;
    CHECK_INT(load_views(COUNT, (fst_load_options){0}, &load, &is_cached), FST_OK);
    fst_loader_close(load.loader); // it does not wait for the thread, nor end it
    load.loader = NULL;
    for (int i = 0; i < 10000 && fixture_mapped_bytes(load.data) < COUNT * BYTES; i++)
        pause_shortly();
    uint64_t mapped_bytes = fixture_mapped_bytes(load.data);
    int started = threads_started;
    unload(&load);
    CHECK(is_settled(live));
    if (!is_cached) SKIP("another program has emptied the page cache");
    CHECK(mapped_bytes >= COUNT * BYTES);
    CHECK_INT(started, 1);
    CHECK_INT(load.stats.bytes_mapped + load.stats.bytes_read, 0); // by the load itself
}

/// A small load, one whose files other processes read too, one that may not use the guard against
/// files that shrink, and one that may only use one thread.
TEST(other_views_are_left_to_the_program)
{
    fst_load_tuning keeps_handler = {.struct_size = sizeof keeps_handler, .keep_sigbus_handler = 1};
    const fst_load_options options[] = {
        {0}, {.share = FST_SHARE_NODE}, {.tuning = &keeps_handler}, {.thread_count = 1}};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        loaded load;
        long live = fsti_alloc_live();
        bool is_cached;
        CHECK_INT(load_views(i == 0 ? 4 : COUNT, options[i], &load, &is_cached), FST_OK);
        int started = threads_started;
        unload(&load);
        CHECK_INT(fsti_alloc_live(), live);
        if (!is_cached) SKIP("another program has emptied the page cache");
        CHECK_INT(started, 0);
    }
}

TEST(a_load_needs_no_thread_for_it)
{
    loaded load;
    long live = fsti_alloc_live();
    bool is_cached;
    threads_left = 0;
    CHECK_INT(load_views(COUNT, (fst_load_options){0}, &load, &is_cached), FST_OK);
    threads_left = -1;
    bool is_right = fixture_matches(load.data, 0, BYTES);
    unload(&load);
    CHECK_INT(fsti_alloc_live(), live);
    CHECK(is_right);
    if (!is_cached) SKIP("another program has emptied the page cache");
}

TEST(the_threads_that_read_come_first)
{
    const char *path = fixture_tensors("half", COUNT, BYTES);
    fst_load_options options = {.struct_size = sizeof options, .mode = FST_MODE_MAP};
    fst_load_stats stats = FST_STRUCT_INIT(fst_load_stats);
    fst_model *model;
    fst_loader *loader;
    long live = fsti_alloc_live();
    fixture_warm(path);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK_INT(posix_fadvise(fd, (off_t)(COUNT * BYTES / 2), 0, POSIX_FADV_DONTNEED), 0);
    close(fd);
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    threads_left = 1;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    threads_left = -1;
    CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
    fst_loader_close(loader);
    fst_model_close(model);
    CHECK(is_settled(live));
    if (stats.chunks_resident < 4 || stats.chunks_resident == stats.chunk_count)
        SKIP("this file system does not evict");
    CHECK(strstr(stats.reason, "no thread can be started") == NULL);
}

TEST(a_forked_child_frees_its_views)
{
    if (CHECK_SANITIZED) SKIP("a sanitizer's allocator may stay locked in the child of a fork");
    long live = fsti_alloc_live();
    for (int i = 0; i < 20; i++) {
        loaded load;
        bool is_cached;
        int status = 0;
        CHECK_INT(load_views(COUNT, (fst_load_options){0}, &load, &is_cached), FST_OK);
        pid_t child = fork();
        if (child == 0) {
            unload(&load);
            _exit(fsti_alloc_live() == live ? 0 : 1);
        }
        CHECK_INT(waitpid(child, &status, 0), child);
        unload(&load);
        CHECK_INT(status, 0);
    }
    CHECK(is_settled(live));
}

/// The first step that has to read is the last one.
TEST(evicted_pages_are_not_read)
{
    loaded load;
    bool is_cached;
    long live = fsti_alloc_live();
    atomic_store(&looks_evicted, true);
    CHECK_INT(load_views(COUNT, (fst_load_options){0}, &load, &is_cached), FST_OK);
    int started = threads_started;
    fst_loader_close(load.loader);
    load.loader = NULL;
    for (int i = 0; i < 20; i++) pause_shortly();
    uint64_t mapped_bytes = fixture_mapped_bytes(load.data);
    unload(&load);
    CHECK(is_settled(live));
    atomic_store(&looks_evicted, false);
    if (!is_cached || started == 0) SKIP("the file is not cached");
    CHECK(mapped_bytes <= 2 << 20);
}

/// The mapping is freed, however far the thread has come.
TEST(freed_views_are_not_mapped_further)
{
    long live = fsti_alloc_live();
    for (int i = 0; i < 50; i++) {
        loaded load;
        bool is_cached;
        CHECK_INT(load_views(COUNT, (fst_load_options){0}, &load, &is_cached), FST_OK);
        unload(&load);
    }
    CHECK(is_settled(live));
}

/// Pages behind the new end of a file would end the process with SIGBUS.
TEST(files_may_shrink_meanwhile)
{
    long live = fsti_alloc_live();
    for (int i = 0; i < 20; i++) {
        loaded load;
        bool is_cached;
        CHECK_INT(load_views(COUNT, (fst_load_options){0}, &load, &is_cached), FST_OK);
        CHECK_INT(truncate(fixture_path("cached"), (off_t)i * (off_t)BYTES / 2), 0);
        for (int k = 0; k < i % 4; k++) pause_shortly();
        unload(&load);
    }
    CHECK(is_settled(live));
}

/// A model of two files, each of one tensor of 16 MB. Both are cached.
static fst_status open_pair(fst_model **out) {
    const char *paths[2];
    for (int i = 0; i < 2; i++) {
        char json[100];
        const char *name = i == 0 ? "a" : "b";
        snprintf(json, sizeof json,
                 "{\"%s\":{\"dtype\":\"U8\",\"shape\":[16000000],\"data_offsets\":[0,16000000]}}",
                 name);
        paths[i] = fixture_model(name, json, 16000000);
        fixture_warm(paths[i]);
    }
    return fst_model_open_files(paths, 2, NULL, out, NULL);
}

/// Whether `steps` steps have ended, within 20 seconds. The thread then waits in the next one.
static bool allow_steps(int steps) {
    int wanted = atomic_load(&calls_made) + 2 * steps;
    atomic_fetch_add(&calls_left, 2 * steps);
    for (int i = 0; i < 10000 && atomic_load(&calls_made) < wanted; i++) pause_shortly();
    return atomic_load(&calls_made) == wanted;
}

static bool is_mapped(const void *address) {
    unsigned char flag;
    uintptr_t page = (uintptr_t)address / 4096 * 4096;
    return mincore((void *)page, 4096, &flag) == 0;
}

/// A file's memory is freed with its last tensor, while the pages of another file are mapped.
TEST(mappings_are_released_in_any_order)
{
    fst_model *model;
    fst_loader *loader;
    fst_tensor *tensors[2];
    fst_tensor_view views[2] = {FST_STRUCT_INIT(fst_tensor_view), FST_STRUCT_INIT(fst_tensor_view)};
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    long live = fsti_alloc_live();
    options.mode = FST_MODE_MAP;
    threads_started = 0;
    atomic_store(&calls_left, 0);
    CHECK_INT(open_pair(&model), FST_OK);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    for (size_t i = 0; i < 2; i++) {
        CHECK_INT(fst_loader_tensor_at(loader, i, -1, &tensors[i], NULL), FST_OK);
        CHECK_INT(fst_tensor_view_get(tensors[i], &views[i], NULL), FST_OK);
    }
    fst_loader_close(loader);
    fst_model_close(model);
    bool is_used = threads_started > 0 && allow_steps(1);
    fst_tensor_unref(tensors[1]);
    bool was_released = !is_used || (allow_steps(2) && !is_mapped(views[1].data));
    bool is_other_mapped = is_mapped(views[0].data);
    fst_tensor_unref(tensors[0]);
    atomic_store(&calls_left, 1000000);
    CHECK(is_settled(live));
    atomic_store(&calls_left, -1);
    if (!is_used) SKIP("the files are not cached");
    CHECK(was_released);
    CHECK(is_other_mapped);
}

/// Where the program's threads take all CPUs, those in the background do not get on.
TEST(few_threads_run_at_once)
{
    loaded loads[8];
    bool is_cached;
    int started = 0;
    long live = fsti_alloc_live();
    atomic_store(&calls_left, 0);
    for (int i = 0; i < 8; i++) {
        CHECK_INT(load_views(COUNT, (fst_load_options){0}, &loads[i], &is_cached), FST_OK);
        started += threads_started;
    }
    for (int i = 0; i < 8; i++) unload(&loads[i]);
    atomic_store(&calls_left, 1000000);
    CHECK(is_settled(live));
    atomic_store(&calls_left, -1);
    if (!is_cached || started == 0) SKIP("the file is not cached");
    CHECK_INT(started, 4);
}

/// Writable mappings count for RLIMIT_DATA, and the thread would keep one after its last tensor.
TEST(no_mapping_is_kept_if_writable_memory_is_limited)
{
    struct rlimit before, limited;
    uint64_t kib;
    loaded load;
    bool is_cached;
    if (CHECK_SANITIZED) SKIP("a sanitizer's own memory is beyond any limit");
    CHECK_INT(getrlimit(RLIMIT_DATA, &before), 0);
    CHECK(fsti_proc_number("/proc/self/status", "VmData:", &kib));
    limited = before;
    limited.rlim_cur = kib * 1024 + COUNT * BYTES * 3 / 2;
    CHECK_INT(setrlimit(RLIMIT_DATA, &limited), 0);
    fst_status status = load_views(COUNT, (fst_load_options){0}, &load, &is_cached);
    CHECK_INT(setrlimit(RLIMIT_DATA, &before), 0);
    CHECK_INT(status, FST_OK);
    unload(&load);
    CHECK_INT(threads_started, 0);
}

/// Threads allocate while they hold locks that fork() takes, so fork() must take an allocator's
/// locks last: its handlers, registered on first use, must be there before the library's.
TEST(an_allocator_registers_its_fork_handlers_first)
{
    CHECK(first_allocation > 0);
    CHECK(first_allocation < first_handlers);
}
