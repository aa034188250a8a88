// SPDX-License-Identifier: Apache-2.0
#include "gpu_fixture.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"

static gpu_fake fakes[2] = {{.kind = FST_DEVICE_CUDA, .name = "libcuda.so.1"},
                            {.kind = FST_DEVICE_HIP, .name = "libamdhip64.so"}};

void gpu_find_hook(void *handle, const char *name, void *function) {
    void *address = dlsym(handle, name);
    if (address == NULL) abort();
    memcpy(function, &address, sizeof address);
}

const gpu_fake *gpu_fake_of(size_t index) {
    gpu_fake *one = &fakes[index];
    if (one->set != NULL) return one;
    void *handle = dlopen(one->name, RTLD_NOW);
    if (handle == NULL) abort();
    gpu_find_hook(handle, "fake_gpu_set", &one->set);
    gpu_find_hook(handle, "fake_gpu_fail", &one->fail);
    gpu_find_hook(handle, "fake_gpu_get", &one->get);
    gpu_find_hook(handle, "fake_gpu_fill", &one->fill);
    gpu_find_hook(handle, "fake_gpu_hold", &one->hold);
    gpu_find_hook(handle, "fake_gpu_let_go", &one->let_go);
    gpu_find_hook(handle, "fake_gpu_hold_copies", &one->hold_copies);
    return one;
}

fst_load_options gpu_options_on(fst_device_kind kind, int32_t index) {
    return (fst_load_options){.struct_size = sizeof(fst_load_options),
                              .device = {kind, index},
                              .tuning = fixture_gds(FST_GDS_OFF)};
}

fst_tensor_view gpu_view_of(const fst_tensor *tensor) {
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    if (fst_tensor_view_get(tensor, &view, NULL) != FST_OK) abort();
    return view;
}

fst_save_tensor gpu_save_row(const fst_tensor *tensor) {
    fst_tensor_view view = gpu_view_of(tensor);
    return (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                             .name = view.name,
                             .name_size = view.name_size,
                             .dtype = view.dtype,
                             .rank = view.rank,
                             .shape = view.shape,
                             .data = view.data,
                             .device = view.device};
}

fst_model *gpu_open_model(const char *path) {
    fst_model *model = NULL;
    fst_error error;
    if (fst_model_open(path, NULL, &model, &error) == FST_OK) return model;
    fprintf(stderr, "%s\n", error.message);
    abort();
}

/// A model of many dtypes, large and small, at misaligned offsets.
fst_model *gpu_mixed_model(void) {
    static const char *const rows[] = {
        "\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}",
        "\"big\":{\"dtype\":\"F32\",\"shape\":[1500,1000],\"data_offsets\":[3,6000003]}",
        "\"half\":{\"dtype\":\"F16\",\"shape\":[1000,1001],\"data_offsets\":[6000003,8002003]}",
        "\"brain\":{\"dtype\":\"BF16\",\"shape\":[999,100],\"data_offsets\":[8002003,8201803]}",
        "\"e4\":{\"dtype\":\"F8_E4M3\",\"shape\":[70002],\"data_offsets\":[8201803,8271805]}",
        "\"four\":{\"dtype\":\"F4\",\"shape\":[100,200],\"data_offsets\":[8271805,8281805]}",
        "\"odd\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[8281805,8281806]}",
        "\"ids\":{\"dtype\":\"I16\",\"shape\":[4000],\"data_offsets\":[8281806,8289806]}",
        "\"none\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[8289806,8289806]}",
        "\"double\":{\"dtype\":\"F64\",\"shape\":[5000],\"data_offsets\":[8289806,8329806]}",
        "\"e5\":{\"dtype\":\"F8_E5M2\",\"shape\":[100002],\"data_offsets\":[8329806,8429808]}",
        "\"e8\":{\"dtype\":\"F8_E8M0\",\"shape\":[1004],\"data_offsets\":[8429808,8430812]}",
        "\"fn\":{\"dtype\":\"F8_E4M3FNUZ\",\"shape\":[1000],\"data_offsets\":[8430812,8431812]}",
        "\"fz\":{\"dtype\":\"F8_E5M2FNUZ\",\"shape\":[1000],\"data_offsets\":[8431812,8432812]}",
        "\"flags\":{\"dtype\":\"BOOL\",\"shape\":[1001],\"data_offsets\":[8432812,8433813]}",
        "\"small\":{\"dtype\":\"U8\",\"shape\":[77],\"data_offsets\":[8433813,8433890]}",
        "\"words\":{\"dtype\":\"U32\",\"shape\":[3001],\"data_offsets\":[8433890,8445894]}"};
    char json[4096] = "{";
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        strcat(json, i == 0 ? "" : ",");
        strcat(json, rows[i]);
    }
    strcat(json, "}");
    return gpu_open_model(fixture_model("mixed", json, 8445894));
}

/// Tensors of 100 floats each, none of them aligned.
fst_model *gpu_small_model(size_t count) {
    char *json = malloc(count * 80 + 100), *at = json;
    at += sprintf(at, "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}");
    for (size_t i = 0; i < count; i++)
        at +=
            sprintf(at, ",\"t%zu\":{\"dtype\":\"F32\",\"shape\":[100],\"data_offsets\":[%zu,%zu]}",
                    i, 1 + 400 * i, 1 + 400 * (i + 1));
    sprintf(at, "}");
    const char *path = fixture_model("small", json, 1 + 400 * count);
    free(json);
    return gpu_open_model(path);
}

/// True when both hold the same bytes; `far` lies on a device.
bool gpu_same_tensor(const fst_tensor *far, const fst_tensor *near) {
    fst_tensor_view a = gpu_view_of(far), b = gpu_view_of(near);
    if (a.size_bytes != b.size_bytes || a.dtype != b.dtype) return false;
    // Kernels read vectors of 16 bytes; the caller's memory can have any alignment.
    if (a.size_bytes >= 16 && a.device.kind != FST_DEVICE_CPU && (uintptr_t)a.data % 16 != 0) {
        fprintf(stderr, "%s is not aligned: %p\n", a.name, a.data);
        return false;
    }
    char *copy = malloc(a.size_bytes + 1);
    bool same = fst_tensor_read(far, copy, (size_t)a.size_bytes, NULL) == FST_OK &&
                (a.size_bytes == 0 || memcmp(copy, b.data, (size_t)a.size_bytes) == 0);
    free(copy);
    return same;
}

/// Loads by both options and compares; the device's statistics go to *stats.
bool gpu_same_load(fst_model *model, const fst_load_options *far, fst_load_stats *stats) {
    fst_load_options near = *far;
    near.device = (fst_device){FST_DEVICE_CPU, 0};
    near.mode = FST_MODE_LOAD;
    near.allocator = NULL;
    near.stream = 0;
    near.tuning = NULL;
    fst_loader *one = NULL, *two = NULL;
    fst_error error = {0};
    bool same = fst_loader_open(model, far, &one, &error) == FST_OK &&
                fst_loader_open(model, &near, &two, NULL) == FST_OK;
    for (size_t i = 0; same && i < fst_loader_tensor_count(one); i++) {
        fst_tensor *a = NULL, *b = NULL;
        same = fst_loader_next(one, -1, &a, &error) == FST_OK &&
               fst_loader_next(two, -1, &b, &error) == FST_OK && gpu_same_tensor(a, b);
        if (!same) fprintf(stderr, "tensor %zu: %s\n", i, error.message);
        fst_tensor_unref(a);
        fst_tensor_unref(b);
    }
    if (stats != NULL) stats->struct_size = sizeof *stats;
    if (same && stats != NULL) same = fst_loader_stats_get(one, stats, NULL) == FST_OK;
    if (!same) fprintf(stderr, "%s\n", error.message);
    fst_loader_close(one);
    fst_loader_close(two);
    return same;
}

/// Only the cached staging ring remains of a load, and is then freed too.
bool gpu_is_clean(const gpu_fake *driver) {
    fst_memory_trim(); // what was dropped is given back by then
    if (fixture_live_buffers() != 0 || driver->get("depth") != 0) return false;
    return driver->get("allocations") == 0 && driver->get("locked_bytes") == 0 &&
           driver->get("streams") == 0 && driver->get("events") == 0 &&
           driver->get("overwritten") == 0 && fst_memory_pinned() == 0 &&
           (driver->kind != FST_DEVICE_HIP || driver->get("last_error") == 0);
}

/// Reads everything, in slices, with and without conversions.
bool gpu_same_however(fst_model *model, const gpu_fake *driver) {
    fst_load_stats stats;
    fst_load_options options = gpu_options_on(driver->kind, 0);
    if (!gpu_same_load(model, &options, &stats)) return false;
    options.convert = 1;
    for (unsigned dtype = 0; dtype < FST_DTYPE_COUNT; dtype++) {
        options.dtype = (fst_dtype)dtype;
        if (!gpu_same_load(model, &options, &stats)) return false;
    }
    options.convert = 0;
    const uint64_t begin[] = {10, 3}, end[] = {900, 90}, column[] = {0, 7}, last[] = {1000, 8};
    const uint64_t rows[] = {1, 0}, row_end[] = {1400, 1000}, long_end[] = {1000, 998};
    size_t half, brain, big;
    if (fst_model_find(model, "half", SIZE_MAX, &half, NULL) != FST_OK ||
        fst_model_find(model, "brain", SIZE_MAX, &brain, NULL) != FST_OK ||
        fst_model_find(model, "big", SIZE_MAX, &big, NULL) != FST_OK)
        return false;
    const struct {
        size_t tensor;
        const uint64_t *begin, *end;
    } boxes[] = {{half, begin, end},   {half, column, last},   {brain, begin, end},
                 {big, rows, row_end}, {half, rows, long_end}, {big, NULL, NULL}};
    fst_part items[6];
    for (size_t i = 0; i < 6; i++)
        items[i] = (fst_part){.struct_size = sizeof(fst_part),
                              .tensor_index = boxes[i].tensor,
                              .begin = boxes[i].begin,
                              .end = boxes[i].end};
    options.parts = items;
    options.part_count = 6;
    if (!gpu_same_load(model, &options, &stats)) return false;
    options.convert = 1;
    options.dtype = FST_DTYPE_F32;
    return gpu_same_load(model, &options, &stats);
}

static const struct {
    const char *dtype;
    size_t width;
} patterns[] = {{"F64", 8},     {"F32", 4},     {"F16", 2},         {"BF16", 2},
                {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1},
                {"F8_E8M0", 1}, {"F4", 1},      {"I8", 1},          {"U8", 1},
                {"I16", 2},     {"U16", 2},     {"I32", 4},         {"U32", 4}};

const size_t gpu_pattern_count = sizeof patterns / sizeof *patterns;

const char *gpu_all_patterns(size_t index) {
    const char *name = patterns[index].dtype, *dtype = name;
    size_t width = patterns[index].width;
    size_t count = 65536, size = count * width;
    char json[200];
    snprintf(json, sizeof json,
             "{\"x\":{\"dtype\":\"%s\",\"shape\":[%zu],\"data_offsets\":[0,%zu]}}", dtype,
             strcmp(dtype, "F4") == 0 ? 2 * count : count, size);
    const char *path = fixture_model(name, json, size);
    unsigned char *bytes = calloc(count, width);
    uint64_t seed = 7;
    for (size_t i = 0; i < count; i++) {
        uint64_t value = fixture_random(&seed) & fixture_random(&seed); // half of the bits are 0
        memcpy(bytes + i * width, &value, width);
        for (size_t k = 0; k < 2 && k < width; k++)
            bytes[i * width + width - 1 - k] = (unsigned char)(i >> (8 - 8 * k));
    }
    FILE *file = fopen(path, "r+b");
    if (file == NULL || fseek(file, -(long)size, SEEK_END) != 0 ||
        fwrite(bytes, 1, size, file) != size || fclose(file) != 0)
        abort();
    free(bytes);
    return path;
}

bool gpu_restart_with(const char *name, const char *value) {
    pid_t child = fork();
    if (child == 0) {
        setenv(name, value, 1);
        execl("/proc/self/exe", "again", (char *)NULL);
        _exit(99);
    }
    int status = 0;
    waitpid(child, &status, 0);
    // Under an emulator a program may not be able to start itself.
    if (WIFEXITED(status) && WEXITSTATUS(status) == 99)
        check_skip_reason = "the program can't start itself here";
    return WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 99);
}
