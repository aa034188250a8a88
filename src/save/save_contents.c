// SPDX-License-Identifier: Apache-2.0
/// The tensors of a save, and the layouts of their files.
#include "save_contents.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static fst_status copy_tensors(const contents_request *request, save_contents *contents,
                               fst_error *error) {
    const fst_save_tensor *tensors = request->tensors;
    size_t tensor_count = request->tensor_count;
    uint64_t name_bytes = 1;
    for (size_t i = 0; i < tensor_count; i++) name_bytes += tensors[i].name_size;
    contents->tensor_count = tensor_count;
    contents->tensors = fsti_alloc_zeroed(tensor_count + 1, sizeof *contents->tensors);
    contents->members = fsti_alloc((tensor_count + 1) * sizeof *contents->members);
    contents->member_begin = fsti_alloc_zeroed(contents->file_count + 2, sizeof(size_t));
    contents->names = fsti_alloc((size_t)name_bytes);
    if (contents->tensors == NULL || contents->members == NULL || contents->member_begin == NULL ||
        contents->names == NULL)
        return fsti_error_memory(error, tensor_count * sizeof *contents->tensors);
    char *name = contents->names;
    for (size_t i = 0; i < tensor_count; i++) {
        save_tensor *tensor = &contents->tensors[i];
        memcpy(name, tensors[i].name, tensors[i].name_size);
        tensor->name = name;
        tensor->name_size = tensors[i].name_size;
        tensor->data = tensors[i].data;
        tensor->device = tensors[i].device;
        tensor->file = tensors[i].file_index;
        name += tensors[i].name_size;
    }
    return FST_OK;
}

/// Groups the tensors by file with a counting sort. The counts are stored two positions further, so
/// that begin[f + 1] can serve as the write position of file f. After the last loop it is the end
/// of file f, which is the beginning of file f + 1.
static void group_members(save_contents *contents) {
    size_t *begin = contents->member_begin;
    for (size_t i = 0; i < contents->tensor_count; i++) begin[contents->tensors[i].file + 2]++;
    for (uint32_t f = 1; f <= contents->file_count; f++) begin[f + 1] += begin[f];
    for (size_t i = 0; i < contents->tensor_count; i++)
        contents->members[begin[contents->tensors[i].file + 1]++] = (uint32_t)i;
}

const uint32_t *fsti_contents_members(const save_contents *contents, uint32_t file_index) {
    return contents->members + contents->member_begin[file_index];
}

static fst_status lay_out_file(const contents_request *request, save_contents *contents,
                               uint32_t file, fst_save_tensor *own, fst_error *error) {
    const uint32_t *members = fsti_contents_members(contents, file);
    size_t count = contents->member_begin[file + 1] - contents->member_begin[file];
    fst_layout *layout = &contents->files[file].layout;
    for (size_t i = 0; i < count; i++) own[i] = request->tensors[members[i]];
    FST_TRY(fsti_layout_make(own, count, request->options, layout, error));
    if (request->is_shifted)
        FST_TRY(fsti_layout_shift(layout, request->shift_begin, FSTI_OUTPUT_BLOCK_BYTES, error));
    for (size_t i = 0; i < count; i++) {
        save_tensor *tensor = &contents->tensors[members[i]];
        tensor->index = (uint32_t)i;
        fsti_layout_tensor(layout, i, &tensor->offset, &tensor->size_bytes);
    }
    return FST_OK;
}

static fsti_name tensor_name(const void *tensors, size_t index) {
    const save_tensor *tensor = (const save_tensor *)tensors + index;
    return (fsti_name){tensor->name, tensor->name_size};
}

/// In a sharded model a name must be unique over all files.
static fst_status check_names(const save_contents *contents, fst_error *error) {
    size_t twice;
    if (contents->file_count < 2) return FST_OK; // the layout has checked
    if (!fsti_names_twice(tensor_name, contents->tensors, contents->tensor_count, &twice))
        return fsti_error_memory(error, contents->tensor_count * sizeof(uint32_t));
    if (twice == SIZE_MAX) return FST_OK;
    return fsti_tensor_refuse(&contents->tensors[twice], "duplicate tensor name", error);
}

static fst_status lay_out_all(const contents_request *request, save_contents *contents,
                              fst_error *error) {
    fst_save_tensor *own = fsti_alloc((contents->tensor_count + 1) * sizeof *own);
    if (own == NULL) return fsti_error_memory(error, contents->tensor_count * sizeof *own);
    fst_status status = check_names(contents, error);
    for (uint32_t f = 0; f < contents->file_count && status == FST_OK; f++)
        status = lay_out_file(request, contents, f, own, error);
    fsti_free(own);
    return status;
}

fst_status fsti_contents_make(const contents_request *request, save_contents *out,
                              fst_error *error) {
    uint32_t wanted = request->options->file_count;
    out->file_count = wanted > 0 ? wanted : 1;
    out->files = fsti_alloc_zeroed(out->file_count, sizeof *out->files);
    if (out->files == NULL) return fsti_error_memory(error, out->file_count * sizeof *out->files);
    FST_TRY(copy_tensors(request, out, error));
    group_members(out);
    return lay_out_all(request, out, error);
}

uint64_t fsti_contents_bytes(const save_contents *contents) {
    uint64_t sum = 0;
    for (uint32_t f = 0; f < contents->file_count; f++) sum += contents->files[f].layout.file_bytes;
    return sum;
}

size_t fsti_contents_empty_count(const save_contents *contents) {
    size_t count = 0;
    for (size_t i = 0; i < contents->tensor_count; i++)
        count += contents->tensors[i].size_bytes == 0;
    return count;
}

void fsti_contents_clear(save_contents *contents) {
    for (uint32_t f = 0; contents->files != NULL && f < contents->file_count; f++) {
        fsti_target_clear(&contents->files[f].target);
        fsti_layout_clear(&contents->files[f].layout);
        fsti_chunk_digests_close(contents->files[f].digests.chunks);
    }
    fsti_free(contents->files);
    fsti_free(contents->tensors);
    fsti_free(contents->members);
    fsti_free(contents->member_begin);
    fsti_free(contents->names);
    *contents = (save_contents){0};
}

fst_status fsti_tensor_refuse(const save_tensor *tensor, const char *why, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.tensor = tensor->name;
    location.tensor_size = tensor->name_size;
    return fsti_error_set(error, FST_E_ARGUMENT, location, "%s", why);
}

fst_status fsti_tensor_refuse_range(const save_tensor *tensor, byte_range range, const char *why,
                                    fst_error *error) {
    char words[128];
    snprintf(words, sizeof words, "bytes %" PRIu64 " to %" PRIu64 " of the tensor %s", range.begin,
             range.end, why);
    return fsti_tensor_refuse(tensor, words, error);
}
