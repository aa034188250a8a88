// SPDX-License-Identifier: Apache-2.0
/// The subcommands, each defined in its cmd_*.c.
#ifndef CLI_COMMANDS_H
#define CLI_COMMANDS_H

#include "options.h"

extern const cli_command inspect_command, show_command, verify_command, load_command,
    convert_command, extract_command, split_command, merge_command, edit_command, diff_command,
    hash_command, sign_command, rescue_command, clean_command, bench_command, engines_command,
    cache_command, delta_command;

#endif
