// SPDX-License-Identifier: Apache-2.0
/// Whether a path is a file or a folder.
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "open_model.h"
#include "store/store.h"

fst_status fsti_model_path_kind(const char *path, path_kind *out, fst_error *error) {
    struct stat info;
    *out = PATH_IS_ABSENT;
    if (fsti_location_is_url(path)) { // decided from the text, without a request
        size_t size = strcspn(path, "?#");
        *out = path[size - 1] == '/' ? PATH_IS_FOLDER : PATH_IS_FILE;
        return FST_OK;
    }
    if (stat(path, &info) == 0) {
        *out = S_ISDIR(info.st_mode)   ? PATH_IS_FOLDER
               : S_ISREG(info.st_mode) ? PATH_IS_FILE
                                       : PATH_IS_OTHER;
        return FST_OK;
    }
    if (errno == ENOENT || errno == ENOTDIR || errno == ENAMETOOLONG) return FST_OK;
    return fsti_error_errno(error, errno, path, "examining the path");
}
