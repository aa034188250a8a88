// SPDX-License-Identifier: Apache-2.0
/// The folder that a delta is written to.
#ifndef FSTI_MAKE_FOLDER_H
#define FSTI_MAKE_FOLDER_H

#include "delta.h"
#include "output/output.h"

typedef struct make_folder {
    const char *path;
    int lock; ///< -1: none
    fsti_folder_use use;
} make_folder;

/// Creates the folder at `path`, locks it and marks it. FST_E_ARGUMENT if it holds a version, or
/// model files that the mark of a killed call does not list; FST_E_TIMEOUT if another call is
/// writing to it. The remains of a killed call are deleted.
fst_status fsti_make_folder_begin(make_folder *folder, bool durable, fst_error *error);
/// Lists the complete shard behind the descriptor in the mark, before it gets its name.
fst_status fsti_make_folder_list(const char *folder, int fd, const char *name, bool durable,
                                 fst_error *error);
/// Unlocks the folder. Deletes the mark if `status` is FST_OK, otherwise everything that was
/// written and the folders that were created.
void fsti_make_folder_end(make_folder *folder, fst_status status);

#endif
