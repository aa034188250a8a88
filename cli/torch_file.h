// SPDX-License-Identifier: Apache-2.0
/// Files of torch.save: known by their first bytes, converted by the Python package.
#ifndef CLI_TORCH_FILE_H
#define CLI_TORCH_FILE_H

#include "rewrite.h"

/// True for a zip archive, or a pickle of protocol 2 and later. Never waits on a pipe.
bool cli_is_torch_file(const char *path);

/// Replaces this process by Python, which has torch read the file (weights only) and writes what
/// the plan says. Returns, with an exit code, when there is no Python to be had.
int cli_convert_torch_file(const char *source, const rewrite_plan *plan);

#endif
