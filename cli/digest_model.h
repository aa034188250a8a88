// SPDX-License-Identifier: Apache-2.0
/// Digests of a model's tensors and files, as text.
#ifndef CLI_DIGEST_MODEL_H
#define CLI_DIGEST_MODEL_H

#include "cli.h"

/// The digest of a name. False for an unknown name.
bool cli_digest_find(const char *name, fst_digest *out);

/// Digests a model: one line per digest, in file order.
///   fastsafetensors-digest 1 ALGORITHM
///   file HEX NAME            (each file, all bytes)
///   tensor HEX NAME          (names as JSON strings)
/// A file's name is its path below `path` (the model's folder, or a file in it). The caller frees
/// the text. Returns an exit code after printing any error.
int cli_digest_model(fst_model *model, const char *path, fst_digest digest, char **text);

/// Whether the digests can be stored: names of files that are not UTF-8 cannot, because the text
/// has them as JSON. Returns an exit code after printing why not.
int cli_digest_check_names(const fst_model *model, const char *path);

#endif
