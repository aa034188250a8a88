// SPDX-License-Identifier: Apache-2.0
/// Loads in a cgroup near its limit: they wait for released memory, and an error states how much
/// the load needs.
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "fastsafetensors/loader.h"
#include "fixture.h"

#define COUNT 6
#define BYTES ((uint64_t)4 << 20)

/// Sets how many bytes the cgroup has left, whatever is used.
static void set_left(uint64_t left) {
    char text[32];
    snprintf(text, sizeof text, "%llu\n", (unsigned long long)left);
    fixture_file("job/memory.max", text, strlen(text));
}

static void enter_group(uint64_t left) {
    static char root[512], self[512];
    mkdir(fixture_path("job"), 0700);
    snprintf(root, sizeof root, "%s", fixture_path("."));
    snprintf(self, sizeof self, "%s", fixture_file("self", "0::/job\n", 8));
    set_left(left);
    fixture_file("job/memory.current", "0\n", 2);
    fsti_cgroup_fake(root, self);
}

/// Loads a model of COUNT tensors; *count: tensors that were returned with their bytes.
static fst_status load_in_group(uint64_t left, uint64_t budget, size_t *count, fst_error *error) {
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *model;
    fst_loader *loader;
    fst_tensor *tensor;
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    *count = 0;
    options.mode = FST_MODE_LOAD;
    options.tuning = fixture_engine(FST_ENGINE_PREAD);
    options.budget_bytes = budget;
    const char *path = fixture_tensors("model", COUNT, BYTES);
    if (fst_model_open(path, NULL, &model, error) != FST_OK) return error->status;
    enter_group(left);
    fst_status status = fst_loader_open(model, &options, &loader, error);
    fst_model_close(model);
    bool is_open = status == FST_OK;
    while (status == FST_OK) {
        status = fst_loader_next(loader, -1, &tensor, error);
        if (status != FST_OK) break;
        if (fst_tensor_view_get(tensor, &view, error) == FST_OK)
            *count += fixture_matches(view.data, *count * BYTES, BYTES) ? 1u : 0u;
        fst_tensor_unref(tensor);
    }
    if (is_open) fst_loader_close(loader);
    fsti_cgroup_fake(NULL, NULL);
    return status;
}

TEST(budgeted_load_waits_for_its_own_memory)
{
    fst_error error;
    size_t count;
    // One batch fits in addition to the reservation of the previous one, two never do.
    CHECK_INT(load_in_group(10 << 20, 16 << 20, &count, &error), FST_END);
    CHECK_INT(count, COUNT);
    // Two fit, but then no buffer that reads go through.
    CHECK_INT(load_in_group(13 << 20, 16 << 20, &count, &error), FST_END);
    CHECK_INT(count, COUNT);
}

TEST(memory_that_never_suffices_is_an_error)
{
    fst_error error;
    size_t count;
    CHECK_INT(load_in_group(3 << 20, 16 << 20, &count, &error), FST_E_NO_MEMORY);
    CHECK_INT(count, 0);
}

TEST(an_error_says_what_the_load_needs)
{
    fst_error error;
    size_t count;
    CHECK_INT(load_in_group(6 << 20, 0, &count, &error), FST_E_NO_MEMORY);
    CHECK_CONTAINS(error.message, "The load needs 251");
}

static fst_status open_stream(fst_loader **out) {
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *model;
    options.mode = FST_MODE_LOAD;
    options.tuning = fixture_engine(FST_ENGINE_PREAD);
    options.budget_bytes = 9 << 20;
    FST_TRY(fst_model_open(fixture_tensors("model", COUNT, BYTES), NULL, &model, NULL));
    enter_group((uint64_t)64 << 20);
    fst_status status = fst_loader_open(model, &options, out, NULL);
    fst_model_close(model);
    set_left(1 << 20);
    return status;
}

/// A tensor is held for longer than a load waits for memory.
TEST(a_program_that_works_on_its_tensors_may_free_them_late)
{
    fst_loader *loader;
    fst_tensor *tensor;
    fst_error error;
    size_t count = 1;
    CHECK_INT(open_stream(&loader), FST_OK);
    CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
    usleep(1200000);
    set_left((uint64_t)64 << 20);
    fst_tensor_unref(tensor);
    for (fst_status status; (status = fst_loader_next(loader, -1, &tensor, &error)) != FST_END;) {
        CHECK_INT(status, FST_OK);
        fst_tensor_unref(tensor);
        count++;
    }
    CHECK_INT(count, COUNT);
    fst_loader_close(loader);
    fsti_cgroup_fake(NULL, NULL);
}

/// Also one that looks seldom.
TEST(a_program_that_polls_gets_the_error)
{
    fst_loader *loader;
    fst_tensor *tensor, *next;
    fst_status status = FST_E_TIMEOUT;
    CHECK_INT(open_stream(&loader), FST_OK);
    CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
    for (int i = 0; i < 20 && status == FST_E_TIMEOUT; i++) {
        usleep(350000);
        status = fst_loader_next(loader, 0, &next, NULL);
    }
    CHECK_INT(status, FST_E_NO_MEMORY);
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    fsti_cgroup_fake(NULL, NULL);
}
