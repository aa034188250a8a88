// SPDX-License-Identifier: Apache-2.0
/// Writes small texts atomically. Private to the verify module.
#ifndef FSTI_MANIFEST_TEXT_H
#define FSTI_MANIFEST_TEXT_H

#include "output/output.h"

/// FST_E_ARGUMENT if writing to `path` would replace a model, an index, or the file `source` (a
/// model or a key; NULL: no such file). FST_E_NOT_REGULAR if it is a folder, device or FIFO. NULL
/// for `path`: nothing to check.
fst_status fsti_text_check_target(const char *path, const char *source, fst_error *error);
/// Writes a text to `path` atomically, and syncs it. FST_E_ARGUMENT if a model is there,
/// FST_E_FILE_CHANGED if one is saved there meanwhile. `check` (or NULL) runs before the text is
/// put in place, and once more when it is (fsti_output_place_beside()).
fst_status fsti_text_publish(const char *path, const char *bytes, size_t size,
                             fsti_output_check check, void *context, fst_error *error);

#endif
