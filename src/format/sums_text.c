// SPDX-License-Identifier: Apache-2.0
/// Parses and writes checksum lists.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format.h"
#include "text_out.h"

#define HEX_SIZE 64u
#define BSD_START "SHA256 ("
#define BSD_MIDDLE ") = "

/// A line without its end, and its parts.
typedef struct sum_line {
    char *text;
    size_t size;
    const char *hex;
    bool is_escaped;
} sum_line;

/// Parses "SHA256 (NAME) = HEX" and leaves the name.
static bool split_bsd(sum_line *line) {
    size_t start = strlen(BSD_START), end = strlen(BSD_MIDDLE) + HEX_SIZE;
    if (line->size <= start + end || memcmp(line->text, BSD_START, start) != 0) return false;
    line->hex = line->text + line->size - HEX_SIZE;
    if (memcmp(line->hex - strlen(BSD_MIDDLE), BSD_MIDDLE, strlen(BSD_MIDDLE)) != 0) return false;
    line->text += start;
    line->size -= start + end;
    return true;
}

/// Parses "HEX  NAME" and "HEX *NAME".
static bool split_plain(sum_line *line) {
    if (line->size <= HEX_SIZE + 2 || line->text[HEX_SIZE] != ' ') return false;
    if (line->text[HEX_SIZE + 1] != ' ' && line->text[HEX_SIZE + 1] != '*') return false;
    line->hex = line->text;
    line->text += HEX_SIZE + 2;
    line->size -= HEX_SIZE + 2;
    return true;
}

static bool split_line(sum_line *line, unsigned char *digest) {
    char hex[HEX_SIZE];
    line->is_escaped = line->size > 0 && line->text[0] == '\\';
    line->text += line->is_escaped;
    line->size -= line->is_escaped;
    if (!split_bsd(line) && !split_plain(line)) return false;
    for (size_t i = 0; i < HEX_SIZE; i++) {
        char digit = line->hex[i];
        hex[i] = digit >= 'A' && digit <= 'F' ? (char)(digit - 'A' + 'a') : digit;
    }
    return fsti_digest_read(hex, HEX_SIZE / 2, digest);
}

/// Undoes the escapes "\\", "\n" and "\r" in place.
static bool unescape(sum_line *line) {
    size_t out = 0;
    for (size_t i = 0; i < line->size && line->is_escaped; i++) {
        char byte = line->text[i];
        if (byte == '\\') {
            char code = ++i < line->size ? line->text[i] : '\0';
            byte = code == 'n' ? '\n' : code == 'r' ? '\r' : code == '\\' ? '\\' : '\0';
        }
        if (byte == '\0') return false;
        line->text[out++] = byte;
    }
    if (line->is_escaped) line->size = out;
    return true;
}

static bool read_sum(char *text, size_t size, fsti_signed_file *out) {
    sum_line line = {.text = text, .size = size};
    if (!split_line(&line, out->digest) || !unescape(&line)) return false;
    while (line.size > 2 && memcmp(line.text, "./", 2) == 0) { // from "sha256sum ./*"
        line.text += 2;
        line.size -= 2;
    }
    if (!fsti_path_stays_inside(line.text, line.size)) return false;
    line.text[line.size] = '\0'; // at the line end, or over the text after the name
    out->name = line.text;
    out->name_size = line.size;
    return true;
}

/// The size of the line at `text` without its end; *next is the start of the next one.
static size_t measure_line(const char *text, size_t rest, size_t *next) {
    const char *end = memchr(text, '\n', rest);
    size_t size = end == NULL ? rest : (size_t)(end - text);
    *next = end == NULL ? rest : size + 1;
    return size > 0 && text[size - 1] == '\r' ? size - 1 : size;
}

bool fsti_sums_peek(const char *bytes, size_t byte_count) {
    unsigned char digest[HEX_SIZE / 2];
    for (size_t at = 0, next; at < byte_count; at += next) {
        sum_line line = {.text = (char *)bytes + at};
        line.size = measure_line(line.text, byte_count - at, &next);
        if (line.size > 0 && line.text[0] != '#') return split_line(&line, digest);
    }
    return false;
}

void fsti_sums_clear(fsti_sums *sums) {
    fsti_free(sums->bytes);
    fsti_free(sums->files);
    *sums = (fsti_sums){0};
}

static fst_status read_lines(fsti_sums *sums, size_t byte_count, const char *path,
                             fst_error *error) {
    size_t capacity = 0;
    for (size_t at = 0, next; at < byte_count; at += next) {
        size_t size = measure_line(sums->bytes + at, byte_count - at, &next);
        if (size == 0 || sums->bytes[at] == '#') continue;
        if (!fsti_array_reserve((void **)&sums->files, &capacity, sums->file_count,
                                sizeof *sums->files, UINT32_MAX))
            return fsti_error_memory(error, sums->file_count * sizeof *sums->files);
        fsti_signed_file *file = &sums->files[sums->file_count];
        *file = (fsti_signed_file){0};
        fsti_error_location location = {.file = path, .byte_offset = at};
        if (!read_sum(sums->bytes + at, size, file))
            return fsti_error_set(error, FST_E_MANIFEST, location,
                                  "not a line of sha256sum for a file inside the folder");
        sums->file_count++;
    }
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    if (sums->file_count > 0) return FST_OK;
    return fsti_error_set(error, FST_E_MANIFEST, location, "an empty checksum list");
}

static int compare_names(const void *a, const void *b) {
    const fsti_signed_file *const *one = a, *const *other = b;
    return strcmp((*one)->name, (*other)->name);
}

fst_status fsti_sums_check_duplicates(const fsti_sums *sums, const char *path, fst_error *error) {
    const fsti_signed_file **sorted = fsti_alloc((sums->file_count + 1) * sizeof *sorted);
    if (sorted == NULL) return fsti_error_memory(error, sums->file_count * sizeof *sorted);
    const char *name = NULL;
    for (size_t i = 0; i < sums->file_count; i++) sorted[i] = &sums->files[i];
    if (sums->file_count > 1) qsort(sorted, sums->file_count, sizeof *sorted, compare_names);
    for (size_t i = 1; i < sums->file_count && name == NULL; i++)
        if (strcmp(sorted[i - 1]->name, sorted[i]->name) == 0 &&
            memcmp(sorted[i - 1]->digest, sorted[i]->digest, sizeof sorted[i]->digest) != 0)
            name = sorted[i]->name;
    fsti_free(sorted);
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    if (name == NULL) return FST_OK;
    return fsti_error_set(error, FST_E_MANIFEST, location,
                          "it lists two different checksums for %.200s", name);
}

fst_status fsti_sums_parse(char *bytes, size_t byte_count, const char *path, fsti_sums *out,
                           fst_error *error) {
    *out = (fsti_sums){.bytes = bytes};
    fst_status status = read_lines(out, byte_count, path, error);
    if (status == FST_OK) status = fsti_sums_check_duplicates(out, path, error);
    if (status != FST_OK) fsti_sums_clear(out);
    return status;
}

/// Writes a name like coreutils, whose lines start with a backslash if the name has escapes.
static void put_name(text_out *text, const fsti_signed_file *file) {
    for (size_t i = 0; i < file->name_size; i++) {
        char byte = file->name[i];
        const char *escape = byte == '\\'   ? "\\\\"
                             : byte == '\n' ? "\\n"
                             : byte == '\r' ? "\\r"
                                            : NULL;
        if (escape != NULL)
            fsti_text_puts(text, escape);
        else
            fsti_text_put(text, &byte, 1);
    }
}

fst_status fsti_sums_write(const fsti_signed_file *files, size_t file_count, char **out,
                           size_t *size_bytes, fst_error *error) {
    text_out text = {0};
    for (size_t i = 0; i < file_count; i++) {
        char digits[HEX_SIZE + 1];
        fsti_digest_print(files[i].digest, HEX_SIZE / 2, digits);
        if (strcspn(files[i].name, "\\\n\r") < files[i].name_size) fsti_text_puts(&text, "\\");
        fsti_text_puts(&text, digits);
        fsti_text_puts(&text, "  ");
        put_name(&text, &files[i]);
        fsti_text_puts(&text, "\n");
    }
    if (text.failed) {
        fsti_free(text.bytes);
        return fsti_error_memory(error, text.size);
    }
    *out = text.bytes;
    *size_bytes = text.size;
    return FST_OK;
}
