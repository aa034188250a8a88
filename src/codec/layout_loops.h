// SPDX-License-Identifier: Apache-2.0
/// The loops of one instruction set: CODEC_NAME names the table, the compiler's flags choose it.
/// Plain integer arithmetic without branches, for the compiler to vectorise.
#include <stdbool.h>
#include <string.h>

#include "codec_kernels.h"

#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)
#define TEXT(a) #a
#define TEXT_OF(a) TEXT(a)

/// Loops work on blocks of this many elements, so that compilers know they are worth it.
#define BLOCK 64u

#define DEFINE_SPLIT(bits, bytes)                                                                  \
    static inline void split_block_##bits(const unsigned char *restrict source,                    \
                                          unsigned char *const *planes, size_t at, size_t count,   \
                                          uint32_t rotation) {                                     \
        uint##bits##_t values[BLOCK];                                                              \
        memcpy(values, source + at * bytes, count * bytes);                                        \
        for (size_t i = 0; i < count; i++)                                                         \
            values[i] = (uint##bits##_t)(values[i] << rotation |                                   \
                                         values[i] >> ((bits - rotation) & (bits - 1)));           \
        for (uint32_t k = 0; k < bytes; k++) {                                                     \
            unsigned char *restrict plane = planes[k] + at;                                        \
            uint32_t shift = (bytes - 1 - k) * 8;                                                  \
            for (size_t i = 0; i < count; i++) plane[i] = (unsigned char)(values[i] >> shift);     \
        }                                                                                          \
    }                                                                                              \
    static void split_##bits(const void *source, unsigned char *const *planes, size_t count,       \
                             uint32_t rotation) {                                                  \
        size_t at = 0;                                                                             \
        for (; at + BLOCK <= count; at += BLOCK)                                                   \
            split_block_##bits(source, planes, at, BLOCK, rotation);                               \
        split_block_##bits(source, planes, at, count - at, rotation);                              \
    }

DEFINE_SPLIT(16, 2)
DEFINE_SPLIT(32, 4)
DEFINE_SPLIT(64, 8)

#define DEFINE_JOIN(bits, bytes)                                                                   \
    static inline void join_block_##bits(unsigned char *restrict target,                           \
                                         const unsigned char *const *planes, size_t at,            \
                                         size_t count, uint32_t rotation) {                        \
        uint##bits##_t values[BLOCK];                                                              \
        for (size_t i = 0; i < count; i++) values[i] = planes[bytes - 1][at + i];                  \
        for (uint32_t k = 0; k + 1 < bytes; k++) {                                                 \
            const unsigned char *restrict plane = planes[k] + at;                                  \
            uint32_t shift = (bytes - 1 - k) * 8;                                                  \
            for (size_t i = 0; i < count; i++)                                                     \
                values[i] |= (uint##bits##_t)((uint##bits##_t)plane[i] << shift);                  \
        }                                                                                          \
        for (size_t i = 0; i < count; i++)                                                         \
            values[i] = (uint##bits##_t)(values[i] >> rotation |                                   \
                                         values[i] << ((bits - rotation) & (bits - 1)));           \
        memcpy(target + at * bytes, values, count * bytes);                                        \
    }                                                                                              \
    static void join_##bits(void *target, const unsigned char *const *planes, size_t count,        \
                            uint32_t rotation) {                                                   \
        size_t at = 0;                                                                             \
        for (; at + BLOCK <= count; at += BLOCK)                                                   \
            join_block_##bits(target, planes, at, BLOCK, rotation);                                \
        join_block_##bits(target, planes, at, count - at, rotation);                               \
    }

DEFINE_JOIN(16, 2)
DEFINE_JOIN(32, 4)
DEFINE_JOIN(64, 8)

static inline unsigned char rotate_left(unsigned char value) {
    return (unsigned char)(value << 1 | value >> 7);
}

static inline unsigned char rotate_right(unsigned char value) {
    return (unsigned char)(value >> 1 | value << 7);
}

/// The first element of a pair has the lower half of each plane's byte. A last one without a
/// partner is paired with zero.
static void split_nibbles(const void *source, unsigned char *const *planes, size_t count) {
    const unsigned char *restrict in = source;
    unsigned char *restrict upper = planes[0];
    unsigned char *restrict lower = planes[1];
    size_t pairs = count / 2;
    for (size_t i = 0; i < pairs; i++) {
        unsigned char first = rotate_left(in[2 * i]), second = rotate_left(in[2 * i + 1]);
        upper[i] = (unsigned char)(first >> 4 | (second & 0xf0));
        lower[i] = (unsigned char)((first & 0x0f) | second << 4);
    }
    if (count % 2 == 0) return;
    unsigned char last = rotate_left(in[count - 1]);
    upper[pairs] = (unsigned char)(last >> 4);
    lower[pairs] = (unsigned char)(last & 0x0f);
}

static void join_nibbles(void *target, const unsigned char *const *planes, size_t count) {
    unsigned char *restrict out = target;
    const unsigned char *restrict upper = planes[0];
    const unsigned char *restrict lower = planes[1];
    size_t pairs = count / 2;
    for (size_t i = 0; i < pairs; i++) {
        unsigned char first = (unsigned char)(upper[i] << 4 | (lower[i] & 0x0f));
        unsigned char second = (unsigned char)((upper[i] & 0xf0) | lower[i] >> 4);
        out[2 * i] = rotate_right(first);
        out[2 * i + 1] = rotate_right(second);
    }
    if (count % 2 != 0)
        out[count - 1] = rotate_right((unsigned char)(upper[pairs] << 4 | (lower[pairs] & 0x0f)));
}

#include "crc32c_loops.h"

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
};
