// SPDX-License-Identifier: Apache-2.0
/// Shared by the subcommands. The command only uses the public headers.
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
    EXIT_OK = 0,
    EXIT_INVALID = 1,    ///< invalid, different, or no match
    EXIT_UNREADABLE = 2, ///< something could not be read or written
    EXIT_USAGE = 3,      ///< the command line is wrong
    EXIT_MISSING = 4,    ///< a dependency is missing: Python, torch, a library
};

// ---- failures: report.c ----

/// Whether --json was given: results and errors are then JSON objects on stdout.
bool cli_wants_json(void);
/// In JSON, errors that follow are printed as the answer of `verify` for this path. NULL: as the
/// failure of the command.
void cli_errors_of_path(const char *path);
void cli_set_json(bool wanted);

/// Prints an error to stderr: "FILE: what happened [Kind]".
void cli_print_error(const fst_error *error);
/// Ends an answer with the path of the file that was written: ", written to PATH", or the last key
/// of a JSON object, "target".
void cli_print_written(const char *path);
/// Prints an error and returns its exit code: format violations are invalid, system errors
/// unreadable.
int cli_fail(const fst_error *error);
/// The exit code of a status, without printing.
int cli_code_of(fst_status status);
/// The same, and EXIT_MISSING if a library or driver is not installed.
int cli_code_of_error(const fst_error *error);
/// Prints a failure of the command itself. `kind` ("NoMatch") is for --json. Returns `code`.
__attribute__((format(printf, 3, 4))) int cli_refuse(int code, const char *kind, const char *format,
                                                     ...);
/// Prints a line on stderr that is not an error.
__attribute__((format(printf, 1, 2))) void cli_print_note(const char *format, ...);
/// Warns that --dtype has no effect, because no tensor can be converted or all have that dtype.
void cli_say_unconverted(fst_dtype dtype);
/// Out of memory: EXIT_UNREADABLE.
int cli_no_memory(void);
/// A failed system call on `path`, by errno: EXIT_UNREADABLE.
int cli_fail_errno(const char *what, const char *path);
/// Prints the error "PATH: MESSAGE" of a file. Returns the exit code of the status.
int cli_fail_file(fst_status status, const char *path, const char *message);
/// Wrong usage: prints the message and a hint at --help; returns EXIT_USAGE.
__attribute__((format(printf, 2, 3))) int cli_usage(const char *command, const char *format, ...);
/// {"kind": ..., "message": ..., "file": ..., "tensor": ..., "byte": ...}
void cli_print_error_json(const fst_error *error);

// ---- text: terminal.c ----

/// Colours and progress bars are for terminals only. NO_COLOR turns colours off.
bool cli_stdout_is_terminal(void);
/// TERM is "dumb": the terminal understands no escape sequences.
bool cli_terminal_is_dumb(void);
/// Columns of the terminal of a descriptor; 0: it is not a terminal.
int cli_terminal_columns(int fd);
/// The escape sequence of a style, or "" where there are no colours.
const char *cli_bold(void);
const char *cli_dim(void);
const char *cli_plain(void);

/// "1.5 GiB" into `text` (at least 16 bytes); returns `text`.
char *cli_size_text(uint64_t size_bytes, char *text);
/// Writes "[768, 30522]" to `text`, cut with "..." if it does not fit. Returns `text`.
char *cli_shape_text(const uint64_t *shape, uint32_t rank, char *text, size_t text_size);
// Print text from files, servers or the command line. They replace characters that fst_text_step()
// rejects, and bytes that are not UTF-8, by '?'.

/// The same in place; returns the new size.
size_t cli_make_printable(char *text, size_t size);
/// A URL without query, user and password, valid until the next call; other paths unchanged.
const char *cli_display_path(const char *path);
bool cli_is_address(const char *path);
/// Reports that a command does not accept URLs.
int cli_refuse_address(const char *command, const char *path);
void cli_print_path(const char *path);
/// Prints a name. Returns its width in columns.
int cli_print_name(const char *name, size_t size);
/// The same in at most `columns` columns; longer text is truncated.
int cli_print_cut(const char *name, size_t size, int columns);
/// Prints a JSON string with its quotes: ASCII escapes for unprintable characters, U+FFFD
/// for invalid UTF-8.
void cli_print_json(const char *text, size_t size);
void cli_put_json(FILE *out, const char *text, size_t size);
/// Prints a number as JSON: null for NaN and infinities.
void cli_print_number(double number);
/// Columns that cli_print_name() takes for a text.
int cli_columns(const char *text, size_t size);
const char *cli_plural(uint64_t count); ///< "s", or "" for one

/// The index of a word in a NULL-terminated list, or -1; the number of a dtype, or -1.
int cli_find_word(const char *word, const char *const *words);
int cli_find_dtype(const char *name);
/// True if the name matches one of the shell patterns, or there are no patterns.
bool cli_name_matches(const fst_tensor_info *info, const char *const *globs, size_t glob_count);

/// Parses a whole number of at most `max`.
bool cli_parse_count(const char *text, uint64_t max, uint64_t *out);
double cli_seconds_now(void);

// ---- progress: progress.c ----

/// Starts a progress bar on stderr if it is a terminal and neither --json nor --no-progress was
/// given. It appears after half a second and is updated ten times a second. Returns the callback,
/// or NULL without a bar.
fst_progress_callback cli_progress_begin(void);
/// The same for a save. Always returns a callback, which cancels the save on SIGINT, SIGTERM or
/// SIGHUP, so that nothing is left behind; main() then ends by that signal.
fst_progress_callback cli_save_begin(void);
int cli_caught_signal(void);
/// Ends the bar: complete on success, otherwise erased.
void cli_progress_end(bool good);
/// Clears the line of a shown bar, which is drawn again with its next progress. From any thread.
void cli_progress_hide(void);
void cli_set_progress(bool wanted);

#endif
