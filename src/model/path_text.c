// SPDX-License-Identifier: Apache-2.0
/// Path and URL texts: recognising folders, joining, redacting.
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
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

char *fsti_model_join(const char *start, const char *end) {
    size_t size = strlen(start) + strlen(end) + 1, length = strlen(start);
    const char *query = "";
    if (fsti_location_is_url(start)) {
        length = strcspn(start, "?#");
        // A store's query is the version of one object.
        if (strncasecmp(start, "http", 4) == 0) query = start + length;
    }
    char *text = fsti_alloc(size);
    if (text != NULL) snprintf(text, size, "%.*s%s%s", (int)length, start, end, query);
    return text;
}

char *fsti_model_redact(const char *path) {
    size_t size = strlen(path) + 1;
    char *text = fsti_string_copy(path, size - 1);
    if (text != NULL && fsti_location_is_url(path)) fsti_url_redact(path, text, size);
    return text;
}

bool fsti_model_is_bucket(const char *url) {
    static const char *const listed[] = {"s3://", "gs://", "az://"};
    for (size_t i = 0; i < sizeof listed / sizeof *listed; i++)
        if (strncasecmp(url, listed[i], 5) == 0) return strcspn(url + 5, "/?#") == strlen(url + 5);
    return false;
}
