// SPDX-License-Identifier: Apache-2.0
/// Interface of the verify module: makes manifests, and verifies whole folders. Loads are verified
/// elsewhere, by the loading threads (transfer/verify_chunk.c).
///
/// Knows: manifests, signatures, whole folders.
/// Does not know: loads: they are verified while they are read.
/// Main types: fsti_check_listener, fsti_bundle_paths.
#ifndef FSTI_FOLDER_CHECK_H
#define FSTI_FOLDER_CHECK_H

#include "base/primitives.h"
#include "fastsafetensors/verify.h"

/// The receiver of progress.
typedef struct fsti_check_progress {
    fst_progress_callback callback; ///< NULL: none
    void *context;
} fsti_check_progress;

/// Implements the public functions; options are complete and checked, and stats are set.
fst_status fsti_manifest_make(const char *path, const char *target,
                              const fst_manifest_options *options, fst_manifest_stats *stats,
                              fst_error *error);
/// The receiver of differences.
typedef struct fsti_check_listener {
    fst_manifest_callback callback; ///< NULL: none
    void *context;
    fsti_check_progress progress;
} fsti_check_listener;
fst_status fsti_manifest_check(const char *path, const char *manifest,
                               const fsti_check_listener *listener, fst_manifest_stats *stats,
                               fst_error *error);

/// Paths of a bundle, and of the key that signs or verifies it.
typedef struct fsti_bundle_paths {
    const char *folder, *bundle, *key; ///< bundle NULL: model.sig in the folder
    const char *keep; ///< when signing: an older bundle with reusable digests; or NULL
    fsti_check_listener listener;
} fsti_bundle_paths;
fst_status fsti_bundle_sign(const fsti_bundle_paths *paths, fst_manifest_stats *stats,
                            fst_error *error);
fst_status fsti_bundle_check(const fsti_bundle_paths *paths, fst_manifest_stats *stats,
                             fst_error *error);

#endif
