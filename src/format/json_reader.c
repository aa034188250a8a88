// SPDX-License-Identifier: Apache-2.0
/// Reads JSON values: strings with escapes, unsigned integers; skips all others.
#include "json_reader.h"

#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/// The first byte at or after `at` that is a quote, a backslash, a control byte or not ASCII. May
/// read up to 15 bytes past the text, which ends in FSTI_FORMAT_PADDING_BYTES zeros; a zero stops
/// the scan.
static inline const char *scan_plain(const char *at) {
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), backslash = _mm_set1_epi8('\\');
    const __m128i first_plain = _mm_set1_epi8(0x20);
    for (;; at += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)at);
        // In a signed comparison, bytes below 0x20 and bytes from 0x80 up are both "less".
        __m128i stop = _mm_or_si128(
            _mm_cmplt_epi8(bytes, first_plain),
            _mm_or_si128(_mm_cmpeq_epi8(bytes, quote), _mm_cmpeq_epi8(bytes, backslash)));
        int mask = _mm_movemask_epi8(stop);
        if (mask != 0) return at + __builtin_ctz((unsigned)mask);
    }
#else
    for (;; at++) {
        unsigned char byte = (unsigned char)*at;
        if (byte == '"' || byte == '\\' || byte < 0x20 || byte >= 0x80) return at;
    }
#endif
}

static int hex_digit(char byte) {
    if (byte >= '0' && byte <= '9') return byte - '0';
    if (byte >= 'a' && byte <= 'f') return byte - 'a' + 10;
    if (byte >= 'A' && byte <= 'F') return byte - 'A' + 10;
    return -1;
}

/// The four hex digits at `at`, or -1. Stops at NUL, so it never reads past the text.
static int32_t hex4(const char *at) {
    int32_t value = 0;
    for (int i = 0; i < 4; i++) {
        int digit = hex_digit(at[i]);
        if (digit < 0) return -1;
        value = value * 16 + digit;
    }
    return value;
}

/// Checks the escape at the cursor and moves past it.
static bool check_escape(json_reader *reader) {
    const char *at = reader->cursor;
    if (at[1] != '\0' && strchr("\"\\/bfnrt", at[1]) != NULL) {
        reader->cursor += 2;
        return true;
    }
    if (at[1] != 'u') return json_fault(reader, "invalid escape in string");
    int32_t unit = hex4(at + 2);
    if (unit < 0) return json_fault(reader, "invalid \\u escape in string");
    reader->cursor += 6;
    if (unit < 0xd800 || unit > 0xdfff) return true;
    bool paired = unit < 0xdc00 && at[6] == '\\' && at[7] == 'u';
    int32_t low = paired ? hex4(at + 8) : -1;
    reader->cursor = at;
    if (low < 0xdc00 || low > 0xdfff) return json_fault(reader, "lone surrogate in string");
    reader->cursor = at + 12;
    return true;
}

bool fsti_json_begin(json_reader *reader, const char *text, size_t text_bytes) {
    size_t fault_at;
    *reader = (json_reader){.start = text, .cursor = text, .end = text + text_bytes};
    if (fsti_utf8_valid((const unsigned char *)text, text_bytes, &fault_at)) return true;
    reader->cursor = text + fault_at;
    return json_fault(reader, "invalid UTF-8");
}

/// Reads a string; the cursor is after the opening quote.
static bool read_string_tail(json_reader *reader, json_string *out) {
    out->text = reader->cursor;
    out->escaped = false;
    for (;;) {
        reader->cursor = scan_plain(reader->cursor);
        unsigned char byte = (unsigned char)*reader->cursor;
        if (byte == '"') break;
        if (byte == '\\') {
            out->escaped = true;
            if (!check_escape(reader)) return false;
        } else if (byte >= 0x80) {
            reader->has_high_bytes = true;
            reader->cursor++;
        } else if (byte == 0 && reader->cursor >= reader->end) {
            return json_fault(reader, "text ends inside a string");
        } else {
            return json_fault(reader, "control character in string");
        }
    }
    out->size = (size_t)(reader->cursor - out->text);
    reader->cursor++;
    return true;
}

bool fsti_json_read_string(json_reader *reader, json_string *out) {
    return json_expect(reader, '"', "expected a string") && read_string_tail(reader, out);
}

bool fsti_json_read_u64(json_reader *reader, uint64_t *out) {
    json_skip_space(reader);
    const char *at = reader->cursor;
    if (*at < '0' || *at > '9') return json_fault(reader, "expected an unsigned integer");
    uint64_t value = (uint64_t)(*at++ - '0');
    if (value == 0 && *at >= '0' && *at <= '9')
        return json_fault(reader, "number with a leading zero");
    for (; *at >= '0' && *at <= '9'; at++) {
        uint64_t digit = (uint64_t)(*at - '0');
        if (!fsti_mul(value, 10, &value) || !fsti_add(value, digit, &value))
            return json_fault(reader, "number above 64 bits");
    }
    if (*at == '.' || *at == 'e' || *at == 'E')
        return json_fault(reader, "expected an unsigned integer");
    reader->cursor = at;
    *out = value;
    return true;
}

static const char *skip_digits(const char *at) {
    while (*at >= '0' && *at <= '9') at++;
    return at;
}

/// Whether a number exceeds the range of 64-bit floats, which the reference refuses anywhere. Uses
/// the C locale, because the program may set another decimal point.
static bool is_out_of_range(const char *number, const char *end, bool has_exponent) {
    if (!has_exponent && end - number < 300) return false; // the largest float has 309 digits
    locale_t c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (c_locale == (locale_t)0) return false;
    double value = strtod_l(number, NULL, c_locale);
    freelocale(c_locale);
    return isinf(value);
}

/// Skips a number according to JSON's grammar.
static bool skip_number(json_reader *reader) {
    const char *at = reader->cursor;
    bool has_exponent = false;
    if (*at == '-') at++;
    const char *digits = at;
    at = *at == '0' ? at + 1 : skip_digits(at);
    bool is_valid = at > digits;
    if (is_valid && *at == '.') {
        digits = at + 1;
        at = skip_digits(digits);
        is_valid = at > digits;
    }
    if (is_valid && (*at == 'e' || *at == 'E')) {
        digits = at + 1 + (at[1] == '+' || at[1] == '-');
        at = skip_digits(digits);
        is_valid = at > digits;
        has_exponent = true;
    }
    if (!is_valid) return json_fault(reader, "invalid number");
    if (is_out_of_range(reader->cursor, at, has_exponent))
        return json_fault(reader, "number out of range");
    reader->cursor = at;
    return true;
}

static bool skip_word(json_reader *reader, const char *word) {
    size_t size = strlen(word);
    if (strncmp(reader->cursor, word, size) != 0) return json_fault(reader, "invalid literal");
    reader->cursor += size;
    return true;
}

static bool skip_members(json_reader *reader, unsigned depth, bool is_object) {
    char close = is_object ? '}' : ']';
    if (json_take(reader, close)) return true;
    do {
        json_string key;
        if (is_object && (!fsti_json_read_string(reader, &key) ||
                          !json_expect(reader, ':', "expected ':' after a key")))
            return false;
        if (!fsti_json_skip_value(reader, depth)) return false;
    } while (json_take(reader, ','));
    return json_expect(reader, close, is_object ? "expected ',' or '}'" : "expected ',' or ']'");
}

bool fsti_json_skip_value(json_reader *reader, unsigned depth) {
    json_skip_space(reader);
    json_string string;
    switch (*reader->cursor) {
    case '{':
    case '[':
        if (depth >= JSON_DEPTH_MAX) return json_fault(reader, "nested too deeply");
        reader->cursor++;
        return skip_members(reader, depth + 1, reader->cursor[-1] == '{');
    case '"': return fsti_json_read_string(reader, &string);
    case 't': return skip_word(reader, "true");
    case 'f': return skip_word(reader, "false");
    case 'n': return skip_word(reader, "null");
    default: return skip_number(reader);
    }
}

bool fsti_json_expect_end(json_reader *reader) {
    json_skip_space(reader);
    return reader->cursor == reader->end ||
           json_fault(reader, "unexpected text after the JSON value");
}

/// Writes a code point as UTF-8. Returns its size.
static size_t put_utf8(char *target, uint32_t point) {
    if (point < 0x80) {
        target[0] = (char)point;
        return 1;
    }
    size_t size = point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
    static const unsigned char leads[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = size; i-- > 1; point >>= 6) target[i] = (char)(0x80 | (point & 0x3f));
    target[0] = (char)(leads[size] | point);
    return size;
}

/// Decodes the escape at *at, which was checked before, and moves past it.
static uint32_t decode_escape(const char **at) {
    static const char letters[] = "bfnrt", values[] = "\b\f\n\r\t";
    char kind = (*at)[1];
    if (kind != 'u') {
        *at += 2;
        const char *found = strchr(letters, kind);
        return found != NULL ? (uint32_t)values[found - letters] : (uint32_t)kind;
    }
    uint32_t unit = (uint32_t)hex4(*at + 2);
    *at += 6;
    if (unit < 0xd800 || unit > 0xdfff) return unit;
    uint32_t low = (uint32_t)hex4(*at + 2);
    *at += 6;
    return 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
}

size_t fsti_json_decode(const json_string *string, char *target) {
    const char *at = string->text, *end = at + string->size;
    char *write = target;
    while (at < end) {
        if (*at == '\\') {
            write += put_utf8(write, decode_escape(&at));
        } else {
            *write++ = *at++;
        }
    }
    return (size_t)(write - target);
}

bool fsti_json_equals(const json_string *string, const char *literal) {
    size_t size = strlen(literal);
    if (!string->escaped) return string->size == size && memcmp(string->text, literal, size) == 0;
    char decoded[128]; // longer than any literal, even with every letter escaped
    if (string->size > sizeof decoded) return false;
    return fsti_json_decode(string, decoded) == size && memcmp(decoded, literal, size) == 0;
}
