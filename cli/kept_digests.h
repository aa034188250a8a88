// SPDX-License-Identifier: Apache-2.0
/// Digests in a model's metadata, when the model is written anew.
#ifndef CLI_KEPT_DIGESTS_H
#define CLI_KEPT_DIGESTS_H

#include "cli.h"

typedef struct kept_digests {
    const fst_model *model; ///< the model before the change
    fst_metadata_entry *entries;
    size_t entry_count;
    size_t tensor_count; ///< of the new model
    /// The new tensor with the same bytes as tensor `source`, or NULL.
    const fst_save_tensor *(*find)(const void *context, size_t source);
    const void *context;
    char **keys; ///< keys allocated for entries
    size_t key_count;
} kept_digests;

/// Updates the entries for the new model: digests of unchanged bytes are kept under the tensors'
/// new names. If a tensor would have no digest, all are deleted and a line on stderr says so,
/// because readers expect a digest for every tensor. False if memory is exhausted.
bool cli_digests_select(kept_digests *digests);
/// Frees the keys, after the entries' last use.
void cli_digests_clear(kept_digests *digests);

#endif
