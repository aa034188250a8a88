// SPDX-License-Identifier: Apache-2.0
/// What the subcommands share. The command uses the public header only.
#ifndef CLI_H
#define CLI_H

#include <fastsafetensors.h>
#include <fastsafetensors/experimental.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/// Exit codes of all subcommands.
enum {
    EXIT_GOOD = 0,
    EXIT_INVALID = 1,    ///< the answer is no: invalid, different, nothing matches
    EXIT_UNREADABLE = 2, ///< something could not be read or written
    EXIT_USAGE = 3,      ///< the command line is wrong
    EXIT_MISSING = 4,    ///< what this needs is not installed: Python, torch, a library
};

/// A subcommand; `argv[0]` is its name.
typedef int (*cli_command)(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_verify(int argc, char **argv);
int cmd_load(int argc, char **argv);
int cmd_engines(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_convert(int argc, char **argv);
int cmd_extract(int argc, char **argv);
int cmd_merge(int argc, char **argv);
int cmd_split(int argc, char **argv);
int cmd_diff(int argc, char **argv);
int cmd_hash(int argc, char **argv);

/// Says a failure on stderr and returns the exit code for it: what the format forbids is invalid,
/// what the system refuses is unreadable.
int cli_fail(const fst_error *error);
/// Wrong usage: prints the message and a hint at --help; returns EXIT_USAGE.
__attribute__((format(printf, 2, 3))) int cli_usage(const char *command, const char *format, ...);

/// Colours and bars are for terminals only, and not where NO_COLOR is set.
bool cli_stdout_is_terminal(void);
bool cli_stderr_is_terminal(void);
/// The escape sequence of a style, or "" where there are no colours.
const char *cli_bold(void);
const char *cli_dim(void);
const char *cli_plain(void);

/// "1.5 GiB" into `text` (at least 16 bytes); returns `text`.
char *cli_size_text(uint64_t size_bytes, char *text);
/// "[768, 30522]" into `text`; cut with ".." when it does not fit; returns `text`.
char *cli_shape_text(const uint64_t *shape, uint32_t rank, char *text, size_t text_size);
/// Prints a name for people: control bytes would drive the terminal, so they become '?'.
/// Returns the columns it took.
int cli_print_name(const char *name, size_t size);
/// Prints a JSON string with its quotes.
void cli_print_json(const char *text, size_t size);
/// Columns of UTF-8 text, counting code points.
int cli_columns(const char *text, size_t size);

/// A bar on stderr, redrawn as bytes arrive: an fst_progress_callback.
int cli_show_progress(void *context, uint64_t bytes_done, uint64_t bytes_total, size_t tensors_done,
                      size_t tensors_total);

/// The number of a word in a list, or -1; the number of a dtype by name, or -1.
int cli_find_word(const char *word, const char *const *words, int count);
int cli_find_dtype(const char *name);
/// True when the name matches one of the shell patterns, or there are none.
bool cli_name_matches(const fst_tensor_info *info, const char *const *globs, size_t glob_count);

/// Parses "64MiB", "2G", "1000"; false when it is none.
bool cli_parse_size(const char *text, uint64_t *size_bytes);

#endif
