// SPDX-License-Identifier: Apache-2.0
/// compare_loads MODEL DTYPE BUDGET: loads a model to the CPU and to "cuda", and compares bytes.
///
/// DTYPE: "-" or the type to convert to. BUDGET: bytes, 0 for none. If the model has a tensor
/// "rows", its middle rows are loaded as well. Prints counts.
#include <fastsafetensors.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TENSOR_COUNT_MAX 4096

static void check(fst_status status, const char *what, const fst_error *error) {
    if (status == FST_OK) return;
    printf("%s: %s\n", what, error->message);
    exit(1);
}

/// The bytes of one tensor, copied to memory of the program.
typedef struct copy {
    char *data;
    uint64_t size_bytes;
    fst_dtype dtype;
} copy;

static size_t load(fst_model *model, const fst_load_options *options, copy *copies,
                   fst_load_stats *stats) {
    fst_error error;
    fst_loader *loader;
    fst_tensor *tensor;
    fst_status status;
    size_t count = 0;
    check(fst_loader_open(model, options, &loader, &error), "open", &error);
    while ((status = fst_loader_next(loader, -1, &tensor, &error)) == FST_OK) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        check(fst_tensor_view_get(tensor, &view, &error), "view", &error);
        if (view.size_bytes >= 16 && (uintptr_t)view.data % 16 != 0) puts("misaligned");
        copies[count] = (copy){malloc(view.size_bytes + 1), view.size_bytes, view.dtype};
        if (view.size_bytes > 0)
            check(fst_tensor_read(tensor, copies[count].data, view.size_bytes, &error), "read",
                  &error);
        fst_tensor_unref(tensor);
        count++;
    }
    if (status != FST_END) check(status, "next", &error);
    check(fst_loader_stats_get(loader, stats, &error), "stats", &error);
    fst_loader_close(loader);
    return count;
}

/// All tensors, and the middle rows of "rows".
static size_t list_parts(const fst_model *model, fst_part *parts, uint64_t *bounds) {
    size_t count = fst_model_tensor_count(model), rows;
    for (size_t i = 0; i < count; i++)
        parts[i] = (fst_part){.struct_size = sizeof(fst_part), .tensor_index = i};
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    if (fst_model_find(model, "rows", SIZE_MAX, &rows, NULL) != FST_OK ||
        fst_model_tensor_info(model, rows, &info, NULL) != FST_OK)
        return count;
    bounds[0] = info.shape[0] / 3;
    bounds[1] = 1;
    bounds[2] = 2 * info.shape[0] / 3;
    bounds[3] = info.shape[1] - 1;
    parts[count] = parts[rows];
    parts[count].begin = bounds;
    parts[count].end = bounds + 2;
    return count + 1;
}

int main(int argc, char **argv) {
    fst_error error;
    fst_model *model;
    static copy here[TENSOR_COUNT_MAX], there[TENSOR_COUNT_MAX];
    static fst_part parts[TENSOR_COUNT_MAX];
    uint64_t bounds[4], bytes = 0;
    if (argc != 4) return 2;
    check(fst_model_open(argv[1], NULL, &model, &error), "model", &error);
    fst_load_stats stats = FST_STRUCT_INIT(fst_load_stats);
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    options.mode = FST_MODE_LOAD;
    options.order = FST_ORDER_REQUEST;
    options.parts = parts;
    options.part_count = list_parts(model, parts, bounds);
    options.convert = strcmp(argv[2], "-") != 0;
    if (options.convert)
        check(fst_dtype_from_name(argv[2], SIZE_MAX, &options.dtype, &error), "dtype", &error);
    size_t count = load(model, &options, here, &stats), wrong = 0;
    check(fst_device_parse("cuda", &options.device, &error), "device", &error);
    options.budget_bytes = strtoull(argv[3], NULL, 10);
    if (load(model, &options, there, &stats) != count) return 1;
    for (size_t i = 0; i < count; i++) {
        bytes += here[i].size_bytes;
        wrong += here[i].size_bytes != there[i].size_bytes || here[i].dtype != there[i].dtype ||
                 memcmp(here[i].data, there[i].data, here[i].size_bytes) != 0;
    }
    printf("%zu tensors, %" PRIu64 " bytes, %zu wrong, %" PRIu64 " sent, %" PRIu64 " launches\n",
           count, bytes, wrong, stats.device_bytes, stats.device_launches);
    fst_model_close(model);
    return wrong > 0;
}
