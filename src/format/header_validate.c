// SPDX-License-Identifier: Apache-2.0
/// The checks of the reference validator, in its order, so that result and error name agree.
#include <inttypes.h>
#include <string.h>

#include "header_build.h"

fst_status fsti_header_length(const unsigned char *prefix, const fsti_header_rules *rules,
                              uint64_t *header_bytes, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = rules->path;
    if (rules->file_size < FSTI_FORMAT_LENGTH_BYTES)
        return fsti_error_set(error, FST_E_HEADER_TOO_SMALL, location,
                              "the file has %" PRIu64
                              " bytes, fewer than the 8 bytes of the length field",
                              rules->file_size);
    uint64_t length = fsti_number_load(prefix, FSTI_FORMAT_LENGTH_BYTES);
    location.byte_offset = 0;
    if (length > FSTI_FORMAT_HEADER_BYTES_MAX)
        return fsti_error_set(error, FST_E_HEADER_TOO_LARGE, location,
                              "the header claims %" PRIu64 " bytes, the format allows %u", length,
                              FSTI_FORMAT_HEADER_BYTES_MAX);
    if (length > rules->file_size - FSTI_FORMAT_LENGTH_BYTES)
        return fsti_error_set(error, FST_E_INVALID_HEADER_LENGTH, location,
                              "the header claims %" PRIu64 " bytes, the file has %" PRIu64
                              " after the length field",
                              length, rules->file_size - FSTI_FORMAT_LENGTH_BYTES);
    *header_bytes = length;
    return FST_OK;
}

static bool count_elements(const fsti_header *header, const fsti_tensor *tensor, uint64_t *out) {
    const uint64_t *shape = fsti_header_shape(header, tensor);
    uint64_t count = 1;
    // [2^63, 4, 0] overflows before the zero, as in the reference.
    for (uint32_t i = 0; i < tensor->rank; i++)
        if (!fsti_mul(count, shape[i], &count)) return false;
    *out = count;
    return true;
}

static fst_status validate_tensor(const fsti_header *header, const fsti_tensor *tensor,
                                  uint64_t expected_begin, fsti_error_location location,
                                  fst_error *error) {
    location.tensor = fsti_header_name(header, tensor);
    location.tensor_size = tensor->name_size;
    location.byte_offset = FSTI_FORMAT_LENGTH_BYTES + tensor->name_at;
    if (tensor->begin != expected_begin || tensor->end < tensor->begin)
        return fsti_error_set(error, FST_E_INVALID_OFFSET, location,
                              "data_offsets [%" PRIu64 ", %" PRIu64
                              "], expected to begin at %" PRIu64,
                              tensor->begin, tensor->end, expected_begin);
    uint64_t element_count = 0, size_bytes = 0;
    fst_status status = FST_E_VALIDATION_OVERFLOW;
    if (count_elements(header, tensor, &element_count))
        status = fsti_dtype_size((fst_dtype)tensor->dtype, element_count, &size_bytes);
    if (status != FST_OK)
        return fsti_error_set(error, status, location, "%s (dtype %s)", fsti_status_meaning(status),
                              fsti_dtype_name((fst_dtype)tensor->dtype));
    if (tensor->end - tensor->begin != size_bytes)
        return fsti_error_set(
            error, FST_E_TENSOR_INVALID_INFO, location,
            "shape and dtype %s need %" PRIu64 " bytes, but data_offsets cover %" PRIu64,
            fsti_dtype_name((fst_dtype)tensor->dtype), size_bytes, tensor->end - tensor->begin);
    return FST_OK;
}

size_t fsti_header_whole_count(const fsti_header *header, uint64_t data_bytes) {
    size_t count = header->tensor_count; // in file order, so truncated tensors are last
    while (count > 0 && header->tensors[count - 1].end > data_bytes) count--;
    return count;
}

fst_status fsti_header_validate(const fsti_header *header, const fsti_header_rules *rules,
                                fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = rules->path;
    uint64_t covered = 0;
    for (size_t i = 0; i < header->tensor_count; i++) {
        FST_TRY(validate_tensor(header, &header->tensors[i], covered, location, error));
        covered = header->tensors[i].end;
    }
    uint64_t data_bytes = rules->file_size - header->data_begin;
    if (covered == data_bytes || (covered < data_bytes && rules->lenient)) return FST_OK;
    location.byte_offset = header->data_begin + fsti_min(covered, data_bytes);
    if (covered < data_bytes)
        return fsti_error_set(error, FST_E_METADATA_INCOMPLETE_BUFFER, location,
                              "the tensors cover %" PRIu64 " bytes, the file holds %" PRIu64
                              " bytes of data",
                              covered, data_bytes);
    if (rules->cut) return FST_OK;
    size_t whole_count = fsti_header_whole_count(header, data_bytes);
    bool can_rescue = whole_count > 0 && !fsti_packed_is(header);
    return fsti_error_set(error, FST_E_METADATA_INCOMPLETE_BUFFER, location,
                          "the file is truncated: %" PRIu64 " of %" PRIu64
                          " bytes are missing, %zu of %zu tensors are complete%s",
                          covered - data_bytes, header->data_begin + covered, whole_count,
                          header->tensor_count,
                          can_rescue ? " ('fastsafetensors rescue' writes these)" : "");
}
