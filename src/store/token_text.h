// SPDX-License-Identifier: Apache-2.0
/// Text formats of credential providers' requests and responses. Private to the store module. Pure.
#ifndef FSTI_TOKEN_TEXT_H
#define FSTI_TOKEN_TEXT_H

#include "base/primitives.h"

/// The value of a top-level member of a JSON object: a string, unescaped, or a number as written.
/// False if it is missing or too long, or the JSON before it is invalid.
bool fsti_json_find(const char *text, size_t size, const char *name, char *out, size_t out_size);
/// A JSON list of objects and the member to read from each: {"LIST": [{"NAME": "text"}]}.
typedef struct json_list {
    const char *text;
    size_t size;
    const char *list, *name;
} json_list;
/// Calls `visit` with each text; it returns false to stop. False for invalid JSON.
typedef bool (*fsti_json_visitor)(void *context, const char *text);
bool fsti_json_visit(const json_list *list, fsti_json_visitor visit, void *context);
/// Parses "2026-11-22T10:00:00Z" (fractions are ignored) to Unix time; -1 if invalid.
int64_t fsti_date_read(const char *text);
/// Appends "name=value" to a form, with the value escaped and an & between. False if it is too
/// long.
bool fsti_form_add(char *form, size_t size, const char *name, const char *value);

#define BASE64_BYTES(size) (((size) + 2) / 3 * 4 + 1)
/// Base64 with a NUL. `is_url`: the URL-safe alphabet without padding.
void fsti_base64_write(const unsigned char *bytes, size_t size, bool is_url, char *out);
/// Decodes base64; -1 if it is invalid or too long.
int64_t fsti_base64_read(const char *text, unsigned char *out, size_t size);

#endif
