// SPDX-License-Identifier: Apache-2.0
/// The combined metadata of a model's files. With embedded digests there may be as many keys as
/// tensors, so lookups use an index.
#ifndef CLI_METADATA_H
#define CLI_METADATA_H

#include "cli.h"

/// All metadata of a model's files in order; for a key in several files the first value. The caller
/// frees the array; NULL without memory.
fst_metadata_entry *cli_model_metadata(const fst_model *model, size_t *count);

/// An index of entries by key. The entries must outlive it; free(order) ends it.
typedef struct metadata_index {
    const fst_metadata_entry **order;
    size_t count;
} metadata_index;

/// False without memory.
bool cli_metadata_index(const fst_metadata_entry *entries, size_t count, metadata_index *out);
/// The entry whose key is `prefix` followed by `rest`, or NULL.
const fst_metadata_entry *cli_metadata_find(const metadata_index *index, const char *prefix,
                                            const char *rest, size_t rest_size);

#endif
