// SPDX-License-Identifier: Apache-2.0
/// Looking up codes, for one instruction set. A stream's next bits are kept uppermost in a word
/// whose lowest bit is set before it is shifted: zeros below it are the bits that were taken. Of a
/// fresh word at most 62 bits are taken, so that bit is never one of them.
#include "huffman.h"

typedef struct rushing {
    uint64_t bits;
    const unsigned char *at; ///< where `bits` was read
    unsigned char *target;
} rushing;

static inline uint64_t load_word(const unsigned char *bytes) {
    uint64_t word;
    memcpy(&word, bytes, 8);
    return word;
}

ALWAYS_INLINE void begin_rush(rushing *rush, const huffman_stream *stream) {
    uint64_t end = (stream->bits_left + 7) / 8; // at least 8
    rush->at = stream->begin + end - 8;
    rush->bits = (load_word(rush->at) | 1) << (end * 8 - stream->bits_left);
    rush->target = stream->target;
}

ALWAYS_INLINE void end_rush(const rushing *rush, huffman_stream *stream) {
    uint64_t taken = (uint64_t)__builtin_ctzll(rush->bits);
    stream->bits_left = (uint64_t)(rush->at - stream->begin) * 8 + 64 - taken;
    stream->target = rush->target;
}

ALWAYS_INLINE void look_up(rushing *rush, const uint64_t *cells) {
    uint64_t cell = cells[rush->bits >> (64 - HUFFMAN_BITS)], symbols = cell >> 8;
    memcpy(rush->target, &symbols, HUFFMAN_STORE_BYTES);
    rush->bits <<= cell & 63;
    rush->target += cell >> 56;
}

ALWAYS_INLINE void refill(rushing *rush) {
    uint32_t taken = (uint32_t)__builtin_ctzll(rush->bits);
    rush->at -= taken >> 3;
    rush->bits = (load_word(rush->at) | 1) << (taken & 7);
}

/// Bytes that a turn may move on in the input, and write in the output.
#define TURN_IN 8
#define TURN_OUT (HUFFMAN_LOOKUPS * HUFFMAN_SYMBOLS)
#define OUT_BEYOND (HUFFMAN_STORE_BYTES - HUFFMAN_SYMBOLS)

/// Turns that a stream has for certain.
ALWAYS_INLINE size_t turns_of(const rushing *rush, const huffman_stream *stream) {
    size_t in = (size_t)(rush->at - stream->begin) / TURN_IN;
    size_t room = (size_t)(stream->target_end - rush->target);
    size_t out = room < OUT_BEYOND ? 0 : (room - OUT_BEYOND) / TURN_OUT;
    return in < out ? in : out;
}

static void rush_one(const huffman_table *table, huffman_stream *stream) {
    const uint64_t *cells = table->cells + HUFFMAN_CELLS;
    rushing rush;
    if (stream->bits_left < 64) return;
    begin_rush(&rush, stream);
    while (turns_of(&rush, stream) > 0) {
        for (uint32_t i = 0; i < HUFFMAN_LOOKUPS; i++) look_up(&rush, cells);
        refill(&rush);
    }
    end_rush(&rush, stream);
}

ALWAYS_INLINE void turn_four(rushing *a, rushing *b, rushing *c, rushing *d,
                             const uint64_t *cells) {
#pragma GCC unroll 5
    for (uint32_t i = 0; i < HUFFMAN_LOOKUPS; i++) {
        look_up(a, cells);
        look_up(b, cells);
        look_up(c, cells);
        look_up(d, cells);
    }
    refill(a);
    refill(b);
    refill(c);
    refill(d);
}

/// Four at once, since what a lookup waits for is the one before it.
static void rush_four(const huffman_table *table, huffman_stream *streams) {
    const uint64_t *cells = table->cells + HUFFMAN_CELLS;
    rushing a, b, c, d;
    begin_rush(&a, &streams[0]);
    begin_rush(&b, &streams[1]);
    begin_rush(&c, &streams[2]);
    begin_rush(&d, &streams[3]);
    for (;;) {
        size_t turns = turns_of(&a, &streams[0]), other = turns_of(&b, &streams[1]);
        turns = turns < other ? turns : other;
        other = turns_of(&c, &streams[2]);
        turns = turns < other ? turns : other;
        other = turns_of(&d, &streams[3]);
        turns = turns < other ? turns : other;
        if (turns == 0) break;
        for (; turns > 0; turns--) turn_four(&a, &b, &c, &d, cells);
    }
    end_rush(&a, &streams[0]);
    end_rush(&b, &streams[1]);
    end_rush(&c, &streams[2]);
    end_rush(&d, &streams[3]);
}

static void rush_streams(const huffman_table *table, huffman_stream *streams, size_t count) {
    bool are_long = count == HUFFMAN_STREAMS;
    for (size_t i = 0; i < count; i++) are_long = are_long && streams[i].bits_left >= 64;
    if (are_long) rush_four(table, streams);
    for (size_t i = 0; i < count; i++) rush_one(table, &streams[i]);
}
