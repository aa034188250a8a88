// SPDX-License-Identifier: Apache-2.0
/// The names in a folder: the one place that lists folders, so that none ends early without a word.
#include <dirent.h>
#include <errno.h>
#include <string.h>

#include "io.h"

/// The next name but "." and ".."; NULL at the end, and with errno set where the rest can't be
/// told.
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
            .folder_fd = dirfd(directory), // of a folder that was opened there is one
            .may_be_folder = type == DT_DIR || type == DT_LNK || type == DT_UNKNOWN,
        };
        status = visit(context, &entry, error);
    }
    closedir(directory);
    return status;
}
