// SPDX-License-Identifier: Apache-2.0
/// A strict reader of JSON text (RFC 8259) that never looks back: private to the format room.
#ifndef FSTI_JSON_READER_H
#define FSTI_JSON_READER_H

#include "format.h"

/// The text must end in zero bytes (FSTI_FORMAT_PADDING_BYTES): NUL is no JSON, so it stops
/// every scan. All read functions return false at a fault and leave `fault` and `cursor` there.
typedef struct json_reader {
    const char *start, *cursor, *end;
    const char *fault;   ///< what was wrong; a constant
    bool has_high_bytes; ///< some byte >= 0x80 was seen: UTF-8 must be checked
} json_reader;

/// A string as it stands in the text, between its quotes.
typedef struct json_string {
    const char *text;
    size_t size;
    bool escaped;
} json_string;

/// Levels of arrays and objects below which a value must stay, the outermost included
/// (the reference's limit).
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

/// Skips white space and takes `byte`; false without a fault when something else stands there.
static inline bool json_take(json_reader *reader, char byte) {
    json_skip_space(reader);
    if (*reader->cursor != byte) return false;
    reader->cursor++;
    return true;
}

static inline bool json_expect(json_reader *reader, char byte, const char *what) {
    return json_take(reader, byte) || json_fault(reader, what);
}

/// A reader of a whole text. Names are decoded in place while it is read, so its UTF-8 is looked
/// at first: false with the fault where it is none.
bool fsti_json_begin(json_reader *reader, const char *text, size_t text_bytes);
/// The cursor stands behind the opening quote.
bool fsti_json_read_string_tail(json_reader *reader, json_string *out);
bool fsti_json_read_string(json_reader *reader, json_string *out);
/// An unsigned integer without sign, fraction, exponent or leading zero, below 2^64.
bool fsti_json_read_u64(json_reader *reader, uint64_t *out);
/// Any value; `depth` is the number of levels already open.
bool fsti_json_skip_value(json_reader *reader, unsigned depth);
/// Nothing but white space up to the end.
bool fsti_json_expect_end(json_reader *reader);

/// Writes the decoded string to `target` (at least string->size bytes, may be string->text
/// itself); returns the decoded size, never more than string->size.
size_t fsti_json_decode(const json_string *string, char *target);
/// Compares the decoded string.
bool fsti_json_equals(const json_string *string, const char *literal);

#endif
