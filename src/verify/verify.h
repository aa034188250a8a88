// SPDX-License-Identifier: Apache-2.0
/// The door of the verify room: manifests being made, and whole folders held against them. What is
/// loaded is verified elsewhere, by the threads that load (transfer/verify_chunk.c).
#ifndef FSTI_VERIFY_H
#define FSTI_VERIFY_H

#include "base/base.h"
#include "fastsafetensors/verify.h"

/// Whom progress is told.
typedef struct fsti_check_progress {
    fst_progress_callback callback; ///< NULL: nobody
    void *context;
} fsti_check_progress;

/// The public functions; options are complete and checked, stats are all there.
fst_status fsti_manifest_make(const char *path, const char *target,
                              const fst_manifest_options *options, fst_manifest_stats *stats,
                              fst_error *error);
/// Whom differences are told.
typedef struct fsti_check_listener {
    fst_manifest_callback callback; ///< NULL: nobody
    void *context;
    fsti_check_progress progress;
} fsti_check_listener;
fst_status fsti_manifest_check(const char *path, const char *manifest,
                               const fsti_check_listener *listener, fst_manifest_stats *stats,
                               fst_error *error);

/// Paths of a bundle, and of the key that it is made or verified with.
typedef struct fsti_bundle_paths {
    const char *folder, *bundle, *key; ///< bundle NULL: model.sig in the folder
    const char *keep; ///< signing: an older bundle, whose digests may stand; or NULL
    fsti_check_listener listener;
} fsti_bundle_paths;
fst_status fsti_bundle_sign(const fsti_bundle_paths *paths, fst_manifest_stats *stats,
                            fst_error *error);
fst_status fsti_bundle_check(const fsti_bundle_paths *paths, fst_manifest_stats *stats,
                             fst_error *error);

#endif
