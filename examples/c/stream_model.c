// SPDX-License-Identifier: Apache-2.0
/// stream_model MODEL [BUDGET_MIB]: reads a model of any size with a limited amount of memory and
/// sums its bytes.
#include <fastsafetensors.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t sum_bytes(const fst_tensor *tensor) {
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    uint64_t sum = 0;
    if (fst_tensor_view_get(tensor, &view, NULL) != FST_OK) return 0;
    for (uint64_t i = 0; i < view.size_bytes; i++) sum += ((const unsigned char *)view.data)[i];
    return sum;
}

int main(int argc, char **argv) {
    fst_error error;
    fst_model *model;
    fst_loader *loader = NULL;
    fst_tensor *tensor;
    uint64_t sum = 0, count = 0;
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    options.budget_bytes = (argc > 2 ? strtoull(argv[2], NULL, 10) : 256) << 20;
    if (argc < 2) return fprintf(stderr, "usage: stream_model MODEL [BUDGET_MIB]\n"), 2;
    fst_status status = fst_model_open(argv[1], NULL, &model, &error);
    if (status == FST_OK) status = fst_loader_open(model, &options, &loader, &error);
    while (status == FST_OK && (status = fst_loader_next(loader, -1, &tensor, &error)) == FST_OK) {
        sum += sum_bytes(tensor);
        count++;
        fst_tensor_unref(tensor); // its memory counts against the budget until here
    }
    if (status != FST_END) return fprintf(stderr, "%s\n", error.message), 1;
    printf("%" PRIu64 " tensors, sum of bytes %" PRIu64 "\n", count, sum);
    fst_loader_close(loader);
    fst_model_close(model);
    return 0;
}
