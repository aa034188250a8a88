// SPDX-License-Identifier: Apache-2.0
/// Digests in a model's __metadata__, and comparisons with stored ones.
#ifndef CLI_HASH_STORE_H
#define CLI_HASH_STORE_H

#include "digest_model.h"

/// The model's metadata plus digests of its tensors: "digest.algorithm", "digest.tensor.NAME". Free
/// with hash_metadata_free(); NULL without memory.
fst_metadata_entry *hash_metadata(const fst_model *model, const char *text, size_t *count);
void hash_metadata_free(fst_metadata_entry *entries, size_t count);

/// The stored digests of a model, and the computed ones.
typedef struct hash_check {
    char algorithm[16]; ///< "" if none are stored
    char *kept;         ///< of the .digest file; NULL: embedded in the model
    char *found;
} hash_check;

/// Finds the stored digests and computes the model's. Returns EXIT_OK, or an exit code after
/// printing the error. Call hash_check_clear() in any case.
int hash_gather(const char *path, fst_model *model, hash_check *check);
void hash_check_clear(hash_check *check);
/// Whether there are stored digests, and the computed ones equal them. Prints nothing.
bool hash_is_same(const fst_model *model, const hash_check *check);
/// Prints the differences; in JSON as members of the caller's object. EXIT_INVALID if there is a
/// difference or nothing is stored.
int hash_compare(const char *path, const fst_model *model, const hash_check *check, bool quiet);

#endif
