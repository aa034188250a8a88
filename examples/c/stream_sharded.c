// SPDX-License-Identifier: Apache-2.0
/// stream_sharded MODEL [BUDGET_MIB]: streams a model of one or many files within a memory budget,
/// with progress, and sums its bytes.
#include <fastsafetensors.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static int show_progress(void *context, uint64_t bytes_done, uint64_t bytes_total,
                         size_t tensors_done, size_t tensors_total) {
    (void)context;
    fprintf(stderr, "\r%3.0f %%  %zu of %zu tensors",
            bytes_total > 0 ? 100.0 * (double)bytes_done / (double)bytes_total : 100.0,
            tensors_done, tensors_total);
    return 0; // anything else would cancel
}

static uint64_t sum_bytes(const fst_tensor *tensor) {
    fst_tensor_view view;
    uint64_t sum = 0;
    if (fst_tensor_view_get(tensor, &view, NULL) != FST_OK) return 0;
    for (uint64_t i = 0; i < view.size_bytes; i++) sum += ((const unsigned char *)view.data)[i];
    return sum;
}

int main(int argc, char **argv) {
    fst_error error;
    fst_model *model;
    fst_loader *loader;
    fst_tensor *tensor;
    fst_status status;
    uint64_t sum = 0, count = 0;
    if (argc < 2 || argc > 3) {
        fprintf(stderr, "usage: stream_sharded MODEL [BUDGET_MIB]\n");
        return 2;
    }
    fst_load_options options = {
        .struct_size = sizeof options,
        .mode = FST_MODE_LOAD,
        .budget_bytes = (argc > 2 ? strtoull(argv[2], NULL, 10) : 256) << 20,
        .progress = show_progress,
    };
    if (fst_model_open(argv[1], NULL, &model, &error) != FST_OK) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    status = fst_loader_open(model, &options, &loader, &error);
    fst_model_close(model);
    if (status == FST_OK) {
        while ((status = fst_loader_next(loader, -1, &tensor, &error)) == FST_OK) {
            sum += sum_bytes(tensor);
            count++;
            fst_tensor_unref(tensor);
        }
        fst_loader_close(loader);
    }
    if (status != FST_END) {
        fprintf(stderr, "\n%s\n", error.message);
        return 1;
    }
    fprintf(stderr, "\n");
    printf("%" PRIu64 " tensors, sum of bytes %" PRIu64 "\n", count, sum);
    return 0;
}
