// SPDX-License-Identifier: Apache-2.0
/// Finds the tensors of the base that a delta changes, their positions, and the checksums that they
/// must have.
#include <stdlib.h>
#include <string.h>

#include "delta_private.h"

delta_span fsti_delta_span(const fst_delta *delta, size_t first) {
    delta_span span = {first, first};
    while (span.end < delta->version_count && span.end - first < DELTA_FOLD_MAX &&
           delta->versions[span.end].encoding == delta->versions[first].encoding)
        span.end++;
    return span;
}

size_t fsti_delta_decoders(const fst_delta *delta, delta_span span) {
    size_t count = span.end - span.first;
    for (size_t i = span.first; i < span.end; i++)
        if (delta->versions[i].encoding == FST_DELTA_OVERWRITE)
            return 2 * count + DELTA_LIST_BYTES / DELTA_DECODER_BYTES;
    return count;
}

delta_frames fsti_delta_frames(const fst_delta *delta, const delta_tensor *tensor,
                               delta_span span) {
    delta_frames found = {delta->frames + tensor->first_frame, 0};
    size_t left = tensor->frame_count;
    while (left > 0 && found.frames->version < span.first) found.frames++, left--;
    while (found.count < left && found.frames[found.count].version < span.end) found.count++;
    return found;
}

const fsti_digest_kind *fsti_delta_digest(const fst_delta *delta, const delta_frames *frames,
                                          unsigned char *digest) {
    const delta_frame *last = &frames->frames[frames->count - 1];
    const fsti_digest_kind *kind = delta->versions[last->version].kind;
    (void)fsti_digest_read(last->checksum, kind->digest_bytes, digest);
    return kind;
}

fst_status fsti_delta_check_digest(const fst_delta *delta, const delta_tensor *tensor,
                                   const delta_frames *frames, const unsigned char *found,
                                   fst_error *error) {
    unsigned char expected[FSTI_DIGEST_BYTES_MAX] = {0};
    const fsti_digest_kind *kind = fsti_delta_digest(delta, frames, expected);
    if (memcmp(found, expected, kind->digest_bytes) == 0) return FST_OK;
    fsti_error_location place = {.file = fsti_file_path(frames->frames[frames->count - 1].file),
                                 .tensor = tensor->name,
                                 .tensor_size = tensor->name_size,
                                 .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_DIGEST, place,
                          "the new tensor does not match its %s checksum: the delta is damaged, or "
                          "the checkpoint is not version %s",
                          kind->name, delta->versions[frames->frames[0].version].text.base);
}

static int compare_sizes(const void *a_pointer, const void *b_pointer) {
    const bound_tensor *a = a_pointer, *b = b_pointer;
    if (a->size_bytes != b->size_bytes) return a->size_bytes > b->size_bytes ? -1 : 1;
    return a->tensor < b->tensor ? -1 : a->tensor > b->tensor;
}

fst_status fsti_delta_check_size(const fst_delta *delta, const delta_tensor *tensor,
                                 const delta_frames *frames, uint64_t size_bytes,
                                 fst_error *error) {
    if (size_bytes <= UINT32_MAX ||
        delta->versions[frames->frames[0].version].encoding != FST_DELTA_OVERWRITE)
        return FST_OK;
    fsti_error_location place = {
        .tensor = tensor->name, .tensor_size = tensor->name_size, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_UNSUPPORTED, place,
                          "an overwrite delta cannot address a tensor of 4 GiB or more");
}

static fst_status bind_tensor(const delta_tensor *tensor, const fst_model *base, bound_tensor *out,
                              fst_error *error) {
    fst_tensor_info info;
    size_t index;
    FST_TRY(fsti_model_find(base, tensor->name, tensor->name_size, &index, error));
    fsti_model_tensor_info(base, index, &info);
    *out = (bound_tensor){tensor, index, info.file_index, info.file_offset, info.size_bytes, 0};
    return FST_OK;
}

fst_status fsti_delta_bind(const fst_delta *delta, delta_span span, const fst_model *base,
                           bound_tensor **out, size_t *count, fst_error *error) {
    *count = 0;
    *out = fsti_alloc_zeroed(delta->tensor_count + 1, sizeof **out);
    if (*out == NULL) return fsti_error_memory(error, delta->tensor_count * sizeof **out);
    for (size_t i = 0; i < delta->tensor_count; i++) {
        const delta_tensor *tensor = &delta->tensors[i];
        delta_frames frames = fsti_delta_frames(delta, tensor, span);
        if (frames.count == 0) continue;
        fst_status status = bind_tensor(tensor, base, &(*out)[*count], error);
        if (status == FST_OK)
            status =
                fsti_delta_check_size(delta, tensor, &frames, (*out)[*count].size_bytes, error);
        if (status != FST_OK) {
            fsti_free(*out);
            *out = NULL;
            *count = 0;
            return status;
        }
        (*count)++;
    }
    qsort(*out, *count, sizeof **out, compare_sizes);
    return FST_OK;
}
