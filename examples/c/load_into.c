// SPDX-License-Identifier: Apache-2.0
/// load_into MODEL: loads every tensor into memory that the program already has: here one block,
/// tensors in the reverse of their order in the file.
#include <fastsafetensors.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/// Gives every tensor its place in `memory`.
static void place_tensors(const fst_model *model, fst_request_item *items, char *memory) {
    size_t count = fst_model_tensor_count(model);
    for (size_t i = 0; i < count; i++) {
        fst_tensor_info info;
        if (fst_model_tensor_info(model, count - 1 - i, &info, NULL) != FST_OK) continue;
        items[i].tensor_index = count - 1 - i;
        items[i].destination = memory;
        items[i].destination_bytes = info.size_bytes;
        memory += info.size_bytes;
    }
}

static uint64_t total_bytes(const fst_model *model) {
    uint64_t total = 0;
    for (size_t i = 0; i < fst_model_tensor_count(model); i++) {
        fst_tensor_info info;
        if (fst_model_tensor_info(model, i, &info, NULL) == FST_OK) total += info.size_bytes;
    }
    return total;
}

int main(int argc, char **argv) {
    fst_error error;
    fst_model *model;
    fst_loader *loader = NULL;
    if (argc != 2) {
        fprintf(stderr, "usage: load_into MODEL\n");
        return 2;
    }
    if (fst_model_open(argv[1], NULL, &model, &error) != FST_OK) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    size_t count = fst_model_tensor_count(model);
    uint64_t size = total_bytes(model);
    char *memory = malloc(size + 1);
    fst_request_item *items = calloc(count + 1, sizeof *items);
    if (memory == NULL || items == NULL) {
        fprintf(stderr, "out of memory\n");
        return 1;
    }
    place_tensors(model, items, memory);
    fst_load_options options = {.struct_size = sizeof options, .items = items, .item_count = count};
    fst_status status = fst_loader_open(model, &options, &loader, &error);
    if (status == FST_OK) status = fst_loader_wait(loader, -1, &error);
    if (status == FST_OK)
        printf("%zu tensors, %" PRIu64 " bytes, first byte %d\n", count, size,
               size > 0 ? (unsigned char)memory[0] : 0);
    else
        fprintf(stderr, "%s\n", error.message);
    fst_loader_close(loader); // the memory may be freed only after this
    fst_model_close(model);
    free(items);
    free(memory);
    return status != FST_OK;
}
