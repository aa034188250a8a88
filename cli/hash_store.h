// SPDX-License-Identifier: Apache-2.0
/// Where digests are kept: a file beside the model, or its __metadata__.
#ifndef CLI_HASH_STORE_H
#define CLI_HASH_STORE_H

#include "digest_model.h"

/// Writes the text of cli_digest_model() to "<path>.digest", in one step. Returns an exit code.
int hash_sidecar_write(const char *path, const char *text);

/// The model's metadata and the digests of tensors: "digest.algorithm", "digest.tensor.NAME".
/// hash_metadata_free() frees; NULL without memory.
fst_metadata_entry *hash_metadata(const fst_model *model, const char *text, size_t *count);
void hash_metadata_free(fst_metadata_entry *entries, size_t count);

/// The digests that are kept of a model, and those that it has.
typedef struct hash_check {
    char algorithm[16]; ///< "" when none are kept
    char *kept;         ///< beside the model; NULL: inside
    char *found;
} hash_check;

/// Finds kept digests, beside or inside, and makes the model's own. EXIT_GOOD, or an exit code
/// after saying what is wrong; hash_check_clear() in any case.
int hash_gather(const char *path, fst_model *model, hash_check *check);
void hash_check_clear(hash_check *check);
/// Says what differs; in JSON as members of the caller's object. EXIT_INVALID when something does,
/// or nothing is kept.
int hash_compare(const char *path, const fst_model *model, const hash_check *check, bool quiet);

#endif
