// SPDX-License-Identifier: Apache-2.0
/// Verifies files against digests of their whole contents or of their tensors. Private to the model
/// module. A file is read once, through the descriptor that it will be loaded from, and digested
/// chunk by chunk. Loads are then verified against these chunk digests as against a manifest.
#ifndef FSTI_FILE_DIGESTS_H
#define FSTI_FILE_DIGESTS_H

#include "open_model.h"

/// Finds digests for the files at `path`, other than a manifest: the requested bundle, a checksum
/// list, the Hub cache, a sidecar, or embedded digests. *found is the path of the source. *out is
/// NULL if there are at most embedded digests.
fst_status fsti_file_digests_find(const char *path, const char *folder,
                                  const model_request *request, file_digests **out, char **found,
                                  fst_error *error);
/// Parses `bytes`, the text of the file at `path`. *out is NULL if it may be a manifest; otherwise
/// the text is taken over.
fst_status fsti_file_digests_read(const char *path, char *bytes, size_t byte_count,
                                  file_digests **out, fst_error *error);
/// Uses the digests embedded in the files.
fst_status fsti_file_digests_embedded(file_digests **out, fst_error *error);
void fsti_file_digests_close(file_digests *expected);

/// Whether it is a signed bundle, whose names are relative to its own folder.
bool fsti_file_digests_are_signed(const file_digests *expected);

/// The name under which a list has the file at `path`: relative to the model's folder, or for a
/// bundle to the bundle's folder. `text` has space for two paths.
const char *fsti_verification_name(const model_verification *verification, const char *path,
                                   char *text);

/// A file and its name relative to the model's or the bundle's folder.
typedef struct named_file {
    const char *name;
    fsti_file *file;
} named_file;
/// Reads the file and verifies it. *listed with its digests (BLAKE3 of chunks of
/// FSTI_FILE_DIGESTS_CHUNK_BYTES) belongs to `whole`.
fst_status fsti_file_digests_scan(file_digests *expected, const named_file *file,
                                  const fsti_manifest_file **listed, fst_error *error);
#define FSTI_FILE_DIGESTS_CHUNK_BYTES ((uint32_t)1 << 20)
/// Verifies the bytes of an index by name. Embedded digests, the Hub cache and sidecars only cover
/// weights, so they accept every index.
bool fsti_file_digests_match(const file_digests *expected, const char *name, const char *bytes,
                             size_t byte_count);
void fsti_file_digests_describe(const file_digests *expected, fst_verification *out);

#endif
