// SPDX-License-Identifier: Apache-2.0
/// Private mappings for views. Each load, and each view of a single tensor, has its own mapping, so
/// that stores do not reach others, and the last tensor of a mapping frees its pages.
#include <stdatomic.h>

#include "open_model.h"

static void release_mapping(fsti_buffer *buffer) {
    fsti_io_unmap(buffer->data, buffer->size_bytes);
}

/// Maps `range` as a buffer that unmaps it by `release`.
static fst_status map_range(fsti_file *file, const fsti_map_range *range,
                            void (*release)(fsti_buffer *buffer), fsti_buffer **out,
                            fst_error *error) {
    void *address;
    FST_TRY(fsti_file_map_private(file, range, &address, error));
    fst_status status = fsti_buffer_wrap(address, range->size_bytes, release, out, error);
    if (status != FST_OK)
        fsti_io_unmap(address, range->size_bytes);
    else
        (*out)->writable = range->is_writable;
    return status;
}

fst_status fsti_model_map_file(const fst_model *model, uint32_t file_index, bool is_writable,
                               fsti_buffer **out, fst_error *error) {
    fsti_file *file = model->files[file_index].file;
    fsti_map_range range = {0, fsti_file_size(file), is_writable};
    return map_range(file, &range, release_mapping, out, error);
}

/// The number of live mappings of single tensors. The kernel limits mappings per process
/// (vm.max_map_count, 65,530 by default), and the program needs some too.
static atomic_uint tensor_mapping_count;
#define TENSOR_MAPPINGS_MAX 16384u

static void release_tensor_mapping(fsti_buffer *buffer) {
    release_mapping(buffer);
    atomic_fetch_sub(&tensor_mapping_count, 1);
}

fst_status fsti_model_map_tensor(const fst_model *model, model_entry position, fsti_buffer **out,
                                 char **data, fst_error *error) {
    const model_file *file = &model->files[position.file];
    const fsti_tensor *entry = &file->header->tensors[position.tensor];
    uint64_t first = file->header->data_begin + entry->begin;
    uint64_t begin = fsti_align_down(first, fsti_page_bytes());
    fsti_map_range range = {begin, file->header->data_begin + entry->end - begin, true};
    fsti_error_location where = {.file = fsti_file_path(file->file), .byte_offset = FST_NO_OFFSET};
    // Count first, and take it back on failure: concurrent calls cannot exceed the limit together.
    if (atomic_fetch_add(&tensor_mapping_count, 1) >= TENSOR_MAPPINGS_MAX) {
        atomic_fetch_sub(&tensor_mapping_count, 1);
        return fsti_error_set(error, FST_E_UNSUPPORTED, where,
                              "%u tensors are already mapped one by one", TENSOR_MAPPINGS_MAX);
    }
    fst_status status = map_range(file->file, &range, release_tensor_mapping, out, error);
    if (status != FST_OK)
        atomic_fetch_sub(&tensor_mapping_count, 1);
    else
        *data = (*out)->data + (first - begin);
    return status;
}
