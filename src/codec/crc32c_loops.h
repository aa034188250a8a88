// SPDX-License-Identifier: Apache-2.0
/// CRC32C for one instruction set: by the CPU's instruction in three parallel lanes, whose results
/// are combined by shifting over the bytes of later lanes; without the instruction by table. The
/// polynomial is 0x1EDC6F41, reflected; RFC 3720, B.4 has test vectors.
#define CRC_POLYNOMIAL 0x82f63b78u

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#define CRC_BYTES_8(crc, value) ((uint32_t)_mm_crc32_u64(crc, value))
#define CRC_BYTE(crc, value) _mm_crc32_u8(crc, value)
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define CRC_BYTES_8(crc, value) __crc32cd(crc, value)
#define CRC_BYTE(crc, value) __crc32cb(crc, value)
#endif

#if defined(CRC_BYTES_8)

static inline uint64_t load_8(const unsigned char *bytes) {
    uint64_t value;
    memcpy(&value, bytes, 8);
    return value;
}

/// Bytes per lane; a step of three lanes is 12 KiB.
#define LANE_BYTES 4096u

/// Multiplies two reflected polynomials modulo the CRC's.
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
        if ((a & bit) != 0) product ^= b;
        b = b >> 1 ^ ((b & 1) != 0 ? CRC_POLYNOMIAL : 0);
    }
    return product;
}

/// x^(8 * LANE_BYTES), and its square: multiplying a CRC by them appends as many zero bytes.
/// Computed by 15 and 16 squarings of x.
#define PAST_LANE 0x35d73a62u
#define PAST_LANES 0x28461564u

static uint32_t crc32c_of(const void *source, size_t size) {
    const unsigned char *bytes = source;
    uint32_t crc = ~0u;
    for (; size >= 3 * LANE_BYTES; size -= 3 * LANE_BYTES) {
        uint32_t first = crc, second = 0, third = 0;
        for (size_t i = 0; i < LANE_BYTES; i += 8) {
            first = CRC_BYTES_8(first, load_8(bytes + i));
            second = CRC_BYTES_8(second, load_8(bytes + LANE_BYTES + i));
            third = CRC_BYTES_8(third, load_8(bytes + 2 * LANE_BYTES + i));
        }
        crc = multiply(PAST_LANES, first) ^ multiply(PAST_LANE, second) ^ third;
        bytes += 3 * LANE_BYTES;
    }
    for (; size >= 8; size -= 8, bytes += 8) crc = CRC_BYTES_8(crc, load_8(bytes));
    for (; size > 0; size--) crc = CRC_BYTE(crc, *bytes++);
    return ~crc;
}

#else

#include <pthread.h>

/// Tables for eight bytes at a time, for CPUs without the instruction.
static uint32_t crc_tables[8][256];

static void fill_crc_tables(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ ((crc & 1) != 0 ? CRC_POLYNOMIAL : 0);
        crc_tables[0][i] = crc;
    }
    for (uint32_t k = 1; k < 8; k++)
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t before = crc_tables[k - 1][i];
            crc_tables[k][i] = before >> 8 ^ crc_tables[0][before & 255];
        }
}

static uint32_t crc32c_of(const void *source, size_t size) {
    static pthread_once_t filled = PTHREAD_ONCE_INIT;
    const unsigned char *bytes = source;
    uint32_t crc = ~0u;
    pthread_once(&filled, fill_crc_tables);
    for (; size >= 8; size -= 8, bytes += 8) {
        uint32_t next = 0;
        for (uint32_t k = 0; k < 4; k++) {
            next ^= crc_tables[7 - k][(crc >> 8 * k & 255) ^ bytes[k]];
            next ^= crc_tables[3 - k][bytes[4 + k]];
        }
        crc = next;
    }
    for (; size > 0; size--) crc = crc >> 8 ^ crc_tables[0][(crc & 255) ^ *bytes++];
    return ~crc;
}

#endif
