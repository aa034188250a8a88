// SPDX-License-Identifier: Apache-2.0
/// Adler-32 (RFC 1950) as weight deltas use it: initial value 1, digest in big-endian order.
#include "digest.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MODULUS 65521u
/// Bytes after which the second sum may exceed 32 bits, rounded down to a multiple of 32.
#define RUN_BYTES ((size_t)5536)

typedef struct adler32_state {
    uint32_t first, second;
} adler32_state;

static void sum_plain(adler32_state *state, const unsigned char *bytes, size_t size) {
    for (size_t i = 0; i < size; i++) {
        state->first += bytes[i];
        state->second += state->first;
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static uint32_t add_lanes(__m256i lanes) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(four);
}

/// A multiple of 32 bytes, at most RUN_BYTES. Byte i of a block counts 32 - i times in the second
/// sum, and the first sum before each block counts 32 times. The 16-bit sums of maddubs do not
/// saturate: 255 * (32 + 31) is below 2^15.
__attribute__((target("avx2"))) static void sum_avx2(adler32_state *state,
                                                     const unsigned char *bytes, size_t size) {
    const __m256i weights =
        _mm256_setr_epi8(32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14,
                         13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1);
    const __m256i zero = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1);
    __m256i sum = zero, before = zero, weighted = zero;
    for (size_t at = 0; at < size; at += 32) {
        __m256i block = _mm256_loadu_si256((const __m256i *)(const void *)(bytes + at));
        before = _mm256_add_epi32(before, sum);
        sum = _mm256_add_epi32(sum, _mm256_sad_epu8(block, zero));
        weighted = _mm256_add_epi32(weighted,
                                    _mm256_madd_epi16(_mm256_maddubs_epi16(block, weights), ones));
    }
    state->second += state->first * (uint32_t)size + 32 * add_lanes(before) + add_lanes(weighted);
    state->first += add_lanes(sum);
}
#endif

static void sum_run(adler32_state *state, const unsigned char *bytes, size_t size) {
    size_t done = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        done = size & ~(size_t)31;
        sum_avx2(state, bytes, done);
    }
#endif
    sum_plain(state, bytes + done, size - done);
    state->first %= MODULUS;
    state->second %= MODULUS;
}

static bool update_adler32(void *state, const void *bytes, size_t size_bytes) {
    const unsigned char *at = bytes;
    while (size_bytes > 0) {
        size_t run = size_bytes < RUN_BYTES ? size_bytes : RUN_BYTES;
        sum_run(state, at, run);
        at += run;
        size_bytes -= run;
    }
    return true;
}

static void put_digest(const adler32_state *state, unsigned char *digest) {
    digest[0] = (unsigned char)(state->second >> 8);
    digest[1] = (unsigned char)state->second;
    digest[2] = (unsigned char)(state->first >> 8);
    digest[3] = (unsigned char)state->first;
}

static fst_status ready_adler32(fst_error *error) {
    (void)error;
    return FST_OK;
}

static bool hash_adler32(const void *bytes, size_t size_bytes, unsigned char *digest) {
    adler32_state state = {1, 0};
    update_adler32(&state, bytes, size_bytes);
    put_digest(&state, digest);
    return true;
}

static void *begin_adler32(void) {
    adler32_state *state = fsti_alloc(sizeof *state);
    if (state != NULL) *state = (adler32_state){1, 0};
    return state;
}

static bool end_adler32(void *state, unsigned char *digest) {
    if (digest != NULL) put_digest(state, digest);
    fsti_free(state);
    return true;
}

const fsti_digest_kind fsti_digest_adler32 = {
    .name = "adler32",
    .number = FST_DIGEST_ADLER32,
    .digest_bytes = 4,
    .ready = ready_adler32,
    .hash = hash_adler32,
    .begin = begin_adler32,
    .update = update_adler32,
    .end = end_adler32,
};
