// SPDX-License-Identifier: Apache-2.0
/// Prints errors: a line on stderr, or a JSON object on stdout.
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "cli.h"

static bool wants_json;
static const char *checked_path; ///< see cli_errors_of_path()

bool cli_wants_json(void) { return wants_json; }

void cli_set_json(bool wanted) { wants_json = wanted; }

int cli_code_of(fst_status status) {
    bool of_format = (status >= FST_E_HEADER_TOO_SMALL && status <= FST_E_TENSOR_NOT_FOUND) ||
                     status == FST_E_INDEX_JSON || status == FST_E_PATH_ESCAPES ||
                     status == FST_E_DUPLICATE_TENSOR || status == FST_E_NO_TENSORS ||
                     status == FST_E_CORRUPT || status == FST_E_VERSION ||
                     (status >= FST_E_DIGEST && status <= FST_E_SIGNATURE);
    if (status == FST_E_ARGUMENT) return EXIT_USAGE;
    return of_format ? EXIT_INVALID : EXIT_UNREADABLE;
}

int cli_code_of_error(const fst_error *error) {
    // A missing library or driver has the status of everything that a system does not support.
    bool is_missing = error->status == FST_E_UNSUPPORTED &&
                      (strstr(error->message, "was not found") != NULL ||
                       strstr(error->message, "is not installed here") != NULL);
    return is_missing ? EXIT_MISSING : cli_code_of(error->status);
}

void cli_errors_of_path(const char *path) { checked_path = path; }

/// Begins the JSON answer of a command that failed.
static void begin_failure(void) {
    printf("{");
    if (checked_path != NULL) {
        printf("\"path\": ");
        cli_print_json(cli_display_path(checked_path), strlen(cli_display_path(checked_path)));
        printf(", \"valid\": false, \"errors\": [], ");
    }
    printf("\"error\": ");
}

void cli_print_error_json(const fst_error *error) {
    printf("{\"kind\": \"%s\", \"message\": ", fst_status_name(error->status));
    cli_print_json(error->message, strlen(error->message));
    if (error->file[0] != '\0') {
        printf(", \"file\": ");
        cli_print_json(error->file, strlen(error->file));
    }
    if (error->tensor[0] != '\0') {
        printf(", \"tensor\": ");
        cli_print_json(error->tensor, strlen(error->tensor));
    }
    if (error->byte_offset != FST_NO_OFFSET) printf(", \"byte\": %" PRIu64, error->byte_offset);
    if (error->os_errno != 0) printf(", \"errno\": %d", error->os_errno);
    printf("}");
}

void cli_print_written(const char *path) {
    if (wants_json) {
        printf(", \"target\": ");
        cli_print_json(path, strlen(path));
        printf("}\n");
    } else {
        printf(", written to ");
        cli_print_path(path);
        printf("\n");
    }
}

void cli_print_error(const fst_error *error) {
    fprintf(stderr, "fastsafetensors: %s [%s]\n", error->message, fst_status_name(error->status));
}

int cli_fail(const fst_error *error) {
    if (wants_json) {
        begin_failure();
        cli_print_error_json(error);
        printf("}\n");
    } else {
        cli_print_error(error);
    }
    return cli_code_of_error(error);
}

static void print_line(const char *kind, const char *format, va_list arguments) {
    char message[1024];
    vsnprintf(message, sizeof message, format, arguments);
    if (!wants_json) message[cli_make_printable(message, strlen(message))] = '\0';
    if (!wants_json) {
        // A wrong command line is no error of a kind: the answer names the option.
        if (strcmp(kind, "Usage") == 0)
            fprintf(stderr, "fastsafetensors: %s\n", message);
        else
            fprintf(stderr, "fastsafetensors: %s [%s]\n", message, kind);
        return;
    }
    begin_failure();
    printf("{\"kind\": \"%s\", \"message\": ", kind);
    cli_print_json(message, strlen(message));
    printf("}}\n");
}

void cli_print_note(const char *format, ...) {
    char message[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    message[cli_make_printable(message, strlen(message))] = '\0';
    fprintf(stderr, "fastsafetensors: %s\n", message);
}

int cli_refuse(int code, const char *kind, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    print_line(kind, format, arguments);
    va_end(arguments);
    return code;
}

int cli_no_memory(void) {
    return cli_refuse(EXIT_UNREADABLE, fst_status_name(FST_E_NO_MEMORY), "out of memory");
}

int cli_fail_errno(const char *what, const char *path) {
    fst_error error = {.byte_offset = FST_NO_OFFSET, .os_errno = errno, .status = FST_E_IO};
    if (errno == ENOENT) error.status = FST_E_NOT_FOUND;
    if (errno == EACCES || errno == EPERM || errno == EROFS) error.status = FST_E_PERMISSION;
    if (errno == ENOSPC || errno == EDQUOT) error.status = FST_E_NO_SPACE;
    snprintf(error.file, sizeof error.file, "%s", path);
    snprintf(error.message, sizeof error.message, "%.400s: %s failed: %s", path, what,
             strerror(error.os_errno));
    error.message[cli_make_printable(error.message, strlen(error.message))] = '\0';
    return cli_fail(&error);
}

int cli_fail_file(fst_status status, const char *path, const char *message) {
    fst_error error = {.status = status, .byte_offset = FST_NO_OFFSET};
    snprintf(error.file, sizeof error.file, "%s", path);
    snprintf(error.message, sizeof error.message, "%.400s: %s", path, message);
    error.message[cli_make_printable(error.message, strlen(error.message))] = '\0';
    return cli_fail(&error);
}

int cli_usage(const char *command, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    print_line("Usage", format, arguments);
    va_end(arguments);
    if (!wants_json)
        fprintf(stderr, "try 'fastsafetensors %s%s--help'\n", command == NULL ? "" : command,
                command == NULL ? "" : " ");
    return EXIT_USAGE;
}

void cli_say_unconverted(fst_dtype dtype) {
    fprintf(stderr,
            "fastsafetensors: warning: --dtype %s has no effect: no tensor can be converted to it "
            "(floats convert to floats, integers to wider integers)\n",
            fst_dtype_name(dtype));
}
