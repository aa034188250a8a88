// SPDX-License-Identifier: Apache-2.0
/// GPUs with fake drivers: failed operations are retried, missing features are replaced, and no
/// load leaves a process with more memory than it requested.
#include <dlfcn.h>
#include <fastsafetensors.h>

#include "check.h"
#include "fixture.h"
#include "gpu/gpu_private.h"
#include "gpu_fixture.h"

/// Each test uses devices that no other test has opened, because a device remembers some results.
enum { DEVICE_COUNT = 8, SHARED_DEVICE = 3 };
__attribute__((constructor)) static void give_devices(void) {
    for (size_t k = 0; k < 2; k++) gpu_fake_of(k)->set("devices", DEVICE_COUNT);
}

TEST(pinned_memory_uses_an_existing_context)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_model *model = gpu_open_model(fixture_tensors("small", 4, 100000));
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 1);
    fst_device any;
    CHECK(gpu_same_load(model, &options, NULL));
    CHECK_INT(driver->get("contexts"), 2);
    CHECK_INT(fst_device_parse("pinned", &any, NULL), FST_OK);
    options.device = any;
    fst_loader *loader;
    fst_tensor *tensor;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    CHECK_INT(fst_loader_tensor_at(loader, 0, -1, &tensor, NULL), FST_OK);
    fst_device device = gpu_view_of(tensor).device;
    CHECK(device.kind == FST_DEVICE_PINNED && device.index == 0); // it belongs to no device
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    CHECK_INT(driver->get("contexts"), 2);
    // HIP's threads have a device from the beginning.
    const gpu_fake *hip = gpu_fake_of(1);
    CHECK_INT(hip->get("contexts"), 0);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

TEST(kernel_load_is_retried_after_out_of_memory)
{
    static const char *const calls[] = {"cuModuleLoadData", "cuModuleGetFunction"};
    const gpu_fake *driver = gpu_fake_of(1); // of CUDA's device 1 the kernel is there
    fst_model *model = gpu_mixed_model();
    for (size_t i = 0; i < 2; i++) {
        fst_load_options options = gpu_options_on(FST_DEVICE_HIP, (int32_t)i);
        options.convert = 1;
        options.dtype = FST_DTYPE_F32;
        driver->fail(calls[i], 1, 2);
        CHECK(gpu_same_load(model, &options, NULL));
        driver->fail(NULL, 0, 0);
        long launches = driver->get("launches");
        CHECK(gpu_same_load(model, &options, NULL));
        CHECK(driver->get("launches") > launches);
        CHECK_INT(driver->get("modules"), i + 1); // one was unloaded, whose function was not found
    }
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

TEST(kernels_are_loaded_while_reads_run)
{
    // By its own thread, so that reading threads do not wait for it before their first read.
    // If that thread is late, another one loads the kernel, but not every time.
    const gpu_fake *driver = gpu_fake_of(0);
    fst_model *model = gpu_mixed_model();
    bool apart = false;
    driver->set("module_us", 20000);
    for (int32_t index = 4; index < DEVICE_COUNT && !apart; index++) {
        fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, index);
        options.convert = 1;
        options.dtype = FST_DTYPE_F32;
        fst_loader *loader;
        long modules = driver->get("module_calls"), copies = driver->get("module_copies");
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
        fst_loader_close(loader);
        CHECK(driver->get("module_calls") > modules);
        apart = driver->get("module_copies") == copies;
    }
    CHECK(apart);
    driver->set("module_us", 0);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

TEST(staging_memory_waits_for_released_buffers)
{
    // 12 MB that are being given back, 12 MB of tensors, and two places of 2.16 MB each.
    const gpu_fake *driver = gpu_fake_of(0);
    fst_model *model = gpu_open_model(fixture_model(
        "halves",
        "{\"a\":{\"dtype\":\"BF16\",\"shape\":[3000000],\"data_offsets\":[0,6000000]},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[3000000],"
        "\"data_offsets\":[6000000,12000000]}}      ",
        12000000));
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 1);
    fst_load_stats stats;
    fst_memory_trim();
    driver->set("memory", 27 << 20);
    driver->set("free_us", 300000);
    CHECK(gpu_same_load(model, &options, NULL));
    options.convert = 1;
    options.dtype = FST_DTYPE_F16;
    CHECK(gpu_same_load(model, &options, &stats));
    CHECK(stats.device_launches > 0 && strstr(stats.reason, "by the CPU") == NULL);
    driver->set("free_us", 0);
    driver->set("memory", 1l << 32);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

TEST(loaded_driver_libraries_are_preferred)
{
    static const char *const names[] = {"libcufile.so.0", "libhiprtc.so", NULL};
    CHECK(dlopen(names[0], RTLD_NOW | RTLD_NOLOAD) == NULL); // it exists, and is unused
    void *framework = dlopen(names[1], RTLD_NOW);
    CHECK(framework != NULL && fsti_gpu_open_library(names) == framework);
    static const char *const none[] = {"libfst-is-not-there.so", NULL};
    CHECK(fsti_gpu_open_library(none) == NULL);
}

TEST(loads_do_not_wait_for_other_streams)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_model *model = gpu_open_model(fixture_tensors("others", 4, 3000000));
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 1);
    fst_loader *loader;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK); // memory and locks are there now
    fst_loader_close(loader);
    fsti_device_wait_released();
    driver->hold(NULL); // the default stream, which blocking streams wait for
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    fst_status status = fst_loader_wait(loader, 10000, NULL);
    driver->let_go();
    fst_loader_close(loader);
    CHECK_INT(status, FST_OK);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

TEST(long_waits_sleep)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_model *model = gpu_open_model(fixture_tensors("slow", 8, 3000000));
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 1);
    long waits = driver->get("blocking_waits");
    driver->set("delay_us", 30000);
    CHECK(gpu_same_load(model, &options, NULL));
    driver->set("delay_us", 0);
    CHECK(driver->get("blocking_waits") > waits);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

TEST(pinning_is_retried)
{
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        fst_model *model = gpu_open_model(fixture_tensors("locked", 4, 3000000));
        fst_load_options options = gpu_options_on(driver->kind, 1);
        fst_load_stats stats;
        fst_memory_trim();
        driver->set("no_lock", 1);
        for (int round = 0; round < 2; round++) {
            CHECK(gpu_same_load(model, &options, &stats));
            CHECK_CONTAINS(stats.reason, "not all of them pinned");
            CHECK_CONTAINS(stats.reason, "gds: switched off"); // to the end
        }
        driver->set("no_lock", 0);
        CHECK(gpu_same_load(model, &options, &stats));
        CHECK(strstr(stats.reason, "not all of them pinned") == NULL);
        CHECK(driver->get("locked_bytes") > 0);
        fst_model_close(model);
        CHECK(gpu_is_clean(driver));
    }
}

TEST(unpinnable_shared_memory_is_copied_to)
{
    static const char *const settings[] = {"no_lock", "other_address"};
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        fst_model *model = gpu_open_model(fixture_tensors("shared", 4, 3000000));
        fst_load_options options = gpu_options_on(driver->kind, SHARED_DEVICE);
        fst_load_stats stats;
        driver->set("integrated", 1); // queried when the device is opened, which is here
        for (size_t i = 0; i < 2; i++) {
            driver->set(settings[i], 1);
            CHECK(gpu_same_load(model, &options, &stats));
            CHECK_INT(stats.device_bytes, 12000000);
            driver->set(settings[i], 0);
        }
        CHECK(gpu_same_load(model, &options, &stats));
        CHECK_INT(stats.device_bytes, 0);
        driver->set("integrated", 0);
        fst_model_close(model);
        CHECK(gpu_is_clean(driver));
    }
}

TEST(handled_driver_errors_are_cleared)
{
    const gpu_fake *driver = gpu_fake_of(1);
    int (*take)(void), (*allocate)(uint64_t *, size_t);
    void *handle = dlopen(driver->name, RTLD_NOW);
    gpu_find_hook(handle, "hipGetLastError", &take);
    gpu_find_hook(handle, "hipMalloc", &allocate);
    fst_model *model = gpu_open_model(fixture_tensors("quiet", 4, 3000000));
    fst_load_options options = gpu_options_on(FST_DEVICE_HIP, 1);
    fst_loader *loader;
    fst_memory_trim();
    driver->set("memory", 4 << 20);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_E_NO_MEMORY);
    driver->set("memory", 1l << 32);
    CHECK_INT(take(), 0);
    driver->set("no_lock", 1);
    options.device.kind = FST_DEVICE_HIP;
    CHECK(gpu_same_load(model, &options, NULL));
    CHECK_INT(take(), 0);
    driver->set("no_lock", 0);
    // The caller's own errors stay visible to the caller.
    uint64_t address;
    driver->fail("cuMemAlloc", 1, 2);
    CHECK_INT(allocate(&address, 100), 2);
    CHECK(gpu_same_load(model, &options, NULL));
    CHECK_INT(take(), 2);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}
