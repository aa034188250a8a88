// SPDX-License-Identifier: Apache-2.0
/// Digests by libraries that are found when they are asked for: xxHash's libxxhash (XXH3, 64 bits)
/// and OpenSSL's libcrypto (SHA-256).
#ifndef CLI_HASH_LIBRARY_H
#define CLI_HASH_LIBRARY_H

#include "cli.h"

#define DIGEST_BYTES_MAX 32
#define DIGEST_TEXT_MAX (2 * DIGEST_BYTES_MAX + 1)

typedef struct digest_library digest_library;

/// Loads the library of an algorithm: "xxh3" or "sha256". NULL after saying what is missing.
const digest_library *cli_digest_library(const char *algorithm);
const char *cli_digest_name(const digest_library *library);

/// A digest in progress; NULL without memory.
void *cli_digest_begin(const digest_library *library);
void cli_digest_update(const digest_library *library, void *state, const void *bytes, size_t size);
/// Ends it: its hexadecimal digits go to `text`.
void cli_digest_end(const digest_library *library, void *state, char *text);

/// Digests of a model, as text: one line each, in file order.
///   fastsafetensors-digest 1 ALGORITHM
///   file HEX NAME            (each file, every byte)
///   tensor HEX NAME          (names as JSON strings)
/// The text is the caller's, to be freed. Returns an exit code.
int cli_digest_model(fst_model *model, const digest_library *library, char **text);

#endif
