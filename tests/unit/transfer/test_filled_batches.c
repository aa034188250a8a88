// SPDX-License-Identifier: Apache-2.0
/// Loads into new memory whose small pages are created by userfaultfd(2): the loaded bytes, the
/// next load into the same memory, and loads that end early.
#include <fcntl.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../memory/fill_fixture.h"
#include "check.h"
#include "memory/memory.h"
#include "fixture.h"

#define COUNT 24
#define BYTES (((uint64_t)5 << 20) + 4321)

static fst_status open_loader(const char *path, uint64_t budget, fst_loader **out) {
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *model;
    alarm(60); // an access that waits for ever
    options.mode = FST_MODE_LOAD;
    options.tuning = fixture_engine(FST_ENGINE_MMAP);
    options.budget_bytes = budget;
    FST_TRY(fst_model_open(path, NULL, &model, NULL));
    fst_status status = fst_loader_open(model, &options, out, NULL);
    fst_model_close(model);
    return status;
}

/// A model in the page cache. The next loads get small pages and keep no memory.
static const char *make_model(void) {
    const char *path = fixture_tensors("model", COUNT, BYTES);
    fixture_warm(path);
    fsti_arena_keep_max(0);
    fsti_pages_fake(fill_slow_huge_pages);
    fill_created_bytes = 0;
    return path;
}

static void finish(void) {
    fsti_arena_keep_max(0);
    fsti_pages_fake(NULL);
    fill_is_refused = false;
    alarm(0);
    CHECK_INT(fixture_live_buffers(), 0);
}

/// Whether the system allows fills.
static bool has_fills(void) {
    int fd = fsti_fill_open();
    fsti_fill_close(fd);
    return fd >= 0;
}

TEST(a_load_creates_its_pages_with_their_bytes)
{
    fst_loader *loader;
    const char *path = make_model();
    if (!has_fills()) SKIP("the system refuses userfaultfd(2)");
    for (int is_cached = 0; is_cached < 2; is_cached++) {
        fill_created_bytes = 0;
        if (!is_cached) fixture_evict(path);
        CHECK_INT(open_loader(path, 0, &loader), FST_OK);
        CHECK(fixture_is_loaded(loader, COUNT, BYTES));
        fst_loader_close(loader);
        // But for the pages that are shared by chunks, and those that were measured.
        CHECK(fill_created_bytes > COUNT * BYTES - COUNT * BYTES / 8);
    }
    finish();
}

static atomic_uint measure_count;

static uint64_t count_measures(char *data, bool is_huge) {
    (void)data;
    atomic_fetch_add(&measure_count, 1);
    return is_huge ? 1000 : 4000; // huge pages are faster
}

/// Whether few bytes of a load were filled, and whether pages were measured.
static void load_small(bool is_cached, bool *is_filled, bool *is_measured) {
    fst_loader *loader;
    const char *path = fixture_tensors("small", 3, BYTES);
    if (!is_cached) fixture_evict(path);
    fsti_pages_fake(count_measures);
    fill_created_bytes = 0;
    measure_count = 0;
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *model;
    options.mode = FST_MODE_LOAD;
    options.cache = is_cached ? FST_CACHE_AUTO : FST_CACHE_BYPASS;
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK(fixture_is_loaded(loader, 3, BYTES));
    fst_loader_close(loader);
    fst_model_close(model);
    *is_filled = fill_created_bytes > 2 * BYTES;
    *is_measured = measure_count > 0;
}

/// A measurement may take as long as they do.
TEST(small_loads_of_cached_files_are_filled_without_a_measurement)
{
    bool is_filled, is_measured;
    (void)make_model();
    if (!has_fills()) SKIP("the system refuses userfaultfd(2)");
    load_small(true, &is_filled, &is_measured);
    CHECK(is_filled && !is_measured);
    fill_is_refused = true;
    load_small(true, &is_filled, &is_measured);
    CHECK(!is_filled && is_measured);
    fill_is_refused = false;
    load_small(false, &is_filled, &is_measured); // read directly to its place, if it is not cached
    CHECK(is_filled != is_measured);
    finish();
}

/// When it is complete; before its loader is closed.
TEST(a_complete_load_has_no_fill)
{
    fst_loader *loader;
    fst_tensor *tensor;
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    const char *path = make_model();
    CHECK_INT(open_loader(path, 0, &loader), FST_OK);
    while (fst_loader_next(loader, -1, &tensor, NULL) == FST_OK) {
        CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
        CHECK_INT(fst_tensor_view_get(tensor, &view, NULL), FST_OK);
        CHECK(!fixture_mapping_has(view.data, "um"));
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    finish();
}

TEST(a_stream_creates_its_pages_with_their_bytes)
{
    fst_loader *loader;
    const char *path = make_model();
    if (!has_fills()) SKIP("the system refuses userfaultfd(2)");
    CHECK_INT(open_loader(path, (uint64_t)64 << 20, &loader), FST_OK);
    CHECK(fixture_is_loaded(loader, COUNT, BYTES));
    fst_loader_close(loader);
    CHECK(fill_created_bytes > COUNT * BYTES / 2);
    finish();
}

TEST(loads_without_userfaultfd)
{
    fst_loader *loader;
    const char *path = make_model();
    fill_is_refused = true;
    CHECK_INT(open_loader(path, 0, &loader), FST_OK);
    CHECK(fixture_is_loaded(loader, COUNT, BYTES));
    fst_loader_close(loader);
    CHECK_INT(fill_created_bytes, 0);
    finish();
}

/// A load that ends early leaves memory that the next one can use.
TEST(cancelled_loads_leave_usable_memory)
{
    fst_loader *loader;
    const char *path = make_model();
    fsti_arena_keep_max((uint64_t)1 << 30);
    for (int i = 0; i < 20; i++) {
        fst_tensor *tensor = NULL;
        CHECK_INT(open_loader(path, 0, &loader), FST_OK);
        if (i % 2 == 1) CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
        fst_loader_close(loader);
        fst_tensor_unref(tensor);
        CHECK_INT(open_loader(path, 0, &loader), FST_OK);
        CHECK(fixture_is_loaded(loader, COUNT, BYTES));
        fst_loader_close(loader);
        fsti_arena_trim();
    }
    finish();
}

/// The rest of the batch has no pages yet when a returned tensor is written to.
TEST(tensors_outlive_a_cancelled_load)
{
    const char *path = make_model();
    fst_loader *loader;
    fst_tensor *tensor;
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    CHECK_INT(open_loader(path, 0, &loader), FST_OK);
    CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
    fst_loader_close(loader);
    CHECK_INT(fst_tensor_view_get(tensor, &view, NULL), FST_OK);
    CHECK(fixture_matches(view.data, 0, BYTES));
    CHECK(!fixture_mapping_has(view.data, "um")); // "userfaultfd missing tracking"
    memset((char *)(uintptr_t)view.data, 3, view.size_bytes);
    fst_tensor_unref(tensor);
    finish();
}

TEST(a_file_that_shrinks_is_an_error)
{
    const char *path = make_model();
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *model;
    fst_loader *loader;
    fst_error error = {.status = FST_OK};
    options.mode = FST_MODE_LOAD;
    options.tuning = fixture_engine(FST_ENGINE_MMAP);
    alarm(60);
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    CHECK_INT(truncate(path, 20 << 20), 0);
    fst_status status = fst_loader_open(model, &options, &loader, &error);
    if (status == FST_OK) {
        status = fst_loader_wait(loader, -1, &error);
        fst_loader_close(loader);
    }
    CHECK_INT(status, FST_E_FILE_CHANGED);
    fst_model_close(model);
    finish();
}

/// The number that the load's descriptor has in the parent may be another file's in a child.
TEST(a_child_that_closes_the_load_closes_no_other_file)
{
    fst_loader *loader;
    fst_tensor *tensor;
    int status = -1;
    const char *path = make_model();
    CHECK_INT(open_loader(path, (uint64_t)64 << 20, &loader), FST_OK);
    CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
    fst_tensor_unref(tensor);
    pid_t child = fork();
    if (child == 0) {
        int files[16], closed = 0;
        for (int i = 0; i < 16; i++) files[i] = fsti_lockable_open(path, O_RDONLY);
        fst_loader_close(loader);
        for (int i = 0; i < 16; i++) closed += fcntl(files[i], F_GETFD) < 0;
        _exit(closed);
    }
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    fst_loader_close(loader);
    finish();
}
