// SPDX-License-Identifier: Apache-2.0
/// The conversion kernels, compiled once per instruction set (CONVERT_NAME names the table). Loops
/// use branch-free integer arithmetic where possible, so that the compiler can vectorise them.
/// Floating-point instructions are used only where flush-to-zero modes cannot change results.
/// Formats: OCP 8-bit floating point specification 1.0 (E4M3, E5M2), OCP microscaling formats 1.0
/// (E8M0, E2M1), and https://arxiv.org/abs/2206.02915 for the FNUZ forms.
#include <string.h>

#include "convert.h"

#if defined(CONVERT_F16C)
#include <immintrin.h>
#endif

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

#define NAN_BITS 0x7fc00000u

// ---- decoding small floats: sign, exponent, mantissa of any width ----

/// A float format of at most 16 bits. FNUZ formats have no negative zero; its pattern is their only
/// NaN.
typedef struct small_format {
    uint32_t exponent_bits, mantissa_bits, bias;
    bool has_infinity, is_fnuz, has_nan;
} small_format;

static inline uint32_t decode_small(small_format format, uint32_t value) {
    uint32_t exponent_mask = (1u << format.exponent_bits) - 1;
    uint32_t mantissa_mask = (1u << format.mantissa_bits) - 1;
    uint32_t sign = value >> (format.exponent_bits + format.mantissa_bits) & 1;
    uint32_t exponent = value >> format.mantissa_bits & exponent_mask;
    uint32_t mantissa = value & mantissa_mask;
    if (format.is_fnuz && sign == 1 && exponent == 0 && mantissa == 0) return NAN_BITS;
    if (format.has_infinity && exponent == exponent_mask) {
        uint32_t quiet = mantissa == 0 ? 0 : 0x00400000u; // quiet, as the CPU instruction makes it
        return sign << 31 | 0x7f800000u | quiet | mantissa << (23 - format.mantissa_bits);
    }
    if (!format.has_infinity && format.has_nan && !format.is_fnuz && exponent == exponent_mask &&
        mantissa == mantissa_mask)
        return sign << 31 | NAN_BITS;
    if (exponent == 0) {
        if (mantissa == 0) return sign << 31;
        uint32_t shift = (uint32_t)__builtin_clz(mantissa) - (31 - format.mantissa_bits);
        mantissa = mantissa << shift & mantissa_mask;
        return sign << 31 | (127 - format.bias + 1 - shift) << 23 |
               mantissa << (23 - format.mantissa_bits);
    }
    return sign << 31 | (exponent + 127 - format.bias) << 23 |
           mantissa << (23 - format.mantissa_bits);
}

/// 2^(x - 127); 255 is NaN. 2^-127 is a subnormal float.
static inline uint32_t decode_e8m0(uint32_t value) {
    return value == 0xff ? NAN_BITS : value == 0 ? 0x00400000u : value << 23;
}

static const small_format format_e4m3 = {4, 3, 7, false, false, true};
static const small_format format_e5m2 = {5, 2, 15, true, false, true};
static const small_format format_e4m3fnuz = {4, 3, 8, false, true, true};
static const small_format format_e5m2fnuz = {5, 2, 16, false, true, true};
static const small_format format_e2m1 = {2, 1, 1, false, false, false};
static const small_format format_half = {5, 10, 15, true, false, true};

static small_format format_of(fst_dtype dtype) {
    switch (dtype) {
    case FST_DTYPE_F8_E4M3: return format_e4m3;
    case FST_DTYPE_F8_E5M2: return format_e5m2;
    case FST_DTYPE_F8_E4M3FNUZ: return format_e4m3fnuz;
    case FST_DTYPE_F8_E5M2FNUZ: return format_e5m2fnuz;
    case FST_DTYPE_F4: return format_e2m1;
    default: return format_half;
    }
}

static void fill_table(fst_dtype dtype, uint32_t *table) {
    small_format format = format_of(dtype);
    uint32_t count = dtype == FST_DTYPE_F4 ? 16 : 256;
    for (uint32_t i = 0; i < count; i++)
        table[i] = dtype == FST_DTYPE_F8_E8M0 ? decode_e8m0(i) : decode_small(format, i);
}

/// A table of all values of a dtype of at most 8 bits, computed once per process. While another
/// thread computes it, the caller fills `own` instead of waiting. The release store publishes the
/// table: a thread that loads READY with acquire sees all of its entries.
static const uint32_t *table_of(fst_dtype dtype, uint32_t *own) {
    enum { MISSING, BEING_MADE, READY };
    static uint32_t tables[FST_DTYPE_COUNT][256];
    static atomic_int states[FST_DTYPE_COUNT];
    int state = atomic_load_explicit(&states[dtype], memory_order_acquire);
    if (state == READY) return tables[dtype];
    if (state == MISSING && atomic_compare_exchange_strong(&states[dtype], &state, BEING_MADE)) {
        fill_table(dtype, tables[dtype]);
        atomic_store_explicit(&states[dtype], READY, memory_order_release);
        return tables[dtype];
    }
    fill_table(dtype, own);
    return own;
}

static void decode_bytes(fst_dtype dtype, const uint8_t *source, float *target, size_t count) {
    uint32_t own[256];
    const uint32_t *table = table_of(dtype, own);
    for (size_t i = 0; i < count; i++) memcpy(target + i, &table[source[i]], 4);
}

/// Two elements per byte, the first in the low half.
static void decode_nibbles(const uint8_t *source, float *target, size_t count) {
    uint32_t own[256];
    const uint32_t *table = table_of(FST_DTYPE_F4, own);
    for (size_t i = 0; i < count; i++)
        memcpy(target + i, &table[source[i / 2] >> (i % 2 * 4) & 15], 4);
}

static void decode_half(const uint8_t *source, float *target, size_t count) {
    size_t i = 0;
#if defined(CONVERT_F16C)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(target + i,
                         _mm256_cvtph_ps(_mm_loadu_si128((const void *)(source + 2 * i))));
#endif
    for (; i < count; i++) {
        uint16_t value;
        memcpy(&value, source + 2 * i, 2);
        target[i] = float_of(decode_small(format_half, value));
    }
}

static void decode_bfloat(const uint8_t *source, float *target, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint16_t value;
        memcpy(&value, source + 2 * i, 2);
        uint32_t bits = (uint32_t)value << 16;
        memcpy(target + i, &bits, 4);
    }
}

static void decode_double(const uint8_t *source, float *target, size_t count) {
    for (size_t i = 0; i < count; i++) {
        double value;
        memcpy(&value, source + 8 * i, 8);
        target[i] = (float)value;
    }
}

static void to_float(fst_dtype from, const void *source, float *target, size_t count) {
    switch (from) {
    case FST_DTYPE_F64: decode_double(source, target, count); break;
    case FST_DTYPE_F32: memcpy(target, source, count * 4); break;
    case FST_DTYPE_F16: decode_half(source, target, count); break;
    case FST_DTYPE_BF16: decode_bfloat(source, target, count); break;
    case FST_DTYPE_F4: decode_nibbles(source, target, count); break;
    default: decode_bytes(from, source, target, count); break;
    }
}

// ---- encoding: round to nearest even ----

/// Encodes |value| before sign and special values. Normal numbers are rounded by adding half an ulp
/// (less 1 if the result would otherwise be odd). Subnormal ones are rounded by the CPU: the ulp of
/// `magic` equals the format's smallest number, so the addition rounds to a multiple of it.
static inline uint32_t round_small(small_format format, uint32_t magnitude) {
    uint32_t drop = 23 - format.mantissa_bits;
    uint32_t odd = magnitude >> drop & 1;
    uint32_t normal = ((magnitude + odd + (1u << (drop - 1)) - 1) >> drop) -
                      ((127 - format.bias) << format.mantissa_bits);
    uint32_t magic = (127 - format.bias + drop + 1) << 23;
    uint32_t subnormal = bits_of(float_of(magnitude) + float_of(magic)) - magic;
    return magnitude < (127 - format.bias + 1) << 23 ? subnormal : normal;
}

static inline uint32_t encode_small(small_format format, float value) {
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    uint32_t width = format.exponent_bits + format.mantissa_bits;
    uint32_t sign = bits >> 31 << width, all = (1u << width) - 1;
    uint32_t infinity = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
    uint32_t rounded = round_small(format, magnitude);
    bool is_nan = magnitude > 0x7f800000u;
    // The shift would overflow for magnitudes this large, so compare first.
    bool is_huge = magnitude >= (127 + 17) << 23;
    if (format.is_fnuz) {
        bool special = is_nan || is_huge || rounded > all;
        uint32_t signed_value = rounded == 0 ? 0 : sign | rounded;
        return special ? 1u << width : signed_value;
    }
    if (format.has_infinity) {
        uint32_t finite = is_huge || rounded > infinity ? infinity : rounded;
        return sign | (is_nan ? infinity | 1u << (format.mantissa_bits - 1) : finite);
    }
    // E4M3 has no infinity. Values beyond its range become the largest number, as in torch 2.13
    // (the saturating mode of the OCP specification; older torch versions produce NaN).
    if (format.has_nan) {
        uint32_t finite = is_huge || rounded >= all ? all - 1 : rounded;
        return sign | (is_nan ? all : finite);
    }
    // E2M1 has neither NaN nor infinity; larger values become its largest number.
    return (is_nan ? 0 : sign) | (is_nan || is_huge || rounded > all ? all : rounded);
}

/// The nearest power of two to |value|. A tie rounds up. With exponent 0 the tie is 2^-127 itself,
/// which is code 0.
static inline uint32_t encode_e8m0(float value) {
    uint32_t bits = bits_of(value), exponent = bits >> 23 & 0xff;
    uint32_t guard = bits >> 22 & 1, sticky = (bits & 0x3fffff) != 0;
    uint32_t up = guard & (sticky | (exponent > 0));
    return exponent == 0xff ? 0xff : exponent + up;
}

static inline void encode_bytes(small_format format, const float *source, uint8_t *target,
                                size_t count) {
    for (size_t i = 0; i < count; i++) target[i] = (uint8_t)encode_small(format, source[i]);
}

static void encode_nibbles(const float *source, uint8_t *target, size_t count) {
    for (size_t i = 0; i + 1 < count; i += 2)
        target[i / 2] = (uint8_t)(encode_small(format_e2m1, source[i]) |
                                  encode_small(format_e2m1, source[i + 1]) << 4);
}

static void encode_powers(const float *source, uint8_t *target, size_t count) {
    for (size_t i = 0; i < count; i++) target[i] = (uint8_t)encode_e8m0(source[i]);
}

static void encode_half(const float *source, uint8_t *target, size_t count) {
    size_t i = 0;
#if defined(CONVERT_F16C)
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((void *)(target + 2 * i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < count; i++) {
        uint32_t bits = bits_of(source[i]), payload = bits >> 13 & 0x3ff;
        bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        // As the CPU instruction does: NaN becomes quiet and keeps the upper bits of its payload.
        uint16_t value = (uint16_t)(is_nan ? (bits >> 31 << 15 | 0x7e00u | payload)
                                           : encode_small(format_half, source[i]));
        memcpy(target + 2 * i, &value, 2);
    }
}

static void encode_bfloat(const float *source, uint8_t *target, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(source[i]);
        uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
        // Rounding could turn a NaN into infinity or zero. The result is 0x7fc0, as in torch.
        bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        uint16_t value = (uint16_t)(is_nan ? NAN_BITS >> 16 : rounded);
        memcpy(target + 2 * i, &value, 2);
    }
}

static void encode_double(const float *source, uint8_t *target, size_t count) {
    for (size_t i = 0; i < count; i++) {
        double value = (double)source[i];
        memcpy(target + 8 * i, &value, 8);
    }
}

static void from_float(fst_dtype to, const float *source, void *target, size_t count) {
    switch (to) {
    case FST_DTYPE_F64: encode_double(source, target, count); break;
    case FST_DTYPE_F32: memcpy(target, source, count * 4); break;
    case FST_DTYPE_F16: encode_half(source, target, count); break;
    case FST_DTYPE_BF16: encode_bfloat(source, target, count); break;
    case FST_DTYPE_F4: encode_nibbles(source, target, count); break;
    case FST_DTYPE_F8_E8M0: encode_powers(source, target, count); break;
    case FST_DTYPE_F8_E4M3: encode_bytes(format_e4m3, source, target, count); break;
    case FST_DTYPE_F8_E5M2: encode_bytes(format_e5m2, source, target, count); break;
    case FST_DTYPE_F8_E4M3FNUZ: encode_bytes(format_e4m3fnuz, source, target, count); break;
    default: encode_bytes(format_e5m2fnuz, source, target, count); break;
    }
}

// ---- integers: widening only ----

#define DEFINE_WIDEN(type)                                                                         \
    static void widen_##type(const uint8_t *source, int64_t *target, size_t count) {               \
        for (size_t i = 0; i < count; i++) {                                                       \
            type value;                                                                            \
            memcpy(&value, source + i * sizeof value, sizeof value);                               \
            target[i] = (int64_t)value;                                                            \
        }                                                                                          \
    }                                                                                              \
    static void narrow_##type(const int64_t *source, uint8_t *target, size_t count) {              \
        for (size_t i = 0; i < count; i++) {                                                       \
            type value = (type)source[i];                                                          \
            memcpy(target + i * sizeof value, &value, sizeof value);                               \
        }                                                                                          \
    }
DEFINE_WIDEN(int8_t)
DEFINE_WIDEN(uint8_t)
DEFINE_WIDEN(int16_t)
DEFINE_WIDEN(uint16_t)
DEFINE_WIDEN(int32_t)
DEFINE_WIDEN(uint32_t)

static void to_integer(fst_dtype from, const void *source, int64_t *target, size_t count) {
    switch (from) {
    case FST_DTYPE_I8: widen_int8_t(source, target, count); break;
    case FST_DTYPE_U8: widen_uint8_t(source, target, count); break;
    case FST_DTYPE_I16: widen_int16_t(source, target, count); break;
    case FST_DTYPE_U16: widen_uint16_t(source, target, count); break;
    case FST_DTYPE_I32: widen_int32_t(source, target, count); break;
    case FST_DTYPE_U32: widen_uint32_t(source, target, count); break;
    default: memcpy(target, source, count * 8); break;
    }
}

static void from_integer(fst_dtype to, const int64_t *source, void *target, size_t count) {
    switch (to) {
    case FST_DTYPE_I8: narrow_int8_t(source, target, count); break;
    case FST_DTYPE_U8: narrow_uint8_t(source, target, count); break;
    case FST_DTYPE_I16: narrow_int16_t(source, target, count); break;
    case FST_DTYPE_U16: narrow_uint16_t(source, target, count); break;
    case FST_DTYPE_I32: narrow_int32_t(source, target, count); break;
    case FST_DTYPE_U32: narrow_uint32_t(source, target, count); break;
    default: memcpy(target, source, count * 8); break;
    }
}

#define TEXT_OF(value) #value
#define TEXT(value) TEXT_OF(value)
#define JOIN_OF(a, b) a##b
#define JOIN(a, b) JOIN_OF(a, b)

const convert_kernels JOIN(fsti_convert_, CONVERT_NAME) = {
    TEXT(CONVERT_NAME), to_float, from_float, to_integer, from_integer,
};
