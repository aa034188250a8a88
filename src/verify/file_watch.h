// SPDX-License-Identifier: Apache-2.0
/// Notices that files were replaced or changed while a list of their digests was made, because a
/// list of two saves would call a mix of them valid. Private to the verify module.
#ifndef FSTI_FILE_WATCH_H
#define FSTI_FILE_WATCH_H

#include "base/primitives.h"

/// A file, with its identity and times when the watch began.
typedef struct watched_file watched_file;

typedef struct file_watch {
    watched_file *files;
    size_t count, capacity;
} file_watch;

/// Adds the file at folder + name. A URL, or a file that cannot be examined, is not watched.
fst_status fsti_file_watch_add(file_watch *watch, const char *folder, const char *name,
                               fst_error *error);
/// FST_E_FILE_CHANGED with the first file that is no longer what it was, of those whose path
/// `wants` accepts (NULL: of all).
fst_status fsti_file_watch_check(const file_watch *watch, bool (*wants)(const char *path),
                                 fst_error *error);
void fsti_file_watch_clear(file_watch *watch);

#endif
