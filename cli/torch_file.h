// SPDX-License-Identifier: Apache-2.0
/// torch.save files: recognised by their first bytes, converted by the Python package.
#ifndef CLI_TORCH_FILE_H
#define CLI_TORCH_FILE_H

#include "rewrite.h"

/// Whether it is a zip archive, or a pickle of protocol 2 or later. Never waits on a pipe.
bool cli_is_torch_file(const char *path);

/// Replaces this process by Python, where torch reads the file (weights only) and the package
/// writes the target. Returns an exit code if Python is not available.
int cli_convert_torch_file(const char *source, const rewrite_plan *plan);

#endif
