// SPDX-License-Identifier: Apache-2.0
/// Models read from a pipe.
#ifndef CLI_STANDARD_INPUT_H
#define CLI_STANDARD_INPUT_H

#include "cli.h"

/// How much of a pipe is read and stored.
typedef enum input_part {
    INPUT_ALL,      ///< everything
    INPUT_MEASURED, ///< read everything, store the header: the file has a hole in place of tensors
    INPUT_HEADER,   ///< read and store the header; the file gets the length that it states
} input_part;

/// Replaces an operand that names a pipe by a file: "-" and descriptors of pipes are copied to an
/// unnamed file in TMPDIR. Other operands are unchanged. Returns EXIT_OK, or an exit code after
/// printing the error.
int cli_take_input(char **word, input_part part);

/// Whether a target is standard output: "-", or an equivalent path.
bool cli_is_output(const char *path);

/// Whether a path, as changed by cli_take_input(), is standard input.
bool cli_is_input(const char *path);

#endif
