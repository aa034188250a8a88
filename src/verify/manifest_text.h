// SPDX-License-Identifier: Apache-2.0
/// Writes small texts atomically. Private to the verify module.
#ifndef FSTI_MANIFEST_TEXT_H
#define FSTI_MANIFEST_TEXT_H

#include "base/primitives.h"

/// FST_E_ARGUMENT if writing to `path` would replace a model, an index, or the file `source` (a
/// model or a key; NULL: no such file). FST_E_NOT_REGULAR if it is a folder, device or FIFO. NULL
/// for `path`: nothing to check.
fst_status fsti_text_check_target(const char *path, const char *source, fst_error *error);
/// Checks that the model which a text describes is still there.
typedef fst_status (*fsti_text_check)(void *context, fst_error *error);
/// Writes a text to `path` atomically, and syncs it. FST_E_ARGUMENT if a model is there,
/// FST_E_FILE_CHANGED if one is saved there meanwhile. `check` (or NULL) runs when the text is in
/// place, because saves delete older texts when their files are. If it finds another model
/// (FST_E_FILE_CHANGED, FST_E_NOT_FOUND), the text is deleted.
fst_status fsti_text_publish(const char *path, const char *bytes, size_t size,
                             fsti_text_check check, void *context, fst_error *error);

#endif
