// SPDX-License-Identifier: Apache-2.0
/// Digests of a model's tensors and files, as text.
#ifndef CLI_DIGEST_MODEL_H
#define CLI_DIGEST_MODEL_H

#include "cli.h"

/// The digest of a name; false for a name that is none.
bool cli_digest_find(const char *name, fst_digest *out);

/// Digests of a model: one line each, in file order.
///   fastsafetensors-digest 1 ALGORITHM
///   file HEX NAME            (each file, every byte)
///   tensor HEX NAME          (names as JSON strings)
/// The text is the caller's, to be freed. Returns an exit code, after saying what is wrong.
int cli_digest_model(fst_model *model, fst_digest digest, char **text);

#endif
