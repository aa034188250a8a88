// SPDX-License-Identifier: Apache-2.0
/// Copies a model tensor by tensor into a new file, durably: an example of the streaming writer.
///   save_stream SOURCE TARGET
#include <fastsafetensors.h>
#include <stdio.h>
#include <stdlib.h>

static int fail(const fst_error *error) {
    fprintf(stderr, "%s\n", error->message);
    return 1;
}

/// Describes the model's tensors for the writer; the strings stay the model's.
static fst_save_tensor *describe(const fst_model *model) {
    size_t count = fst_model_tensor_count(model);
    fst_save_tensor *tensors = calloc(count + 1, sizeof *tensors);
    for (size_t i = 0; tensors != NULL && i < count; i++) {
        fst_tensor_info info;
        if (fst_model_tensor_info(model, i, &info, NULL) != FST_OK) break;
        tensors[i].name = info.name;
        tensors[i].name_size = info.name_size;
        tensors[i].dtype = info.dtype;
        tensors[i].rank = info.rank;
        tensors[i].shape = info.shape; // data stays NULL: it comes with fst_writer_write()
    }
    return tensors;
}

/// Hands each tensor to the writer as it arrives, and lets it go.
static fst_status copy_tensors(fst_loader *loader, fst_writer *writer, fst_error *error) {
    fst_tensor *tensor;
    fst_status status;
    for (size_t i = 0; (status = fst_loader_next(loader, -1, &tensor, error)) == FST_OK; i++) {
        fst_tensor_view view;
        status = fst_tensor_view_get(tensor, &view, error);
        if (status == FST_OK)
            status = fst_writer_write(writer, i, 0, view.data, (size_t)view.size_bytes, error);
        fst_tensor_unref(tensor);
        if (status != FST_OK) return status;
    }
    return status == FST_END ? fst_writer_commit(writer, error) : status;
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: save_stream SOURCE TARGET\n");
        return 2;
    }
    fst_error error;
    fst_model *model;
    fst_loader *loader = NULL;
    fst_writer *writer = NULL;
    if (fst_model_open(argv[1], NULL, &model, &error) != FST_OK) return fail(&error);
    fst_load_options load = {.struct_size = sizeof load, .budget_bytes = (uint64_t)256 << 20};
    fst_save_options save = {.struct_size = sizeof save, .promise = FST_SAVE_DURABLE};
    fst_save_tensor *tensors = describe(model);
    fst_status status = FST_E_NO_MEMORY;
    if (tensors != NULL)
        status = fst_writer_open(argv[2], tensors, fst_model_tensor_count(model), &save, &writer,
                                 &error);
    if (status == FST_OK) status = fst_loader_open(model, &load, &loader, &error);
    if (status == FST_OK) status = copy_tensors(loader, writer, &error);
    fst_loader_close(loader);
    fst_writer_close(writer); // not committed: leaves nothing behind
    free(tensors);
    fst_model_close(model);
    if (status != FST_OK) return fail(&error);
    printf("%s is on the device\n", argv[2]);
    return 0;
}
