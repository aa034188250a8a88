// SPDX-License-Identifier: Apache-2.0
/// Lists a folder. All listings use this function, so that read errors are never ignored.
#include <dirent.h>
#include <errno.h>
#include <string.h>

#include "io.h"

/// The next name except "." and ".."; NULL at the end, or with errno set on failure.
static const struct dirent *next_entry(DIR *directory) {
    const struct dirent *entry;
    do {
        errno = 0;
        entry = readdir(directory);
    } while (entry != NULL &&
             (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0));
    return entry;
}

fst_status fsti_folder_visit(const char *folder, fsti_folder_visitor visit, void *context,
                             fst_error *error) {
    DIR *directory = opendir(folder);
    if (directory == NULL) return fsti_error_errno(error, errno, folder, "opening the folder");
    fst_status status = FST_OK;
    while (status == FST_OK) {
        const struct dirent *found = next_entry(directory);
        if (found == NULL && errno != 0)
            status = fsti_error_errno(error, errno, folder, "listing the folder");
        if (found == NULL) break;
        unsigned char type = found->d_type;
        fsti_folder_entry entry = {
            .name = found->d_name,
            .folder_fd = dirfd(directory), // an open folder has a descriptor
            .may_be_folder = type == DT_DIR || type == DT_LNK || type == DT_UNKNOWN,
        };
        status = visit(context, &entry, error);
    }
    closedir(directory);
    return status;
}
