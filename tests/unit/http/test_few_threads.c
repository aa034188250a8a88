// SPDX-License-Identifier: Apache-2.0
/// Remote loads with few available threads (a limit of the user or a container): they use fewer, or
/// report the limit instead of a lack of memory.
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fastsafetensors.h"
#include "fixture.h"
#include "range_server.h"

#define TENSOR_COUNT 12
#define TENSOR_BYTES ((uint64_t)700001)

static atomic_long threads_left = -1; ///< of the library; below 0: no limit

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument) {
    if (!range_server_runs(run)) {
        if (atomic_load(&threads_left) == 0) return EAGAIN;
        if (atomic_load(&threads_left) > 0) atomic_fetch_sub(&threads_left, 1);
    }
    return __real_pthread_create(thread, attributes, run, argument);
}

static fst_status load_all(const char *path, fst_error *error) {
    fst_load_options options = {.struct_size = sizeof options, .mode = FST_MODE_LOAD};
    fst_model *model;
    fst_loader *loader = NULL;
    fst_tensor *tensor;
    fst_status status = fst_model_open(path, NULL, &model, error);
    if (status != FST_OK) return status;
    status = fst_loader_open(model, &options, &loader, error);
    for (size_t i = 0; status == FST_OK; i++) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        status = fst_loader_next(loader, -1, &tensor, error);
        if (status != FST_OK) break;
        if (fst_tensor_view_get(tensor, &view, NULL) != FST_OK ||
            !fixture_matches(view.data, i * TENSOR_BYTES, TENSOR_BYTES))
            status = (fst_status)9999;
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    fst_model_close(model);
    return status == FST_END ? FST_OK : status;
}

enum { CHILD_LOADED, CHILD_TOLD, CHILD_WRONG };

/// Loads in a child without threads, which may start `thread_count` threads.
static int load_in_child(const char *path, int thread_count, const char *cache) {
    pid_t child = fork();
    int result = 0;
    if (child != 0) {
        if (child < 0 || waitpid(child, &result, 0) != child || !WIFEXITED(result)) return -1;
        return WEXITSTATUS(result);
    }
    fst_error error = {.status = FST_OK};
    fst_remote_options remote = {.struct_size = sizeof remote, .cache_dir = cache};
    if (fst_remote_configure(&remote, NULL) != FST_OK) _exit(CHILD_WRONG);
    atomic_store(&threads_left, thread_count);
    fst_status status = load_all(path, &error);
    bool is_told = status == FST_E_IO && error.os_errno == EAGAIN &&
                   strstr(error.message, "a thread could not be started (EAGAIN)") != NULL &&
                   strstr(error.message, "pids.max") != NULL && strstr(error.message, path) != NULL;
    if (status != FST_OK && !is_told) printf("# %d: %s\n", thread_count, error.message);
    fflush(stdout);
    _exit(status == FST_OK ? CHILD_LOADED : is_told ? CHILD_TOLD : CHILD_WRONG);
}

/// The thread sanitizer ends a forked child that starts threads.
#ifdef __SANITIZE_THREAD__
#define CHILD_MAY_START_THREADS false
#else
#define CHILD_MAY_START_THREADS true
#endif

TEST(remote_load_without_threads_names_the_limit)
{
    if (CHECK_SANITIZED) SKIP("a sanitizer's allocator may stay locked in the child of a fork");
    if (!range_server_usable()) SKIP("libcurl is not installed");
    const char *url = range_server_begin(fixture_tensors("model", TENSOR_COUNT, TENSOR_BYTES));
    CHECK_INT(load_in_child(url, 0, "off"), CHILD_TOLD);
    CHECK_INT(load_in_child(url, 0, fixture_path("cache")), CHILD_TOLD);
}

TEST(remote_load_works_with_few_threads)
{
    if (CHECK_SANITIZED) SKIP("a sanitizer's allocator may stay locked in the child of a fork");
    if (!range_server_usable()) SKIP("libcurl is not installed");
    const char *url = range_server_begin(fixture_tensors("model", TENSOR_COUNT, TENSOR_BYTES));
    for (int count = 1; count < 8; count++) {
        CHECK_INT(load_in_child(url, count, "off"), CHILD_LOADED);
        char name[32];
        snprintf(name, sizeof name, "cache%d", count);
        CHECK_INT(load_in_child(url, count, fixture_path(name)), CHILD_LOADED);
    }
}

TEST(local_load_without_threads_works)
{
    if (!CHILD_MAY_START_THREADS) SKIP("the thread sanitizer allows no threads after a fork");
    const char *path = fixture_tensors("local", TENSOR_COUNT, TENSOR_BYTES);
    for (int count = 0; count < 4; count++)
        CHECK_INT(load_in_child(path, count, "off"), CHILD_LOADED);
}
