// SPDX-License-Identifier: Apache-2.0
/// The fast decoding loops, compiled once per instruction set. They decode all but the end of a
/// stream. The next bits of a stream are at the top of a word whose lowest bit is set before it is
/// shifted, so that the zeros below that bit count the consumed bits. A word provides at most 62
/// bits, so this bit is never consumed.
#include "huffman.h"

typedef struct fast_stream {
    uint64_t bits;
    const unsigned char *at; ///< where `bits` was read
    unsigned char *target;
} fast_stream;

static inline uint64_t load_word(const unsigned char *bytes) {
    uint64_t word;
    memcpy(&word, bytes, 8);
    return word;
}

ALWAYS_INLINE void begin_fast(fast_stream *fast, const huffman_stream *stream) {
    uint64_t end = (stream->bits_left + 7) / 8; // at least 8
    fast->at = stream->begin + end - 8;
    fast->bits = (load_word(fast->at) | 1) << (end * 8 - stream->bits_left);
    fast->target = stream->target;
}

ALWAYS_INLINE void end_fast(const fast_stream *fast, huffman_stream *stream) {
    uint64_t taken = (uint64_t)__builtin_ctzll(fast->bits);
    stream->bits_left = (uint64_t)(fast->at - stream->begin) * 8 + 64 - taken;
    stream->target = fast->target;
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
                     : [bits] "+&r"(fast->bits), [target] "+r"(fast->target),                      \
                       [index] "=&r"(index), [other] "=&r"(other)                                  \
                     : [codes] "r"(codes), [unused] "i"(64 - HUFFMAN_BITS),                        \
                       [cells] "i"(offsetof(huffman_codes, cells))                                 \
                     : "memory", "cc")

ALWAYS_INLINE void look_up(fast_stream *fast, const huffman_codes *codes, bool is_narrow) {
    if (is_narrow) {
        LOOK_UP("4", "k", "3");
    } else {
        LOOK_UP("8", "q", "7");
    }
}

ALWAYS_INLINE void refill(fast_stream *fast) {
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
        : [bits] "+r"(fast->bits), [at] "+r"(fast->at), [taken] "=&r"(taken), [word] "=&r"(word)
        :
        : "memory", "cc");
}
// NOLINTEND(portability-no-assembler)

#else

ALWAYS_INLINE void look_up(fast_stream *fast, const huffman_codes *codes, bool is_narrow) {
    uint64_t index = fast->bits >> (64 - HUFFMAN_BITS);
    fast->bits <<= codes->taken[index] & 63;
    if (is_narrow) {
        uint32_t cell = codes->cells.narrow[index];
        memcpy(fast->target, &cell, sizeof cell);
        fast->target += cell >> 24;
    } else {
        uint64_t cell = codes->cells.wide[index];
        memcpy(fast->target, &cell, sizeof cell);
        fast->target += cell >> 56;
    }
}

ALWAYS_INLINE void refill(fast_stream *fast) {
    uint32_t taken = (uint32_t)__builtin_ctzll(fast->bits);
    fast->at -= taken >> 3;
    fast->bits = (load_word(fast->at) | 1) << (taken & 7);
}

#endif

/// Bytes that an iteration may consume and write.
#define STEP_IN 8
#define STEP_OUT(is_narrow)                                                                        \
    (HUFFMAN_LOOKUPS * ((is_narrow) ? HUFFMAN_BITS / HUFFMAN_NARROW_BITS : HUFFMAN_SYMBOLS))
#define OUT_BEYOND (HUFFMAN_STORE_BYTES - HUFFMAN_SYMBOLS)

/// Iterations that a stream certainly has.
ALWAYS_INLINE size_t steps_left(const fast_stream *fast, const huffman_stream *stream,
                                bool is_narrow) {
    size_t in = (size_t)(fast->at - stream->begin) / STEP_IN;
    size_t space = (size_t)(stream->target_end - fast->target);
    size_t out = space < OUT_BEYOND ? 0 : (space - OUT_BEYOND) / STEP_OUT(is_narrow);
    return in < out ? in : out;
}

static void decode_one(const huffman_table *table, huffman_stream *stream) {
    fast_stream fast;
    if (stream->bits_left < 64) return;
    begin_fast(&fast, stream);
    while (steps_left(&fast, stream, table->is_narrow) > 0) {
        for (uint32_t i = 0; i < HUFFMAN_LOOKUPS; i++)
            look_up(&fast, &table->codes, table->is_narrow);
        refill(&fast);
    }
    end_fast(&fast, stream);
}

typedef struct four_streams {
    fast_stream a, b, c, d;
} four_streams;

ALWAYS_INLINE void step_four(four_streams *four, const huffman_codes *codes, bool is_narrow) {
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
ALWAYS_INLINE void decode_four(const huffman_table *table, huffman_stream *streams,
                               huffman_ahead ahead, bool is_narrow) {
    four_streams four;
    begin_fast(&four.a, &streams[0]);
    begin_fast(&four.b, &streams[1]);
    begin_fast(&four.c, &streams[2]);
    begin_fast(&four.d, &streams[3]);
    for (;;) {
        size_t steps = steps_left(&four.a, &streams[0], is_narrow),
               other = steps_left(&four.b, &streams[1], is_narrow);
        steps = steps < other ? steps : other;
        other = steps_left(&four.c, &streams[2], is_narrow);
        steps = steps < other ? steps : other;
        other = steps_left(&four.d, &streams[3], is_narrow);
        steps = steps < other ? steps : other;
        if (steps == 0) break;
        for (; steps > 0; steps--) {
            step_four(&four, &table->codes, is_narrow);
            __builtin_prefetch(ahead.at, 0, 2);
            ahead.at += ahead.at < ahead.end ? LINE_BYTES : 0;
        }
    }
    end_fast(&four.a, &streams[0]);
    end_fast(&four.b, &streams[1]);
    end_fast(&four.c, &streams[2]);
    end_fast(&four.d, &streams[3]);
}

static void decode_streams(const huffman_table *table, huffman_stream *streams, size_t count,
                           huffman_ahead ahead) {
    bool are_long = count == HUFFMAN_STREAMS;
    for (size_t i = 0; i < count; i++) are_long = are_long && streams[i].bits_left >= 64;
    if (are_long && table->is_narrow)
        decode_four(table, streams, ahead, true);
    else if (are_long)
        decode_four(table, streams, ahead, false);
    for (size_t i = 0; i < count; i++) decode_one(table, &streams[i]);
}
