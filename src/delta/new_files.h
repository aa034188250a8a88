// SPDX-License-Identifier: Apache-2.0
/// Applying to new files that replace the old ones: readers that have the old files open or mapped
/// keep them. The new files share unchanged blocks with the old ones where the file system can.
#ifndef FSTI_NEW_FILES_H
#define FSTI_NEW_FILES_H

#include "sync_folder.h"

/// Makes the copy NAME.delta-tmp next to a file of the checkpoint and opens it for reading and
/// writing. *fd is -1 after an error.
fst_status fsti_new_file_make(const char *path, int *fd, fst_error *error);
/// Removes the copies of the model's files that earlier applications left.
void fsti_new_files_remove(const fst_model *model);
/// Gives the copies of files[i] (where is_changed[i]) their names and notes the version. The list
/// of renames is written first; once it is there, a kill is followed by fsti_new_files_resume().
typedef struct new_file_set {
    const fst_model *model;
    const bool *is_changed;
    const char *version;
    bool durable;
} new_file_set;
fst_status fsti_new_files_publish(const sync_folder *sync, const new_file_set *set,
                                  fst_error *error);
/// Finishes renames that a kill interrupted. *is_done: there were some.
fst_status fsti_new_files_resume(const sync_folder *sync, bool durable, bool *is_done,
                                 fst_error *error);

#endif
