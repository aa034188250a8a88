// SPDX-License-Identifier: Apache-2.0
/// Models that come through a pipe.
#ifndef CLI_STANDARD_INPUT_H
#define CLI_STANDARD_INPUT_H

#include "cli.h"

/// How much of a pipe is read, and how much of that is kept.
typedef enum input_part {
    INPUT_ALL,      ///< everything is
    INPUT_MEASURED, ///< all is read, the header is kept: the file has a hole where tensors would be
    INPUT_HEADER,   ///< the header is; the file is as long as that says
} input_part;

/// Makes an operand that names a model one that can be opened: "-", and a descriptor that is no
/// file, are read, into a file without a name in TMPDIR. Others stay as they are. EXIT_GOOD, or an
/// exit code after saying what is wrong.
int cli_take_input(char **word, input_part part);

/// Whether a target is standard output: "-", or a name of it.
bool cli_is_output(const char *path);

/// Whether a path, as cli_take_input() has left it, is standard input.
bool cli_is_input(const char *path);

#endif
