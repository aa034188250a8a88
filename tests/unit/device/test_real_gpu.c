// SPDX-License-Identifier: Apache-2.0
/// The same loads on a real GPU; skipped without one. Conversions are compared with those of the
/// CPU, which python/tests compares with torch's bit by bit.
#include <dlfcn.h>
#include <fastsafetensors.h>
#include <pthread.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "gpu/gpu.h"
#include "fixture.h"
#include "gpu_fixture.h"

/// Tensors of 3 MB: more than the ring takes, and no more where each byte is watched.
#define MANY ((size_t)(CHECK_SANITIZED ? 24 : 64))

/// A driver without hooks: only its kind is used.
static gpu_fake real;

/// Whether there is a GPU. If not, prints the reason.
static bool has_gpu(void) {
    real.kind = fst_device_count(FST_DEVICE_CUDA) > 0 ? FST_DEVICE_CUDA : FST_DEVICE_HIP;
    if (fst_device_count(real.kind) > 0) return true;
    check_skip_reason = "no GPU";
    return false;
}

static uint64_t memory_free(void) {
    fst_device_info info = {.struct_size = sizeof info};
    if (fst_device_info_get((fst_device){real.kind, 0}, &info, NULL) != FST_OK) abort();
    return info.memory_free;
}

TEST(real_device_info)
{
    if (!has_gpu()) return;
    fst_device_info info = {.struct_size = sizeof info};
    CHECK_INT(fst_device_info_get((fst_device){real.kind, 0}, &info, NULL), FST_OK);
    printf("# %s, driver %d, %llu MiB, converts: %s\n", info.name, (int)info.driver_version,
           (unsigned long long)(info.memory_bytes >> 20),
           info.converts ? "yes" : info.converts_reason);
    CHECK(info.memory_bytes > 0 && info.name[0] != '\0');
}

TEST(real_models_load)
{
    if (!has_gpu()) return;
    fst_model *model = gpu_open_model(fixture_tensors("tensors", MANY, 3000000));
    fst_load_tuning small_staging = {.struct_size = sizeof small_staging, .staging_bytes = 1};
    for (int round = 0; round < 4; round++) {
        fst_load_options options = gpu_options_on(real.kind, 0);
        if (round % 2 == 0) fixture_evict(fixture_path("tensors"));
        if (round == 3) options.tuning = &small_staging;
        fst_load_stats stats;
        CHECK(gpu_same_load(model, &options, &stats));
        CHECK(strstr(stats.reason, "not all of them pinned") == NULL);
    }
    fst_model_close(model);
}

TEST(real_every_dtype_slice_and_conversion)
{
    if (!has_gpu()) return;
    fst_model *model = gpu_mixed_model();
    CHECK(gpu_same_however(model, &real));
    fst_model_close(model);
}

TEST(real_conversions_of_all_patterns)
{
    if (!has_gpu()) return;
    for (size_t i = 0; i < gpu_pattern_count; i++) {
        fst_model *model = gpu_open_model(gpu_all_patterns(i));
        for (unsigned dtype = 0; dtype < FST_DTYPE_COUNT; dtype++) {
            fst_load_options options = gpu_options_on(real.kind, 0);
            options.convert = 1;
            options.dtype = (fst_dtype)dtype;
            CHECK(gpu_same_load(model, &options, NULL));
        }
        fst_model_close(model);
    }
}

static void *load_many(void *argument) {
    fst_model *model = argument;
    fst_load_options options = gpu_options_on(real.kind, 0);
    for (int i = 0; i < (CHECK_SANITIZED ? 2 : 5); i++)
        if (!gpu_same_load(model, &options, NULL)) return model;
    return NULL;
}

TEST(real_loads_at_the_same_time)
{
    if (!has_gpu()) return;
    fst_model *model = gpu_open_model(fixture_tensors("tensors", 16, 3000000));
    pthread_t threads[8];
    for (size_t i = 0; i < 8; i++)
        if (pthread_create(&threads[i], NULL, load_many, model) != 0) abort();
    void *failed = NULL;
    for (size_t i = 0; i < 8; i++) {
        void *result;
        pthread_join(threads[i], &result);
        if (result != NULL) failed = result;
    }
    CHECK(failed == NULL);
    fst_model_close(model);
}

TEST(real_full_device)
{
    if (!has_gpu()) return;
    fsti_device *device;
    fsti_buffer *hogs[64] = {0};
    size_t count = 0;
    CHECK_INT(fsti_device_get((fst_device){real.kind, 0}, &device, NULL), FST_OK);
    fst_model *model = gpu_open_model(fixture_tensors("tensors", MANY, 3000000));
    for (uint64_t size = (uint64_t)8 << 30; size >= (64 << 20) && count < 64;) {
        if (fsti_buffer_device(device, size, &hogs[count], NULL) == FST_OK)
            count++;
        else
            size /= 2;
    }
    fst_load_options options = gpu_options_on(real.kind, 0);
    fst_loader *loader = NULL;
    fst_error error = {0};
    fst_status status = fst_loader_open(model, &options, &loader, &error);
    fst_loader_close(loader);
    for (size_t i = 0; i < count; i++) fsti_buffer_unref(hogs[i]);
    CHECK_INT(status, FST_E_NO_MEMORY);
    CHECK(strstr(error.message, "needed") != NULL && strstr(error.message, "available") != NULL);
    CHECK(gpu_same_load(model, &options, NULL));
    fst_model_close(model);
}

TEST(real_cancel_and_close_in_flight)
{
    if (!has_gpu()) return;
    fst_model *model = gpu_open_model(fixture_tensors("tensors", MANY, 3000000));
    uint64_t seed = 3;
    for (unsigned round = 0; round < CHECK_ROUNDS(100); round++) {
        fst_load_options options = gpu_options_on(real.kind, 0);
        fst_loader *loader;
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        usleep((useconds_t)(fixture_random(&seed) % 8000));
        if (round % 2 == 0) fst_loader_cancel(loader);
        fst_loader_close(loader);
    }
    fst_load_options options = gpu_options_on(real.kind, 0);
    CHECK(gpu_same_load(model, &options, NULL));
    fst_model_close(model);
}

TEST(real_thousand_loads_do_not_grow)
{
    if (!has_gpu()) return;
    fst_model *model = gpu_open_model(fixture_tensors("little", 8, 300000));
    uint64_t before = 0, pinned = 0;
    for (unsigned round = 0; round < CHECK_ROUNDS(1000); round++) {
        fst_load_options options = gpu_options_on(real.kind, 0);
        fst_loader *loader;
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
        fst_loader_close(loader);
        if (round != 20) continue;
        before = memory_free();
        pinned = fst_memory_pinned();
    }
    // A thread gives memory back, which may be some loads behind.
    for (int i = 0; i < 6000 && memory_free() + (8 << 20) < before; i++) usleep(10000);
    CHECK(memory_free() + (8 << 20) >= before);
    CHECK_INT(fst_memory_pinned(), pinned);
    fst_model_close(model);
}

TEST(real_stream_of_the_caller)
{
    if (!has_gpu()) return;
    if (real.kind != FST_DEVICE_CUDA) return;
    int (*create)(void **, unsigned), (*destroy)(void *);
    int (*fill)(uint64_t, unsigned char, size_t, void *);
    void *handle = dlopen("libcuda.so.1", RTLD_NOW), *stream;
    gpu_find_hook(handle, "cuStreamCreate", &create);
    gpu_find_hook(handle, "cuStreamDestroy_v2", &destroy);
    gpu_find_hook(handle, "cuMemsetD8Async", &fill);
    fst_model *model = gpu_open_model(fixture_tensors("tensors", 2, 3000000));
    fsti_device *device;
    fsti_buffer *memory;
    CHECK_INT(fsti_device_get((fst_device){real.kind, 0}, &device, NULL), FST_OK);
    uint64_t size = fsti_min((uint64_t)1 << 30, memory_free() / 64);
    CHECK_INT(fsti_buffer_device(device, size, &memory, NULL), FST_OK);
    CHECK_INT(fsti_device_enter(device, NULL), FST_OK);
    CHECK_INT(create(&stream, 1), 0);
    for (int round = 0; round < 20; round++) {
        // Much work of the caller's, the last of it on the tensor's place.
        for (int i = 0; i < 20; i++)
            CHECK_INT(fill((uintptr_t)memory->data, (unsigned char)i, size, stream), 0);
        fst_part item = {.struct_size = sizeof item,
                         .tensor_index = 1,
                         .destination = memory->data,
                         .destination_bytes = 3000000};
        fst_load_options options = gpu_options_on(real.kind, 0);
        options.parts = &item;
        options.part_count = 1;
        options.stream = (uintptr_t)stream;
        fst_loader *loader;
        fst_tensor *tensor;
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
        char *copy = malloc(3000000);
        CHECK_INT(fst_tensor_read(tensor, copy, 3000000, NULL), FST_OK);
        bool good = fixture_matches(copy, 3000000, 3000000);
        free(copy);
        fst_tensor_unref(tensor);
        fst_loader_close(loader);
        CHECK(good);
    }
    CHECK_INT(destroy(stream), 0);
    fsti_device_leave(device);
    fsti_buffer_unref(memory);
    fst_model_close(model);
}
