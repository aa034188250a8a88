// SPDX-License-Identifier: Apache-2.0
/// load_tensor MODEL TENSOR: loads one tensor and prints its type, shape and size.
#include <fastsafetensors.h>
#include <inttypes.h>
#include <stdio.h>

int main(int argc, char **argv) {
    fst_error error;
    fst_model *model;
    fst_loader *loader = NULL;
    fst_tensor *tensor;
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    fst_part part = FST_STRUCT_INIT(fst_part);
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    options.parts = &part;
    options.part_count = 1;
    if (argc != 3) return fprintf(stderr, "usage: load_tensor MODEL TENSOR\n"), 2;
    if (fst_model_open(argv[1], NULL, &model, &error) != FST_OK)
        return fprintf(stderr, "%s\n", error.message), 1;
    fst_status status = fst_model_find(model, argv[2], SIZE_MAX, &part.tensor_index, &error);
    if (status == FST_OK) status = fst_loader_open(model, &options, &loader, &error);
    if (status == FST_OK) status = fst_loader_next(loader, -1, &tensor, &error);
    if (status == FST_OK) status = fst_tensor_view_get(tensor, &view, &error);
    fst_loader_close(loader); // the tensor keeps its memory
    fst_model_close(model);
    if (status != FST_OK) return fprintf(stderr, "%s\n", error.message), 1;
    printf("%s %s [", view.name, fst_dtype_name(view.dtype));
    for (uint32_t i = 0; i < view.rank; i++) printf("%s%" PRIu64, i > 0 ? ", " : "", view.shape[i]);
    printf("] %" PRIu64 " bytes\n", view.size_bytes);
    fst_tensor_unref(tensor);
    return 0;
}
