// SPDX-License-Identifier: Apache-2.0
/// Table lookups for one instruction set. The next bits of a stream are at the top of a word whose
/// lowest bit is set before it is shifted, so that the zeros below that bit count the consumed
/// bits. A word provides at most 62 bits, so this bit is never consumed.
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

#if defined(__x86_64__) && defined(__BMI2__)
// Tests compare each instruction set's loops with the plain ones below.
// NOLINTBEGIN(portability-no-assembler)

/// Eight instructions in assembler, because compilers generate more and with longer dependencies:
/// only the necessary shifts (two per cycle), and the next index depends on `taken` alone.
#define LOOK_UP(scale, moved, count_at)                                                            \
    uint64_t index, other;                                                                         \
    __asm__ volatile("mov %[bits], %[index]\n\t"                                                   \
                     "shr %[unused], %[index]\n\t"                                                 \
                     "movzbl (%[codes],%[index]), %k[other]\n\t"                                   \
                     "shlx %[other], %[bits], %[bits]\n\t"                                         \
                     "mov %c[cells](%[codes],%[index]," scale "), %" moved "[other]\n\t"           \
                     "movzbl %c[cells]+" count_at "(%[codes],%[index]," scale "), %k[index]\n\t"   \
                     "mov %" moved "[other], (%[target])\n\t"                                      \
                     "add %[index], %[target]"                                                     \
                     : [bits] "+&r"(rush->bits), [target] "+r"(rush->target),                      \
                       [index] "=&r"(index), [other] "=&r"(other)                                  \
                     : [codes] "r"(codes), [unused] "i"(64 - HUFFMAN_BITS),                        \
                       [cells] "i"(offsetof(huffman_codes, cells))                                 \
                     : "memory", "cc")

ALWAYS_INLINE void look_up(rushing *rush, const huffman_codes *codes, bool is_narrow) {
    if (is_narrow) {
        LOOK_UP("4", "k", "3");
    } else {
        LOOK_UP("8", "q", "7");
    }
}

ALWAYS_INLINE void refill(rushing *rush) {
    uint64_t taken, word;
    __asm__ volatile(
        "tzcnt %[bits], %[taken]\n\t"
        "mov %k[taken], %k[word]\n\t"
        "shr $3, %k[word]\n\t"
        "sub %[word], %[at]\n\t"
        "and $7, %k[taken]\n\t"
        "mov (%[at]), %[word]\n\t"
        "or $1, %[word]\n\t"
        "shlx %[taken], %[word], %[bits]"
        : [bits] "+r"(rush->bits), [at] "+r"(rush->at), [taken] "=&r"(taken), [word] "=&r"(word)
        :
        : "memory", "cc");
}
// NOLINTEND(portability-no-assembler)

#else

ALWAYS_INLINE void look_up(rushing *rush, const huffman_codes *codes, bool is_narrow) {
    uint64_t index = rush->bits >> (64 - HUFFMAN_BITS);
    rush->bits <<= codes->taken[index] & 63;
    if (is_narrow) {
        uint32_t cell = codes->cells.narrow[index];
        memcpy(rush->target, &cell, sizeof cell);
        rush->target += cell >> 24;
    } else {
        uint64_t cell = codes->cells.wide[index];
        memcpy(rush->target, &cell, sizeof cell);
        rush->target += cell >> 56;
    }
}

ALWAYS_INLINE void refill(rushing *rush) {
    uint32_t taken = (uint32_t)__builtin_ctzll(rush->bits);
    rush->at -= taken >> 3;
    rush->bits = (load_word(rush->at) | 1) << (taken & 7);
}

#endif

/// Bytes that an iteration may consume and write.
#define TURN_IN 8
#define TURN_OUT(is_narrow)                                                                        \
    (HUFFMAN_LOOKUPS * ((is_narrow) ? HUFFMAN_BITS / HUFFMAN_NARROW_BITS : HUFFMAN_SYMBOLS))
#define OUT_BEYOND (HUFFMAN_STORE_BYTES - HUFFMAN_SYMBOLS)

/// Iterations that a stream certainly has.
ALWAYS_INLINE size_t turns_of(const rushing *rush, const huffman_stream *stream, bool is_narrow) {
    size_t in = (size_t)(rush->at - stream->begin) / TURN_IN;
    size_t room = (size_t)(stream->target_end - rush->target);
    size_t out = room < OUT_BEYOND ? 0 : (room - OUT_BEYOND) / TURN_OUT(is_narrow);
    return in < out ? in : out;
}

static void rush_one(const huffman_table *table, huffman_stream *stream) {
    rushing rush;
    if (stream->bits_left < 64) return;
    begin_rush(&rush, stream);
    while (turns_of(&rush, stream, table->is_narrow) > 0) {
        for (uint32_t i = 0; i < HUFFMAN_LOOKUPS; i++)
            look_up(&rush, &table->codes, table->is_narrow);
        refill(&rush);
    }
    end_rush(&rush, stream);
}

typedef struct rushing_four {
    rushing a, b, c, d;
} rushing_four;

ALWAYS_INLINE void turn_four(rushing_four *four, const huffman_codes *codes, bool is_narrow) {
#pragma GCC unroll 5
    for (uint32_t i = 0; i < HUFFMAN_LOOKUPS; i++) {
        look_up(&four->a, codes, is_narrow);
        look_up(&four->b, codes, is_narrow);
        look_up(&four->c, codes, is_narrow);
        look_up(&four->d, codes, is_narrow);
    }
    refill(&four->a);
    refill(&four->b);
    refill(&four->c);
    refill(&four->d);
}

/// Each iteration prefetches a cache line.
#define LINE_BYTES 64

/// Decodes four streams together, because each lookup waits for the previous one of its stream.
ALWAYS_INLINE void rush_four(const huffman_table *table, huffman_stream *streams,
                             huffman_ahead ahead, bool is_narrow) {
    rushing_four four;
    begin_rush(&four.a, &streams[0]);
    begin_rush(&four.b, &streams[1]);
    begin_rush(&four.c, &streams[2]);
    begin_rush(&four.d, &streams[3]);
    for (;;) {
        size_t turns = turns_of(&four.a, &streams[0], is_narrow),
               other = turns_of(&four.b, &streams[1], is_narrow);
        turns = turns < other ? turns : other;
        other = turns_of(&four.c, &streams[2], is_narrow);
        turns = turns < other ? turns : other;
        other = turns_of(&four.d, &streams[3], is_narrow);
        turns = turns < other ? turns : other;
        if (turns == 0) break;
        for (; turns > 0; turns--) {
            turn_four(&four, &table->codes, is_narrow);
            __builtin_prefetch(ahead.at, 0, 2);
            ahead.at += ahead.at < ahead.end ? LINE_BYTES : 0;
        }
    }
    end_rush(&four.a, &streams[0]);
    end_rush(&four.b, &streams[1]);
    end_rush(&four.c, &streams[2]);
    end_rush(&four.d, &streams[3]);
}

static void rush_streams(const huffman_table *table, huffman_stream *streams, size_t count,
                         huffman_ahead ahead) {
    bool are_long = count == HUFFMAN_STREAMS;
    for (size_t i = 0; i < count; i++) are_long = are_long && streams[i].bits_left >= 64;
    if (are_long && table->is_narrow)
        rush_four(table, streams, ahead, true);
    else if (are_long)
        rush_four(table, streams, ahead, false);
    for (size_t i = 0; i < count; i++) rush_one(table, &streams[i]);
}
