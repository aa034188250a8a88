// SPDX-License-Identifier: Apache-2.0
/// Text for people: colours, sizes, names, numbers.
#include <errno.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"

bool cli_stdout_is_terminal(void) { return isatty(STDOUT_FILENO) == 1; }

int cli_terminal_columns(int fd) {
    struct winsize size;
    if (isatty(fd) != 1) return 0;
    // Some programs never set their terminal's size, which is then 0.
    return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

bool cli_terminal_is_dumb(void) {
    const char *kind = getenv("TERM");
    return kind != NULL && strcmp(kind, "dumb") == 0;
}

static const char *style(const char *sequence) {
    const char *off = getenv("NO_COLOR");
    bool has_colours = (off == NULL || off[0] == '\0') && !cli_terminal_is_dumb();
    return cli_stdout_is_terminal() && has_colours ? sequence : "";
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
            snprintf(text + used, text_size - used, ", ...");
            used += 5;
            break;
        }
        used += (size_t)snprintf(text + used, text_size - used, "%s%" PRIu64, i > 0 ? ", " : "",
                                 shape[i]);
    }
    snprintf(text + used, text_size - used, "]");
    return text;
}

int cli_columns(const char *text, size_t size) {
    int all = 0, columns;
    for (size_t at = 0; at < size; all += columns < 0 ? 1 : columns)
        at += fst_text_step(text + at, size - at, NULL, &columns);
    return all;
}

size_t cli_make_printable(char *text, size_t size) {
    size_t used = 0, step;
    int columns;
    for (size_t at = 0; at < size; at += step) {
        step = fst_text_step(text + at, size - at, NULL, &columns);
        if (columns >= 0)
            memmove(text + used, text + at, step);
        else
            text[used] = '?';
        used += columns >= 0 ? step : 1;
    }
    return used;
}

int cli_print_name(const char *name, size_t size) {
    int all = 0, columns;
    size_t step;
    for (size_t at = 0; at < size; at += step, all += columns < 0 ? 1 : columns) {
        step = fst_text_step(name + at, size - at, NULL, &columns);
        if (columns >= 0)
            fwrite(name + at, 1, step, stdout);
        else
            putchar('?');
    }
    return all;
}

bool cli_is_address(const char *path) {
    static const char *const starts[] = {"http://", "https://", "s3://", "gs://", "az://", "hf://"};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++)
        if (strncasecmp(path, starts[i], strlen(starts[i])) == 0) return true;
    return false;
}

const char *cli_display_path(const char *path) {
    static char display[8200];
    if (!cli_is_address(path)) return path;
    const char *host = strstr(path, "://") + 3;
    const char *user_end = memchr(host, '@', strcspn(host, "/?#"));
    const char *rest = user_end == NULL ? host : user_end + 1;
    snprintf(display, sizeof display, "%.*s%.*s", (int)(host - path), path,
             (int)strcspn(rest, "?#"), rest);
    return display;
}

int cli_refuse_address(const char *command, const char *path) {
    return cli_usage(command, "this command works on local files only, not on URLs: %s",
                     cli_display_path(path));
}

void cli_print_path(const char *path) {
    const char *display = cli_display_path(path);
    cli_print_name(display, strlen(display));
}

/// Bytes of the characters that fit in the first `most` columns.
static size_t cut_size(const char *name, size_t size, int most) {
    int columns;
    for (size_t at = 0, step; at < size; at += step) {
        step = fst_text_step(name + at, size - at, NULL, &columns);
        most -= columns < 0 ? 1 : columns;
        if (most < 0) return at;
    }
    return size;
}

int cli_print_cut(const char *name, size_t size, int columns) {
    if (cli_columns(name, size) <= columns) return cli_print_name(name, size);
    int used = cli_print_name(name, cut_size(name, size, columns > 2 ? columns - 2 : 0));
    printf("..");
    return used + 2;
}

void cli_print_number(double number) {
    if (isfinite(number))
        printf("%.9g", number);
    else
        printf("null");
}

void cli_put_json(FILE *out, const char *text, size_t size) {
    size_t step;
    uint32_t code;
    int columns;
    fputc('"', out);
    for (size_t at = 0; at < size; at += step) {
        step = fst_text_step(text + at, size - at, &code, &columns);
        if (code == FST_TEXT_INVALID)
            fprintf(out, "\\ufffd"); // paths may have any bytes, JSON may not
        else if (code == '"' || code == '\\')
            fprintf(out, "\\%c", (int)code);
        else if (columns < 0 && code > 0xffff)
            fprintf(out, "\\u%04x\\u%04x", 0xd7c0 + (code >> 10), 0xdc00 + (code & 0x3ff));
        else if (columns < 0)
            fprintf(out, "\\u%04x", code);
        else
            fwrite(text + at, 1, step, out);
    }
    fputc('"', out);
}

void cli_print_json(const char *text, size_t size) { cli_put_json(stdout, text, size); }

bool cli_parse_count(const char *text, uint64_t max, uint64_t *out) {
    char *end;
    if (text[0] < '0' || text[0] > '9') return false;
    errno = 0;
    *out = strtoull(text, &end, 10);
    return *end == '\0' && errno == 0 && *out <= max;
}

double cli_seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

const char *cli_plural(uint64_t count) { return count == 1 ? "" : "s"; }

int cli_find_word(const char *word, const char *const *words) {
    for (int i = 0; words[i] != NULL; i++)
        if (strcmp(word, words[i]) == 0) return i;
    return -1;
}

/// The frameworks' names of dtypes.
static const struct {
    const char *name;
    fst_dtype dtype;
} dtype_names[] = {
    {"float64", FST_DTYPE_F64},
    {"double", FST_DTYPE_F64},
    {"float32", FST_DTYPE_F32},
    {"float", FST_DTYPE_F32},
    {"float16", FST_DTYPE_F16},
    {"half", FST_DTYPE_F16},
    {"bfloat16", FST_DTYPE_BF16},
    {"float8_e4m3fn", FST_DTYPE_F8_E4M3},
    {"float8_e5m2", FST_DTYPE_F8_E5M2},
    {"float8_e4m3fnuz", FST_DTYPE_F8_E4M3FNUZ},
    {"float8_e5m2fnuz", FST_DTYPE_F8_E5M2FNUZ},
    {"float8_e8m0fnu", FST_DTYPE_F8_E8M0},
    {"int64", FST_DTYPE_I64},
    {"int32", FST_DTYPE_I32},
    {"int16", FST_DTYPE_I16},
    {"int8", FST_DTYPE_I8},
    {"uint64", FST_DTYPE_U64},
    {"uint32", FST_DTYPE_U32},
    {"uint16", FST_DTYPE_U16},
    {"uint8", FST_DTYPE_U8},
};

int cli_find_dtype(const char *name) {
    char upper[32] = "";
    fst_dtype dtype;
    if (strncmp(name, "torch.", 6) == 0) name += 6;
    for (size_t i = 0; i < sizeof dtype_names / sizeof *dtype_names; i++)
        if (strcmp(name, dtype_names[i].name) == 0) return (int)dtype_names[i].dtype;
    for (size_t i = 0; name[i] != '\0' && i + 1 < sizeof upper; i++)
        upper[i] = (char)(name[i] >= 'a' && name[i] <= 'z' ? name[i] - 'a' + 'A' : name[i]);
    return fst_dtype_from_name(upper, SIZE_MAX, &dtype, NULL) == FST_OK ? (int)dtype : -1;
}

bool cli_name_matches(const fst_tensor_info *info, const char *const *globs, size_t glob_count) {
    for (size_t i = 0; i < glob_count; i++)
        if (strlen(info->name) == info->name_size && fnmatch(globs[i], info->name, 0) == 0)
            return true;
    return glob_count == 0;
}
