// SPDX-License-Identifier: Apache-2.0
/// Checksum lists of whole files, written and checked. Private to the verify module.
#ifndef FSTI_SUMS_FILES_H
#define FSTI_SUMS_FILES_H

#include "folder_check.h"

/// Writes a list for the model at `path`. NULL target: FILE.sha256, or SHA256SUMS in the folder.
fst_status fsti_sums_make(const char *path, const char *target, const fst_manifest_options *options,
                          fst_manifest_stats *stats, fst_error *error);
/// Whether the file at `path` is a checksum list, not a manifest. False if it cannot be read.
bool fsti_sums_is_list(const char *path);
/// Verifies every file in the list at `list_path`.
fst_status fsti_sums_check(const char *path, const char *list_path,
                           const fsti_check_listener *listener, fst_manifest_stats *stats,
                           fst_error *error);

#endif
