// SPDX-License-Identifier: Apache-2.0
/// Failures of GPUs, with fake drivers: every failure is an error with its reason, and nothing
/// leaks.
#include <dlfcn.h>
#include <fastsafetensors.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "fixture.h"
#include "gpu/gpu.h"
#include "gpu_fixture.h"

TEST(full_device_error_has_sizes)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_memory_trim();
    driver->set("memory", 20 << 20);
    fst_model *model = gpu_open_model(fixture_tensors("tensors", 32, 3000000));
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    fst_loader *loader = NULL;
    fst_error error;
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_NO_MEMORY);
    CHECK(loader == NULL && error.device_code == 2);
    CHECK(strstr(error.message, "96006144 bytes needed") != NULL ||
          strstr(error.message, "bytes needed, ") != NULL);
    CHECK(strstr(error.message, "available on cuda:0") != NULL);
    // Some drivers report more than there is.
    driver->set("reported_free", (long)-4096);
    fst_device_info info = FST_STRUCT_INIT(fst_device_info);
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_NO_MEMORY);
    CHECK(strstr(error.message, " 20971520 of 20971520 available on cuda:0") != NULL);
    CHECK_INT(fst_device_info_get(options.device, &info, &error), FST_OK);
    CHECK_INT(info.memory_free, info.memory_bytes);
    driver->set("reported_free", 0);
    // A later batch, in the middle of a stream.
    options.budget_bytes = 16 << 20;
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_OK);
    fst_tensor *held[32] = {0};
    fst_status status = FST_OK;
    size_t count = 0;
    while (count < 32 && status == FST_OK)
        status = fst_loader_next(loader, -1, &held[count++], &error);
    CHECK_INT(status, FST_E_NO_MEMORY);
    fst_loader_close(loader);
    for (size_t i = 0; i < 32; i++) fst_tensor_unref(held[i]);
    fst_model_close(model);
    driver->set("memory", 1l << 32);
    CHECK(gpu_is_clean(driver));
}

TEST(every_call_may_fail)
{
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        fst_model *model = gpu_mixed_model();
        CHECK_INT(fst_device_count(driver->kind), 2); // a driver that does not start stays so
        bool ended = false;
        for (long nth = 1; !ended && nth < 3000; nth += check_share() > 1 ? 1 + nth / 5
                                                        : nth < 60        ? 1
                                                                          : 1 + nth / 20) {
            fst_load_options options = gpu_options_on(driver->kind, 0);
            options.thread_count = 3;
            options.convert = nth % 2 == 0;
            options.dtype = FST_DTYPE_F32;
            fst_loader *loader = NULL;
            fst_error error = {0};
            driver->fail(NULL, nth, nth % 5 == 0 ? 2 : 719);
            fst_status status = fst_loader_open(model, &options, &loader, &error);
            if (status == FST_OK) status = fst_loader_wait(loader, -1, &error);
            fst_loader_close(loader);
            ended = driver->get("fail_left") > 0;
            driver->fail(NULL, 0, 0);
            if (status != FST_OK) {
                CHECK(status == FST_E_DEVICE || status == FST_E_NO_MEMORY);
                CHECK(error.device_code != 0 && error.message[0] != '\0');
            }
        }
        CHECK(ended);
        CHECK(gpu_same_however(model, driver)); // and it is usable afterwards
        fst_model_close(model);
        CHECK(gpu_is_clean(driver));
    }
}

/// Sends half a slot, queries its arrival, and writes to the slot as soon as one of these calls has
/// failed. True if none failed.
static bool send_and_reuse(fsti_device *device, uint64_t target) {
    fsti_staging_ring *ring = NULL;
    char *data = NULL;
    bool arrived = false;
    fsti_copy_list parcel = {.copy_count = 1};
    parcel.copies[0].target = target;
    parcel.copies[0].size = 1 << 20;
    if (fsti_staging_acquire(device, &ring, NULL) != FST_OK) abort();
    if (fsti_staging_slot(ring, 0, &data, NULL) != FST_OK) abort();
    memset(data, 1, 1 << 20);
    fst_status status = fsti_staging_send(ring, 0, &parcel, NULL);
    if (status == FST_OK) status = fsti_staging_arrived(ring, 0, false, &arrived, NULL);
    if (status == FST_OK) status = fsti_staging_arrived(ring, 0, true, &arrived, NULL);
    memset(data, 2, 1 << 20);
    fsti_staging_drain(ring);
    fsti_staging_release(ring);
    return status == FST_OK;
}

/// The device may still read a slot when a question whether it has done so fails, or what was
/// queued last. The stand-in counts copies whose source was written to before they were done.
TEST(staging_buffers_of_failed_calls_are_not_read)
{
    static const char *const calls[] = {"cuEventQuery", "cuEventRecord", "cuEventSynchronize"};
    const gpu_fake *driver = gpu_fake_of(0);
    fsti_device *device = NULL;
    fsti_buffer *buffer = NULL;
    CHECK_INT(fsti_device_get((fst_device){FST_DEVICE_CUDA, 0}, &device, NULL), FST_OK);
    CHECK_INT(fsti_buffer_device(device, 1 << 20, &buffer, NULL), FST_OK);
    CHECK_INT(fsti_device_enter(device, NULL), FST_OK);
    driver->set("delay_us", 20000);
    CHECK(send_and_reuse(device, (uintptr_t)buffer->data));
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        driver->fail(calls[i], 1, 719);
        bool is_whole = send_and_reuse(device, (uintptr_t)buffer->data);
        CHECK(driver->get("fail_left") > 0 || !is_whole);
        driver->fail(NULL, 0, 0);
        CHECK_INT(driver->get("overwritten"), 0);
    }
    driver->set("delay_us", 0);
    fsti_device_leave(device);
    fsti_buffer_unref(buffer);
    CHECK(gpu_is_clean(driver));
}

TEST(refused_device_keeps_no_memory)
{
    static const char *const calls[] = {"cuCtxPushCurrent", "hipGetDevice", "hipSetDevice"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        const gpu_fake *driver = gpu_fake_of(i == 0 ? 0 : 1);
        fst_model *model = gpu_mixed_model();
        bool ended = false;
        for (long nth = 1; !ended; nth++) {
            fst_load_options options = gpu_options_on(driver->kind, 0);
            fst_loader *loader = NULL;
            options.thread_count = 1;
            driver->fail(calls[i], nth, 719);
            fst_status status = fst_loader_open(model, &options, &loader, NULL);
            if (status == FST_OK) status = fst_loader_wait(loader, -1, NULL);
            fst_loader_close(loader);
            CHECK(gpu_is_clean(driver)); // with the call that fails in it
            ended = driver->get("fail_left") > 0;
            driver->fail(NULL, 0, 0);
            CHECK(status == FST_OK || status == FST_E_DEVICE);
        }
        fst_model_close(model);
    }
}

TEST(contexts_may_be_refused)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_model *model = gpu_mixed_model();
    for (long nth = 1; nth < 8; nth++) {
        fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
        fst_loader *loader = NULL;
        fst_error error;
        options.thread_count = 1;
        driver->fail("cuCtxPushCurrent", nth, 999);
        fst_status status = fst_loader_open(model, &options, &loader, &error);
        if (status == FST_OK) status = fst_loader_wait(loader, -1, &error);
        driver->fail(NULL, 0, 0);
        fst_loader_close(loader);
        CHECK(status == FST_OK || (status == FST_E_DEVICE && error.device_code == 999));
        CHECK(status != FST_OK || nth > 1);
        CHECK_INT(driver->get("depth"), 0);
    }
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

TEST(every_allocation_may_fail)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_model *model = gpu_mixed_model();
    bool ended = false;
    for (long nth = 0; !ended && nth < 500; nth = check_next(nth)) {
        fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
        options.thread_count = 2;
        options.convert = 1;
        options.dtype = FST_DTYPE_F16;
        fst_loader *loader = NULL;
        fsti_alloc_fail_after(nth);
        fst_status status = fst_loader_open(model, &options, &loader, NULL);
        if (status == FST_OK) status = fst_loader_wait(loader, -1, NULL);
        fst_loader_close(loader);
        fsti_alloc_fail_after(-1);
        ended = status == FST_OK;
        CHECK(ended || status == FST_E_NO_MEMORY);
        if (nth % 8 == 0) fst_memory_trim();
    }
    CHECK(ended);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

static int stop_at(void *context, uint64_t done, uint64_t total, size_t tensors, size_t all) {
    (void)total, (void)tensors, (void)all;
    return done >= *(uint64_t *)context;
}

TEST(cancelling_and_closing_in_flight)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_model *model = gpu_open_model(fixture_tensors("tensors", 16, 2000000));
    uint64_t seed = 1;
    driver->set("delay_us", 500);
    for (unsigned round = 0; round < CHECK_ROUNDS(60); round++) {
        fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
        uint64_t limit = fixture_random(&seed) % 32000000;
        options.progress = stop_at;
        options.progress_context = &limit;
        fst_loader *loader;
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        if (round % 3 == 0) usleep((useconds_t)(fixture_random(&seed) % 3000));
        if (round % 3 == 1) fst_loader_cancel(loader);
        if (round % 3 == 2) {
            fst_status status = fst_loader_wait(loader, -1, NULL);
            CHECK(status == FST_E_CANCELLED || status == FST_OK);
        }
        fst_loader_close(loader);
    }
    fst_model_close(model);
    driver->set("delay_us", 0);
    CHECK(gpu_is_clean(driver));
}

// ---- unusable drivers, each in its own process ----

/// What the new process finds; its exit status.
static int meet_driver(const char *expected) {
    fst_device_info info = {.struct_size = sizeof info};
    fst_error error = {0};
    bool is_hip = getenv("MEET_HIP") != NULL;
    fst_device device = {is_hip ? FST_DEVICE_HIP : FST_DEVICE_CUDA, 0};
    fst_status status = fst_device_info_get(device, &info, &error);
    if (strcmp(expected, "unified") == 0) return status == FST_OK && info.unified ? 0 : 1;
    if (strcmp(expected, "host") == 0) {
        fst_model *model = gpu_mixed_model();
        const gpu_fake *driver = gpu_fake_of(is_hip ? 1 : 0);
        bool good = status == FST_OK && !info.converts && info.converts_reason[0] != '\0' &&
                    gpu_same_however(model, driver) && driver->get("launches") == 0;
        fst_model_close(model);
        model = gpu_small_model(3000); // more plain pieces than a parcel has copies
        fst_load_options options = gpu_options_on(device.kind, 0);
        fst_load_stats stats;
        good = good && gpu_same_load(model, &options, &stats) && stats.device_copies >= 3000;
        fst_model_close(model);
        return good && gpu_is_clean(driver) ? 0 : 1;
    }
    bool good = status == FST_E_UNSUPPORTED && strstr(error.message, expected) != NULL &&
                fst_device_count(device.kind) == 0;
    if (!good) fprintf(stderr, "%d: %s\n", (int)status, error.message);
    return good ? 0 : 1;
}

__attribute__((constructor)) static void meet_if_asked(void) {
    const char *expected = getenv("MEET_DRIVER");
    if (expected != NULL) exit(meet_driver(expected));
}

/// Runs this program again with a setting; true when it met what was expected.
static bool meets(const char *name, const char *value, const char *expected) {
    setenv("MEET_DRIVER", expected, 1);
    bool met = gpu_restart_with(name, value);
    unsetenv("MEET_DRIVER");
    return met;
}

TEST(unusable_drivers)
{
    CHECK(meets("LD_LIBRARY_PATH", "/nonexistent", "no driver: libcuda.so.1 was not found"));
    CHECK(meets("FAKE_GPU_VERSION", "10010", "too old"));
    CHECK(meets("FAKE_GPU_INIT_CODE", "100", "sees no device"));
    CHECK(meets("FAKE_GPU_DEVICES", "0", "sees no device"));
    CHECK(meets("FAKE_GPU_INIT_CODE", "999",
                "could not be started: cuInit failed: a fake error (error 999)"));
    CHECK(meets("FAKE_GPU_INTEGRATED", "1", "unified"));
    CHECK(meets("FAKE_GPU_NO_KERNELS", "1", "host"));
    setenv("MEET_HIP", "1", 1);
    CHECK(meets("FAKE_HIPRTC_REFUSE", "1", "host"));
    CHECK(meets("FAKE_GPU_DEVICES", "0", "sees no device"));
    unsetenv("MEET_HIP");
}

TEST(forked_children_are_refused)
{
    fst_model *model = gpu_open_model(fixture_tensors("little", 8, 300000));
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    fst_loader *loader;
    fst_tensor *tensor;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    fst_loader_close(loader);
    pid_t child = fork();
    if (child == 0) {
        fst_error error;
        fst_status status = fst_loader_open(model, &options, &loader, &error);
        bool good = status == FST_E_UNSUPPORTED && strstr(error.message, "fork") != NULL;
        fst_tensor_unref(tensor); // the parent's memory: left alone
        fst_memory_trim();
        good = good && fst_device_count(FST_DEVICE_CUDA) == 0;
        _exit(good ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    fst_tensor_unref(tensor);
    fst_model_close(model);
    CHECK(gpu_is_clean(gpu_fake_of(0)));
}
