// SPDX-License-Identifier: Apache-2.0
/// The metadata of a model's files, as one. Digests are kept there, one a tensor: it may have as
/// many keys as there are tensors, so they are looked up and not searched for.
#ifndef CLI_METADATA_H
#define CLI_METADATA_H

#include "cli.h"

/// All metadata of a model's files, in their order; a key of several files has its first value. The
/// array is the caller's, to be freed; NULL without memory.
fst_metadata_entry *cli_model_metadata(const fst_model *model, size_t *count);

/// Places of entries by their keys. The entries outlive it; free(order) ends it.
typedef struct metadata_index {
    const fst_metadata_entry **order;
    size_t count;
} metadata_index;

/// False without memory.
bool cli_metadata_index(const fst_metadata_entry *entries, size_t count, metadata_index *out);
/// The entry whose key is `prefix` and `rest` in a row, or NULL.
const fst_metadata_entry *cli_metadata_find(const metadata_index *index, const char *prefix,
                                            const char *rest, size_t rest_size);

#endif
