// SPDX-License-Identifier: Apache-2.0
/// Applies a delta to copies of the files, which then replace the files. Readers that have the old
/// files open or mapped keep them. On file systems with reflinks the copies share unchanged blocks
/// with the old files.
#ifndef FSTI_NEW_FILES_H
#define FSTI_NEW_FILES_H

#include "sync_folder.h"

/// Creates the copy NAME.delta-tmp next to a file of the checkpoint and opens it for reading and
/// writing. *fd is -1 after an error.
fst_status fsti_new_file_make(const char *path, int *fd, fst_error *error);
/// Removes the copies of the model's files that earlier applications left.
void fsti_new_files_remove(const fst_model *model);
/// Renames the copies of files[i] (where is_changed[i]) to the files' names and writes the version
/// note. A list of the renames is written first. After a kill, fsti_new_files_resume() completes
/// them from that list.
typedef struct new_file_set {
    const fst_model *model;
    const bool *is_changed;
    const char *version;
    bool durable;
} new_file_set;
fst_status fsti_new_files_publish(const sync_folder *sync, const new_file_set *set,
                                  fst_error *error);
/// Finishes renames that a kill interrupted. Sets *is_done if there were any.
fst_status fsti_new_files_resume(const sync_folder *sync, bool durable, bool *is_done,
                                 fst_error *error);

#endif
