// SPDX-License-Identifier: Apache-2.0
/// Digests in a model's metadata, when the model is written anew.
#ifndef CLI_KEPT_DIGESTS_H
#define CLI_KEPT_DIGESTS_H

#include "cli.h"

typedef struct kept_digests {
    const fst_model *model; ///< as it was
    fst_metadata_entry *entries;
    size_t entry_count;
    size_t tensor_count; ///< of the new model
    /// The tensor of the new model that tensor `source` becomes; NULL: none, or with other bytes.
    const fst_save_tensor *(*find)(const void *context, size_t source);
    const void *context;
    char **keys; ///< made for entries
    size_t key_count;
} kept_digests;

/// Makes the entries those of the new model: digests of bytes that stay as they are stay, under the
/// tensors' new names. Where a tensor would be without one all go, and a line on stderr says so: a
/// model that keeps some is taken for one that keeps all. False without memory.
bool cli_digests_settle(kept_digests *digests);
/// Frees the keys, after the entries' last use.
void cli_digests_clear(kept_digests *digests);

#endif
