// SPDX-License-Identifier: Apache-2.0
/// Conversion of elements on the way to their place: which pairs there are, and the best kernels
/// that the processor has.
#include "convert.h"

#if defined(__x86_64__)
#include <cpuid.h>
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
    // Widening loses nothing: more bits, and a sign only where there was one or room for it.
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
/// Asked of the processor itself: not every compiler knows the feature by name.
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

void fsti_convert_with(const struct convert_kernels *kernels, fsti_conversion conversion,
                       void *target, const void *source, uint64_t unit_count) {
    union {
        float floats[CONVERT_BLOCK];
        int64_t integers[CONVERT_BLOCK];
    } block;
    fst_dtype from = (fst_dtype)conversion.from, to = (fst_dtype)conversion.to;
    bool floats = is_float(from);
    const char *in = source;
    char *out = target;
    uint64_t units_max = CONVERT_BLOCK / conversion.unit_elements;
    for (uint64_t done = 0; done < unit_count;) {
        uint64_t units = fsti_min(unit_count - done, units_max);
        size_t count = (size_t)(units * conversion.unit_elements);
        if (floats) {
            kernels->to_float(from, in, block.floats, count);
            kernels->from_float(to, block.floats, out, count);
        } else {
            kernels->to_integer(from, in, block.integers, count);
            kernels->from_integer(to, block.integers, out, count);
        }
        in += units * conversion.from_bytes;
        out += units * conversion.to_bytes;
        done += units;
    }
}

void fsti_dtype_convert(fsti_conversion conversion, void *target, const void *source,
                        uint64_t unit_count) {
    fsti_convert_with(best_kernels(), conversion, target, source, unit_count);
}
