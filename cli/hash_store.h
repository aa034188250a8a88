// SPDX-License-Identifier: Apache-2.0
/// Stores digests in a file next to the model, or in its __metadata__.
#ifndef CLI_HASH_STORE_H
#define CLI_HASH_STORE_H

#include "digest_model.h"

/// The path with the links of its folders resolved once, so that the digests are those of the model
/// that they are written next to, although a link changes meanwhile. NULL: no memory. Free it.
char *hash_settle(const char *path);
/// Which file hash_sidecar_write() wrote.
typedef struct hash_sidecar {
    uint64_t device, inode;
} hash_sidecar;

/// Writes the text of cli_digest_model() to "<path>.digest" atomically. Returns an exit code.
int hash_sidecar_write(const char *path, const char *text, hash_sidecar *written);
/// Deletes the file if it is still the one that was written.
void hash_sidecar_remove(const char *path, const hash_sidecar *written);
/// For a dry run: whether hash_sidecar_write() could write there. Returns an exit code.
int hash_sidecar_check(const char *path);

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
