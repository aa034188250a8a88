// SPDX-License-Identifier: Apache-2.0
/// Puts the pieces of a chunk, which lies in device memory as it lies in the file, in their places
/// and converts their elements on the way. One block works on one piece. The same source is made
/// into PTX (tools/make_ptx.py), compiled at run time for HIP, and compiled as C by the tests, which
/// compare its results with the processors' kernels bit by bit. No fast-math: denormals count.
///
/// Small floats are given by exponent bits, mantissa bits and bias; a table of dtypes as in
/// fastsafetensors/dtype.h says which is which.
#if defined(__CUDACC__) || defined(__HIPCC__) || defined(__CUDACC_RTC__) || defined(__HIPCC_RTC__)
#define DEVICE static __device__ __forceinline__
typedef unsigned long long u64;
#define FLOAT_OF(bits) __uint_as_float(bits)
#define BITS_OF(value) __float_as_uint(value)
#define DOUBLE_OF(bits) __longlong_as_double((long long)(bits))
#define BITS_OF_DOUBLE(value) ((u64)__double_as_longlong(value))
#endif
typedef unsigned int u32;
typedef unsigned char u8;

/// As fsti_piece in gpu.h.
struct piece {
    u64 target; ///< device address
    u32 source; ///< place of the first unit in the chunk
    u32 units;  ///< of all runs together
    u32 run_units, stride_bytes;
    u8 from, to; ///< dtypes; equal: bytes are moved
    u8 from_bytes, to_bytes, unit_elements;
    u8 unused[3];
};

// Numbers of fst_dtype that the kernel tells apart.
enum {
    F4_T = 1,
    U8_T = 4,
    I8_T = 5,
    E5M2_T = 6,
    E4M3_T = 7,
    E8M0_T = 8,
    E4M3FNUZ_T = 9,
    E5M2FNUZ_T = 10,
    I16_T = 11,
    U16_T = 12,
    F16_T = 13,
    BF16_T = 14,
    I32_T = 15,
    U32_T = 16,
    F32_T = 17,
    F64_T = 19,
    I64_T = 20,
    U64_T = 21
};

#define NAN_BITS 0x7fc00000u

/// exponent bits, mantissa bits, bias, and flags.
struct small {
    u32 exponent_bits, mantissa_bits, bias, has_infinity, is_fnuz, has_nan;
};

DEVICE struct small small_of(u32 dtype) {
    struct small format = {5, 10, 15, 1, 0, 1};
    if (dtype == E4M3_T || dtype == E4M3FNUZ_T) {
        format.exponent_bits = 4;
        format.mantissa_bits = 3;
        format.bias = dtype == E4M3_T ? 7 : 8;
        format.has_infinity = 0;
    } else if (dtype == E5M2_T || dtype == E5M2FNUZ_T) {
        format.mantissa_bits = 2;
        format.bias = dtype == E5M2_T ? 15 : 16;
        format.has_infinity = dtype == E5M2_T;
    } else if (dtype == F4_T) {
        format.exponent_bits = 2;
        format.mantissa_bits = 1;
        format.bias = 1;
        format.has_infinity = format.has_nan = 0;
    }
    format.is_fnuz = dtype == E4M3FNUZ_T || dtype == E5M2FNUZ_T;
    return format;
}

DEVICE u32 decode_small(struct small format, u32 value) {
    u32 exponent_mask = (1u << format.exponent_bits) - 1;
    u32 mantissa_mask = (1u << format.mantissa_bits) - 1;
    u32 sign = value >> (format.exponent_bits + format.mantissa_bits) & 1;
    u32 exponent = value >> format.mantissa_bits & exponent_mask;
    u32 mantissa = value & mantissa_mask;
    u32 up = 23 - format.mantissa_bits;
    if (format.is_fnuz && sign == 1 && exponent == 0 && mantissa == 0) return NAN_BITS;
    if (format.has_infinity && exponent == exponent_mask)
        return sign << 31 | 0x7f800000u | (mantissa == 0 ? 0u : 0x00400000u) | mantissa << up;
    if (!format.has_infinity && format.has_nan && !format.is_fnuz && exponent == exponent_mask &&
        mantissa == mantissa_mask)
        return sign << 31 | NAN_BITS;
    if (exponent == 0) {
        u32 shift = 0;
        if (mantissa == 0) return sign << 31;
        while ((mantissa >> format.mantissa_bits) == 0) {
            mantissa <<= 1;
            shift++;
        }
        return sign << 31 | (127 - format.bias + 1 - shift) << 23 | (mantissa & mantissa_mask) << up;
    }
    return sign << 31 | (exponent + 127 - format.bias) << 23 | mantissa << up;
}

/// Round to nearest even: half an ulp is added to normal numbers; subnormal ones are rounded by an
/// addition that leaves just the bits that remain.
DEVICE u32 round_small(struct small format, u32 magnitude) {
    u32 drop = 23 - format.mantissa_bits, odd = magnitude >> drop & 1;
    u32 magic = (127 - format.bias + drop + 1) << 23;
    if (magnitude < (127 - format.bias + 1) << 23)
        return BITS_OF(FLOAT_OF(magnitude) + FLOAT_OF(magic)) - magic;
    return ((magnitude + odd + (1u << (drop - 1)) - 1) >> drop) -
           ((127 - format.bias) << format.mantissa_bits);
}

DEVICE u32 encode_small(struct small format, u32 bits) {
    u32 magnitude = bits & 0x7fffffffu, width = format.exponent_bits + format.mantissa_bits;
    u32 sign = bits >> 31 << width, all = (1u << width) - 1;
    u32 infinity = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
    u32 rounded = round_small(format, magnitude);
    u32 is_nan = magnitude > 0x7f800000u, is_huge = magnitude >= (127u + 17u) << 23;
    if (format.is_fnuz) {
        if (is_nan || is_huge || rounded > all) return 1u << width;
        return rounded == 0 ? 0 : sign | rounded;
    }
    if (format.has_infinity) {
        if (is_nan) return sign | infinity | 1u << (format.mantissa_bits - 1);
        return sign | (is_huge || rounded > infinity ? infinity : rounded);
    }
    if (format.has_nan) {
        if (is_nan) return sign | all;
        return sign | (is_huge || rounded >= all ? all - 1 : rounded);
    }
    return (is_nan ? 0 : sign) | (is_nan || is_huge || rounded > all ? all : rounded);
}

/// `count` bytes, little-endian, of no particular alignment.
DEVICE u64 read_bytes(const u8 *source, u32 count) {
    u64 value = 0;
    for (u32 i = 0; i < count; i++) value |= (u64)source[i] << 8 * i;
    return value;
}

DEVICE void write_bytes(u8 *target, u64 value, u32 count) {
    if (count == 2 && (u64)target % 2 == 0)
        *(unsigned short *)(void *)target = (unsigned short)value;
    else if (count == 4 && (u64)target % 4 == 0)
        *(u32 *)(void *)target = (u32)value;
    else if (count == 8 && (u64)target % 8 == 0)
        *(u64 *)(void *)target = value;
    else
        for (u32 i = 0; i < count; i++) target[i] = (u8)(value >> 8 * i);
}

/// An element's pattern as the pattern of a 32-bit float.
DEVICE u32 to_float(u32 from, u64 value) {
    switch (from) {
    case F64_T: return BITS_OF((float)DOUBLE_OF(value));
    case F32_T: return (u32)value;
    case BF16_T: return (u32)value << 16;
    case E8M0_T: return value == 0xff ? NAN_BITS : value == 0 ? 0x00400000u : (u32)value << 23;
    default: return decode_small(small_of(from), (u32)value);
    }
}

DEVICE u64 from_float(u32 to, u32 bits) {
    u32 is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    switch (to) {
    case F64_T: return BITS_OF_DOUBLE((double)FLOAT_OF(bits));
    case F32_T: return bits;
    case BF16_T: return is_nan ? NAN_BITS >> 16 : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    case F16_T:
        // A NaN becomes quiet and keeps the top of its payload, as the processors' instruction does.
        if (is_nan) return bits >> 31 << 15 | 0x7e00u | (bits >> 13 & 0x3ff);
        return encode_small(small_of(F16_T), bits);
    case E8M0_T: {
        u32 exponent = bits >> 23 & 0xff, guard = bits >> 22 & 1, sticky = (bits & 0x3fffff) != 0;
        return exponent == 0xff ? 0xff : exponent + (guard & (sticky | (exponent > 0)));
    }
    default: return encode_small(small_of(to), bits);
    }
}

/// Integers are only ever widened: the sign fills the new bits.
DEVICE u64 widen(u32 from, u64 value) {
    u32 bits = from == I8_T ? 8 : from == I16_T ? 16 : from == I32_T ? 32 : 0;
    return bits != 0 && (value >> (bits - 1) & 1) != 0 ? value | ~(u64)0 << bits : value;
}

DEVICE u32 is_integer(u32 dtype) {
    return dtype == U8_T || dtype == I8_T || dtype == I16_T || dtype == U16_T || dtype == I32_T ||
           dtype == U32_T || dtype == I64_T || dtype == U64_T;
}

DEVICE u64 convert_one(const struct piece *piece, u64 value) {
    if (is_integer(piece->from)) return widen(piece->from, value);
    // An E8M0 result of a double that is no float must not be rounded twice by other rules: all
    // go through 32-bit floats, on processors as well.
    return from_float(piece->to, to_float(piece->from, value));
}

DEVICE void convert_unit(const struct piece *piece, const u8 *in, u8 *out) {
    u64 result = 0;
    if (piece->unit_elements == 1) {
        result = convert_one(piece, read_bytes(in, piece->from_bytes));
        write_bytes(out, result, piece->to_bytes);
        return;
    }
    // Pairs of elements: one of the two sides has two in a byte, the first in its low half.
    for (u32 i = 0; i < 2; i++) {
        u32 in_bytes = piece->from_bytes / 2, out_bytes = piece->to_bytes / 2;
        u64 value = in_bytes == 0 ? (u64)(*in >> 4 * i & 15) : read_bytes(in + i * in_bytes, in_bytes);
        u64 one = convert_one(piece, value);
        if (out_bytes == 0)
            result |= one << 4 * i;
        else
            write_bytes(out + i * out_bytes, one, out_bytes);
    }
    if (piece->to_bytes == 1) *out = (u8)result;
}

/// Moves bytes to a place that is a multiple of 4, from one that need not be: words are made of
/// the two that hold them. Up to 7 bytes behind the source are read: the chunk's memory has them.
DEVICE void move_words(u8 *target, const u8 *source, u32 bytes, u32 thread, u32 thread_count) {
    u32 shift = (u32)((u64)source % 4) * 8, words = bytes / 4;
    const u32 *in = (const u32 *)(const void *)(source - shift / 8);
    u32 *out = (u32 *)(void *)target;
    for (u32 i = thread; i < words; i += thread_count)
        out[i] = shift == 0 ? in[i] : in[i] >> shift | in[i + 1] << (32 - shift);
    for (u32 i = words * 4 + thread; i < bytes; i += thread_count) target[i] = source[i];
}

/// One thread's part of one piece.
DEVICE void scatter_piece(const struct piece *piece, const u8 *chunk, u32 thread,
                          u32 thread_count) {
    u8 *target = (u8 *)piece->target;
    const u8 *source = chunk + piece->source;
    if (piece->from == piece->to && piece->run_units == piece->units && piece->target % 4 == 0) {
        move_words(target, source, piece->units * piece->from_bytes, thread, thread_count);
        return;
    }
    for (u32 i = thread; i < piece->units; i += thread_count) {
        u32 run = i / piece->run_units, place = i % piece->run_units;
        const u8 *in = source + (u64)run * piece->stride_bytes + (u64)place * piece->from_bytes;
        u8 *out = target + (u64)i * piece->to_bytes;
        if (piece->from == piece->to)
            for (u32 k = 0; k < piece->from_bytes; k++) out[k] = in[k];
        else
            convert_unit(piece, in, out);
    }
}

#if defined(__CUDACC__) || defined(__HIPCC__) || defined(__CUDACC_RTC__) || defined(__HIPCC_RTC__)
extern "C" __global__ void fst_scatter_pieces(const struct piece *pieces, const u8 *chunk) {
    struct piece piece = pieces[blockIdx.x];
    scatter_piece(&piece, chunk, threadIdx.x, blockDim.x);
}
#endif
