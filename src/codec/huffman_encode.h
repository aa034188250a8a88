// SPDX-License-Identifier: Apache-2.0
/// The fast encoding loop, compiled once per instruction set. It looks up two symbols at a time.
#include "bit_writer.h"
#include "huffman_code.h"

/// Joined codes.
typedef struct code_group {
    uint64_t bits;
    uint32_t count; ///< of bits, in the lowest byte
} code_group;

ALWAYS_INLINE code_group join(uint32_t first, uint32_t second) {
    return (code_group){second >> 8 | (uint64_t)(first >> 8) << (second & 63), first + second};
}

/// Writes two groups, the last one first: at once, if they are short.
ALWAYS_INLINE void put_groups(bit_writer *writer, code_group first, code_group last) {
    uint32_t count = (first.count + last.count) & 0xff;
    if (count <= 56) {
        bits_put(writer, last.bits | first.bits << (last.count & 63), count);
    } else {
        bits_put(writer, last.bits, last.count & 63);
        bits_store(writer);
        bits_put(writer, first.bits, first.count & 63);
    }
    bits_store(writer);
}

/// Writes the codes of eight symbols, two looked up at a time. Returns the flag of a missing code.
ALWAYS_INLINE uint32_t put_pairs(const huffman_code *code, bit_writer *writer, uint64_t symbols) {
    uint32_t a = code->pairs[symbols & 0xffff], b = code->pairs[symbols >> 16 & 0xffff];
    uint32_t c = code->pairs[symbols >> 32 & 0xffff], d = code->pairs[symbols >> 48];
    put_groups(writer, join(a, b), join(c, d));
    return (a | b) | (c | d);
}

/// Whether every other of eight symbols is zero.
ALWAYS_INLINE bool is_even(uint64_t symbols) { return (symbols & 0xff00ff00ff00ff00) == 0; }

/// Finds the codes of eight symbols, every other of which is zero, four looked up at a time.
ALWAYS_INLINE code_group find_even(const huffman_code *code, uint64_t symbols, uint32_t *missing) {
    symbols |= symbols >> 8;
    uint32_t a = code->even[symbols & 0xffff], b = code->even[symbols >> 32 & 0xffff];
    *missing |= a | b;
    return join(a, b);
}

/// Writes the codes of 16 symbols. Returns the flag of a missing code.
ALWAYS_INLINE uint32_t put_line(const huffman_code *code, bit_writer *writer,
                                const unsigned char *symbols) {
    uint64_t first, last;
    uint32_t missing = 0;
    memcpy(&first, symbols, sizeof first);
    memcpy(&last, symbols + 8, sizeof last);
    if (is_even(first | last)) {
        code_group first_group = find_even(code, first, &missing);
        code_group last_group = find_even(code, last, &missing);
        if ((missing & HUFFMAN_NO_CODE) == 0) {
            put_groups(writer, first_group, last_group);
            return 0;
        }
    }
    missing = put_pairs(code, writer, last);
    return put_pairs(code, writer, first) | missing;
}

ALWAYS_INLINE uint32_t put_single(const huffman_code *code, bit_writer *writer, uint32_t symbol) {
    uint32_t single = code->singles[symbol];
    bits_put(writer, single >> 8, single & 63);
    return single;
}

static unsigned char *encode_stream(const huffman_code *code, const unsigned char *symbols,
                                    size_t size, unsigned char *target, uint32_t *missing) {
    bit_writer writer = {.at = target};
    uint32_t seen = 0;
    for (; size % 16 != 0; size--, bits_store(&writer))
        seen |= put_single(code, &writer, symbols[size - 1]);
    for (; size > 0 && !code->is_joined; size -= 4, bits_store(&writer))
        for (uint32_t i = 1; i <= 4; i++) seen |= put_single(code, &writer, symbols[size - i]);
    for (; size > 0; size -= 16) seen |= put_line(code, &writer, symbols + size - 16);
    *missing |= seen;
    return bits_end_stream(&writer);
}
