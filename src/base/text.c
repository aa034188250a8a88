// SPDX-License-Identifier: Apache-2.0
/// The only filter for text of files, servers and users that goes to a terminal.
#include <string.h>

#include "primitives.h"
#include "fastsafetensors/experimental/terminal_text.h"

typedef struct code_range {
    uint32_t first, last;
} code_range;

/// Characters that are replaced, sorted. They control terminals, change the text direction, end
/// lines, or are invisible, which would make two names look equal: controls (Cc), format characters
/// (Cf), line and paragraph separators, fillers and variation selectors.
static const code_range hidden[] = {
    {0x0000, 0x001f},   {0x007f, 0x009f},   {0x00ad, 0x00ad},   {0x034f, 0x034f},
    {0x0600, 0x0605},   {0x061c, 0x061c},   {0x06dd, 0x06dd},   {0x070f, 0x070f},
    {0x0890, 0x0891},   {0x08e2, 0x08e2},   {0x115f, 0x1160},   {0x17b4, 0x17b5},
    {0x180b, 0x180f},   {0x200b, 0x200f},   {0x2028, 0x202e},   {0x2060, 0x206f},
    {0x3164, 0x3164},   {0xfe00, 0xfe0f},   {0xfeff, 0xfeff},   {0xffa0, 0xffa0},
    {0xfff0, 0xfffb},   {0x110bd, 0x110bd}, {0x110cd, 0x110cd}, {0x13430, 0x1343f},
    {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, {0xe0000, 0xe0fff},
};

/// East Asian characters and emoji that take two columns, sorted.
static const code_range wide[] = {
    {0x1100, 0x115f},   {0x231a, 0x231b},   {0x2329, 0x232a},   {0x23e9, 0x23ec},
    {0x23f0, 0x23f0},   {0x23f3, 0x23f3},   {0x25fd, 0x25fe},   {0x2614, 0x2615},
    {0x2648, 0x2653},   {0x267f, 0x267f},   {0x2693, 0x2693},   {0x26a1, 0x26a1},
    {0x26aa, 0x26ab},   {0x26bd, 0x26be},   {0x26c4, 0x26c5},   {0x26ce, 0x26ce},
    {0x26d4, 0x26d4},   {0x26ea, 0x26ea},   {0x26f2, 0x26f3},   {0x26f5, 0x26f5},
    {0x26fa, 0x26fa},   {0x26fd, 0x26fd},   {0x2705, 0x2705},   {0x270a, 0x270b},
    {0x2728, 0x2728},   {0x274c, 0x274c},   {0x274e, 0x274e},   {0x2753, 0x2755},
    {0x2757, 0x2757},   {0x2795, 0x2797},   {0x27b0, 0x27b0},   {0x27bf, 0x27bf},
    {0x2b1b, 0x2b1c},   {0x2b50, 0x2b50},   {0x2b55, 0x2b55},   {0x2e80, 0x303e},
    {0x3041, 0xa4cf},   {0xa960, 0xa97f},   {0xac00, 0xd7a3},   {0xf900, 0xfaff},
    {0xfe10, 0xfe19},   {0xfe30, 0xfe6f},   {0xff01, 0xff60},   {0xffe0, 0xffe6},
    {0x16fe0, 0x18d08}, {0x1aff0, 0x1b2fb}, {0x1f004, 0x1f004}, {0x1f0cf, 0x1f0cf},
    {0x1f18e, 0x1f18e}, {0x1f191, 0x1f19a}, {0x1f200, 0x1f320}, {0x1f32d, 0x1f335},
    {0x1f337, 0x1f37c}, {0x1f37e, 0x1f393}, {0x1f3a0, 0x1f3ca}, {0x1f3cf, 0x1f3d3},
    {0x1f3e0, 0x1f3f0}, {0x1f3f4, 0x1f3f4}, {0x1f3f8, 0x1f43e}, {0x1f440, 0x1f440},
    {0x1f442, 0x1f4fc}, {0x1f4ff, 0x1f53d}, {0x1f54b, 0x1f54e}, {0x1f550, 0x1f567},
    {0x1f57a, 0x1f57a}, {0x1f595, 0x1f596}, {0x1f5a4, 0x1f5a4}, {0x1f5fb, 0x1f64f},
    {0x1f680, 0x1f6c5}, {0x1f6cc, 0x1f6cc}, {0x1f6d0, 0x1f6d2}, {0x1f6d5, 0x1f6df},
    {0x1f6eb, 0x1f6ec}, {0x1f6f4, 0x1f6fc}, {0x1f7e0, 0x1f7f0}, {0x1f90c, 0x1f93a},
    {0x1f93c, 0x1f945}, {0x1f947, 0x1f9ff}, {0x1fa70, 0x1faff}, {0x20000, 0x3fffd},
};

/// Combining marks of widely used scripts, which take no column. Sorted.
static const code_range combining[] = {
    {0x0300, 0x036f}, {0x0483, 0x0489}, {0x0591, 0x05bd}, {0x05bf, 0x05bf}, {0x05c1, 0x05c2},
    {0x05c4, 0x05c5}, {0x05c7, 0x05c7}, {0x0610, 0x061a}, {0x064b, 0x065f}, {0x0670, 0x0670},
    {0x06d6, 0x06dc}, {0x06df, 0x06e4}, {0x0900, 0x0902}, {0x093c, 0x093c}, {0x0941, 0x0948},
    {0x094d, 0x094d}, {0x0e31, 0x0e31}, {0x0e34, 0x0e3a}, {0x0e47, 0x0e4e}, {0x1ab0, 0x1aff},
    {0x1dc0, 0x1dff}, {0x20d0, 0x20f0}, {0x302a, 0x302d}, {0x3099, 0x309a}, {0xfe20, 0xfe2f},
};

static bool is_in(const code_range *ranges, size_t count, uint32_t code) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (ranges[middle].last < code)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && ranges[low].first <= code;
}
#define IS_IN(ranges, code) is_in(ranges, sizeof(ranges) / sizeof *(ranges), code)

/// Decodes one character of UTF-8. Returns its size in bytes; 0 if it is malformed.
static size_t decode(const unsigned char *at, size_t left, uint32_t *code) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    unsigned char lead = at[0];
    size_t size = lead < 0x80   ? 1
                  : lead < 0xc2 ? 0
                  : lead < 0xe0 ? 2
                  : lead < 0xf0 ? 3
                  : lead < 0xf5 ? 4
                                : 0;
    if (size == 0 || size > left) return 0;
    *code = size == 1 ? lead : lead & (0xffu >> (size + 1));
    for (size_t i = 1; i < size; i++) {
        if ((at[i] & 0xc0) != 0x80) return 0;
        *code = *code << 6 | (at[i] & 0x3fu);
    }
    bool is_surrogate = *code >= 0xd800 && *code < 0xe000;
    return *code < least[size] || *code > 0x10ffff || is_surrogate ? 0 : size;
}

static int columns_of(uint32_t code) {
    bool is_shown = code < 0x7f ? code >= 0x20 : !IS_IN(hidden, code);
    if (!is_shown) return -1;
    if (code < 0x300) return 1;
    return IS_IN(combining, code) ? 0 : IS_IN(wide, code) ? 2 : 1;
}

size_t fsti_text_step(const char *text, size_t left, uint32_t *code, int *columns) {
    size_t size = decode((const unsigned char *)text, left, code);
    *columns = size == 0 ? -1 : columns_of(*code);
    if (size == 0) *code = FST_TEXT_INVALID;
    return size == 0 ? 1 : size;
}

void fsti_text_make_printable(char *text) {
    size_t size = strlen(text), used = 0;
    for (size_t at = 0, step; at < size; at += step) {
        uint32_t code;
        int columns;
        step = fsti_text_step(text + at, size - at, &code, &columns);
        if (columns >= 0)
            memmove(text + used, text + at, step);
        else
            text[used] = '?';
        used += columns >= 0 ? step : 1;
    }
    text[used] = '\0';
}

void fsti_path_trim(char *path) {
    for (size_t size = strlen(path); size > 1; path[--size] = '\0') {
        bool is_dot = path[size - 1] == '.' && path[size - 2] == '/';
        if (path[size - 1] != '/' && (!is_dot || size == 2)) return;
    }
}
