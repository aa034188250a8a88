// SPDX-License-Identifier: Apache-2.0
/// The interface of the delta module: it stores a version of a checkpoint as the changes since the
/// previous version.
///
/// Knows: versions of a checkpoint, frames, the journal of an update.
/// Does not know: where deltas come from, engines.
/// Main types: fst_delta, fsti_delta_live.
#ifndef FSTI_DELTA_H
#define FSTI_DELTA_H

#include "base/primitives.h"
#include "fastsafetensors/experimental/weight_delta.h"

// The work of the public functions. Their wrappers in src/api have checked arguments and completed
// structs.
fst_status fsti_delta_open(const char *const *folders, size_t folder_count, fst_delta **out,
                           fst_error *error);
void fsti_delta_close(fst_delta *delta);
void fsti_delta_info(const fst_delta *delta, fst_delta_info *out);
/// False if the chain has no such tensor.
bool fsti_delta_tensor(const fst_delta *delta, size_t index, fst_delta_tensor *out);
fst_status fsti_delta_version(const char *checkpoint, char *version, int *is_interrupted,
                              fst_error *error);
fst_status fsti_delta_apply(const fst_delta *delta, const char *checkpoint,
                            const fst_delta_options *options, fst_delta_stats *stats,
                            fst_error *error);
fst_status fsti_delta_recover(const char *checkpoint, const fst_delta_options *options,
                              fst_delta_stats *stats, fst_error *error);

/// Tensors in the caller's memory.
typedef struct fsti_delta_live {
    const fst_delta_memory *tensors;
    size_t count;
} fsti_delta_live;
fst_status fsti_delta_prepare(const fst_delta *delta, const fsti_delta_live *live,
                              const fst_delta_options *options, fst_delta_change **out,
                              fst_error *error);
void fsti_delta_commit(fst_delta_change *change);
void fsti_delta_drop(fst_delta_change *change);
fst_status fsti_delta_patch_make(const fst_delta *delta, size_t index,
                                 const fst_delta_patch_options *options, fst_delta_patch *out,
                                 fst_error *error);
fst_status fsti_delta_make(const char *old, const char *folder,
                           const fst_delta_make_options *options, fst_delta_stats *stats,
                           fst_error *error);

#endif
