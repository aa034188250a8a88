// SPDX-License-Identifier: Apache-2.0
/// The loops of one instruction set: CODEC_NAME names the table, compiler flags choose the set.
/// Vectors use the compiler's generic vector extension.
#include <stdbool.h>
#include <string.h>

#include "codec_kernels.h"

/// For functions that are fast only with constant arguments.
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)
#define TEXT(a) #a
#define TEXT_OF(a) TEXT(a)

typedef uint8_t bytes_16 __attribute__((vector_size(16)));
typedef uint16_t words_16 __attribute__((vector_size(16)));
typedef uint32_t words_32 __attribute__((vector_size(16)));
typedef uint64_t words_64 __attribute__((vector_size(16)));

/// Elements per block: one vector per plane. Nibbles are joined in larger vectors if the CPU has
/// them, because compilers emulate unsupported vector sizes byte by byte.
#define BLOCK 16u
#if defined(__AVX2__)
#define PAIRS 32u
#else
#define PAIRS 16u
#endif
typedef uint8_t pair_bytes __attribute__((vector_size(PAIRS)));
typedef uint16_t pair_words __attribute__((vector_size(PAIRS)));

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifdef PICK
#define PICK_PAIRS PICK
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (bytes_16){__VA_ARGS__})
#define PICK_PAIRS(a, b, ...) __builtin_shuffle(a, b, (pair_bytes){__VA_ARGS__})
#endif
#define EVEN_BYTES(a, b) PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD_BYTES(a, b) PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define LOWER_HALVES(a, b) PICK(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define UPPER_HALVES(a, b) PICK(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#if PAIRS == 32
#define LOWER_PAIRS(a, b)                                                                          \
    PICK_PAIRS(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, \
               11, 43, 12, 44, 13, 45, 14, 46, 15, 47)
#define UPPER_PAIRS(a, b)                                                                          \
    PICK_PAIRS(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25,   \
               57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63)
#else
#define LOWER_PAIRS(a, b) PICK_PAIRS(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define UPPER_PAIRS(a, b)                                                                          \
    PICK_PAIRS(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#endif

ALWAYS_INLINE bytes_16 load_vector(const unsigned char *bytes) {
    bytes_16 vector;
    memcpy(&vector, bytes, sizeof vector);
    return vector;
}

ALWAYS_INLINE bytes_16 rotate_left(bytes_16 vector, uint32_t element_bytes) {
    if (element_bytes == 2) return (bytes_16)((words_16)vector << 1 | (words_16)vector >> 15);
    if (element_bytes == 4) return (bytes_16)((words_32)vector << 1 | (words_32)vector >> 31);
    return (bytes_16)((words_64)vector << 1 | (words_64)vector >> 63);
}

ALWAYS_INLINE bytes_16 rotate_right(bytes_16 vector, uint32_t element_bytes) {
    if (element_bytes == 2) return (bytes_16)((words_16)vector >> 1 | (words_16)vector << 15);
    if (element_bytes == 4) return (bytes_16)((words_32)vector >> 1 | (words_32)vector << 31);
    return (bytes_16)((words_64)vector >> 1 | (words_64)vector << 63);
}

/// Moves even bytes to the first half of the vectors and odd ones to the second, once per halving
/// of the element size; then vector k has byte k of the elements.
ALWAYS_INLINE void split_block(const unsigned char *source, unsigned char *const *planes, size_t at,
                               uint32_t bytes, bool is_rotated) {
    bytes_16 vectors[8], next[8];
    for (uint32_t k = 0; k < bytes; k++) {
        vectors[k] = load_vector(source + k * BLOCK);
        if (is_rotated) vectors[k] = rotate_left(vectors[k], bytes);
    }
    for (uint32_t size = bytes; size > 1; size /= 2) {
        for (uint32_t k = 0; k < bytes / 2; k++) {
            next[k] = EVEN_BYTES(vectors[2 * k], vectors[2 * k + 1]);
            next[bytes / 2 + k] = ODD_BYTES(vectors[2 * k], vectors[2 * k + 1]);
        }
        for (uint32_t k = 0; k < bytes; k++) vectors[k] = next[k];
    }
    for (uint32_t k = 0; k < bytes; k++)
        memcpy(planes[bytes - 1 - k] + at, &vectors[k], sizeof vectors[k]);
}

/// The inverse of split_block().
ALWAYS_INLINE void join_block(unsigned char *target, const unsigned char *const *planes, size_t at,
                              uint32_t bytes, bool is_rotated) {
    bytes_16 vectors[8], next[8];
    for (uint32_t k = 0; k < bytes; k++) vectors[k] = load_vector(planes[bytes - 1 - k] + at);
    for (uint32_t size = bytes; size > 1; size /= 2) {
        for (uint32_t k = 0; k < bytes / 2; k++) {
            next[2 * k] = LOWER_HALVES(vectors[k], vectors[bytes / 2 + k]);
            next[2 * k + 1] = UPPER_HALVES(vectors[k], vectors[bytes / 2 + k]);
        }
        for (uint32_t k = 0; k < bytes; k++) vectors[k] = next[k];
    }
    for (uint32_t k = 0; k < bytes; k++) {
        if (is_rotated) vectors[k] = rotate_right(vectors[k], bytes);
        memcpy(target + k * BLOCK, &vectors[k], sizeof vectors[k]);
    }
}

/// An incomplete last block is processed through a complete one.
ALWAYS_INLINE void split_all(const void *source, unsigned char *const *planes, size_t count,
                             uint32_t bytes, bool is_rotated) {
    unsigned char block[BLOCK * 8] = {0}, cut[8][BLOCK], *cuts[8];
    const unsigned char *in = source;
    size_t at = 0;
    for (; at + BLOCK <= count; at += BLOCK)
        split_block(in + at * bytes, planes, at, bytes, is_rotated);
    if (at == count) return;
    memcpy(block, in + at * bytes, (count - at) * bytes);
    for (uint32_t k = 0; k < bytes; k++) cuts[k] = cut[k];
    split_block(block, cuts, 0, bytes, is_rotated);
    for (uint32_t k = 0; k < bytes; k++) memcpy(planes[k] + at, cut[k], count - at);
}

ALWAYS_INLINE void join_all(void *target, const unsigned char *const *planes, size_t count,
                            uint32_t bytes, bool is_rotated) {
    unsigned char block[BLOCK * 8], cut[8][BLOCK] = {{0}};
    const unsigned char *cuts[8];
    unsigned char *out = target;
    size_t at = 0;
    for (; at + BLOCK <= count; at += BLOCK)
        join_block(out + at * bytes, planes, at, bytes, is_rotated);
    if (at == count) return;
    for (uint32_t k = 0; k < bytes; k++) {
        memcpy(cut[k], planes[k] + at, count - at);
        cuts[k] = cut[k];
    }
    join_block(block, cuts, 0, bytes, is_rotated);
    memcpy(out + at * bytes, block, (count - at) * bytes);
}

#define DEFINE_LAYOUT(bits, bytes)                                                                 \
    static void split_##bits(const void *source, unsigned char *const *planes, size_t count,       \
                             uint32_t rotation) {                                                  \
        if (rotation != 0)                                                                         \
            split_all(source, planes, count, bytes, true);                                         \
        else                                                                                       \
            split_all(source, planes, count, bytes, false);                                        \
    }                                                                                              \
    static void join_##bits(void *target, const unsigned char *const *planes, size_t count,        \
                            uint32_t rotation) {                                                   \
        if (rotation != 0)                                                                         \
            join_all(target, planes, count, bytes, true);                                          \
        else                                                                                       \
            join_all(target, planes, count, bytes, false);                                         \
    }

DEFINE_LAYOUT(16, 2)
DEFINE_LAYOUT(32, 4)
DEFINE_LAYOUT(64, 8)

/// Two vectors of elements make one of pairs. The first element of a pair has the lower half of
/// each byte.
ALWAYS_INLINE void split_pairs(const unsigned char *in, unsigned char *upper,
                               unsigned char *lower) {
    bytes_16 low = load_vector(in), high = load_vector(in + 16);
    low = low << 1 | low >> 7;
    high = high << 1 | high >> 7;
    bytes_16 first = EVEN_BYTES(low, high), second = ODD_BYTES(low, high);
    bytes_16 uppers = first >> 4 | (second & 0xf0), lowers = (first & 0x0f) | second << 4;
    memcpy(upper, &uppers, 16);
    memcpy(lower, &lowers, 16);
}

#define WORDS_LEFT(vector, bits) ((pair_bytes)((pair_words)(vector) << (bits)))
#define WORDS_RIGHT(vector, bits) ((pair_bytes)((pair_words)(vector) >> (bits)))

/// Joins two vectors at once, including the rotation to the right: from the upper half u and the
/// lower half l an element becomes l0 u3 u2 u1 u0 l3 l2 l1, most significant bit first. Shifts are
/// of words, as CPUs have them; bits that cross a byte are masked.
ALWAYS_INLINE void join_pairs(unsigned char *out, const unsigned char *upper,
                              const unsigned char *lower) {
    pair_bytes u, l;
    memcpy(&u, upper, sizeof u);
    memcpy(&l, lower, sizeof l);
    pair_bytes first =
        (WORDS_LEFT(u, 3) & 0x78) | (WORDS_RIGHT(l, 1) & 0x07) | (WORDS_LEFT(l, 7) & 0x80);
    pair_bytes second =
        (WORDS_RIGHT(u, 1) & 0x78) | (WORDS_RIGHT(l, 5) & 0x07) | (WORDS_LEFT(l, 3) & 0x80);
    pair_bytes low = LOWER_PAIRS(first, second), high = UPPER_PAIRS(first, second);
    memcpy(out, &low, sizeof low);
    memcpy(out + sizeof low, &high, sizeof high);
}

/// A last element without a partner is paired with zero.
static void split_nibbles(const void *source, unsigned char *const *planes, size_t count) {
    const unsigned char *in = source;
    unsigned char block[32] = {0}, upper[16], lower[16];
    size_t at = 0;
    for (; at + 32 <= count; at += 32) split_pairs(in + at, planes[0] + at / 2, planes[1] + at / 2);
    if (at == count) return;
    memcpy(block, in + at, count - at);
    split_pairs(block, upper, lower);
    memcpy(planes[0] + at / 2, upper, (count - at + 1) / 2);
    memcpy(planes[1] + at / 2, lower, (count - at + 1) / 2);
}

static void join_nibbles(void *target, const unsigned char *const *planes, size_t count) {
    unsigned char *out = target;
    unsigned char block[2 * PAIRS], upper[PAIRS] = {0}, lower[PAIRS] = {0};
    size_t at = 0;
    for (; at + sizeof block <= count; at += sizeof block)
        join_pairs(out + at, planes[0] + at / 2, planes[1] + at / 2);
    if (at == count) return;
    memcpy(upper, planes[0] + at / 2, (count - at + 1) / 2);
    memcpy(lower, planes[1] + at / 2, (count - at + 1) / 2);
    join_pairs(block, upper, lower);
    memcpy(out + at, block, count - at);
}

#include "crc32c_loops.h"
#include "huffman_encode.h"
#include "huffman_loops.h"
#include "sparse_loops.h"

const codec_kernels NAMED(fsti_codec_, CODEC_NAME) = {
    .name = TEXT_OF(CODEC_NAME),
    .split_16 = split_16,
    .split_32 = split_32,
    .split_64 = split_64,
    .split_nibbles = split_nibbles,
    .join_16 = join_16,
    .join_32 = join_32,
    .join_64 = join_64,
    .join_nibbles = join_nibbles,
    .crc32c = crc32c_of,
    .decode_streams = decode_streams,
    .encode_stream = encode_stream,
    .find_edges = find_edges,
    .put_runs = put_runs,
    .xor_runs = xor_runs,
};
