// SPDX-License-Identifier: Apache-2.0
/// JSON text being built. It grows, and remembers failed allocations.
#ifndef FSTI_TEXT_OUT_H
#define FSTI_TEXT_OUT_H

#include "base/primitives.h"

typedef struct text_out {
    char *bytes;
    size_t size, capacity;
    bool failed; ///< out of memory: further text is dropped
} text_out;

void fsti_text_put(text_out *text, const char *bytes, size_t size);
void fsti_text_puts(text_out *text, const char *string);
void fsti_text_put_number(text_out *text, uint64_t number);
/// Appends a JSON string with quotes, escaped like serde_json: two-letter escapes if possible,
/// \u00xx for other control characters, other text unchanged.
void fsti_text_put_json(text_out *text, const char *bytes, size_t size);
/// The same with everything beyond ASCII escaped, like Python's json.dumps. Valid UTF-8 only.
void fsti_text_put_ascii_json(text_out *text, const char *bytes, size_t size);
/// Reserves `size` more bytes. False without memory.
bool fsti_text_reserve(text_out *text, size_t size);

#endif
