// SPDX-License-Identifier: Apache-2.0
/// A model whose files stay the same while a command reads them by the model and by their paths.
#ifndef CLI_STEADY_MODEL_H
#define CLI_STEADY_MODEL_H

#include "cli.h"

/// A digest of what differs between models at one path: their files (path, inode, size, time
/// of the last change), and which tensors are where in them.
typedef struct steady_identity {
    unsigned char bytes[FST_DIGEST_BYTES_MAX];
} steady_identity;

/// Opens a model. Returns an exit code after printing any error. Close with fst_model_close().
int steady_open(const char *path, fst_model **model, steady_identity *identity);
/// Whether the path still leads to the model that was opened. Returns an exit code after printing
/// that it does not.
int steady_check(const char *path, const steady_identity *identity);

/// Prints that the path leads to something else now. Returns an exit code.
int steady_refuse(const char *path);

#endif
