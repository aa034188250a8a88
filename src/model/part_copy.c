// SPDX-License-Identifier: Apache-2.0
/// Copies small parts of tensors immediately. Planning, allocating and starting threads would cost
/// more than these few bytes.
#include <string.h>

#include "dtype/dtype_info.h"
#include "open_model.h"

/// The bytes of a part, relative to the tensor's start.
typedef struct part_span {
    uint64_t first, end;                ///< range including gaps between rows
    uint64_t part_bytes;                ///< without gaps
    uint64_t run_bytes;                 ///< contiguous bytes
    uint32_t rank_of_runs;              ///< number of dimensions outside the runs
    uint64_t pitch[FSTI_PART_RANK_MAX]; ///< bytes between neighbours, by dimension
} part_span;

/// False if nothing can be copied: no elements, too far apart, or not whole bytes.
static bool measure_span(const fsti_tensor *tensor, const uint64_t *shape, const fst_part *part,
                         part_span *span) {
    uint64_t bits = fsti_dtype_bits((fst_dtype)tensor->dtype);
    *span = (part_span){0};
    if (bits % 8 != 0 || tensor->rank > FSTI_PART_RANK_MAX || tensor->end == tensor->begin)
        return false;
    // For a tensor with elements, no product below exceeds its size.
    uint64_t pitch = bits / 8, last = 0;
    span->part_bytes = span->run_bytes = pitch;
    bool is_run = true;
    for (uint32_t d = tensor->rank; d-- > 0;) {
        uint64_t count = part->end[d] - part->begin[d];
        if (count == 0) return false;
        span->pitch[d] = pitch;
        span->first += part->begin[d] * pitch;
        last += (part->end[d] - 1) * pitch;
        span->part_bytes *= count;
        if (is_run) span->run_bytes = span->part_bytes;
        if (is_run) span->rank_of_runs = d;
        is_run = is_run && count == shape[d];
        pitch *= shape[d];
    }
    span->end = last + bits / 8;
    return span->end - span->first <= FST_PART_BYTES_MAX;
}

/// Copies the part's runs out of its range.
static void pick_runs(const part_span *span, const fst_part *part, const char *bytes) {
    uint64_t at[FSTI_PART_RANK_MAX] = {0};
    char *target = part->destination;
    for (uint64_t done = 0; done < span->part_bytes; done += span->run_bytes) {
        uint64_t from = 0;
        for (uint32_t d = 0; d < span->rank_of_runs; d++) from += at[d] * span->pitch[d];
        memcpy(target + done, bytes + from, (size_t)span->run_bytes);
        for (uint32_t d = span->rank_of_runs; d-- > 0;) {
            if (++at[d] < part->end[d] - part->begin[d]) break;
            at[d] = 0;
        }
    }
}

static fst_status read_span(fsti_file *file, const part_span *span, uint64_t offset, char *bytes,
                            fst_error *error) {
    size_t got, size = (size_t)(span->end - span->first);
    FST_TRY(fsti_file_read(file, bytes, size, offset, &got, error));
    FST_TRY(fsti_file_check(file, error));
    if (got == size) return FST_OK;
    fsti_error_location location = {.file = fsti_file_path(file), .byte_offset = offset + got};
    return fsti_error_set(error, FST_E_SHORT_READ, location, "the file ends inside the tensor");
}

fst_status fsti_part_copy(const fst_model *model, const fst_part *part, int *copied,
                          fst_error *error) {
    model_entry entry = fsti_model_entry(model, part->tensor_index);
    const model_file *file = &model->files[entry.file];
    const fsti_tensor *tensor = &file->header->tensors[entry.tensor];
    const uint64_t *shape = fsti_header_shape(file->header, tensor);
    part_span span;
    for (uint32_t d = 0; d < tensor->rank; d++)
        if (part->begin[d] > part->end[d] || part->end[d] > shape[d])
            return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "slice out of range");
    if (model->verification != NULL || !measure_span(tensor, shape, part, &span)) return FST_OK;
    if (part->destination_bytes != span.part_bytes)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "the destination has a wrong size");
    uint64_t begin = file->header->data_begin + tensor->begin + span.first, resident;
    uint64_t size = span.end - span.first;
    if (!fsti_file_resident(file->file, begin, begin + size, &resident) || resident < size)
        return FST_OK;
    bool is_run = span.run_bytes == span.part_bytes;
    char *bytes = is_run ? part->destination : fsti_alloc((size_t)size);
    if (bytes == NULL) return fsti_error_memory(error, size);
    fst_status status = read_span(file->file, &span, begin, bytes, error);
    if (status == FST_OK && !is_run) pick_runs(&span, part, bytes);
    if (!is_run) fsti_free(bytes);
    *copied = status == FST_OK;
    return status;
}
