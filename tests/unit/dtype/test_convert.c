// SPDX-License-Identifier: Apache-2.0
/// Conversions: every set of kernels gives the same bits as the scalar one, for all inputs of up to
/// 16 bits, a dense sample of the others, and every alignment. Known values are right.
/// (python/tests/test_convert.py compares with torch.)
#include <math.h>

#include "check.h"
#include "dtype/convert.h"
#include "fixture.h"

static const fst_dtype floats[] = {FST_DTYPE_F64,         FST_DTYPE_F32,         FST_DTYPE_F16,
                                   FST_DTYPE_BF16,        FST_DTYPE_F8_E4M3,     FST_DTYPE_F8_E5M2,
                                   FST_DTYPE_F8_E4M3FNUZ, FST_DTYPE_F8_E5M2FNUZ, FST_DTYPE_F8_E8M0,
                                   FST_DTYPE_F4};
static const fst_dtype integers[] = {FST_DTYPE_I8,  FST_DTYPE_U8,  FST_DTYPE_I16, FST_DTYPE_U16,
                                     FST_DTYPE_I32, FST_DTYPE_U32, FST_DTYPE_I64, FST_DTYPE_U64};
#define FLOAT_COUNT (sizeof floats / sizeof *floats)
#define INTEGER_COUNT (sizeof integers / sizeof *integers)
#define ELEMENTS ((size_t)65536)

/// All patterns of small types; of large ones a sample that covers every exponent, with the low
/// bits that decide rounding.
static void fill_inputs(fst_dtype dtype, char *bytes) {
    uint64_t random = 99;
    uint32_t bits = fsti_dtype_bits(dtype);
    for (size_t i = 0; i < ELEMENTS; i++) {
        uint64_t value = i;
        if (bits == 32) value = (i << 16) | (fixture_random(&random) & 0xffff);
        if (bits == 32 && i % 3 == 0) value &= ~(uint64_t)0x7fff; // ties
        if (bits == 64) value = (i << 48) | (fixture_random(&random) & 0xffffffffffff);
        if (bits == 4)
            bytes[i / 2] = (char)(i / 2 & 0xff);
        else
            memcpy(bytes + i * (bits / 8), &value, bits / 8);
    }
}

static void convert_all(const convert_kernels *kernels, fst_dtype from, fst_dtype to, char *target,
                        const char *source) {
    fsti_conversion conversion = fsti_dtype_conversion(from, to);
    fsti_convert_with(kernels, conversion, target, source, ELEMENTS / conversion.unit_elements);
}

static void compare_with_scalar(const convert_kernels *kernels) {
    char *source = malloc(ELEMENTS * 8 + 64), *expected = malloc(ELEMENTS * 8 + 64),
         *actual = malloc(ELEMENTS * 8 + 64);
    for (size_t a = 0; a < FLOAT_COUNT + INTEGER_COUNT; a++)
        for (size_t b = 0; b < FLOAT_COUNT + INTEGER_COUNT; b++) {
            fst_dtype from = a < FLOAT_COUNT ? floats[a] : integers[a - FLOAT_COUNT];
            fst_dtype to = b < FLOAT_COUNT ? floats[b] : integers[b - FLOAT_COUNT];
            if (!fsti_dtype_convertible(from, to)) continue;
            size_t size = ELEMENTS * fsti_dtype_bits(to) / 8;
            fill_inputs(from, source + 3);
            convert_all(&fsti_convert_scalar, from, to, expected, source + 3);
            memset(actual, 0x5a, size + 64);
            convert_all(kernels, from, to, actual + 5, source + 3);
            if (memcmp(actual + 5, expected, size) != 0 || actual[4] != 0x5a ||
                actual[size + 5] != 0x5a)
                check_fail(__FILE__, __LINE__, "%s: %s to %s differs", kernels->name,
                           fsti_dtype_name(from), fsti_dtype_name(to));
        }
    free(source);
    free(expected);
    free(actual);
}

TEST(avx2_equals_scalar)
{
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2")) SKIP("the processor has no AVX2");
    compare_with_scalar(&fsti_convert_avx2);
#else
    SKIP("not an x86-64 processor");
#endif
}

TEST(avx512_equals_scalar)
{
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl"))
        SKIP("the processor has no AVX-512");
    compare_with_scalar(&fsti_convert_avx512);
#else
    SKIP("not an x86-64 processor");
#endif
}

TEST(neon_equals_scalar)
{
#if defined(__aarch64__)
    compare_with_scalar(&fsti_convert_neon);
#else
    SKIP("not an AArch64 processor (make test-aarch64 runs this)");
#endif
}

TEST(known_values)
{
    static const float values[] = {0.0f,    1.0f,  -1.5f,  448.0f,        464.0f,
                                   464.01f, 1e30f, -1e30f, 0.0009765625f, 6.0f};
    static const uint8_t e4m3[] = {0x00, 0x38, 0xbc, 0x7e, 0x7e, 0x7e, 0x7e, 0xfe, 0x00, 0x4c};
    static const uint8_t e5m2[] = {0x00, 0x3c, 0xbe, 0x5f, 0x5f, 0x5f, 0x7c, 0xfc, 0x14, 0x46};
    static const uint8_t e4m3fnuz[] = {0x00, 0x40, 0xc4, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01, 0x54};
    static const uint8_t e8m0[] = {0, 127, 128, 136, 136, 136, 227, 227, 117, 130};
    struct {
        fst_dtype dtype;
        const uint8_t *bytes;
    } cases[] = {{FST_DTYPE_F8_E4M3, e4m3},
                 {FST_DTYPE_F8_E5M2, e5m2},
                 {FST_DTYPE_F8_E4M3FNUZ, e4m3fnuz},
                 {FST_DTYPE_F8_E8M0, e8m0}};
    for (size_t c = 0; c < 4; c++) {
        uint8_t out[10];
        fsti_dtype_convert(fsti_dtype_conversion(FST_DTYPE_F32, cases[c].dtype), out, values, 10);
        for (int i = 0; i < 10; i++)
            if (out[i] != cases[c].bytes[i])
                check_fail(__FILE__, __LINE__, "%g to %s is %02x, not %02x", (double)values[i],
                           fsti_dtype_name(cases[c].dtype), out[i], cases[c].bytes[i]);
    }
    // E2M1 saturates and has no NaN.
    static const float small[] = {0.25f, 0.75f, 5.0f, 100.0f, -100.0f, 0.26f, 2.5f, 3.5f};
    uint8_t nibbles[4];
    fsti_dtype_convert(fsti_dtype_conversion(FST_DTYPE_F32, FST_DTYPE_F4), nibbles, small, 4);
    CHECK_INT(nibbles[0], 0x20); // 0.25 ties to 0, 0.75 to 1.0
    CHECK_INT(nibbles[1], 0x76); // 5 ties to 4, 100 becomes 6
    CHECK_INT(nibbles[2], 0x1f);
    CHECK_INT(nibbles[3], 0x64);
}

TEST(supported_conversions)
{
    CHECK(fsti_dtype_convertible(FST_DTYPE_F64, FST_DTYPE_F4));
    CHECK(fsti_dtype_convertible(FST_DTYPE_BF16, FST_DTYPE_F32));
    CHECK(fsti_dtype_convertible(FST_DTYPE_U8, FST_DTYPE_I16));
    CHECK(!fsti_dtype_convertible(FST_DTYPE_U8, FST_DTYPE_I8));
    CHECK(!fsti_dtype_convertible(FST_DTYPE_I8, FST_DTYPE_U16));
    CHECK(!fsti_dtype_convertible(FST_DTYPE_I64, FST_DTYPE_I32));
    CHECK(!fsti_dtype_convertible(FST_DTYPE_I64, FST_DTYPE_F16));
    CHECK(!fsti_dtype_convertible(FST_DTYPE_F32, FST_DTYPE_I64));
    CHECK(!fsti_dtype_convertible(FST_DTYPE_F32, FST_DTYPE_F32));
    CHECK(!fsti_dtype_convertible(FST_DTYPE_BOOL, FST_DTYPE_U8));
    CHECK(!fsti_dtype_convertible(FST_DTYPE_C64, FST_DTYPE_F32));
}

/// Large targets are written with non-temporal stores, from the first cache line on. The result
/// has the same bits at every alignment.
TEST(large_targets_get_the_same_bits)
{
    enum { LARGE = 200003 };
    static const fst_dtype pairs[][2] = {{FST_DTYPE_BF16, FST_DTYPE_F32},
                                         {FST_DTYPE_F32, FST_DTYPE_BF16},
                                         {FST_DTYPE_F64, FST_DTYPE_F8_E4M3},
                                         {FST_DTYPE_I16, FST_DTYPE_I64},
                                         {FST_DTYPE_F4, FST_DTYPE_F16}};
    char *source = malloc(LARGE * 8 + 64), *plain = malloc(LARGE * 16 + 64),
         *streamed = malloc(LARGE * 16 + 256);
    for (size_t i = 0; i < LARGE * 8; i++) source[i] = (char)fixture_byte(i);
    for (size_t p = 0; p < sizeof pairs / sizeof *pairs; p++)
        for (size_t place = 0; place < 130; place += place < 8 ? 1 : 61) {
            fsti_conversion c = fsti_dtype_conversion(pairs[p][0], pairs[p][1]);
            size_t size = (size_t)LARGE * c.to_bytes;
            // Small pieces are written with ordinary stores.
            for (size_t at = 0; at < LARGE; at += 1000) {
                size_t units = LARGE - at < 1000 ? LARGE - at : 1000;
                fsti_dtype_convert(c, plain + at * c.to_bytes, source + at * c.from_bytes, units);
            }
            memset(streamed, 0x5a, size + 256);
            fsti_dtype_convert(c, streamed + 64 + place, source, LARGE);
            CHECK(memcmp(streamed + 64 + place, plain, size) == 0);
            CHECK_INT(streamed[63 + place], 0x5a);
            CHECK_INT(streamed[64 + place + size], 0x5a);
        }
    free(source);
    free(plain);
    free(streamed);
}
