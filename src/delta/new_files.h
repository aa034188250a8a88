// SPDX-License-Identifier: Apache-2.0
/// Applies a delta to copies of the files, which then replace the files. Readers that have the old
/// files open or mapped keep them. On file systems with reflinks the copies share unchanged blocks
/// with the old files.
#ifndef FSTI_NEW_FILES_H
#define FSTI_NEW_FILES_H

#include "sync_folder.h"

/// Removes the copies that an earlier update left, and lists those that this one may make. An error
/// if earlier ones cannot be removed: their list must not be replaced then.
fst_status fsti_new_files_begin(const sync_folder *sync, const fst_model *model, fst_error *error);
/// Creates the copy NAME.delta-tmp next to a file of the checkpoint and opens it for reading and
/// writing. *fd is -1 after an error; a file that has the copy's name already is one. *stamp is
/// that of the file that was copied.
fst_status fsti_new_file_make(const char *path, int *fd, fsti_delta_stamp *stamp, fst_error *error);
/// Removes the copies that an update has listed. Other files with such names stay.
void fsti_new_files_remove(const sync_folder *sync);
/// Renames the copies of files[i] (where is_changed[i]) to the files' names and writes the version
/// note. A list of the renames is written first. After a kill, fsti_new_files_resume() completes
/// them from that list. After an error the old files have their names again, or the message says
/// that they have not. FST_E_FILE_CHANGED if a file is no longer the one that was copied.
typedef struct new_file_set {
    const fst_model *model;
    const bool *is_changed;
    const fsti_delta_stamp *stamps; ///< of the files when they were copied
    const char *version;
    bool durable;
} new_file_set;
fst_status fsti_new_files_publish(const sync_folder *sync, const new_file_set *set,
                                  fst_error *error);
/// Finishes renames that a kill interrupted. Sets *is_done if there were any.
fst_status fsti_new_files_resume(const sync_folder *sync, bool durable, bool *is_done,
                                 fst_error *error);

#endif
