// SPDX-License-Identifier: Apache-2.0
/// Conversion of elements while loading: the supported pairs, and the choice of the fastest kernels
/// that the CPU supports.
#include "convert.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <emmintrin.h>
#endif

static bool is_float(fst_dtype dtype) {
    switch (dtype) {
    case FST_DTYPE_F64:
    case FST_DTYPE_F32:
    case FST_DTYPE_F16:
    case FST_DTYPE_BF16:
    case FST_DTYPE_F8_E4M3:
    case FST_DTYPE_F8_E5M2:
    case FST_DTYPE_F8_E4M3FNUZ:
    case FST_DTYPE_F8_E5M2FNUZ:
    case FST_DTYPE_F8_E8M0:
    case FST_DTYPE_F4: return true;
    default: return false;
    }
}

static bool is_unsigned(fst_dtype dtype) {
    return dtype == FST_DTYPE_U8 || dtype == FST_DTYPE_U16 || dtype == FST_DTYPE_U32 ||
           dtype == FST_DTYPE_U64;
}

static bool is_integer(fst_dtype dtype) {
    return is_unsigned(dtype) || dtype == FST_DTYPE_I8 || dtype == FST_DTYPE_I16 ||
           dtype == FST_DTYPE_I32 || dtype == FST_DTYPE_I64;
}

bool fsti_dtype_convertible(fst_dtype from, fst_dtype to) {
    if (from == to) return false;
    if (is_float(from) && is_float(to)) return true;
    // Widening is exact: more bits, and a signed result unless the source is unsigned.
    return is_integer(from) && is_integer(to) && fsti_dtype_bits(to) > fsti_dtype_bits(from) &&
           (is_unsigned(from) || !is_unsigned(to));
}

fsti_conversion fsti_dtype_conversion(fst_dtype from, fst_dtype to) {
    fsti_conversion conversion = {.from = (uint8_t)from, .to = (uint8_t)to};
    // Two 4-bit elements share a byte.
    uint32_t elements = from == FST_DTYPE_F4 || to == FST_DTYPE_F4 ? 2 : 1;
    conversion.unit_elements = (uint8_t)elements;
    conversion.from_bytes = (uint8_t)(elements * fsti_dtype_bits(from) / 8);
    conversion.to_bytes = (uint8_t)(elements * fsti_dtype_bits(to) / 8);
    return conversion;
}

#if defined(__x86_64__)
/// Asks the CPU directly, because some compilers do not know the feature's name.
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

static const convert_kernels *best_kernels(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && has_f16c())
        return &fsti_convert_avx512;
    if (__builtin_cpu_supports("avx2") && has_f16c()) return &fsti_convert_avx2;
    return &fsti_convert_scalar;
#elif defined(__aarch64__)
    return &fsti_convert_neon;
#else
    return &fsti_convert_scalar;
#endif
}

#if defined(__x86_64__)
/// Above this size the result does not stay in the CPU cache. Non-temporal stores then avoid
/// reading each line before overwriting it.
#define STREAM_BYTES_MIN ((uint64_t)256 << 10)
#define LINE_BYTES 64u

/// Copies a block with non-temporal stores to a target at the start of a cache line.
static void stream_block(char *target, const char *block, size_t size) {
    size_t body = size / LINE_BYTES * LINE_BYTES;
    for (size_t at = 0; at < body; at += 16)
        _mm_stream_si128((__m128i *)(void *)(target + at),
                         _mm_load_si128((const __m128i *)(const void *)(block + at)));
    memcpy(target + body, block + body, size - body);
}

/// Units before the target's first cache line; UINT64_MAX if no element begins at a line.
static uint64_t units_to_line(const char *target, uint32_t unit_bytes) {
    uint64_t head = -(uintptr_t)target % LINE_BYTES;
    return head % unit_bytes == 0 ? head / unit_bytes : UINT64_MAX;
}
#endif

/// Scratch space for blocks, which fits in the L1 cache.
typedef union convert_blocks {
    _Alignas(64) float floats[CONVERT_BLOCK];
    int64_t integers[CONVERT_BLOCK];
} convert_blocks;

/// Describes `count` elements to convert from `in` to `out`.
typedef struct convert_span {
    const char *in;
    char *out;
    size_t count;
} convert_span;

/// Converts one block by way of floats or 64-bit integers. Without `span.out` the result stays in
/// the scratch space.
static void convert_block(const struct convert_kernels *kernels, fsti_conversion conversion,
                          convert_blocks *blocks, convert_span span) {
    fst_dtype from = (fst_dtype)conversion.from, to = (fst_dtype)conversion.to;
    bool is_ready = from == FST_DTYPE_F32 && (uintptr_t)span.in % sizeof(float) == 0;
    if (is_ready && span.out != NULL) {
        kernels->from_float(to, (const void *)span.in, span.out, span.count);
    } else if (is_float(from)) {
        kernels->to_float(from, span.in, blocks->floats, span.count);
        if (span.out != NULL) kernels->from_float(to, blocks->floats, span.out, span.count);
    } else {
        kernels->to_integer(from, span.in, blocks->integers, span.count);
        if (span.out != NULL) kernels->from_integer(to, blocks->integers, span.out, span.count);
    }
}

/// The first unit to write with non-temporal stores; UINT64_MAX: never. Only for results that are
/// final in the scratch space (32-bit floats, 64-bit integers). Other results would need one more
/// copy, which costs as much as the stores save.
static uint64_t find_stream_start(fsti_conversion conversion, const char *target,
                                  uint64_t unit_count) {
#if defined(__x86_64__)
    bool needs_no_packing = conversion.to == FST_DTYPE_F32 || conversion.to == FST_DTYPE_I64 ||
                            conversion.to == FST_DTYPE_U64;
    if (needs_no_packing && unit_count * conversion.to_bytes >= STREAM_BYTES_MIN)
        return units_to_line(target, conversion.to_bytes);
#endif
    (void)conversion;
    (void)target;
    (void)unit_count;
    return UINT64_MAX;
}

void fsti_convert_with(const struct convert_kernels *kernels, fsti_conversion conversion,
                       void *target, const void *source, uint64_t unit_count) {
    convert_blocks blocks;
    const char *in = source;
    char *out = target;
    uint64_t units_max = CONVERT_BLOCK / conversion.unit_elements;
    uint64_t stream_from = find_stream_start(conversion, out, unit_count);
    for (uint64_t done = 0; done < unit_count;) {
        uint64_t units = fsti_min(unit_count - done, units_max);
        bool is_streamed = done >= stream_from;
        // The first block is short, so that all others begin at a cache line.
        if (!is_streamed && stream_from < unit_count) units = fsti_min(units, stream_from - done);
        convert_span span = {in, is_streamed ? NULL : out,
                             (size_t)(units * conversion.unit_elements)};
        convert_block(kernels, conversion, &blocks, span);
#if defined(__x86_64__)
        if (is_streamed)
            stream_block(out, (const char *)blocks.floats, (size_t)(units * conversion.to_bytes));
#endif
        in += units * conversion.from_bytes;
        out += units * conversion.to_bytes;
        done += units;
    }
#if defined(__x86_64__)
    if (stream_from < unit_count)
        // Non-temporal stores are weakly ordered, even on x86. Without the fence, a thread that
        // sees the chunk's ready flag could read stale elements.
        _mm_sfence();
#endif
}

void fsti_dtype_convert(fsti_conversion conversion, void *target, const void *source,
                        uint64_t unit_count) {
    fsti_convert_with(best_kernels(), conversion, target, source, unit_count);
}
