// SPDX-License-Identifier: Apache-2.0
/// Command lines by tables: one table gives parsing, help and completion.
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H

#include "cli.h"
#include "standard_input.h"

/// An option. A table of them ends with one that has no name.
typedef struct cli_option {
    int key;                  ///< what `take` is called with
    const char *name;         ///< "dtype", without the dashes
    const char *value;        ///< what its value is called ("DTYPE"); NULL: it takes none
    const char *const *words; ///< the values there are, ending in NULL; NULL: any
    const char *help;
    unsigned of; ///< in a table of several commands: the bits of those that have it; 0: all
} cli_option;

/// Rows that several commands have.
#define CLI_SELECT_OPTION                                                                          \
    {'s', "select", "GLOB", NULL, "only tensors whose names match; may come several times", 0}
#define CLI_LENIENT_OPTION(of)                                                                     \
    {'l', "lenient", NULL, NULL, "accept bytes after the last tensor", of}
#define CLI_QUICK_OPTION                                                                           \
    {'q', "quick", NULL, NULL, "do not wait until the bytes are on the device", 0}
#define CLI_DRY_RUN_OPTION                                                                         \
    {'d', "dry-run", NULL, NULL, "say what would be written, write nothing", 0}

/// A value as it was given: `word` is its place in the option's words.
typedef struct cli_value {
    const char *text;
    int word;
} cli_value;

/// Which operands name models, and may be "-": standard input.
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
    const char *operands; ///< "SOURCE TARGET"
    const char *summary;  ///< a line
    const char *about;    ///< what its help says
    const char *examples; ///< lines
    const cli_option *options;
    unsigned bit; ///< of its options, where the table is that of several commands
    int operand_min, operand_max;
    cli_inputs inputs;
    /// What of a model that comes through a pipe the request looks at; NULL: all of it.
    input_part (*part)(const void *request);
    bool has_json, has_progress;
    bool has_cache; ///< it reads addresses
    /// Takes one option into the request: EXIT_GOOD, or an exit code after saying what is wrong.
    int (*take)(void *request, int key, cli_value value);
    int (*run)(const cli_command *command, char **argv);
};

/// All subcommands, ending in NULL.
extern const cli_command *const cli_commands[];
const cli_command *cli_command_find(const char *name);

/// What a command line came to.
typedef struct cli_operands {
    char **words;
    int count;
    bool is_answered; ///< the help was asked for and given
} cli_operands;

/// Parses a command line: options go to `request` by the command's `take`, operands are gathered
/// at the end of argv. EXIT_GOOD, or EXIT_USAGE after saying what is wrong.
int cli_parse(const cli_command *command, char **argv, void *request, cli_operands *operands);

void cli_print_help(const cli_command *command);
/// The candidates for the last of `words`, a line each; ":files" stands for names of files.
int cli_complete(char **words, int count);
/// Of several names the one that is nearest to `word`, or NULL: none is near.
const char *cli_nearest(const char *word, const char *const *names, size_t count);

/// Words of options that several commands have.
extern const char *const cli_dtype_words[];

#endif
