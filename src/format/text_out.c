// SPDX-License-Identifier: Apache-2.0
/// Builds JSON text.
#include "text_out.h"

#include <string.h>

bool fsti_text_reserve(text_out *text, size_t size) {
    if (text->failed) return false;
    if (size <= text->capacity - text->size) return true;
    uint64_t wanted;
    if (!fsti_add(text->size, size, &wanted)) wanted = SIZE_MAX;
    wanted = fsti_max(wanted, text->capacity + text->capacity / 2 + 256);
    char *grown = wanted >= SIZE_MAX ? NULL : fsti_realloc(text->bytes, (size_t)wanted);
    if (grown == NULL) {
        text->failed = true;
        return false;
    }
    text->bytes = grown;
    text->capacity = (size_t)wanted;
    return true;
}

void fsti_text_put(text_out *text, const char *bytes, size_t size) {
    if (!fsti_text_reserve(text, size) || size == 0) return;
    memcpy(text->bytes + text->size, bytes, size);
    text->size += size;
}

void fsti_text_puts(text_out *text, const char *string) {
    fsti_text_put(text, string, strlen(string));
}

void fsti_text_put_number(text_out *text, uint64_t number) {
    char digits[20];
    size_t at = sizeof digits;
    do {
        digits[--at] = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    fsti_text_put(text, digits + at, sizeof digits - at);
}

static void put_code_unit(text_out *text, uint32_t unit) {
    static const char hex[] = "0123456789abcdef";
    char escape[6] = {
        '\\', 'u', hex[unit >> 12 & 15], hex[unit >> 8 & 15], hex[unit >> 4 & 15], hex[unit & 15]};
    fsti_text_put(text, escape, sizeof escape);
}

/// The letter of a two-letter escape, or 0.
static char escape_letter(unsigned char byte) {
    switch (byte) {
    case '"': return '"';
    case '\\': return '\\';
    case '\b': return 'b';
    case '\f': return 'f';
    case '\n': return 'n';
    case '\r': return 'r';
    case '\t': return 't';
    default: return 0;
    }
}

static void put_escape(text_out *text, unsigned char byte) {
    char letter = escape_letter(byte);
    if (letter == 0) {
        put_code_unit(text, byte);
        return;
    }
    char escape[2] = {'\\', letter};
    fsti_text_put(text, escape, 2);
}

static bool needs_escape(unsigned char byte) { return byte < 0x20 || byte == '"' || byte == '\\'; }

void fsti_text_put_json(text_out *text, const char *bytes, size_t size) {
    fsti_text_put(text, "\"", 1);
    size_t plain = 0; // characters without escapes are copied together
    for (size_t i = 0; i < size; i++) {
        unsigned char byte = (unsigned char)bytes[i];
        if (!needs_escape(byte)) continue;
        fsti_text_put(text, bytes + plain, i - plain);
        put_escape(text, byte);
        plain = i + 1;
    }
    fsti_text_put(text, bytes + plain, size - plain);
    fsti_text_put(text, "\"", 1);
}

/// Decodes the code point at `bytes` (valid UTF-8, not ASCII); *length: its size.
static uint32_t decode_point(const unsigned char *bytes, size_t *length) {
    uint32_t lead = bytes[0];
    *length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    uint32_t point = lead & (0x7fu >> *length);
    for (size_t i = 1; i < *length; i++) point = point << 6 | (bytes[i] & 0x3fu);
    return point;
}

void fsti_text_put_ascii_json(text_out *text, const char *bytes, size_t size) {
    const unsigned char *in = (const unsigned char *)bytes;
    fsti_text_put(text, "\"", 1);
    for (size_t i = 0, length = 1; i < size; i += length) {
        length = 1;
        if (needs_escape(in[i])) {
            put_escape(text, in[i]);
        } else if (in[i] < 0x7f) {
            fsti_text_put(text, bytes + i, 1);
        } else if (in[i] == 0x7f) {
            put_code_unit(text, in[i]);
        } else {
            uint32_t point = decode_point(in + i, &length);
            if (point >= 0x10000) {
                put_code_unit(text, 0xd800 + ((point - 0x10000) >> 10));
                point = 0xdc00 + ((point - 0x10000) & 0x3ff);
            }
            put_code_unit(text, point);
        }
    }
    fsti_text_put(text, "\"", 1);
}
