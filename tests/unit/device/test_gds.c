// SPDX-License-Identifier: Apache-2.0
/// GPUDirect Storage with fake libraries: used if it works, otherwise replaced by normal reads.
#include <dlfcn.h>
#include <fastsafetensors.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "fixture.h"
#include "gpu/gpu.h"
#include "gpu_fixture.h"
#include "io/io.h"

static void (*set)(const char *name, long value);
static long (*get)(const char *name);

/// Everything that cuFile needs is there, except for a kernel module at `module`.
static void fake_system(const char *module) {
    fsti_gds_fake_system(&(fsti_gds_system){
        .module = module, .module_list = "/proc/self", .udev = "/proc/self", .start_ms = 200});
}

static void find_library(const char *name) {
    void *handle = dlopen(name, RTLD_NOW);
    if (handle == NULL) abort();
    gpu_find_hook(handle, "fake_gds_set", &set);
    gpu_find_hook(handle, "fake_gds_get", &get);
    fake_system("/proc/self"); // as if nvidia-fs were loaded
    fsti_gds_clear_verdicts();
}

/// A file on a file system that takes O_DIRECT, not in the page cache, whose tensors begin at
/// `place` modulo 16 (8 or 0); NULL if no tensor fits.
static fst_model *cold_model_at(size_t place) {
    // Offsets that GPU kernels accept, because misaligned tensors are scattered and cannot be read
    // directly.
    char json[1200] = "{";
    for (size_t i = 0; i < 8; i++)
        sprintf(json + strlen(json),
                "%s\"t%zu\":{\"dtype\":\"U8\",\"shape\":[3000000],\"data_offsets\":[%zu,%zu]}",
                i > 0 ? "," : "", i, i * 3000000, (i + 1) * 3000000);
    strcat(json, "}");
    while ((strlen(json) + 8) % 16 != place) strcat(json, " ");
    const char *path = fixture_model("cold", json, 24000000);
    fsti_file *file;
    if (fsti_file_open(path, &file, NULL) != FST_OK) abort();
    char reason[160];
    bool direct = fsti_io_engine_direct.usable(file, reason, sizeof reason);
    fsti_file_unref(file);
    fixture_evict(path);
    if (!direct) check_skip_reason = "the temporary folder takes no O_DIRECT";
    return direct ? gpu_open_model(path) : NULL;
}
static fst_model *cold_model(void) { return cold_model_at(0); }

TEST(absent_bytes_are_read_by_gpudirect)
{
    static const char *const names[] = {"libcufile.so.0", "libhipfile.so"};
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        find_library(names[k]);
        set("mode", 0);
        for (int way = FST_GDS_AUTO; way <= FST_GDS_STRICT; way++) {
            fst_model *model = cold_model();
            if (model == NULL) return;
            fst_load_options options = gpu_options_on(driver->kind, 0);
            fst_load_stats stats;
            long reads = get("reads");
            options.tuning = fixture_gds((fst_gds)way);
            CHECK(gpu_same_load(model, &options, &stats));
            if (way == FST_GDS_OFF) {
                CHECK_INT(stats.gds_bytes, 0);
                CHECK(strstr(stats.reason, "gds: switched off") != NULL);
                CHECK_INT(get("reads"), reads);
            } else {
                // All of it, except for the bytes outside whole pages.
                CHECK(stats.gds_bytes >= 24000000 - 8192);
                CHECK(stats.device_bytes <= 8192 && stats.device_copies <= 2);
                CHECK(strstr(stats.engine, "gds") != NULL);
                CHECK(get("reads") - reads <= (long)stats.chunk_count + 1);
            }
            fst_model_close(model);
            CHECK_INT(get("handles"), 0);
        }
        CHECK(gpu_is_clean(driver));
    }
}

/// The page cache is filled by reads of the CPU; strict GPUDirect Storage takes precedence.
TEST(a_load_that_keeps_the_cache_does_not_use_gpudirect)
{
    const gpu_fake *driver = gpu_fake_of(0);
    find_library("libcufile.so.0");
    set("mode", 0);
    for (int strict = 0; strict < 2; strict++) {
        fst_model *model = cold_model();
        if (model == NULL) return;
        fst_load_options options = gpu_options_on(driver->kind, 0);
        fst_load_stats stats;
        options.cache = FST_CACHE_KEEP;
        options.tuning = fixture_gds(strict ? FST_GDS_STRICT : FST_GDS_AUTO);
        CHECK(gpu_same_load(model, &options, &stats));
        CHECK_INT(stats.gds_bytes > 0, strict);
        const char *reason = "gds: switched off, because the page cache is to be filled";
        CHECK_INT(strstr(stats.reason, reason) == NULL, strict);
        fst_model_close(model);
    }
}

TEST(cached_bytes_use_the_staging_ring)
{
    const gpu_fake *driver = gpu_fake_of(0);
    find_library("libcufile.so.0");
    set("mode", 0);
    fst_model *model = cold_model();
    if (model == NULL) return;
    fixture_warm(fixture_path("cold"));
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    options.tuning = fixture_gds(FST_GDS_AUTO);
    fst_load_stats stats;
    CHECK(gpu_same_load(model, &options, &stats));
    CHECK_INT(stats.gds_bytes, 0);
    CHECK_INT(stats.device_bytes, 24000000);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

TEST(compatibility_mode_is_refused)
{
    const gpu_fake *driver = gpu_fake_of(0);
    find_library("libcufile.so.0");
    for (long mode = 1; mode <= 3; mode += 2) {
        set("mode", mode);
        fsti_gds_clear_verdicts();
        fst_model *model = cold_model();
        if (model == NULL) return;
        fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
        options.tuning = fixture_gds(FST_GDS_AUTO);
        fst_load_stats stats;
        long reads = get("reads"), allocations = driver->get("alloc_calls");
        CHECK(gpu_same_load(model, &options, &stats));
        long each = driver->get("alloc_calls") - allocations;
        for (int round = 0; round < 3; round++) {
            // The verdict is cached, also for other files on the same file system.
            fst_model *again = cold_model();
            CHECK(gpu_same_load(again, &options, &stats));
            fst_model_close(again);
        }
        CHECK(get("reads") - reads <= 3);
        // Memory for the tensors, and no memory for a probe.
        CHECK_INT(driver->get("alloc_calls") - allocations, 4 * each);
        CHECK_INT(each, 1);
        CHECK_INT(stats.gds_bytes, 0);
        CHECK(strstr(stats.reason, mode == 1 ? "compatibility" : "rejects the file") != NULL);
        options.tuning = fixture_gds(FST_GDS_STRICT);
        fst_loader *loader = NULL;
        fst_error error;
        CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_UNSUPPORTED);
        CHECK(loader == NULL && strstr(error.message, "gds") != NULL);
        fst_model_close(model);
    }
    set("mode", 0);
    CHECK(gpu_is_clean(driver));
}

static int given, taken_back;

/// As a framework's caching allocator: at a multiple of 512 within what the driver gave.
static void *give_memory(void *context, size_t size, size_t alignment) {
    fsti_buffer *memory;
    fsti_buffer **place = context;
    (void)alignment;
    if (fsti_buffer_device((*place)->device, size + 512, &memory, NULL) != FST_OK) return NULL;
    place[++given] = memory;
    return memory->data + 512;
}

static void take_memory(void *context, void *pointer, size_t size) {
    fsti_buffer **place = context;
    (void)size;
    for (int i = 1; i <= given; i++) {
        if (place[i] == NULL || place[i]->data + 512 != pointer) continue;
        fsti_buffer_unref(place[i]);
        place[i] = NULL;
        taken_back++;
    }
}

TEST(framework_memory_is_a_gpudirect_target)
{
    const gpu_fake *driver = gpu_fake_of(0);
    find_library("libcufile.so.0");
    set("mode", 0);
    fst_model *model = cold_model();
    if (model == NULL) return;
    fsti_device *device;
    fsti_buffer *buffers[16] = {0};
    CHECK_INT(fsti_device_get((fst_device){FST_DEVICE_CUDA, 0}, &device, NULL), FST_OK);
    CHECK_INT(fsti_buffer_device(device, 4096, &buffers[0], NULL),
              FST_OK); // the buffer's device is reported
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    fst_allocator allocator = {.struct_size = sizeof allocator,
                               .context = buffers,
                               .allocate = give_memory,
                               .release = take_memory};
    options.allocator = &allocator;
    options.tuning = fixture_gds(FST_GDS_STRICT);
    fst_load_stats stats;
    CHECK(gpu_same_load(model, &options, &stats));
    CHECK(stats.gds_bytes >= 24000000 - 8192);
    CHECK(given > 0 && taken_back == given);
    fsti_buffer_unref(buffers[0]);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

TEST(scattered_tensors_are_refused_with_gds_required)
{
    const gpu_fake *driver = gpu_fake_of(0);
    find_library("libcufile.so.0");
    set("mode", 0);
    fst_model *model = cold_model_at(8);
    if (model == NULL) return;
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    fst_loader *loader = NULL;
    fst_load_stats stats;
    fst_error error;
    options.tuning = fixture_gds(FST_GDS_STRICT);
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_UNSUPPORTED);
    CHECK(loader == NULL);
    CHECK_CONTAINS(error.message, "gds (GPUDirect Storage) can't be used: all tensors are");
    options.tuning = fixture_gds(FST_GDS_AUTO);
    CHECK(gpu_same_load(model, &options, &stats));
    CHECK_INT(stats.gds_bytes, 0);
    CHECK_CONTAINS(stats.reason, "gds: all tensors are");
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

TEST(concurrent_readers_do_not_change_the_verdict)
{
    const gpu_fake *driver = gpu_fake_of(0);
    find_library("libcufile.so.0");
    for (long mode = 0; mode < 2; mode++) {
        fst_model *model = cold_model();
        if (model == NULL) return;
        fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
        fst_load_stats stats;
        set("mode", mode);
        options.tuning = fixture_gds(FST_GDS_AUTO);
        set("noisy", 1000);
        fsti_gds_clear_verdicts();
        CHECK(gpu_same_load(model, &options, &stats));
        CHECK_INT(stats.gds_bytes, 0);
        CHECK_CONTAINS(stats.reason, "reads of other threads");
        // A failed probe is not cached, and other processes' reads do not prevent a later success.
        fixture_evict(fixture_path("cold"));
        set("noisy", 5);
        CHECK(gpu_same_load(model, &options, &stats));
        CHECK_INT(stats.gds_bytes > 0, mode == 0);
        CHECK_CONTAINS(stats.reason, mode == 0 ? "went directly to" : "compatibility");
        fixture_evict(fixture_path("cold"));
        CHECK(gpu_same_load(model, &options, &stats)); // as is remembered now
        CHECK_CONTAINS(stats.reason, mode == 0 ? "went directly to" : "compatibility");
        fst_model_close(model);
    }
    set("mode", 0);
    set("noisy", 0);
    fsti_gds_clear_verdicts();
    CHECK(gpu_is_clean(driver));
}

TEST(cufile_is_not_loaded_without_nvidia_fs)
{
    const gpu_fake *driver = gpu_fake_of(0);
    find_library("libcufile.so.0");
    set("mode", 1);
    fake_system("/nonexistent");
    fst_model *model = cold_model();
    if (model == NULL) return;
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    options.tuning = fixture_gds(FST_GDS_AUTO);
    fst_load_stats stats;
    long opens = get("opens"), reads = get("reads");
    CHECK(gpu_same_load(model, &options, &stats));
    CHECK_INT(get("opens"), opens);
    CHECK_INT(get("reads"), reads);
    CHECK(strstr(stats.reason, "nvidia-fs is not loaded") != NULL);
    fst_model_close(model);
    set("mode", 0);
    CHECK(gpu_is_clean(driver));
}

TEST(failed_and_short_gpudirect_reads)
{
    const gpu_fake *driver = gpu_fake_of(0);
    find_library("libcufile.so.0");
    for (long nth = 2; nth < 9; nth++) {
        fst_model *model = cold_model();
        if (model == NULL) return;
        fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
        options.tuning = fixture_gds(FST_GDS_AUTO);
        fst_load_stats stats;
        set("short_at", nth);
        CHECK(gpu_same_load(model, &options, &stats)); // continues where the read ended
        CHECK(stats.gds_bytes >= 24000000 - 8192);
        fixture_evict(fixture_path("cold"));
        set("short_at", 0);
        set("fail_at", nth);
        CHECK(gpu_same_load(model, &options, &stats)); // the rest through the ring
        CHECK(stats.gds_bytes < 24000000 - 8192 && stats.device_bytes > 1000000);
        CHECK(strstr(stats.reason, "gds: stopped: a read failed: Input/output error") != NULL);
        fixture_evict(fixture_path("cold"));
        set("fail_at", nth);
        options.tuning = fixture_gds(FST_GDS_STRICT);
        fst_loader *loader = NULL;
        fst_error error = {0};
        fst_status status = fst_loader_open(model, &options, &loader, &error);
        if (status == FST_OK) status = fst_loader_wait(loader, -1, &error);
        set("fail_at", 0);
        fst_loader_close(loader);
        CHECK_INT(status, FST_E_IO);
        CHECK(strstr(error.message, "gds") != NULL && error.byte_offset > 0);
        fst_model_close(model);
        CHECK_INT(get("handles"), 0);
    }
    CHECK(gpu_is_clean(driver));
}

static int meet_library(const char *expected) {
    fake_system(getenv("MEET_NO_MODULE") == NULL ? "/proc/self" : "/nonexistent");
    fst_engine_info infos[16] = {FST_STRUCT_INIT(fst_engine_info)};
    size_t count = 0;
    const char *path = fixture_tensors("any", 1, 100000);
    if (fst_engines_probe(path, infos, 16, &count, NULL) != FST_OK || count != 9) return 1;
    for (size_t i = 0; i < count; i++)
        if (strstr(infos[i].reason, expected) != NULL) return 0;
    for (size_t i = 0; i < count; i++) fprintf(stderr, "%s: %s\n", infos[i].name, infos[i].reason);
    return 1;
}

__attribute__((constructor)) static void meet_if_asked(void) {
    const char *expected = getenv("MEET_LIBRARY");
    if (expected != NULL) exit(meet_library(expected));
}

/// Runs this program again with a setting; true when it met what was expected.
static bool meets(const char *name, const char *value, const char *expected) {
    setenv("MEET_LIBRARY", expected, 1);
    bool met = gpu_restart_with(name, value);
    unsetenv("MEET_LIBRARY");
    return met;
}

TEST(gpudirect_verdicts_have_reasons)
{
    CHECK(meets("LD_LIBRARY_PATH", "/nonexistent", "no driver: libcuda.so.1 was not found"));
    CHECK(meets("LD_LIBRARY_PATH", "/nonexistent", "no cuda device"));
    CHECK(meets("FAKE_GDS_MODE", "2", "could not be started (error 5001)"));
    CHECK(meets("MEET_NO_MODULE", "1", "nvidia-fs is not loaded"));
    CHECK(meets("FAKE_GPU_INIT_CODE", "100", "sees no device"));
    CHECK(meets("FAKE_GPU_MEMORY", "1000", "out of device memory"));
    CHECK(meets("FAKE_GPU_INTEGRATED", "1", "shared memory"));
    fst_model *model = cold_model();
    if (model == NULL) return;
    fst_model_close(model);
    CHECK(meets("FAKE_GDS_MODE", "1", "compatibility mode"));
    CHECK(meets("FAKE_GDS_MODE", "0", "went directly to the device"));
}

// ---- the start of the library, each case in its own process ----

/// Whether GPUDirect Storage is refused for a reason with `part` in it.
static bool is_refused(const char *part) {
    char reason[192] = "";
    if (!fsti_gds_usable(false, true, reason, sizeof reason) && strstr(reason, part) != NULL)
        return true;
    fprintf(stderr, "%s (expected: %s)\n", reason, part);
    return false;
}

static atomic_bool other_loaded;
static void load_nothing(void) {}

/// The library does not return: the first request waits 200 ms, later ones do not, and neither
/// other libraries nor fork() wait for it.
static bool meet_hang(void) {
    const char *expected = "libcufile.so.0 has not started within 200 ms";
    bool good = is_refused(expected);
    for (int i = 0; i < 100 && good; i++) good = is_refused(expected);
    fsti_library_once(&other_loaded, load_nothing);
    pid_t child = fork();
    if (child == 0) _exit(is_refused(expected) ? 0 : 1);
    int status = 1;
    waitpid(child, &status, 0);
    return good && atomic_load(&other_loaded) && status == 0 && get("opens") == 1;
}

/// A library that starts late can be used from then on.
static bool meet_late(void) {
    char reason[192];
    if (!is_refused("has not started within 200 ms")) return false;
    for (int i = 0; i < 3000; i++) {
        if (fsti_gds_usable(false, true, reason, sizeof reason)) return get("opens") == 1;
        usleep(10000);
    }
    return false;
}

static int meet_start(const char *kind) {
    find_library("libcufile.so.0");
    if (strcmp(kind, "hang") == 0) return meet_hang() ? 0 : 1;
    if (strcmp(kind, "late") == 0) return meet_late() ? 0 : 1;
    fsti_gds_fake_system(&(fsti_gds_system){.module = "/proc/self", .module_list = "/nonexistent"});
    bool refused = is_refused("was not started: it needs /nonexistent, which does not exist here");
    return refused && get("opens") == 0 ? 0 : 1;
}

__attribute__((constructor)) static void start_if_asked(void) {
    const char *kind = getenv("MEET_START");
    if (kind != NULL) exit(meet_start(kind));
}

TEST(a_library_that_does_not_start_is_refused)
{
    setenv("FAKE_GDS_MODE", "4", 1);
    setenv("FAKE_GDS_START_MS", "100000000", 1);
    CHECK(gpu_restart_with("MEET_START", "hang"));
    setenv("FAKE_GDS_START_MS", "700", 1);
    CHECK(gpu_restart_with("MEET_START", "late"));
    unsetenv("FAKE_GDS_START_MS");
    unsetenv("FAKE_GDS_MODE");
    CHECK(gpu_restart_with("MEET_START", "no list of modules"));
}

TEST(containers_without_udev_are_reported)
{
    find_library("libcufile.so.0");
    fst_model *model = cold_model();
    if (model == NULL) return;
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    fst_loader *loader = NULL;
    fst_error error;
    set("mode", 3);
    options.tuning = fixture_gds(FST_GDS_STRICT);
    fsti_gds_fake_system(&(fsti_gds_system){
        .module = "/proc/self", .module_list = "/proc/self", .udev = "/nonexistent"});
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_UNSUPPORTED);
    CHECK_CONTAINS(error.message, "rejects the file or its file system (error 5027). /run/udev is "
                                  "missing here, which cuFile needs: mount it into the container");
    fsti_gds_clear_verdicts();
    fake_system("/proc/self");
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_UNSUPPORTED);
    CHECK(strstr(error.message, "udev") == NULL);
    set("mode", 0);
    fsti_gds_clear_verdicts();
    fst_model_close(model);
}
