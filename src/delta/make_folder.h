// SPDX-License-Identifier: Apache-2.0
/// The folder that a delta is written to.
#ifndef FSTI_MAKE_FOLDER_H
#define FSTI_MAKE_FOLDER_H

#include "delta.h"

/// Makes the folder, locks it and marks it. FST_E_ARGUMENT if it holds a version, or files of a
/// model that an ended call did not leave; files that such a call left are removed. FST_E_TIMEOUT
/// if another call is writing to it.
fst_status fsti_make_folder_begin(const char *folder, bool durable, int *lock, fst_error *error);
/// After a success removes the mark, otherwise all files that were written. Unlocks the folder.
void fsti_make_folder_end(const char *folder, int lock, fst_status status);

#endif
