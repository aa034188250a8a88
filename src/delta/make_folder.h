// SPDX-License-Identifier: Apache-2.0
/// The folder that a delta is written to.
#ifndef FSTI_MAKE_FOLDER_H
#define FSTI_MAKE_FOLDER_H

#include "delta.h"

/// Makes the folder and marks it. FST_E_ARGUMENT where it holds a version, or files of a model that
/// no killed call has left; what such a call left is removed.
fst_status fsti_make_folder_begin(const char *folder, bool durable, fst_error *error);
/// After a success removes the mark, else all that was written.
void fsti_make_folder_end(const char *folder, fst_status status);

#endif
