// SPDX-License-Identifier: Apache-2.0
/// What the subcommands share. The command uses the public header only.
#ifndef CLI_H
#define CLI_H

#include <fastsafetensors.h>
#include <fastsafetensors/experimental.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/// Exit codes of all subcommands.
enum {
    EXIT_GOOD = 0,
    EXIT_INVALID = 1,    ///< the answer is no: invalid, different, nothing matches
    EXIT_UNREADABLE = 2, ///< something could not be read or written
    EXIT_USAGE = 3,      ///< the command line is wrong
    EXIT_MISSING = 4,    ///< what this needs is not installed: Python, torch, a library
};

// ---- failures: report.c ----

/// --json was given: answers and failures are JSON objects on stdout.
bool cli_wants_json(void);
void cli_set_json(bool wanted);

/// Says a failure and returns the exit code for it: what the format forbids is invalid, what the
/// system refuses is unreadable.
int cli_fail(const fst_error *error);
/// The same without saying it.
int cli_code_of(fst_status status);
/// Says a failure of our own, which has `kind` for programs ("NoMatch"); returns `code`.
__attribute__((format(printf, 3, 4))) int cli_refuse(int code, const char *kind, const char *format,
                                                     ...);
/// A dtype was asked for that no tensor becomes, or all have: no mistake, but worth a word.
void cli_say_unconverted(fst_dtype dtype);
/// Out of memory: EXIT_UNREADABLE.
int cli_no_memory(void);
/// A failed system call on `path`, by errno: EXIT_UNREADABLE.
int cli_fail_errno(const char *what, const char *path);
/// Wrong usage: prints the message and a hint at --help; returns EXIT_USAGE.
__attribute__((format(printf, 2, 3))) int cli_usage(const char *command, const char *format, ...);
/// {"kind": .., "message": .., "file": .., "tensor": .., "byte": ..}
void cli_print_error_json(const fst_error *error);

// ---- text: terminal.c ----

/// Colours and bars are for terminals only, and not where NO_COLOR is set.
bool cli_stdout_is_terminal(void);
/// Columns of the terminal behind a descriptor; 0: it is none.
int cli_terminal_columns(int fd);
/// The escape sequence of a style, or "" where there are no colours.
const char *cli_bold(void);
const char *cli_dim(void);
const char *cli_plain(void);

/// "1.5 GiB" into `text` (at least 16 bytes); returns `text`.
char *cli_size_text(uint64_t size_bytes, char *text);
/// "[768, 30522]" into `text`; cut with ".." when it does not fit; returns `text`.
char *cli_shape_text(const uint64_t *shape, uint32_t rank, char *text, size_t text_size);
/// Replaces what drives terminals, and bytes that are no UTF-8, by '?'; returns the new size.
size_t cli_make_printable(char *text, size_t size);
/// An address without its query, user and password, in a buffer of the next call's; else `path`.
const char *cli_told_path(const char *path);
bool cli_is_address(const char *path);
/// Says that a command does nothing with addresses.
int cli_refuse_address(const char *command, const char *path);
void cli_print_path(const char *path);
/// Prints a name for people: control bytes would drive the terminal, so they become '?'.
/// Returns the columns it took.
int cli_print_name(const char *name, size_t size);
/// The same in at most `columns` columns: what is longer ends in "..".
int cli_print_cut(const char *name, size_t size, int columns);
/// Prints a JSON string with its quotes; what is no UTF-8 is U+FFFD.
void cli_print_json(const char *text, size_t size);
void cli_put_json(FILE *out, const char *text, size_t size);
/// A number as JSON has it: null for what JSON has no word for (NaN, infinities).
void cli_print_number(double number);
/// Columns of UTF-8 text, counting code points.
int cli_columns(const char *text, size_t size);
const char *cli_plural(uint64_t count); ///< "s", or "" for one

/// The number of a word in a list that ends in NULL, or -1; the number of a dtype, or -1.
int cli_find_word(const char *word, const char *const *words);
int cli_find_dtype(const char *name);
/// True when the name matches one of the shell patterns, or there are none.
bool cli_name_matches(const fst_tensor_info *info, const char *const *globs, size_t glob_count);

/// Parses "64MiB", "2G", "1000"; false when it is none.
bool cli_parse_size(const char *text, uint64_t *size_bytes);
/// Parses a whole number of at most `max`.
bool cli_parse_count(const char *text, uint64_t max, uint64_t *out);
double cli_seconds_now(void);

// ---- progress: progress.c ----

/// Begins a bar on stderr, if there is a terminal, --json and --no-progress were not given: drawn
/// first after half a second, then ten times a second. Returns the callback, or NULL: no bar.
fst_progress_callback cli_progress_begin(void);
/// The same of a save: its callback is there in any case, and ends the save when a signal (SIGINT,
/// SIGTERM, SIGHUP) asks for that, so that it leaves nothing behind. main() ends by that signal.
fst_progress_callback cli_save_begin(void);
int cli_caught_signal(void);
/// Ends the bar: at its full length when all went well, else it is wiped out.
void cli_progress_end(bool good);
void cli_set_progress(bool wanted);
/// The bar's text for a terminal of `columns` columns, after `seconds`; parts that do not fit are
/// left out. `text` has at least 256 bytes.
void cli_progress_text(uint64_t done, uint64_t total, double seconds, int columns, char *text);

#endif
