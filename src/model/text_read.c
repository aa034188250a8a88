// SPDX-License-Identifier: Apache-2.0
/// Reads indexes, manifests and lists completely.
#include "open_model.h"

/// Reads an open file completely, if it is not too large.
static fst_status read_whole(fsti_file *file, char **bytes, size_t *byte_count, fst_error *error) {
    uint64_t size = fsti_file_size(file);
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = fsti_file_path(file);
    if (size > FSTI_FORMAT_TEXT_BYTES_MAX)
        return fsti_error_set(error, FST_E_UNSUPPORTED, location,
                              "larger than 1 GiB, the limit of indexes, manifests and lists");
    char *text = fsti_alloc_zeroed(1, (size_t)size + FSTI_FORMAT_PADDING_BYTES);
    if (text == NULL) return fsti_error_memory(error, size);
    fst_status status = fsti_file_read(file, text, (size_t)size, 0, byte_count, error);
    if (status != FST_OK) {
        fsti_free(text);
        return status;
    }
    *bytes = text;
    return FST_OK;
}

fst_status fsti_model_read_text(const char *path, char **bytes, size_t *byte_count,
                                fst_error *error) {
    fsti_file *file = NULL;
    FST_TRY(fsti_file_open(path, &file, error));
    fst_status status = read_whole(file, bytes, byte_count, error);
    fsti_file_unref(file);
    return status;
}
