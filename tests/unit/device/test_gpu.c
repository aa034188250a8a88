// SPDX-License-Identifier: Apache-2.0
/// Loads to GPUs with fake drivers: every route gives the right bytes, and every copy is waited
/// for.
#include <dlfcn.h>
#include <fastsafetensors.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "gpu/gpu.h"
#include "fixture.h"
#include "gpu/gpu_private.h"
#include "gpu_fixture.h"

TEST(models_load_to_the_device)
{
    static const fst_engine engines[] = {FST_ENGINE_AUTO, FST_ENGINE_PREAD, FST_ENGINE_DIRECT,
                                         FST_ENGINE_URING, FST_ENGINE_MMAP};
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        driver->set("delay_us", 300);
        fst_model *model = gpu_open_model(fixture_tensors("tensors", 12, 3000000));
        for (size_t e = 0; e < sizeof engines / sizeof *engines; e++) {
            fst_load_options options = gpu_options_on(driver->kind, 1);
            fst_load_tuning tuning = *options.tuning;
            tuning.engine = engines[e];
            options.tuning = &tuning;
            if (e % 2 == 0) fixture_evict(fixture_path("tensors"));
            fst_load_stats stats = {.struct_size = sizeof stats};
            fst_loader *loader;
            fst_status status = fst_loader_open(model, &options, &loader, NULL);
            if (status == FST_E_UNSUPPORTED) continue; // no O_DIRECT here
            CHECK_INT(status, FST_OK);
            fst_loader_close(loader); // in flight
            CHECK(gpu_same_load(model, &options, &stats));
            CHECK_INT(stats.device_bytes, 36000000);
            CHECK_INT(stats.device_launches, 0);
            CHECK(stats.device_copies <= stats.chunk_count);
            CHECK(stats.buffer_bytes <= 36000000 + 36000000 / 50);
            CHECK(strstr(stats.reason, "copied to the device through") != NULL);
        }
        CHECK_INT(driver->get("contexts"), 2); // that of device 1 alone
        fst_model_close(model);
        driver->set("delay_us", 0);
        CHECK(gpu_is_clean(driver));
    }
}

TEST(every_dtype_slice_and_conversion_loads)
{
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        fst_model *model = gpu_mixed_model();
        CHECK(gpu_same_however(model, driver));
        fst_model_close(model);
        CHECK(driver->get("launches") > 20);
        CHECK(gpu_is_clean(driver));
    }
}

TEST(device_conversions_equal_cpu_conversions)
{
    const gpu_fake *driver = gpu_fake_of(0);
    size_t pairs = 0;
    for (size_t i = 0; i < gpu_pattern_count; i++) {
        fst_model *model = gpu_open_model(gpu_all_patterns(i));
        for (unsigned dtype = 0; dtype < FST_DTYPE_COUNT; dtype++) {
            fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
            fst_load_stats stats;
            options.convert = 1;
            options.dtype = (fst_dtype)dtype;
            CHECK(gpu_same_load(model, &options, &stats));
            CHECK(stats.device_launches == (stats.bytes_converted > 0 ? stats.chunk_count : 0));
            pairs += stats.bytes_converted > 0;
        }
        fst_model_close(model);
    }
    CHECK_INT(pairs, 90 + 18); // ten floats to nine others; integers to wider ones
    CHECK(gpu_is_clean(driver));
}

TEST(slow_device_gets_every_byte)
{
    const gpu_fake *driver = gpu_fake_of(0);
    driver->set("delay_us", 2000);
    fst_model *model = gpu_mixed_model();
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    options.convert = 1;
    options.dtype = FST_DTYPE_F64;
    options.tuning =
        &(fst_load_tuning){.struct_size = sizeof(fst_load_tuning), .staging_bytes = 1}; // two slots
    CHECK(gpu_same_load(model, &options, NULL));
    options.budget_bytes = 32 << 20;
    CHECK(gpu_same_load(model, &options, NULL));
    fst_model_close(model);
    driver->set("delay_us", 0);
    CHECK(gpu_is_clean(driver));
}

TEST(many_small_tensors_take_few_launches)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_model *model = gpu_small_model(20000);
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    fst_load_stats stats;
    long calls = driver->get("calls") - driver->get("queries");
    CHECK(gpu_same_load(model, &options, &stats));
    // A table holds 1792 pieces: tables that are full go ahead.
    CHECK(stats.device_launches >= stats.chunk_count);
    CHECK(stats.device_launches <= stats.chunk_count + 20000 / 1792);
    CHECK_INT(stats.device_copies, 0);
    // Every tensor is read back by the test, with seven calls; the load itself needs few.
    CHECK(driver->get("calls") - driver->get("queries") - calls < 20001 * 8 + 400);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

TEST(a_table_is_copied_together_with_its_chunk)
{
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        fst_model *model = gpu_small_model(1000); // much smaller than a staging buffer
        fst_load_options options = gpu_options_on(driver->kind, 0);
        long copies = driver->get("copies"), launches = driver->get("launches");
        CHECK(gpu_same_load(model, &options, NULL));
        CHECK(driver->get("launches") > launches);
        CHECK_INT(driver->get("copies") - copies, driver->get("launches") - launches);
        fst_model_close(model);
        CHECK(gpu_is_clean(driver));
    }
}

static fsti_buffer *callers;

static void *fake_memory(void *context, size_t size, size_t alignment) {
    fsti_device *device = context;
    fsti_buffer *buffer;
    (void)alignment;
    // As a framework's allocator would: memory that is in use on one of its streams.
    if (fsti_buffer_device(device, size, &buffer, NULL) != FST_OK) return NULL;
    callers = buffer;
    return buffer->data;
}

static size_t released;
static void fake_release(void *context, void *pointer, size_t size) {
    (void)context, (void)pointer, (void)size;
    fsti_buffer_unref(callers);
    released++;
}

TEST(caller_memory_and_stream_are_used)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fsti_device *device;
    fsti_buffer *memory;
    void *handle = dlopen("libcuda.so.1", RTLD_NOW), *stream;
    int (*create)(void **, unsigned), (*destroy)(void *), (*wait)(void *);
    gpu_find_hook(handle, "cuStreamSynchronize", &wait);
    gpu_find_hook(handle, "cuStreamCreate", &create);
    gpu_find_hook(handle, "cuStreamDestroy_v2", &destroy);
    fst_model *model = gpu_open_model(fixture_tensors("tensors", 2, 3000000));
    CHECK_INT(fsti_device_get((fst_device){FST_DEVICE_CUDA, 1}, &device, NULL), FST_OK);
    CHECK_INT(fsti_buffer_device(device, 3000000, &memory, NULL), FST_OK);
    CHECK_INT(fsti_device_enter(device, NULL), FST_OK);
    CHECK_INT(create(&stream, 0), 0);
    // Work of the caller's that still writes to the memory when the load begins.
    driver->fill(stream, 50000, memory->data, 0x11, 3000000);
    fst_part item = {.struct_size = sizeof item,
                     .tensor_index = 1,
                     .destination = memory->data,
                     .destination_bytes = 3000000};
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, -1); // the thread's current
    options.parts = &item;
    options.part_count = 1;
    options.stream = (uintptr_t)stream;
    fst_loader *loader;
    fst_tensor *tensor;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
    CHECK_INT(wait(stream), 0); // the caller's work was before
    CHECK(gpu_view_of(tensor).data == memory->data);
    CHECK_INT(gpu_view_of(tensor).device.index, 1);
    CHECK(fixture_matches(memory->data, 3000000, 3000000));
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    CHECK_INT(destroy(stream), 0);
    fsti_device_leave(device);
    fsti_buffer_unref(memory);
    options = gpu_options_on(FST_DEVICE_CUDA, 1);
    fst_allocator allocator = {.struct_size = sizeof allocator,
                               .context = device,
                               .allocate = fake_memory,
                               .release = fake_release};
    options.allocator = &allocator;
    options.stream = 1; // the default stream
    CHECK(gpu_same_load(model, &options, NULL));
    CHECK_INT(released, 1);
    fst_model_close(model);
}

/// Memory of the caller may be neighbouring allocations, and a real driver refuses a copy across
/// two of them.
TEST(no_copy_crosses_tensors_of_the_caller)
{
    enum { SIZE = 300000 };
    fst_model *model = gpu_open_model(fixture_tensors("tensors", 2, SIZE));
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        fsti_device *device;
        fsti_buffer *memory;
        CHECK_INT(fsti_device_get((fst_device){driver->kind, 0}, &device, NULL), FST_OK);
        CHECK_INT(fsti_buffer_device(device, (uint64_t)2 * SIZE, &memory, NULL), FST_OK);
        fst_part items[2];
        for (size_t i = 0; i < 2; i++)
            items[i] = (fst_part){.struct_size = sizeof items[i],
                                  .tensor_index = i,
                                  .destination = memory->data + i * SIZE,
                                  .destination_bytes = SIZE};
        fst_load_options options = gpu_options_on(driver->kind, 0);
        options.parts = items;
        options.part_count = 2;
        fst_loader *loader;
        fst_load_stats stats = {.struct_size = sizeof stats};
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
        CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
        fst_loader_close(loader);
        CHECK_INT(stats.device_copies, 2);
        CHECK_INT(stats.device_bytes, 2 * SIZE);
        CHECK(fixture_matches(memory->data + SIZE, SIZE, SIZE));
        fsti_buffer_unref(memory);
    }
    fst_model_close(model);
}

TEST(repeated_loads_do_not_leak)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_model *model = gpu_open_model(fixture_tensors("little", 8, 300000));
    long locked = 0, allocated = 0;
    for (unsigned round = 0; round < CHECK_ROUNDS(200); round++) {
        fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, round % 2);
        CHECK(gpu_same_load(model, &options, NULL));
        fsti_device_wait_released();
        if (round == 4) { // both devices have their memory
            locked = driver->get("locked_bytes");
            allocated = driver->get("allocated_bytes");
        }
    }
    CHECK_INT(driver->get("locked_bytes"), locked);
    CHECK_INT(driver->get("allocated_bytes"), allocated);
    CHECK(locked <= 2 * (64 << 20) + (2 << 20));
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

TEST(shared_and_pinned_memory)
{
    const gpu_fake *driver = gpu_fake_of(0);
    long copied = driver->get("copied_out");
    fst_memory_trim();
    fst_model *model = gpu_mixed_model();
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    fst_load_stats stats;
    options.tuning =
        &(fst_load_tuning){.struct_size = sizeof(fst_load_tuning), .unified = FST_UNIFIED_ON};
    CHECK(gpu_same_load(model, &options, &stats));
    CHECK_INT(stats.device_bytes, 0); // no second copy
    CHECK_INT(driver->get("copied_out"), copied);
    CHECK_INT(driver->get("streams"), 0); // and no staging buffers to read it
    driver->set("other_address", 1);
    fst_loader *loader;
    fst_error error;
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_UNSUPPORTED);
    driver->set("other_address", 0);
    options = gpu_options_on(FST_DEVICE_PINNED, 0);
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, &error), FST_OK);
    CHECK(driver->get("locked_bytes") >= 8445894);
    fst_tensor *tensor;
    CHECK_INT(fst_loader_tensor_at(loader, 0, -1, &tensor, &error), FST_OK);
    CHECK_INT(gpu_view_of(tensor).device.kind, FST_DEVICE_PINNED);
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    CHECK(gpu_same_load(model, &options, NULL));
    driver->set("no_lock", 1);
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_NO_MEMORY);
    // Through memory that is not pinned: slower, correct, and reported.
    options = gpu_options_on(FST_DEVICE_CUDA, 0);
    CHECK(gpu_same_load(model, &options, &stats));
    CHECK(strstr(stats.reason, "not all of them pinned") != NULL);
    driver->set("no_lock", 0);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

TEST(tensors_of_devices_are_saved)
{
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        fst_model *model = gpu_open_model(fixture_tensors("tensors", 3, 9000001));
        fst_load_options options = gpu_options_on(driver->kind, 1);
        fst_loader *loader;
        fst_tensor *held[3];
        fst_save_tensor rows[3];
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        for (size_t i = 0; i < 3; i++) {
            CHECK_INT(fst_loader_next(loader, -1, &held[i], NULL), FST_OK);
            rows[i] = gpu_save_row(held[i]);
        }
        fst_save_options save = {.struct_size = sizeof save, .promise = FST_SAVE_DURABLE};
        fst_writer *writer;
        fst_error error;
        const char *path = fixture_path("saved");
        CHECK_INT(fst_writer_open(path, rows, 3, &save, &writer, &error), FST_OK);
        CHECK_INT(fst_writer_commit(writer, &error), FST_OK);
        fst_writer_close(writer);
        fst_model *saved = gpu_open_model(path);
        CHECK(gpu_same_load(saved, &options, NULL));
        fst_model_close(saved);
        // A driver that fails leaves the file that was there.
        CHECK_INT(fst_writer_open(path, rows, 3, &save, &writer, &error), FST_OK);
        driver->fail("cuMemcpyDtoHAsync", 2, 719);
        CHECK_INT(fst_writer_commit(writer, &error), FST_E_DEVICE);
        driver->fail(NULL, 0, 0);
        fst_writer_close(writer);
        saved = gpu_open_model(path);
        CHECK(gpu_same_load(saved, &options, NULL));
        fst_model_close(saved);
        for (size_t i = 0; i < 3; i++) fst_tensor_unref(held[i]);
        fst_loader_close(loader);
        fst_model_close(model);
        CHECK(gpu_is_clean(driver));
    }
}

/// The CPU reads tensors in shared memory itself, for reads and for saves of both kinds.
TEST(tensors_in_shared_memory_are_saved_without_the_driver)
{
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        fst_model *model = gpu_open_model(fixture_tensors("shared", 2, 5000000));
        fst_load_options options = gpu_options_on(driver->kind, 0);
        fst_loader *loader;
        fst_tensor *tensors[2];
        fst_save_tensor rows[2];
        fst_error error;
        options.tuning =
            &(fst_load_tuning){.struct_size = sizeof(fst_load_tuning), .unified = FST_UNIFIED_ON};
        CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_OK);
        for (size_t i = 0; i < 2; i++) {
            CHECK_INT(fst_loader_next(loader, -1, &tensors[i], &error), FST_OK);
            rows[i] = gpu_save_row(tensors[i]);
        }
        fst_loader_close(loader);
        long copied = driver->get("copied_out");
        char path[500];
        snprintf(path, sizeof path, "%s", fixture_path("shared-saved"));
        CHECK_INT(fst_save(path, rows, 2, NULL, NULL, &error), FST_OK);
        fst_async_options how = {.struct_size = sizeof how};
        fst_async_save *save;
        CHECK_INT(fst_async_save_start(path, rows, 2, &how, &save, &error), FST_OK);
        CHECK_INT(fst_async_save_wait(save, -1, &error), FST_OK);
        fst_async_save_close(save);
        CHECK_INT(driver->get("copied_out"), copied);
        fst_model *saved = gpu_open_model(path);
        fst_load_options near = {.struct_size = sizeof near, .mode = FST_MODE_LOAD};
        CHECK_INT(fst_loader_open(saved, &near, &loader, &error), FST_OK);
        for (size_t i = 0; i < 2; i++) {
            fst_tensor *again;
            CHECK_INT(fst_loader_next(loader, -1, &again, &error), FST_OK);
            CHECK(gpu_same_tensor(tensors[i], again));
            fst_tensor_unref(again);
            fst_tensor_unref(tensors[i]);
        }
        CHECK_INT(driver->get("copied_out"), copied);
        CHECK(!fsti_shared_memory_has(rows[0].data, 1) && !fsti_shared_memory_has(rows[1].data, 1));
        fst_loader_close(loader);
        fst_model_close(saved);
        fst_model_close(model);
        CHECK(gpu_is_clean(driver));
    }
}

TEST(devices_have_names)
{
    static const char *const wrong[] = {"",         "cud",        "cuda:",  "cuda:x", "cuda:-1",
                                        "pinned:0", "cuda:99999", "hip:0x", "CUDA",   "cpu:1"};
    fst_device device;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK_INT(fst_device_parse(wrong[i], &device, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_device_parse("cuda:1", &device, NULL), FST_OK);
    CHECK(device.kind == FST_DEVICE_CUDA && device.index == 1);
    CHECK_INT(fst_device_parse("hip", &device, NULL), FST_OK);
    CHECK(device.kind == FST_DEVICE_HIP && device.index == -1);
    CHECK_INT(fst_device_parse("gpu:0", &device, NULL), FST_OK);
    CHECK(device.kind == FST_DEVICE_CUDA && device.index == 0);
    CHECK_INT(fst_device_parse("pinned", &device, NULL), FST_OK);
    CHECK(device.kind == FST_DEVICE_PINNED && device.index == -1);
    CHECK_INT(fst_device_parse("cpu", &device, NULL), FST_OK);
    CHECK(device.kind == FST_DEVICE_CPU && device.index == 0);
    fst_device_info info = {.struct_size = sizeof info};
    CHECK_INT(fst_device_info_get(device, &info, NULL), FST_OK);
    CHECK_TEXT(info.name, "CPU");
    CHECK_INT(fst_device_info_get((fst_device){FST_DEVICE_HIP, 1}, &info, NULL), FST_OK);
    CHECK_TEXT(info.name, "Fake GPU 1");
    CHECK(info.converts && info.memory_free <= info.memory_bytes && !info.unified);
    CHECK_INT(fst_device_count(FST_DEVICE_CUDA), 2);
    CHECK_INT(fst_device_count(FST_DEVICE_PINNED), 1);
    CHECK_INT(fst_device_count(FST_DEVICE_CPU), 1);
    CHECK_INT(fst_device_count((fst_device_kind)9), 0);
    fst_error error;
    CHECK_INT(fst_device_info_get((fst_device){FST_DEVICE_CUDA, 7}, &info, &error), FST_E_ARGUMENT);
    CHECK(strstr(error.message, "cuda:7 does not exist (2 are visible") != NULL);
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    options.mode = FST_MODE_MAP;
    fst_model *model = gpu_open_model(fixture_tensors("little", 8, 300000));
    fst_loader *loader;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_E_ARGUMENT);
    fst_model_close(model);
}
