// SPDX-License-Identifier: Apache-2.0
/// Models that come through a pipe.
#ifndef CLI_STANDARD_INPUT_H
#define CLI_STANDARD_INPUT_H

#include "cli.h"

/// Makes an operand that names a model one that can be opened: "-", and a descriptor that is no
/// file, are read to their end, into a file without a name in TMPDIR. Others stay as they are.
/// EXIT_GOOD, or an exit code after saying what is wrong.
int cli_take_input(char **word);

/// Whether a path, as cli_take_input() has left it, is standard input.
bool cli_is_input(const char *path);

#endif
