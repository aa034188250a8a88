// SPDX-License-Identifier: Apache-2.0
/// Structure-aware mutations of safetensors files: the length field follows the header, numbers
/// change, entries and words move. Most inputs then get past the first checks.
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz_target.h"

#define LENGTH_BYTES 8
#define TEXT_BYTES_MAX 16384

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t size_max);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t size_max, unsigned seed);

static unsigned next_random(unsigned *state) {
    *state = *state * 1103515245u + 12345u;
    return *state >> 16;
}

/// Replaces [begin, end) of the text. False if the buffer is too small.
static bool replace(char *text, size_t *size, size_t begin, size_t end, const char *with) {
    size_t with_size = strlen(with);
    if (*size - (end - begin) + with_size > TEXT_BYTES_MAX) return false;
    memmove(text + begin + with_size, text + end, *size - end);
    memcpy(text + begin, with, with_size);
    *size = *size - (end - begin) + with_size;
    return true;
}

/// The digits at or after an offset. False if it has no digits there.
static bool find_number(const char *text, size_t size, size_t from, size_t *begin, size_t *end) {
    *begin = from;
    while (*begin < size && (text[*begin] < '0' || text[*begin] > '9')) ++*begin;
    *end = *begin;
    while (*end < size && text[*end] >= '0' && text[*end] <= '9') ++*end;
    return *begin < *end;
}

static void change_number(char *text, size_t *size, unsigned *state) {
    static const char *const numbers[] = {"0",
                                          "1",
                                          "2",
                                          "8",
                                          "-1",
                                          "4096",
                                          "1e3",
                                          "4294967296",
                                          "0.5",
                                          "01",
                                          "18446744073709551615",
                                          "18446744073709551616",
                                          "9223372036854775808",
                                          "281474976710656"};
    char other[32];
    size_t begin, end;
    if (!find_number(text, *size, next_random(state) % (*size + 1), &begin, &end)) return;
    snprintf(other, sizeof other, "%lld",
             strtoll(text + begin, NULL, 10) + (long long)(next_random(state) % 17) - 8);
    bool near = next_random(state) % 2 == 0;
    size_t count = sizeof numbers / sizeof *numbers;
    replace(text, size, begin, end, near ? other : numbers[next_random(state) % count]);
}

static void change_word(char *text, size_t *size, unsigned *state) {
    static const char *const words[] = {
        "F32",  "F16",          "BF16",    "F4",      "F6_E2M3",        "F8_E8M0", "C64",
        "BOOL", "I64",          "U8",      "dtype",   "shape",          "a",       "data_offsets",
        "b",    "__metadata__", "\\u0041", "\\ud800", "\\ud83d\\ude00", "",        "null",
        "true", "\\n",          "F128"};
    size_t begin = next_random(state) % (*size + 1);
    while (begin < *size && text[begin] != '"') begin++;
    size_t end = begin + 1;
    while (end < *size && text[end] != '"') end++;
    if (end >= *size) return;
    replace(text, size, begin + 1, end, words[next_random(state) % (sizeof words / sizeof *words)]);
}

/// Copies a piece between commas or brackets to another such position: duplicate entries, moved
/// fields.
static void copy_piece(char *text, size_t *size, unsigned *state) {
    char piece[256];
    size_t begin = next_random(state) % (*size + 1), end;
    while (begin < *size && strchr(",{[", text[begin]) == NULL) begin++;
    if (begin >= *size) return;
    end = begin + 1 + next_random(state) % 200;
    while (end < *size && strchr(",}]", text[end]) == NULL) end++;
    if (end >= *size || end - begin >= sizeof piece - 1) return;
    piece[0] = ',';
    memcpy(piece + 1, text + begin + 1, end - begin - 1);
    piece[end - begin] = '\0';
    size_t place = next_random(state) % (*size + 1);
    while (place < *size && strchr(",}]", text[place]) == NULL) place++;
    if (place < *size && memchr(piece, '\0', end - begin) == NULL)
        replace(text, size, place, place, piece);
}

static void change_text(char *text, size_t *size, unsigned *state) {
    switch (next_random(state) % 4) {
    case 0: change_number(text, size, state); break;
    case 1: change_word(text, size, state); break;
    case 2: copy_piece(text, size, state); break;
    default: *size = LLVMFuzzerMutate((uint8_t *)text, *size, TEXT_BYTES_MAX);
    }
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t size_max, unsigned seed) {
    unsigned state = seed;
    static char text[TEXT_BYTES_MAX + 512];
    uint64_t header_bytes = 0;
    if (size > LENGTH_BYTES) memcpy(&header_bytes, data, LENGTH_BYTES);
    bool plain = size < LENGTH_BYTES + 2 || header_bytes > size - LENGTH_BYTES ||
                 header_bytes > TEXT_BYTES_MAX || header_bytes < 2 || next_random(&state) % 8 == 0;
    if (plain) return LLVMFuzzerMutate(data, size, size_max);
    size_t text_size = (size_t)header_bytes, rest = size - LENGTH_BYTES - text_size;
    memcpy(text, data + LENGTH_BYTES, text_size);
    memset(text + text_size, 0, 8);
    static uint8_t tail[TEXT_BYTES_MAX];
    if (rest > sizeof tail) rest = sizeof tail;
    memcpy(tail, data + LENGTH_BYTES + header_bytes, rest);
    for (unsigned i = 0; i <= next_random(&state) % 3; i++) {
        change_text(text, &text_size, &state);
        memset(text + text_size, 0, 8);
    }
    if (next_random(&state) % 4 == 0) rest = next_random(&state) % 64; // other data than it says
    if (LENGTH_BYTES + text_size + rest > size_max) return LLVMFuzzerMutate(data, size, size_max);
    header_bytes = text_size;
    memcpy(data, &header_bytes, LENGTH_BYTES);
    memcpy(data + LENGTH_BYTES, text, text_size);
    memcpy(data + LENGTH_BYTES + text_size, tail, rest);
    return LENGTH_BYTES + text_size + rest;
}
