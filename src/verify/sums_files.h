// SPDX-License-Identifier: Apache-2.0
/// Lists of whole-file sums, made and held against folders: private to the verify room.
#ifndef FSTI_SUMS_FILES_H
#define FSTI_SUMS_FILES_H

#include "verify.h"

/// Writes the list of the model at `path`; target NULL: FILE.sha256, or SHA256SUMS in the folder.
fst_status fsti_sums_make(const char *path, const char *target, const fst_manifest_options *options,
                          fst_manifest_stats *stats, fst_error *error);
/// Whether the file at `path` is such a list, and no manifest; false where it can't be read.
bool fsti_sums_is_list(const char *path);
/// Holds every file that the list at `list_path` names against it, whole.
fst_status fsti_sums_check(const char *path, const char *list_path,
                           const fsti_check_listener *listener, fst_manifest_stats *stats,
                           fst_error *error);

#endif
