// SPDX-License-Identifier: Apache-2.0
/// Text to and from people: colours, sizes, names, numbers.
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
    // Terminals of programs that never set their size say 0.
    return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

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

/// Bytes of the character that begins here; 0: they are no UTF-8.
static size_t character_size(const char *text, size_t left) {
    unsigned char first = (unsigned char)text[0];
    size_t size = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    if (size == 0 || size > left || first > 0xf4) return 0;
    for (size_t i = 1; i < size; i++)
        if (((unsigned char)text[i] & 0xc0) != 0x80) return 0;
    unsigned char second = size > 1 ? (unsigned char)text[1] : 0;
    bool is_odd = (first == 0xe0 && second < 0xa0) || (first == 0xed && second >= 0xa0) ||
                  (first == 0xf0 && second < 0x90) || (first == 0xf4 && second >= 0x90);
    return is_odd ? 0 : size;
}

/// Whether a character drives terminals: the controls of ASCII, and those of Latin 1 (C1).
static bool is_control(const char *text, size_t size) {
    unsigned char first = (unsigned char)text[0];
    return first < 0x20 || first == 0x7f ||
           (size == 2 && first == 0xc2 && (unsigned char)text[1] < 0xa0);
}

size_t cli_make_printable(char *text, size_t size) {
    size_t used = 0, step;
    for (size_t at = 0; at < size; at += step) {
        size_t own = character_size(text + at, size - at);
        step = own == 0 ? 1 : own;
        if (own == 0 || is_control(text + at, own)) {
            text[used++] = '?';
            continue;
        }
        memmove(text + used, text + at, own);
        used += own;
    }
    return used;
}

int cli_print_name(const char *name, size_t size) {
    int columns = 0;
    size_t step;
    for (size_t at = 0; at < size; at += step, columns++) {
        size_t own = character_size(name + at, size - at);
        step = own == 0 ? 1 : own;
        if (own == 0 || is_control(name + at, own))
            putchar('?');
        else
            fwrite(name + at, 1, own, stdout);
    }
    return columns;
}

bool cli_is_address(const char *path) {
    static const char *const starts[] = {"http://", "https://", "s3://", "gs://", "az://", "hf://"};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++)
        if (strncasecmp(path, starts[i], strlen(starts[i])) == 0) return true;
    return false;
}

const char *cli_told_path(const char *path) {
    static char told[8200];
    if (!cli_is_address(path)) return path;
    const char *host = strstr(path, "://") + 3;
    const char *user_end = memchr(host, '@', strcspn(host, "/?#"));
    const char *rest = user_end == NULL ? host : user_end + 1;
    snprintf(told, sizeof told, "%.*s%.*s", (int)(host - path), path, (int)strcspn(rest, "?#"),
             rest);
    return told;
}

int cli_refuse_address(const char *command, const char *path) {
    return cli_usage(command, "this is done with files, not with addresses: %s",
                     cli_told_path(path));
}

void cli_print_path(const char *path) {
    const char *told = cli_told_path(path);
    cli_print_name(told, strlen(told));
}

/// Bytes of the first `columns` code points.
static size_t cut_size(const char *name, size_t size, int columns) {
    size_t used = 0;
    while (used < size) {
        columns -= ((unsigned char)name[used] & 0xc0) != 0x80;
        if (columns < 0) break;
        used++;
    }
    return used;
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
    fputc('"', out);
    for (size_t at = 0; at < size; at += step) {
        size_t own = character_size(text + at, size - at);
        unsigned char byte = (unsigned char)text[at];
        step = own == 0 ? 1 : own;
        if (own == 0)
            fprintf(out, "\\ufffd"); // paths may be any bytes, JSON may not
        else if (byte == '"' || byte == '\\')
            fprintf(out, "\\%c", byte);
        else if (is_control(text + at, own))
            fprintf(out, "\\u%04x", own == 1 ? byte : (unsigned char)text[at + 1]);
        else
            fwrite(text + at, 1, own, out);
    }
    fputc('"', out);
}

void cli_print_json(const char *text, size_t size) { cli_put_json(stdout, text, size); }

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

/// What frameworks call the dtypes.
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
        if (fnmatch(globs[i], info->name, 0) == 0) return true;
    return glob_count == 0;
}
