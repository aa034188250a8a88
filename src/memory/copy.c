// SPDX-License-Identifier: Apache-2.0
/// Copies large blocks with non-temporal stores, which do not read the target's cache lines first.
/// This halves the memory traffic of copies larger than the cache.
#include <string.h>

#include "memory.h"

/// Smaller targets are likely to be used from the cache.
#define STREAM_BYTES_MIN ((size_t)256 << 10)

#if defined(__x86_64__)
#include <immintrin.h>

#define LINE_BYTES 64u

static void copy_lines_sse2(char *target, const char *source, size_t line_count) {
    for (size_t i = 0; i < line_count; i++, target += LINE_BYTES, source += LINE_BYTES) {
        __m128i a = _mm_loadu_si128((const __m128i *)(const void *)source);
        __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(source + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(const void *)(source + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(const void *)(source + 48));
        _mm_stream_si128((__m128i *)(void *)target, a);
        _mm_stream_si128((__m128i *)(void *)(target + 16), b);
        _mm_stream_si128((__m128i *)(void *)(target + 32), c);
        _mm_stream_si128((__m128i *)(void *)(target + 48), d);
    }
}

__attribute__((target("avx2"))) static void copy_lines_avx2(char *target, const char *source,
                                                            size_t line_count) {
    for (size_t i = 0; i < line_count; i++, target += LINE_BYTES, source += LINE_BYTES) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)source);
        __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(source + 32));
        _mm256_stream_si256((__m256i *)(void *)target, a);
        _mm256_stream_si256((__m256i *)(void *)(target + 32), b);
    }
}

void fsti_copy_bytes(void *target, const void *source, size_t size) {
    if (size < STREAM_BYTES_MIN) {
        memcpy(target, source, size);
        return;
    }
    char *to = target;
    const char *from = source;
    size_t head = (size_t)(-(uintptr_t)to % LINE_BYTES);
    size_t line_count = (size - head) / LINE_BYTES, body = line_count * LINE_BYTES;
    memcpy(to, from, head);
    if (__builtin_cpu_supports("avx2"))
        copy_lines_avx2(to + head, from + head, line_count);
    else
        copy_lines_sse2(to + head, from + head, line_count);
    _mm_sfence(); // non-temporal stores are weakly ordered; order them before the flag that other
                  // threads wait for
    memcpy(to + head + body, from + head + body, size - head - body);
}
#else
// AArch64 cores detect streaming writes and skip allocating cache lines themselves.
void fsti_copy_bytes(void *target, const void *source, size_t size) {
    memcpy(target, source, size);
}
#endif
