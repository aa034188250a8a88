// SPDX-License-Identifier: Apache-2.0
/// A strict single-pass JSON reader (RFC 8259). Private to the format module.
#ifndef FSTI_JSON_READER_H
#define FSTI_JSON_READER_H

#include "format.h"

/// The text must end in FSTI_FORMAT_PADDING_BYTES zero bytes: NUL is invalid in JSON, so it stops
/// every scan. Read functions return false at an error and leave `fault` and `cursor` there.
typedef struct json_reader {
    const char *start, *cursor, *end;
    const char *fault;   ///< the error; a constant text
    bool has_high_bytes; ///< a byte >= 0x80 was seen, so UTF-8 must be checked
} json_reader;

/// The raw text of a string, between its quotes.
typedef struct json_string {
    const char *text;
    size_t size;
    bool escaped;
} json_string;

/// Maximum nesting of arrays and objects, including the outermost (the reference's limit).
#define JSON_DEPTH_MAX 127

static inline void json_skip_space(json_reader *reader) {
    const char *at = reader->cursor;
    while (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t') at++;
    reader->cursor = at;
}

static inline bool json_fault(json_reader *reader, const char *what) {
    reader->fault = what;
    return false;
}

/// Skips white space and consumes `byte`. False, without setting a fault, if another byte follows.
static inline bool json_take(json_reader *reader, char byte) {
    json_skip_space(reader);
    if (*reader->cursor != byte) return false;
    reader->cursor++;
    return true;
}

static inline bool json_expect(json_reader *reader, char byte, const char *what) {
    return json_take(reader, byte) || json_fault(reader, what);
}

/// Starts reading a text. Names are decoded in place while reading, so UTF-8 is checked first;
/// false with the fault if it is invalid.
bool fsti_json_begin(json_reader *reader, const char *text, size_t text_bytes);
bool fsti_json_read_string(json_reader *reader, json_string *out);
/// Reads an unsigned integer without sign, fraction, exponent or leading zero, below 2^64.
bool fsti_json_read_u64(json_reader *reader, uint64_t *out);
/// Skips any value; `depth` is the number of open levels.
bool fsti_json_skip_value(json_reader *reader, unsigned depth);
/// Checks that only white space follows.
bool fsti_json_expect_end(json_reader *reader);

/// Writes the decoded string to `target` (at least string->size bytes; may be string->text).
/// Returns the decoded size, at most string->size.
size_t fsti_json_decode(const json_string *string, char *target);
/// Compares the decoded string.
bool fsti_json_equals(const json_string *string, const char *literal);

#endif
