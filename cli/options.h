// SPDX-License-Identifier: Apache-2.0
/// Command lines described by tables: parsing, help and completion use the same table.
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H

#include "cli.h"
#include "standard_input.h"

/// An option. A table of options ends with an entry without a name.
typedef struct cli_option {
    int key;                  ///< passed to `take`
    const char *name;         ///< "dtype", without the dashes
    const char *value;        ///< placeholder ("DTYPE", "[=FILE]": optional); NULL: no value
    const char *const *words; ///< allowed values, NULL-terminated; NULL: any
    const char *help;
    unsigned of; ///< in a table of several commands: bits of the commands that have it; 0: all
} cli_option;

/// Options shared by several commands.
#define CLI_SELECT_OPTION                                                                          \
    {'s', "select", "GLOB", NULL, "use only tensors whose names match; repeatable", 0}
#define CLI_LENIENT_OPTION(of)                                                                     \
    {'l', "lenient", NULL, NULL, "accept bytes after the last tensor", of}
#define CLI_QUICK_OPTION {'q', "quick", NULL, NULL, "return before the data is on the disk", 0}
#define CLI_DRY_RUN_OPTION                                                                         \
    {'d', "dry-run", NULL, NULL, "print what would be written; write nothing", 0}

/// The value of an option. `word` is its index in the option's words.
typedef struct cli_value {
    const char *text;
    int word;
} cli_value;

/// Which operands are models, and may be "-" for standard input.
typedef enum cli_inputs {
    INPUTS_NONE,
    INPUTS_FIRST,
    INPUTS_ALL,
    INPUTS_ALL_BUT_LAST, ///< the last one is the target
} cli_inputs;

/// A subcommand.
typedef struct cli_command cli_command;
struct cli_command {
    const char *name;
    const char *operands;             ///< "SOURCE TARGET"
    const char *summary;              ///< one line
    const char *about;                ///< text of its help
    const char *examples;             ///< lines
    const char *const *operand_words; ///< choices for the operand, NULL-terminated; NULL: any
    const cli_option *options;
    unsigned bit; ///< selects its options in a table of several commands
    int operand_min, operand_max;
    cli_inputs inputs;
    /// Which part of a piped model the request needs; NULL: all of it.
    input_part (*part)(const void *request);
    bool has_json, has_progress;
    bool has_cache; ///< it reads URLs: --cache-dir and --offline
    /// Applies one option to the request. EXIT_OK, or an exit code after printing the error.
    int (*take)(void *request, int key, cli_value value);
    int (*run)(const cli_command *command, char **argv);
};

/// All subcommands, NULL-terminated.
extern const cli_command *const cli_commands[];
const cli_command *cli_command_find(const char *name);

/// The parsed operands.
typedef struct cli_operands {
    char **words;
    int count;
    bool is_answered; ///< the help was requested and printed
} cli_operands;

/// Parses a command line: options go to `request` through the command's `take`, operands are moved
/// to the end of argv. EXIT_OK, or EXIT_USAGE after printing the error.
int cli_parse(const cli_command *command, char **argv, void *request, cli_operands *operands);

void cli_print_help(const cli_command *command);
/// Prints the shared options, for the general help.
void cli_print_common_options(void);
/// Prints completions for the last of `words`, one per line; ":files" stands for file names.
int cli_complete(char **words, int count);
/// The name closest to `word`, or NULL.
const char *cli_nearest(const char *word, const char *const *names, size_t count);

/// Values of options that several commands have.
extern const char *const cli_dtype_words[];

#endif
