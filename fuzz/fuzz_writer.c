// SPDX-License-Identifier: Apache-2.0
/// Fuzzes saves with any names, dtypes, shapes, metadata and options. A saved file is read back and
/// compared; a rejected save must leave no file.
#include <fastsafetensors.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz_input.h"
#include "fuzz_target.h"

#define COUNT_MAX 8
#define RANK_MAX 4

typedef struct save_case {
    fst_save_tensor tensors[COUNT_MAX];
    uint64_t shapes[COUNT_MAX][RANK_MAX];
    uint64_t sizes[COUNT_MAX];
    char names[COUNT_MAX][24];
    char texts[COUNT_MAX][2][16];
    fst_metadata_entry metadata[COUNT_MAX];
    fst_save_options options;
    size_t count;
} save_case;

static char content[1 << 16];

static size_t take_text(fuzz_input *input, char *text, size_t capacity) {
    size_t size = fuzz_below(input, (uint32_t)capacity);
    for (size_t i = 0; i < size; i++) text[i] = (char)fuzz_byte(input);
    return size;
}

static void take_tensor(fuzz_input *input, save_case *out, size_t index) {
    fst_save_tensor *tensor = &out->tensors[index];
    tensor->struct_size = sizeof *tensor;
    tensor->name = out->names[index];
    tensor->name_size = take_text(input, out->names[index], sizeof out->names[index]);
    tensor->dtype = (fst_dtype)fuzz_below(input, FST_DTYPE_COUNT);
    tensor->rank = fuzz_below(input, RANK_MAX + 1);
    tensor->shape = out->shapes[index];
    uint64_t bits = fst_dtype_bits(tensor->dtype);
    for (uint32_t d = 0; d < tensor->rank; d++) {
        out->shapes[index][d] = fuzz_below(input, 9);
        bits *= out->shapes[index][d];
    }
    out->sizes[index] = bits / 8;
    tensor->data = content + fuzz_below(input, 8);
}

static void take_case(fuzz_input *input, save_case *out) {
    memset(out, 0, sizeof *out);
    out->count = fuzz_below(input, COUNT_MAX + 1);
    for (size_t i = 0; i < out->count; i++) take_tensor(input, out, i);
    out->options.struct_size = sizeof out->options;
    out->options.order = (fst_save_order)fuzz_below(input, FST_SAVE_ORDER_COUNT);
    static const uint64_t alignments[] = {0, 8, 16, 64, 4096, 3, 1 << 20, 1 << 21};
    out->options.alignment_bytes = alignments[fuzz_below(input, 8)];
    out->options.header_alignment_bytes = alignments[fuzz_below(input, 8)];
    out->options.metadata_count = fuzz_below(input, 4);
    out->options.metadata_last = (int)fuzz_below(input, 2);
    out->options.has_metadata = (int)fuzz_below(input, 2);
    out->options.metadata = out->metadata;
    for (size_t i = 0; i < out->options.metadata_count; i++) {
        fst_metadata_entry *entry = &out->metadata[i];
        entry->key = out->texts[i][0];
        entry->key_size = take_text(input, out->texts[i][0], 16);
        entry->value = out->texts[i][1];
        entry->value_size = take_text(input, out->texts[i][1], 16);
    }
}

static void compare(const save_case *saved, const char *path) {
    fst_model *model;
    fst_error error;
    if (fst_model_open(path, NULL, &model, &error) != FST_OK) {
        fprintf(stderr, "%s\n", error.message);
        __builtin_trap();
    }
    for (size_t i = 0; i < saved->count; i++) {
        const fst_save_tensor *tensor = &saved->tensors[i];
        size_t index;
        require(fst_model_find(model, tensor->name, tensor->name_size, &index, NULL) == FST_OK);
        fst_part item = {.struct_size = sizeof item, .tensor_index = index};
        fst_load_options options = {
            .struct_size = sizeof options, .parts = &item, .part_count = 1, .mode = FST_MODE_LOAD};
        fst_loader *loader;
        fst_tensor *loaded;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        require(fst_loader_open(model, &options, &loader, NULL) == FST_OK &&
                fst_loader_next(loader, -1, &loaded, NULL) == FST_OK &&
                fst_tensor_view_get(loaded, &view, NULL) == FST_OK);
        require(view.dtype == tensor->dtype && view.rank == tensor->rank &&
                view.size_bytes == saved->sizes[i]);
        for (uint32_t d = 0; d < view.rank; d++) require(view.shape[d] == tensor->shape[d]);
        require(view.size_bytes == 0 || memcmp(view.data, tensor->data, view.size_bytes) == 0);
        fst_tensor_unref(loaded);
        fst_loader_close(loader);
    }
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    require(fst_model_file_info(model, 0, &info, NULL) == FST_OK);
    // A key marks files with padding tensors.
    require(info.metadata_count == saved->options.metadata_count + (info.padding_count > 0));
    fst_model_close(model);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static char path[64];
    if (path[0] == '\0') {
        bool in_memory = access("/dev/shm", W_OK) == 0;
        snprintf(path, sizeof path, "%s/fuzz-writer-%d", in_memory ? "/dev/shm" : "/tmp",
                 (int)getpid());
        for (size_t i = 0; i < sizeof content; i++) content[i] = (char)(i * 37 + i / 256);
    }
    fuzz_input input = {data, size};
    save_case saved;
    take_case(&input, &saved);
    fst_writer *writer = NULL;
    fst_error error = {0};
    fst_status status =
        fst_writer_open(path, saved.tensors, saved.count, &saved.options, &writer, &error);
    if (status == FST_OK) {
        require(fst_writer_commit(writer, &error) == FST_OK);
        fst_writer_close(writer);
        compare(&saved, path);
        unlink(path);
    } else {
        require(writer == NULL && error.message[0] != '\0' && access(path, F_OK) != 0);
    }
    return 0;
}
