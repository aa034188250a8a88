// SPDX-License-Identifier: Apache-2.0
/// The subset of JSON, dates, forms and base64 that credentials need.
#include "token_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "location/location.h"

// ---- JSON ----

typedef struct json_text {
    const char *at, *end;
} json_text;

static void skip_blanks(json_text *text) {
    while (text->at < text->end && strchr(" \t\r\n", *text->at) != NULL && *text->at != '\0')
        text->at++;
}

static bool take(json_text *text, char byte) {
    skip_blanks(text);
    if (text->at == text->end || *text->at != byte) return false;
    text->at++;
    return true;
}

/// Reads a string after its opening quote, unescaped. NULL `out`: skips it.
static bool read_text(json_text *text, char *out, size_t size) {
    static const char escapes[] = "\"\\/bfnrt", bytes[] = "\"\\/\b\f\n\r\t";
    size_t used = 0;
    while (text->at < text->end && *text->at != '"') {
        char byte = *text->at++;
        if ((unsigned char)byte < ' ') return false;
        if (byte == '\\') {
            const char *escape = text->at < text->end ? strchr(escapes, *text->at) : NULL;
            // \u: the fields read here have no characters above 127, but = and & may be escaped.
            unsigned code = 0;
            char digits[5] = "";
            if (text->end - text->at >= 5 && *text->at == 'u') {
                memcpy(digits, text->at + 1, 4);
                char *end;
                code = (unsigned)strtoul(digits, &end, 16);
                if (end != digits + 4 || code == 0 || code > 127) return false;
                byte = (char)code;
                text->at += 5;
            } else if (escape != NULL && *escape != '\0') {
                byte = bytes[escape - escapes];
                text->at++;
            } else {
                return false;
            }
        }
        if (out == NULL) continue;
        if (used + 1 >= size) return false;
        out[used++] = byte;
    }
    if (out != NULL) out[used] = '\0';
    return take(text, '"');
}

/// Reads a number or a literal.
static bool read_word(json_text *text, char *out, size_t size) {
    const char *begin = text->at;
    while (text->at < text->end && strchr(",}] \t\r\n", *text->at) == NULL) text->at++;
    size_t length = (size_t)(text->at - begin);
    if (length == 0 || memchr(begin, '\0', length) != NULL) return false;
    if (out == NULL) return true;
    if (length >= size) return false;
    memcpy(out, begin, length);
    out[length] = '\0';
    return true;
}

/// Skips an object or a list after its first character.
static bool skip_inside(json_text *text) {
    unsigned depth = 1;
    while (depth > 0 && text->at < text->end) {
        char byte = *text->at++;
        if (byte == '"' && !read_text(text, NULL, 0)) return false;
        if (byte == '{' || byte == '[') depth++;
        if (byte == '}' || byte == ']') depth--;
    }
    return depth == 0;
}

/// Skips a value.
static bool skip_value(json_text *text) {
    if (take(text, '{') || take(text, '[')) return skip_inside(text);
    return take(text, '"') ? read_text(text, NULL, 0) : read_word(text, NULL, 0);
}

/// Moves to the value of an object's member.
static bool find_member(json_text *text, const char *name) {
    char key[64];
    if (!take(text, '{')) return false;
    do {
        if (!take(text, '"')) return false;
        json_text copy = *text;
        bool is_it = read_text(&copy, key, sizeof key) && strcmp(key, name) == 0;
        if (!read_text(text, NULL, 0) || !take(text, ':')) return false;
        skip_blanks(text);
        if (is_it) return true;
        if (!skip_value(text)) return false;
    } while (take(text, ','));
    return false;
}

bool fsti_json_find(const char *text, size_t size, const char *name, char *out, size_t out_size) {
    json_text rest = {text, text + size};
    if (!find_member(&rest, name) || take(&rest, '{') || take(&rest, '[')) return false;
    return take(&rest, '"') ? read_text(&rest, out, out_size) : read_word(&rest, out, out_size);
}

bool fsti_json_visit(const json_list *list, fsti_json_visitor visit, void *context) {
    char value[1100];
    json_text rest = {list->text, list->text + list->size};
    if (!find_member(&rest, list->list) || !take(&rest, '[')) return false;
    if (take(&rest, ']')) return true;
    do {
        skip_blanks(&rest);
        const char *begin = rest.at;
        if (!skip_value(&rest) ||
            !fsti_json_find(begin, (size_t)(rest.at - begin), list->name, value, sizeof value))
            return false;
        if (!visit(context, value)) return true;
    } while (take(&rest, ','));
    return take(&rest, ']');
}

// ---- dates ----

int64_t fsti_date_read(const char *text) {
    struct tm date = {0};
    int *const fields[] = {&date.tm_year, &date.tm_mon, &date.tm_mday,
                           &date.tm_hour, &date.tm_min, &date.tm_sec};
    static const char form[] = "0000-11-22T33:44:55";
    for (size_t i = 0; i < sizeof form - 1; i++, text++) {
        bool is_digit = *text >= '0' && *text <= '9';
        bool is_field = form[i] >= '0' && form[i] <= '5';
        if (is_field ? !is_digit : *text != form[i]) return -1;
        if (is_field) *fields[form[i] - '0'] = *fields[form[i] - '0'] * 10 + *text - '0';
    }
    if (*text == '.') text += 1 + strspn(text + 1, "0123456789");
    if (strcmp(text, "Z") != 0 && strcmp(text, "+00:00") != 0) return -1;
    date.tm_year -= 1900;
    date.tm_mon -= 1;
    return date.tm_year < 70 ? -1 : (int64_t)timegm(&date);
}

// ---- forms ----

bool fsti_form_add(char *form, size_t size, const char *name, const char *value) {
    size_t used = strlen(form);
    int added = snprintf(form + used, size - used, "%s%s=", used > 0 ? "&" : "", name);
    if (added < 0 || (size_t)added >= size - used) return false;
    used += (size_t)added;
    return fsti_url_escape((url_part){value, strlen(value)}, false, form + used, size - used);
}

// ---- BASE64 ----

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

void fsti_base64_write(const unsigned char *bytes, size_t size, bool is_url, char *out) {
    for (size_t i = 0; i < size; i += 3) {
        uint32_t word = (uint32_t)bytes[i] << 16;
        if (i + 1 < size) word |= (uint32_t)bytes[i + 1] << 8;
        if (i + 2 < size) word |= bytes[i + 2];
        size_t count = size - i < 3 ? size - i + 1 : 4;
        for (size_t k = 0; k < 4; k++) {
            char digit = digits[word >> (18 - 6 * k) & 63];
            if (is_url && digit == '+') digit = '-';
            if (is_url && digit == '/') digit = '_';
            if (k < count)
                *out++ = digit;
            else if (!is_url)
                *out++ = '=';
        }
    }
    *out = '\0';
}

int64_t fsti_base64_read(const char *text, unsigned char *out, size_t size) {
    size_t used = 0, length = strlen(text);
    uint32_t word = 0, bits = 0;
    while (length > 0 && text[length - 1] == '=') length--;
    for (size_t i = 0; i < length; i++) {
        const char *digit = strchr(digits, text[i]);
        if (digit == NULL) return -1;
        word = word << 6 | (uint32_t)(digit - digits);
        bits += 6;
        if (bits < 8) continue;
        bits -= 8;
        if (used == size) return -1;
        out[used++] = (unsigned char)(word >> bits & 255);
    }
    return (int64_t)used;
}
