// SPDX-License-Identifier: Apache-2.0
/// 'hash --manifest' and 'verify --manifest'.
#ifndef CLI_MANIFEST_COMMANDS_H
#define CLI_MANIFEST_COMMANDS_H

#include "cli.h"

typedef struct manifest_request {
    const char *algorithm; ///< "xxh3" and "xxh3-128", "blake3", "sha256"
    const char *target;    ///< NULL: next to the model
    const char *keep;
    uint64_t chunk_bytes; ///< 0: the library's default
    bool tensors;
    bool sums; ///< a checksum list for sha256sum instead of a manifest
} manifest_request;

/// Makes the manifest of a model and reports it. Returns an exit code.
int manifest_make(const char *path, const manifest_request *request);
/// Verifies all files against a manifest (NULL: the one next to the model) and prints the
/// differences. Returns an exit code.
int manifest_verify(const char *path, const char *manifest, bool quiet);

/// Verifies a folder against a signed bundle and prints the differences. Returns an exit code.
int signature_verify(fst_bundle_files *files, bool quiet);

#endif
