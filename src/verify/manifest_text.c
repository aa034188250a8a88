// SPDX-License-Identifier: Apache-2.0
/// Writes small texts atomically: they replace older texts, never a model.
#include "manifest_text.h"

#include <sys/stat.h>

#include "location/location.h"
#include "io/io.h"
#include "output/output.h"

fst_status fsti_text_check_target(const char *path, const char *source, fst_error *error) {
    struct stat target, other;
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    if (path == NULL) return FST_OK;
    FST_TRY(fsti_location_require_file(path, "only a local file can be written here", error));
    bool is_model = fsti_path_is_model(path), exists = stat(path, &target) == 0;
    if (!exists && is_model)
        return fsti_error_set(error, FST_E_ARGUMENT, location,
                              "this is the name of a model or an index. Choose another name");
    if (!exists) return FST_OK;
    bool is_source = source != NULL && stat(source, &other) == 0 && other.st_dev == target.st_dev &&
                     other.st_ino == target.st_ino;
    if (!S_ISREG(target.st_mode)) // renaming would replace a device, even /dev/null
        return fsti_error_set(error, FST_E_NOT_REGULAR, location, "not a regular file but %s",
                              S_ISDIR(target.st_mode) ? "a folder" : "a device or FIFO");
    if (!is_source && !is_model) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, location,
                          "this would overwrite %s. Choose another path",
                          is_model ? "a model" : source);
}

fst_status fsti_text_publish(const char *path, const char *bytes, size_t size,
                             fsti_output_check check, void *context, fst_error *error) {
    fsti_target target;
    fsti_output *output = NULL;
    FST_TRY(fsti_text_check_target(path, NULL, error)); // also paths that were chosen here
    FST_TRY(fsti_target_find(path, false, &target, error));
    fst_status status = fsti_output_open(&target, size, true, &output, error);
    if (status == FST_OK) status = fsti_output_write(output, bytes, size, 0, error);
    if (status == FST_OK) status = fsti_output_sync(output, error);
    if (status == FST_OK && check != NULL) status = check(context, false, error);
    // A model may be saved there since the path was checked.
    if (status == FST_OK) status = fsti_output_place_beside(output, check, context, error);
    fsti_output_close(output);
    fsti_target_clear(&target);
    return status;
}
