// SPDX-License-Identifier: Apache-2.0
/// Output for people: messages, colours, sizes, names.
#include <fnmatch.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

#define BAR_COLUMNS 40

int cli_fail(const fst_error *error) {
    fprintf(stderr, "fastsafetensors: %s\n", error->message);
    bool of_format =
        (error->status >= FST_E_HEADER_TOO_SMALL && error->status <= FST_E_TENSOR_NOT_FOUND) ||
        error->status == FST_E_INDEX_JSON || error->status == FST_E_PATH_ESCAPES ||
        error->status == FST_E_DUPLICATE_TENSOR;
    return of_format ? EXIT_INVALID : EXIT_UNREADABLE;
}

int cli_usage(const char *command, const char *format, ...) {
    va_list arguments;
    fprintf(stderr, "fastsafetensors: ");
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\ntry 'fastsafetensors %s%s--help'\n", command == NULL ? "" : command,
            command == NULL ? "" : " ");
    return EXIT_USAGE;
}

static bool is_terminal(int fd) { return isatty(fd) == 1; }

bool cli_stdout_is_terminal(void) { return is_terminal(STDOUT_FILENO); }

bool cli_stderr_is_terminal(void) { return is_terminal(STDERR_FILENO); }

static const char *style(const char *sequence) {
    const char *off = getenv("NO_COLOR");
    return cli_stdout_is_terminal() && (off == NULL || off[0] == '\0') ? sequence : "";
}

const char *cli_bold(void) { return style("\x1b[1m"); }

const char *cli_dim(void) { return style("\x1b[2m"); }

const char *cli_plain(void) { return style("\x1b[0m"); }

char *cli_size_text(uint64_t size_bytes, char *text) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)size_bytes;
    size_t unit = 0;
    for (; value >= 1024 && unit + 1 < sizeof units / sizeof *units; unit++) value /= 1024;
    snprintf(text, 16, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return text;
}

char *cli_shape_text(const uint64_t *shape, uint32_t rank, char *text, size_t text_size) {
    size_t used = (size_t)snprintf(text, text_size, "[");
    for (uint32_t i = 0; i < rank; i++) {
        if (used + 32 > text_size) {
            snprintf(text + used, text_size - used, ", ..");
            used += 4;
            break;
        }
        used += (size_t)snprintf(text + used, text_size - used, "%s%" PRIu64, i > 0 ? ", " : "",
                                 shape[i]);
    }
    snprintf(text + used, text_size - used, "]");
    return text;
}

int cli_columns(const char *text, size_t size) {
    int columns = 0;
    for (size_t i = 0; i < size; i++) columns += ((unsigned char)text[i] & 0xc0) != 0x80;
    return columns;
}

int cli_print_name(const char *name, size_t size) {
    for (size_t i = 0; i < size; i++) {
        unsigned char byte = (unsigned char)name[i];
        putchar(byte < 0x20 || byte == 0x7f ? '?' : byte);
    }
    return cli_columns(name, size);
}

void cli_print_json(const char *text, size_t size) {
    putchar('"');
    for (size_t i = 0; i < size; i++) {
        unsigned char byte = (unsigned char)text[i];
        if (byte == '"' || byte == '\\')
            printf("\\%c", byte);
        else if (byte < 0x20 || byte == 0x7f)
            printf("\\u%04x", byte);
        else
            putchar(byte);
    }
    putchar('"');
}

bool cli_parse_size(const char *text, uint64_t *size_bytes) {
    static const char letters[] = "KMGT";
    char *end;
    if (text[0] < '0' || text[0] > '9') return false;
    uint64_t value = strtoull(text, &end, 10);
    const char *letter = end[0] == '\0' ? NULL : strchr(letters, end[0] & ~0x20);
    unsigned shift = letter == NULL ? 0 : 10 * (unsigned)(letter - letters + 1);
    if (letter != NULL) end++;
    if (strcmp(end, "iB") == 0 || strcmp(end, "B") == 0) end = strchr(end, '\0');
    if (*end != '\0' || (shift > 0 && value >> (64 - shift) != 0)) return false;
    *size_bytes = value << shift;
    return true;
}

int cli_show_progress(void *context, uint64_t bytes_done, uint64_t bytes_total, size_t tensors_done,
                      size_t tensors_total) {
    (void)context;
    char done[16], total[16], bar[BAR_COLUMNS + 1];
    int filled = bytes_total == 0 ? BAR_COLUMNS
                                  : (int)((double)bytes_done / (double)bytes_total * BAR_COLUMNS);
    for (int i = 0; i < BAR_COLUMNS; i++) bar[i] = i < filled ? '#' : '.';
    bar[BAR_COLUMNS] = '\0';
    fprintf(stderr, "\r[%s] %s of %s, %zu of %zu tensors ", bar, cli_size_text(bytes_done, done),
            cli_size_text(bytes_total, total), tensors_done, tensors_total);
    return 0;
}

int cli_find_word(const char *word, const char *const *words, int count) {
    for (int i = 0; i < count; i++)
        if (strcmp(word, words[i]) == 0) return i;
    return -1;
}

int cli_find_dtype(const char *name) {
    for (int i = 0; i < FST_DTYPE_COUNT; i++)
        if (strcmp(name, fst_dtype_name((fst_dtype)i)) == 0) return i;
    return -1;
}

bool cli_name_matches(const fst_tensor_info *info, const char *const *globs, size_t glob_count) {
    for (size_t i = 0; i < glob_count; i++)
        if (fnmatch(globs[i], info->name, 0) == 0) return true;
    return glob_count == 0;
}
