// SPDX-License-Identifier: Apache-2.0
/// Texts that those who lend credentials answer, and are asked with: private to the net room. Pure.
#ifndef FSTI_TOKEN_TEXT_H
#define FSTI_TOKEN_TEXT_H

#include "base/base.h"

/// The value of a member of a JSON object: a text without its quotes and escapes, or a number as it
/// stands there. False where there is none at the object's top, or it does not fit, or the text is
/// no JSON up to there.
bool fsti_json_find(const char *text, size_t size, const char *name, char *out, size_t out_size);
/// A list of objects in JSON, and the member of them that is wanted: {"LIST": [{"NAME": "text"}]}.
typedef struct json_list {
    const char *text;
    size_t size;
    const char *list, *name;
} json_list;
/// Its texts. `visit` returns false to end it. False where the text is no such JSON.
typedef bool (*fsti_json_visitor)(void *context, const char *text);
bool fsti_json_visit(const json_list *list, fsti_json_visitor visit, void *context);
/// Unix time of "2026-11-22T10:00:00Z" (a fraction of the second is passed over); -1 for no date.
int64_t fsti_date_read(const char *text);
/// Adds "name=value" to a form, the value escaped, with an & between. False where it does not fit.
bool fsti_form_add(char *form, size_t size, const char *name, const char *value);

#define BASE64_BYTES(size) (((size) + 2) / 3 * 4 + 1)
/// BASE64 with a NUL; `is_url`: its form for addresses, without = at the end.
void fsti_base64_write(const unsigned char *bytes, size_t size, bool is_url, char *out);
/// The other way; -1 for what is none, or does not fit.
int64_t fsti_base64_read(const char *text, unsigned char *out, size_t size);

#endif
