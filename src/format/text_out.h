// SPDX-License-Identifier: Apache-2.0
/// JSON text under construction: grows, and remembers that it could not.
#ifndef FSTI_TEXT_OUT_H
#define FSTI_TEXT_OUT_H

#include "base/base.h"

typedef struct text_out {
    char *bytes;
    size_t size, capacity;
    bool failed; ///< out of memory: what follows is dropped
} text_out;

void fsti_text_put(text_out *text, const char *bytes, size_t size);
void fsti_text_puts(text_out *text, const char *string);
void fsti_text_put_number(text_out *text, uint64_t number);
/// A JSON string with its quotes, escaped as serde_json does: two-letter escapes where there are
/// any, \u00xx for other control characters, everything else as it is.
void fsti_text_put_json(text_out *text, const char *bytes, size_t size);
/// The same with everything beyond ASCII escaped, as Python's json.dumps does. Valid UTF-8 only.
void fsti_text_put_ascii_json(text_out *text, const char *bytes, size_t size);
/// Makes room for `size` more bytes; false when there is none.
bool fsti_text_reserve(text_out *text, size_t size);

#endif
