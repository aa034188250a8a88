// SPDX-License-Identifier: Apache-2.0
/// Asynchronous saves of tensors that lie on devices: the state at the call, whatever is written to
/// the device's memory afterwards, and drivers that fail.
#include <fastsafetensors.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "gpu_fixture.h"

#define TENSOR_BYTES ((uint64_t)9000001)
#define COUNT 3

/// Whether a file holds the tensors of fixture_tensors().
static bool is_right(const char *path) {
    fst_model *model = gpu_open_model(path);
    fst_loader *loader;
    bool good = model != NULL && fst_loader_open(model, NULL, &loader, NULL) == FST_OK;
    for (uint64_t i = 0; good && i < COUNT; i++) {
        fst_tensor *tensor;
        char name[8];
        snprintf(name, sizeof name, "t%d", (int)i);
        good = fst_loader_tensor(loader, name, SIZE_MAX, -1, &tensor, NULL) == FST_OK;
        if (!good) break;
        good = fixture_matches(gpu_view_of(tensor).data, i * TENSOR_BYTES, TENSOR_BYTES);
        fst_tensor_unref(tensor);
    }
    if (model != NULL) fst_loader_close(loader);
    fst_model_close(model);
    return good;
}

static void save_each_way(const gpu_fake *driver, const char *source) {
    fst_load_options options = gpu_options_on(driver->kind, 1);
    const char *path = fixture_path("saved");
    for (fst_stage stage = 0; stage < FST_STAGE_COUNT; stage++) {
        fst_model *model = gpu_open_model(source);
        fst_loader *loader;
        fst_tensor *held[COUNT];
        fst_save_tensor rows[COUNT];
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        for (size_t i = 0; i < COUNT; i++) {
            CHECK_INT(fst_loader_next(loader, -1, &held[i], NULL), FST_OK);
            rows[i] = gpu_save_row(held[i]);
        }
        fst_async_options how = {.struct_size = sizeof how, .stage = stage};
        fst_async_save *save;
        // A driver that fails leaves the file that was there.
        driver->fail("cuMemcpyDtoHAsync", 2, 719);
        fst_error error;
        fst_status status = fst_async_save_start(path, rows, COUNT, &how, &save, &error);
        if (status == FST_OK) status = fst_async_save_wait(save, -1, &error);
        driver->fail(NULL, 0, 0);
        CHECK_INT(status, FST_E_DEVICE);
        fst_async_save_close(save);
        CHECK_INT(access(path, F_OK) == 0, stage > 0);
        // The optimizer writes when the tensors are staged.
        CHECK_INT(fst_async_save_start(path, rows, COUNT, &how, &save, &error), FST_OK);
        CHECK_INT(fst_async_save_stage(save, -1, &error), FST_OK);
        for (size_t i = 0; i < COUNT; i++)
            memset((void *)(uintptr_t)rows[i].data, 'x', TENSOR_BYTES); // the stand-in's memory
        CHECK_INT(fst_async_save_wait(save, -1, &error), FST_OK);
        CHECK(is_right(path));
        fst_async_save_close(save);
        for (size_t i = 0; i < COUNT; i++) fst_tensor_unref(held[i]);
        fst_loader_close(loader);
        fst_model_close(model);
        CHECK(gpu_is_clean(driver));
    }
    unlink(path);
}

TEST(the_state_at_the_call_is_saved)
{
    const char *source = fixture_tensors("tensors", COUNT, TENSOR_BYTES);
    for (size_t k = 0; k < 2 && !check_failed; k++) save_each_way(gpu_fake_of(k), source);
}
