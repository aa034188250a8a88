// SPDX-License-Identifier: Apache-2.0
/// Where digests are kept: a file beside the model, or its __metadata__.
#ifndef CLI_HASH_STORE_H
#define CLI_HASH_STORE_H

#include "digest.h"

/// Writes the text of cli_digest_model() to "<path>.digest", in one step. Returns an exit code.
int hash_sidecar_write(const char *path, const char *text);

/// The model's metadata and the digests of tensors: "digest.algorithm", "digest.tensor.NAME".
/// hash_metadata_free() frees; NULL without memory.
fst_metadata_entry *hash_metadata(const fst_model *model, const char *text, size_t *count);
void hash_metadata_free(fst_metadata_entry *entries, size_t count);

/// Compares a model with the digests that are kept of it, beside or inside; says what differs.
/// EXIT_INVALID when something does, or nothing is kept.
int hash_verify(const char *path, fst_model *model, bool quiet);

#endif
