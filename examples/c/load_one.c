// SPDX-License-Identifier: Apache-2.0
/// load_one MODEL TENSOR: loads one tensor of a model and prints what it is.
#include <fastsafetensors.h>
#include <inttypes.h>
#include <stdio.h>

int main(int argc, char **argv) {
    fst_error error;
    fst_model *model;
    fst_request_item item = {0};
    fst_load_options options = {.struct_size = sizeof options, .items = &item, .item_count = 1};
    fst_loader *loader = NULL;
    fst_tensor *tensor;
    if (argc != 3) {
        fprintf(stderr, "usage: load_one MODEL TENSOR\n");
        return 2;
    }
    if (fst_model_open(argv[1], NULL, &model, &error) != FST_OK) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    fst_status status = fst_model_find(model, argv[2], SIZE_MAX, &item.tensor_index, &error);
    if (status == FST_OK) status = fst_loader_open(model, &options, &loader, &error);
    if (status == FST_OK) status = fst_loader_item(loader, 0, -1, &tensor, &error);
    fst_loader_close(loader);
    fst_model_close(model);
    if (status != FST_OK) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    // The tensor owns its memory: loader, model and file are closed already.
    fst_tensor_view view;
    if (fst_tensor_view_get(tensor, &view, &error) == FST_OK) {
        printf("%s %s [", view.name, fst_dtype_name(view.dtype));
        for (uint32_t i = 0; i < view.rank; i++)
            printf("%s%" PRIu64, i > 0 ? ", " : "", view.shape[i]);
        printf("] %" PRIu64 " bytes\n", view.size_bytes);
    }
    fst_tensor_unref(tensor);
    return 0;
}
