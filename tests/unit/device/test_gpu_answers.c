// SPDX-License-Identifier: Apache-2.0
/// Drivers that answer wrongly, with fake drivers: success without a result, unknown codes, wrong
/// numbers, answers that change between calls, a device that is lost in the middle, a device that
/// stops. A load ends with the right bytes or with an error in words, and nothing leaks.
#include <dlfcn.h>
#include <fastsafetensors.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "fixture.h"
#include "gpu/gpu.h"
#include "gpu/gpu_private.h"
#include "gpu_fixture.h"

enum { DEVICE_COUNT = 12, NOTHING = -77, HANGING = -78, UNKNOWN_CODE = 12345 };
__attribute__((constructor)) static void give_devices(void) {
    for (size_t k = 0; k < 2; k++) gpu_fake_of(k)->set("devices", DEVICE_COUNT);
}

/// A load of the mixed model with a conversion. Its error, or "".
static fst_error load_once(const gpu_fake *driver, int32_t index, fst_status *status) {
    fst_model *model = gpu_mixed_model();
    fst_load_options options = gpu_options_on(driver->kind, index);
    options.convert = 1;
    options.dtype = FST_DTYPE_F32;
    options.thread_count = 2;
    fst_loader *loader = NULL;
    fst_error error = {0};
    *status = fst_loader_open(model, &options, &loader, &error);
    if (*status == FST_OK) *status = fst_loader_wait(loader, -1, &error);
    fst_loader_close(loader);
    fst_model_close(model);
    return error;
}

/// Whether the device loads every byte right.
static bool is_usable(const gpu_fake *driver, int32_t index) {
    fst_model *model = gpu_mixed_model();
    fst_load_options options = gpu_options_on(driver->kind, index);
    options.convert = 1;
    options.dtype = FST_DTYPE_F32;
    bool same = gpu_same_load(model, &options, NULL);
    fst_model_close(model);
    return same;
}

TEST(success_without_a_result_is_an_error)
{
    // The first five are fatal. Without the others the load is slower, or less is known.
    static const struct {
        const char *function;
        bool is_fatal;
    } calls[] = {{"cuDevicePrimaryCtxRetain", true}, {"cuMemAlloc", true},
                 {"cuStreamCreate", true},           {"cuEventCreate", true},
                 {"cuMemHostRegister", false},       {"cuModuleLoadData", false},
                 {"cuModuleGetFunction", false},     {"cuDeviceGetPCIBusId", false},
                 {"cuDeviceGetAttribute", false},    {"cuDeviceGetName", false}};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        const gpu_fake *driver = gpu_fake_of(0);
        int32_t index = (int32_t)i; // it opens the device and loads the kernel anew
        fst_status status;
        fst_memory_trim();
        driver->fail(calls[i].function, 1, NOTHING);
        fst_error error = load_once(driver, index, &status);
        CHECK(driver->get("fail_left") <= 0); // it was called
        driver->fail(NULL, 0, 0);
        CHECK_INT(status, calls[i].is_fatal ? FST_E_DEVICE : FST_OK);
        if (calls[i].is_fatal)
            CHECK_CONTAINS(error.message, "the driver reported success and returned nothing");
        CHECK(is_usable(driver, index));
        CHECK(gpu_is_clean(driver));
    }
}

TEST(misaligned_memory_is_an_error)
{
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        fst_status status;
        fst_memory_trim();
        driver->set("misaligned", 8);
        fst_error error = load_once(driver, 0, &status);
        long left = driver->get("allocations");
        driver->set("misaligned", 0);
        CHECK_INT(status, FST_E_DEVICE);
        CHECK_CONTAINS(error.message, "the driver returned an address that is not aligned");
        CHECK_INT(left, 0);
        CHECK(is_usable(driver, 0));
        CHECK(gpu_is_clean(driver));
    }
}

/// The kernel could not read it: the CPU converts instead.
TEST(staging_memory_that_is_misaligned_is_not_used)
{
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        fst_status status;
        fst_memory_trim();
        long launches = driver->get("launches");
        driver->set("aligned_first", 1); // the tensors' memory
        driver->set("misaligned", 8);
        CHECK(is_usable(driver, 0));
        CHECK_INT(driver->get("aligned_first"), 0);
        CHECK_INT(driver->get("launches"), launches);
        fst_memory_trim();
        driver->set("misaligned", 0);
        (void)load_once(driver, 0, &status);
        CHECK(status == FST_OK && driver->get("launches") > launches);
        CHECK(gpu_is_clean(driver));
    }
}

/// Drops pinned memory while a call fails, which `fault` names.
static void check_stuck(const char *fault) {
    const gpu_fake *driver = gpu_fake_of(0);
    fsti_device *device = NULL;
    fsti_buffer *buffer = NULL;
    const uint64_t bytes = 1 << 20;
    CHECK_INT(fsti_device_get((fst_device){driver->kind, 0}, &device, NULL), FST_OK);
    CHECK_INT(fsti_buffer_registered(device, bytes, &buffer, NULL), FST_OK);
    char *data = buffer->data;
    fsti_buffer *memory = buffer->host_buffer;
    driver->set(fault, 1);
    fsti_buffer_unref(buffer);
    fsti_device_wait_released();
    driver->set(fault, 0);
    CHECK(driver->get("locked_bytes") >= (long)bytes);
    CHECK_INT(msync(data, bytes, MS_ASYNC), 0); // ENOMEM if it is not mapped
    CHECK_INT(fsti_device_enter(device, NULL), FST_OK);
    fsti_gpu_unpin(device, memory); // now it works
    fsti_device_leave(device);
    CHECK(gpu_is_clean(driver));
}

/// The driver would take the next mapping at this place for the memory that it keeps pinned.
TEST(memory_that_stays_pinned_stays_mapped)
{
    check_stuck("stuck_pins"); // unpinning fails
    check_stuck("gone");       // no context can be entered
}

TEST(name_of_a_device_is_text)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_device_info info = FST_STRUCT_INIT(fst_device_info);
    fst_status status;
    (void)load_once(driver, 0, &status); // the library is loaded
    driver->set("bad_name", 1);
    CHECK_INT(fst_device_info_get((fst_device){driver->kind, DEVICE_COUNT - 2}, &info, NULL),
              FST_OK);
    driver->set("bad_name", 0);
    CHECK_CONTAINS(info.name, "??[GPU ");
}

TEST(unknown_codes_have_their_number)
{
    // The name by which the fakes know a function, and the drivers' own names.
    static const char *const calls[][3] = {
        {"cuMemAlloc", "cuMemAlloc_v2", "hipMalloc"},
        {"cuStreamCreate", "cuStreamCreate", "hipStreamCreateWithFlags"},
        {"cuEventCreate", "cuEventCreate", "hipEventCreateWithFlags"},
        {"cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync"},
        {"cuLaunchKernel", "cuLaunchKernel", "hipModuleLaunchKernel"},
        {"cuEventRecord", "cuEventRecord", "hipEventRecord"},
        {"cuEventQuery", "cuEventQuery", "hipEventQuery"},
        {"cuCtxPushCurrent", "cuCtxPushCurrent_v2", "hipSetDevice"}};
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
            fst_status status;
            char expected[160];
            fst_memory_trim();
            driver->fail(calls[i][0], 1, UNKNOWN_CODE);
            fst_error error = load_once(driver, 0, &status);
            driver->fail(NULL, 0, 0);
            CHECK_INT(status, FST_E_DEVICE);
            CHECK_INT(error.device_code, UNKNOWN_CODE);
            snprintf(expected, sizeof expected,
                     " failed: the driver has no text for this error (%s: %s error 12345)",
                     calls[i][k + 1], k == 0 ? "CUDA" : "HIP");
            CHECK_CONTAINS(error.message, expected);
        }
        CHECK(is_usable(driver, 0));
        CHECK(gpu_is_clean(driver));
    }
}

TEST(reported_memory_is_not_believed)
{
    const gpu_fake *driver = gpu_fake_of(0);
    // Too little, more than there is, an impossible number.
    const long reports[] = {1, 1l << 60, -1};
    for (size_t i = 0; i < 3; i++) {
        driver->set("reported_free", reports[i]);
        CHECK(is_usable(driver, 0));
        fst_memory_trim();
        driver->set("memory", 4 << 20);
        fst_status status;
        fst_error error = load_once(driver, 0, &status);
        driver->set("memory", 1l << 32);
        CHECK_INT(status, FST_E_NO_MEMORY);
        CHECK_CONTAINS(error.message, "out of device memory");
    }
    driver->set("reported_free", 0);
    CHECK(is_usable(driver, 0));
    CHECK(gpu_is_clean(driver));
}

TEST(devices_may_disappear_and_come_back)
{
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        fst_status status;
        CHECK(fst_device_count(driver->kind) == DEVICE_COUNT); // asked once
        driver->set("devices", 1);
        fst_error error = load_once(driver, DEVICE_COUNT - 1, &status);
        CHECK_INT(status, FST_E_DEVICE);
        CHECK_INT(error.device_code, 101);
        CHECK_CONTAINS(error.message, "opening the device failed: a fake error (");
        CHECK(is_usable(driver, 0));
        driver->set("devices", DEVICE_COUNT);
        CHECK(is_usable(driver, DEVICE_COUNT - 1));
        CHECK(gpu_is_clean(driver));
    }
}

TEST(waits_with_a_limit_end_while_the_device_stands_still)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_model *model = gpu_open_model(fixture_tensors("standing", 4, 3000000));
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    fst_loader *loader;
    fst_tensor *tensor = NULL;
    fst_error error;
    driver->set("delay_us", 0);
    driver->hold_copies(true);
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_OK);
    CHECK_INT(fst_loader_wait(loader, 50, &error), FST_E_TIMEOUT);
    CHECK_INT(fst_loader_next(loader, 50, &tensor, &error), FST_E_TIMEOUT);
    CHECK(tensor == NULL);
    driver->hold_copies(false);
    CHECK_INT(fst_loader_wait(loader, -1, &error), FST_OK);
    fst_loader_close(loader);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

TEST(waits_with_a_limit_end_while_a_call_does_not_return)
{
    static const char *const functions[] = {"cuMemcpyHtoDAsync", "cuEventRecord", "cuEventQuery"};
    fst_model *model = gpu_open_model(fixture_tensors("hanging", 4, 3000000));
    for (size_t i = 0; i < 6; i++) {
        const gpu_fake *driver = gpu_fake_of(i / 3);
        fst_load_options options = gpu_options_on(driver->kind, 0);
        fst_loader *loader;
        fst_tensor *tensor = NULL;
        fst_load_stats stats = {.struct_size = sizeof stats};
        fst_error error;
        driver->fail(functions[i % 3], 2, HANGING);
        CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_OK);
        for (int n = 0; n < 20000 && driver->get("fail_left") > 0; n++) usleep(1000);
        CHECK_INT(driver->get("fail_left"), 0); // a thread is in the call
        CHECK_INT(fst_loader_wait(loader, 50, &error), FST_E_TIMEOUT);
        CHECK_INT(fst_loader_stats_get(loader, &stats, &error), FST_OK);
        if (i % 2 == 0) fst_loader_cancel(loader);
        driver->set("fail_code", 0);
        if (i % 2 != 0) CHECK_INT(fst_loader_next(loader, -1, &tensor, &error), FST_OK);
        fst_tensor_unref(tensor);
        fst_loader_close(loader);
        CHECK(gpu_is_clean(driver));
    }
    fst_model_close(model);
}

TEST(a_failed_mapping_of_pinned_memory_has_its_code)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_model *model = gpu_mixed_model();
    fst_load_options options = gpu_options_on(FST_DEVICE_PINNED, -1);
    fst_loader *loader;
    fst_error error = {0};
    driver->fail("cuMemHostGetDevicePointer", 1, 304);
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_DEVICE);
    CHECK_INT(error.device_code, 304);
    CHECK_CONTAINS(error.message, "mapping pinned memory to the device failed");
    driver->fail(NULL, 0, 0);
    CHECK(gpu_same_load(model, &options, NULL));
    fst_model_close(model);
}

/// A context that the program resets is not used again, because NVIDIA's driver then crashes. That
/// also holds when the program makes a new one.
TEST(a_context_that_was_reset_is_an_error)
{
    const gpu_fake *driver = gpu_fake_of(0);
    void *handle = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int (*reset)(int), (*retain)(void **, int);
    gpu_find_hook(handle, "cuDevicePrimaryCtxReset_v2", &reset);
    gpu_find_hook(handle, "cuDevicePrimaryCtxRetain", &retain);
    fst_status status;
    load_once(driver, 5, &status);
    CHECK_INT(status, FST_OK);
    fst_memory_trim(); // waits for the thread that frees what the load had
    CHECK_INT(reset(5), 0);
    for (int round = 0; round < 2; round++) {
        fst_error error = load_once(driver, 5, &status);
        CHECK_INT(status, FST_E_DEVICE);
        CHECK_CONTAINS(error.message, "the primary context of cuda:5 was reset");
        fst_memory_trim();
        CHECK_INT(retain(&context, 5), 0);
    }
    driver->set("resets", 0);
    CHECK(is_usable(driver, 5));
    fst_memory_trim();
    CHECK_INT(driver->get("locked_bytes"), 0);
}

/// The last test, because a lost device stays lost until the process ends.
TEST(a_device_lost_in_the_middle_fails_the_load)
{
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        fst_status status;
        size_t buffers;
        uint64_t bytes;
        driver->set("fail_stays", 1); // every call from the third copy on fails
        driver->fail("cuMemcpyHtoDAsync", 3, 719);
        fst_error error = load_once(driver, 0, &status);
        CHECK_INT(status, FST_E_DEVICE);
        CHECK_INT(error.device_code, 719);
        error = load_once(driver, 0, &status);
        CHECK_INT(status, FST_E_DEVICE);
        CHECK_CONTAINS(error.message, "719");
        fst_memory_trim();
        fst_memory_live(&buffers, &bytes);
        CHECK_INT(buffers, 0);
        CHECK_INT(driver->get("depth"), 0);
        // Loads to the CPU are not affected.
        fst_model *model = gpu_mixed_model();
        fst_load_options near = {.struct_size = sizeof near, .mode = FST_MODE_LOAD};
        fst_loader *loader;
        CHECK_INT(fst_loader_open(model, &near, &loader, NULL), FST_OK);
        CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
        fst_loader_close(loader);
        fst_model_close(model);
    }
}
