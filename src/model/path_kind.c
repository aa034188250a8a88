// SPDX-License-Identifier: Apache-2.0
/// What is at a path: files are examined with system calls, objects by their URL or with a request.
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "open_model.h"
#include "location/location.h"

/// How paths of one kind are examined.
typedef struct path_examiner {
    fst_status (*find_kind)(const char *path, path_kind *out, fst_error *error);
    fst_status (*exists)(const char *path, bool *out, fst_error *error);
    bool may_hide_absence; ///< FST_E_PERMISSION may mean that nothing is there
} path_examiner;

// ---- files ----

static fst_status find_file_kind(const char *path, path_kind *out, fst_error *error) {
    struct stat info;
    *out = PATH_IS_ABSENT;
    if (stat(path, &info) == 0) {
        *out = S_ISDIR(info.st_mode)   ? PATH_IS_FOLDER
               : S_ISREG(info.st_mode) ? PATH_IS_FILE
                                       : PATH_IS_OTHER;
        return FST_OK;
    }
    if (errno == ENOENT || errno == ENOTDIR || errno == ENAMETOOLONG) return FST_OK;
    return fsti_error_errno(error, errno, path, "examining the path");
}

static fst_status file_exists(const char *path, bool *out, fst_error *error) {
    path_kind kind;
    struct stat info;
    FST_TRY(find_file_kind(path, &kind, error));
    *out = kind != PATH_IS_ABSENT || lstat(path, &info) == 0;
    return FST_OK;
}

// ---- objects ----

/// Decided from the text, without a request.
static fst_status find_object_kind(const char *url, path_kind *out, fst_error *error) {
    (void)error;
    size_t size = strcspn(url, "?#");
    *out = url[size - 1] == '/' ? PATH_IS_FOLDER : PATH_IS_FILE;
    return FST_OK;
}

static fst_status object_exists(const char *url, bool *out, fst_error *error) {
    fsti_file *file = NULL;
    fst_error cause = {0};
    fst_status status = fsti_file_open(url, &file, &cause);
    fsti_file_unref(file);
    *out = status == FST_OK;
    if (status == FST_OK || fsti_model_path_is_absent(url, status)) return FST_OK;
    if (error != NULL) *error = cause;
    return status;
}

static const path_examiner *examiner_of(const char *path) {
    static const path_examiner files = {find_file_kind, file_exists, false};
    // Without permission to list a bucket, S3 answers 403 for a missing key.
    static const path_examiner objects = {find_object_kind, object_exists, true};
    return fsti_location_is_url(path) ? &objects : &files;
}

fst_status fsti_model_path_kind(const char *path, path_kind *out, fst_error *error) {
    return examiner_of(path)->find_kind(path, out, error);
}

fst_status fsti_model_path_exists(const char *path, bool *out, fst_error *error) {
    return examiner_of(path)->exists(path, out, error);
}

bool fsti_model_path_is_absent(const char *path, fst_status status) {
    return status == FST_E_NOT_FOUND ||
           (status == FST_E_PERMISSION && examiner_of(path)->may_hide_absence);
}
