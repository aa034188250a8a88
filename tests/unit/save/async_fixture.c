// SPDX-License-Identifier: Apache-2.0
/// See async_fixture.h.
#include "async_fixture.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fastsafetensors.h"

#define TENSOR_BYTES_MAX (9 * MIB + 4321)

/// Tensors of odd sizes, so that blocks hold parts of several.
const uint64_t async_sizes[TENSOR_COUNT] = {1,     4095,   3 * MIB + 1, 0, 9 * MIB + 4321,
                                            70001, 2 * MIB};
static unsigned char *memory[TENSOR_COUNT];
static const char *const async_names[TENSOR_COUNT] = {"a", "b", "c", "d", "e", "f", "g"};

uint64_t async_total_bytes(void) {
    uint64_t sum = 0;
    for (int i = 0; i < TENSOR_COUNT; i++) sum += async_sizes[i];
    return sum;
}

void async_fill(unsigned char value) {
    for (int i = 0; i < TENSOR_COUNT; i++) {
        if (memory[i] == NULL) memory[i] = malloc(TENSOR_BYTES_MAX);
        memset(memory[i], value, async_sizes[i]);
    }
}

void async_make_tensors(fst_save_tensor *out) {
    for (int i = 0; i < TENSOR_COUNT; i++)
        out[i] = (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                                   .name = async_names[i],
                                   .name_size = SIZE_MAX,
                                   .dtype = FST_DTYPE_U8,
                                   .rank = 1,
                                   .shape = &async_sizes[i],
                                   .data = memory[i]};
}

fst_save_options async_save_options(void) {
    return (fst_save_options){.struct_size = sizeof(fst_save_options)};
}

fst_async_options async_options_of(fst_stage stage) {
    return (fst_async_options){.struct_size = sizeof(fst_async_options), .stage = stage};
}

fst_status async_start(const char *path, const fst_async_options *options, fst_async_save **out) {
    fst_save_tensor tensors[TENSOR_COUNT];
    async_make_tensors(tensors);
    return fst_async_save_start(path, tensors, TENSOR_COUNT, options, out, NULL);
}

fst_async_stats async_stats_of(fst_async_save *save) {
    fst_async_stats stats = {.struct_size = sizeof stats};
    if (fst_async_save_stats_get(save, &stats, NULL) != FST_OK) stats.bytes_total = UINT64_MAX;
    return stats;
}

/// The byte that every tensor of a model is made of; -1: mixed, missing, or unreadable.
int async_value_at(const char *path) {
    fst_model *model;
    fst_loader *loader;
    int value = -2;
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) return -1;
    if (fst_model_tensor_count(model) != TENSOR_COUNT ||
        fst_loader_open(model, NULL, &loader, NULL) != FST_OK)
        loader = NULL;
    for (int i = 0; loader != NULL && i < TENSOR_COUNT; i++) {
        fst_tensor *tensor;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        if (fst_loader_tensor(loader, async_names[i], SIZE_MAX, -1, &tensor, NULL) != FST_OK)
            value = -1;
        if (value == -1 || fst_tensor_view_get(tensor, &view, NULL) != FST_OK) break;
        const unsigned char *bytes = view.data;
        for (uint64_t at = 0; at < async_sizes[i]; at++) {
            if (value == -2) value = bytes[at];
            if (bytes[at] != value) value = -1;
        }
        fst_tensor_unref(tensor);
    }
    if (loader != NULL) fst_loader_close(loader);
    fst_model_close(model);
    return value;
}

fst_status async_save_sync(const char *path) {
    fst_save_tensor tensors[TENSOR_COUNT];
    async_make_tensors(tensors);
    return fst_save(path, tensors, TENSOR_COUNT, NULL, NULL, NULL);
}

atomic_bool async_may_write;

int async_hold(void *context, uint64_t done, uint64_t total, size_t tensors_done,
               size_t tensors_total) {
    (void)done, (void)total, (void)tensors_done, (void)tensors_total;
    atomic_bool *gate = context == NULL ? &async_may_write : context;
    while (!atomic_load(gate)) usleep(1000);
    return 0;
}

void *async_release_soon(void *unused) {
    usleep(50000);
    atomic_store(&async_may_write, true);
    return unused;
}
