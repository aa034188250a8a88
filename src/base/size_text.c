// SPDX-License-Identifier: Apache-2.0
/// Sizes that people type, such as "1.5 GiB". Independent of the locale.
#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "primitives.h"

#define SCALE_MAX 1000000000u // further digits of a fraction are ignored

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// The factor of a unit as in GNU's commands: K, M, G, T and KiB, ... are powers of 1024, KB, ...
/// powers of 1000. 0 for other texts.
static uint64_t unit_of(const char *text) {
    static const char letters[] = "KMGT";
    if (strcasecmp(text, "") == 0 || strcasecmp(text, "B") == 0) return 1;
    const char *letter = strchr(letters, toupper((unsigned char)text[0]));
    if (letter == NULL) return 0;
    bool is_decimal = strcasecmp(text + 1, "B") == 0;
    if (!is_decimal && text[1] != '\0' && strcasecmp(text + 1, "iB") != 0) return 0;
    uint64_t unit = 1;
    for (const char *at = letters; at <= letter; at++) unit *= is_decimal ? 1000 : 1024;
    return unit;
}

/// Reads digits and advances *at. False without any, or from 2^64 on.
static bool take_whole(const char **at, uint64_t *whole) {
    if (!is_digit(**at)) return false;
    for (*whole = 0; is_digit(**at); ++*at)
        if (!fsti_mul(*whole, 10, whole) || !fsti_add(*whole, (uint64_t)(**at - '0'), whole))
            return false;
    return true;
}

/// Reads ".25" as 25 of 100, and advances *at. Without a point the fraction is 0. False for a point
/// without digits.
static bool take_fraction(const char **at, uint64_t *fraction, uint64_t *scale) {
    *fraction = 0;
    *scale = 1;
    if (**at != '.') return true;
    ++*at;
    if (!is_digit(**at)) return false;
    for (; is_digit(**at); ++*at) {
        if (*scale == SCALE_MAX) continue;
        *fraction = *fraction * 10 + (uint64_t)(**at - '0');
        *scale *= 10;
    }
    return true;
}

bool fsti_size_parse(const char *text, uint64_t *size_bytes) {
    char unit_text[4];
    uint64_t whole, fraction, scale;
    const char *at = text + strspn(text, " ");
    if (!take_whole(&at, &whole) || !take_fraction(&at, &fraction, &scale)) return false;
    at += strspn(at, " ");
    size_t length = strlen(at);
    while (length > 0 && at[length - 1] == ' ') length--;
    if (length >= sizeof unit_text) return false;
    snprintf(unit_text, sizeof unit_text, "%.*s", (int)length, at);
    uint64_t unit = unit_of(unit_text);
    if (unit == 0 || !fsti_mul(whole, unit, &whole)) return false;
    // In two steps, because fraction * unit may exceed 64 bits.
    uint64_t part = fraction * (unit / scale) + fraction * (unit % scale) / scale;
    return fsti_add(whole, part, size_bytes);
}
