// SPDX-License-Identifier: Apache-2.0
/// UTF-8 validation, according to table 3-7 of the Unicode standard.
#include <string.h>

#include "format.h"

/// Length of the well-formed sequence at `bytes`, or 0.
static size_t sequence_length(const unsigned char *bytes, size_t left) {
    unsigned char lead = bytes[0];
    if (lead < 0x80) return 1;
    if (lead < 0xc2 || lead > 0xf4) return 0;
    size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (length > left) return 0;
    unsigned char low = 0x80, high = 0xbf;
    if (lead == 0xe0) low = 0xa0;  // no overlong forms
    if (lead == 0xed) high = 0x9f; // no surrogates
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f; // at most U+10FFFF
    if (bytes[1] < low || bytes[1] > high) return 0;
    for (size_t i = 2; i < length; i++)
        if ((bytes[i] & 0xc0) != 0x80) return 0;
    return length;
}

bool fsti_utf8_valid(const unsigned char *bytes, size_t size, size_t *fault_at) {
    size_t at = 0;
    while (at < size) {
        uint64_t word;
        if (size - at >= 8 && (memcpy(&word, bytes + at, 8), word & 0x8080808080808080u) == 0) {
            at += 8;
            continue;
        }
        size_t length = sequence_length(bytes + at, size - at);
        if (length == 0) {
            *fault_at = at;
            return false;
        }
        at += length;
    }
    return true;
}

fst_status fsti_utf8_require_name(const char *name, const char *path, fst_error *error) {
    size_t fault_at;
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    if (fsti_utf8_valid((const unsigned char *)name, strlen(name), &fault_at)) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, location,
                          "the file name is not UTF-8, so no manifest or signature can list it. "
                          "Rename the file");
}
