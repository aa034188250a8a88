// SPDX-License-Identifier: Apache-2.0
/// Chunks: every pattern is encoded and decoded with every instruction set; damaged chunks are
/// rejected.
#include "all_kernels.h"
#include "check.h"
#include "codec/codec.h"

#define ROOM_BYTES (((size_t)1 << FSTI_CHUNK_LOG_MAX) + 64)

static fsti_decoder *decoder;
static fsti_encoder *encoder;
static unsigned char *source, *stored, *target;

static bool have_room(void) {
    fst_error error;
    if (source != NULL) return true;
    if (fsti_encoder_open(&encoder, &error) != FST_OK) {
        check_skip_reason = "no libzstd";
        return false;
    }
    source = malloc(ROOM_BYTES);
    stored = malloc(ROOM_BYTES);
    target = malloc(ROOM_BYTES);
    return fsti_decoder_open(&decoder, &error) == FST_OK;
}

static uint64_t seed = 1;

static uint32_t next_random(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33);
}

/// Weights: an exponent byte of few values, the rest noise.
static void fill_weights(fst_dtype dtype, size_t size) {
    uint32_t bytes = fsti_dtype_bits(dtype) <= 8 ? 1 : fsti_dtype_bits(dtype) / 8;
    for (size_t i = 0; i < size; i++) {
        uint32_t some = next_random();
        bool is_top = i % bytes == bytes - 1;
        uint32_t top = (some >> 20 & 0x80) | (0x3c + (uint32_t)__builtin_ctz(some | 64));
        source[i] = (unsigned char)(is_top ? top : some);
    }
}

/// Encodes `size` bytes at source by one set and decodes them by another; false when they differ.
static bool round_trip(fst_dtype dtype, size_t size, fsti_chunk *chunk) {
    fst_error error;
    *chunk = (fsti_chunk){.dtype = dtype, .true_bytes = size};
    if (fsti_chunk_encode(encoder, source, stored, chunk, &error) != FST_OK) return false;
    if (chunk->stored_bytes > size) return false;
    memset(target, 0xa5, size + 16);
    if (fsti_chunk_decode(decoder, chunk, target, &error) != FST_OK) {
        printf("# %s\n", error.message);
        return false;
    }
    for (size_t i = 0; i < 16; i++)
        if (target[size + i] != 0xa5) return false;
    return memcmp(source, target, size) == 0;
}

static size_t element_bytes(fst_dtype dtype) {
    return fsti_dtype_bits(dtype) <= 8 ? 1 : fsti_dtype_bits(dtype) / 8;
}

TEST(crc_has_the_standards_values)
{
    unsigned char bytes[32768] = {0};
    for (size_t k = 0; k < KERNEL_COUNT; k++) {
        if (!fsti_codec_usable(all_kernels[k])) continue;
        fsti_codec_use(all_kernels[k]);
        CHECK_INT(fsti_crc32c("123456789", 9), 0xe3069283);
        CHECK_INT(fsti_crc32c(bytes, 32), 0x8a9136aa); // RFC 3720, B.4
        for (int i = 0; i < 32; i++) bytes[i] = (unsigned char)i;
        CHECK_INT(fsti_crc32c(bytes, 32), 0x46dd794e);
        memset(bytes, 0xff, 32);
        CHECK_INT(fsti_crc32c(bytes, 32), 0x62a8ab43);
        memset(bytes, 0, 32);
    }
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)next_random();
    for (size_t size = sizeof bytes; size > 12000; size -= 997) {
        fsti_codec_use(&fsti_codec_scalar);
        uint32_t wanted = fsti_crc32c(bytes + size % 7, size - 7);
        fsti_codec_use(NULL);
        CHECK_INT(fsti_crc32c(bytes + size % 7, size - 7), wanted);
    }
}

TEST(every_dtype_round_trips_in_all_chunk_sizes)
{
    static const size_t counts[] = {1, 2, 3, 15, 16, 63, 64, 65, 127, 1000, 4097, 131072};
    if (!have_room()) return;
    for (int dtype = 0; dtype < FST_DTYPE_COUNT; dtype++)
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            fsti_chunk chunk;
            size_t size = counts[c] * element_bytes((fst_dtype)dtype);
            fill_weights((fst_dtype)dtype, size);
            CHECK(round_trip((fst_dtype)dtype, size, &chunk));
        }
}

TEST(every_16_bit_pattern_round_trips)
{
    if (!have_room()) return;
    for (uint32_t i = 0; i < 65536; i++) {
        source[2 * i] = (unsigned char)i;
        source[2 * i + 1] = (unsigned char)(i >> 8);
    }
    // A second part, so that planes are worth coding.
    memset(source + 131072, 0x3d, 131072);
    for (int dtype = 0; dtype < FST_DTYPE_COUNT; dtype++) {
        fsti_chunk chunk;
        CHECK(round_trip((fst_dtype)dtype, 131072, &chunk));
        CHECK(round_trip((fst_dtype)dtype, 262144, &chunk));
    }
}

TEST(instruction_sets_give_the_same_bytes)
{
    static unsigned char first[ROOM_BYTES];
    if (!have_room()) return;
    for (int dtype = 0; dtype < FST_DTYPE_COUNT; dtype++) {
        fsti_chunk chunk, reference = {.stored = NULL};
        size_t size = 70001 / element_bytes((fst_dtype)dtype) * element_bytes((fst_dtype)dtype);
        fill_weights((fst_dtype)dtype, size);
        for (size_t k = KERNEL_COUNT; k-- > 0;) {
            if (!fsti_codec_usable(all_kernels[k])) continue;
            fsti_codec_use(all_kernels[k]);
            CHECK(round_trip((fst_dtype)dtype, size, &chunk));
            if (reference.stored == NULL) {
                reference = chunk;
                memcpy(first, stored, chunk.stored_bytes);
            }
            CHECK_INT(chunk.stored_bytes, reference.stored_bytes);
            CHECK_INT(chunk.crc, reference.crc);
            CHECK(memcmp(first, stored, chunk.stored_bytes) == 0);
        }
        fsti_codec_use(NULL);
    }
}

TEST(weights_compress_and_noise_does_not_grow)
{
    fsti_chunk chunk;
    if (!have_room()) return;
    fill_weights(FST_DTYPE_BF16, 262144);
    CHECK(round_trip(FST_DTYPE_BF16, 262144, &chunk));
    CHECK(!chunk.is_raw && chunk.stored_bytes < 262144 * 7 / 10);
    for (size_t i = 0; i < 262144; i++) source[i] = (unsigned char)next_random();
    CHECK(round_trip(FST_DTYPE_BF16, 262144, &chunk));
    CHECK(chunk.is_raw && chunk.stored_bytes == 262144);
    memset(source, 0, 262144);
    CHECK(round_trip(FST_DTYPE_F32, 262144, &chunk));
    CHECK_INT(chunk.stored_bytes, 32);
}

/// The chunk of a constant and of a coded plane, byte for byte as docs/FORMAT.md has it.
TEST(chunk_layout_matches_the_format)
{
    fsti_chunk chunk;
    if (!have_room()) return;
    for (size_t i = 0; i < 32; i++) { // BF16 1.0 and -1.5, alternately
        source[2 * i] = i % 2 == 0 ? 0x80 : 0xc0;
        source[2 * i + 1] = i % 2 == 0 ? 0x3f : 0xbf;
    }
    static const unsigned char wanted[] = {2, 1, 0x7f, 0, 0, 0, 0, 0,    0, 32,
                                           0, 0, 0,    0, 0, 0, 0, 0x81, 0, 0x81};
    CHECK(round_trip(FST_DTYPE_BF16, 64, &chunk));
    CHECK_INT(chunk.stored_bytes, 48);
    CHECK(memcmp(stored, wanted, sizeof wanted) == 0);
}

/// A changed chunk is rejected or decodes to its original bytes.
TEST(damaged_chunks_are_refused)
{
    fsti_chunk chunk;
    fst_error error;
    unsigned refused = 0;
    if (!have_room()) return;
    for (int i = 0; i < 3000; i++) {
        static const fst_dtype dtypes[] = {FST_DTYPE_BF16, FST_DTYPE_F32, FST_DTYPE_F8_E4M3,
                                           FST_DTYPE_U8};
        fst_dtype dtype = dtypes[i % 4];
        size_t size = 4000;
        fill_weights(dtype, size);
        CHECK(round_trip(dtype, size, &chunk));
        // A copy of exactly this size, so that a sanitizer detects reads past its end.
        unsigned char *copy = malloc(chunk.stored_bytes);
        memcpy(copy, stored, chunk.stored_bytes);
        size_t at = i % 2 == 0 ? next_random() % 40 : next_random() % chunk.stored_bytes;
        copy[at] ^= (unsigned char)(1u << next_random() % 8);
        chunk.stored = copy;
        if (i % 7 == 0) chunk.stored_bytes -= next_random() % 20;
        fst_status status = fsti_chunk_decode(decoder, &chunk, target, &error);
        free(copy);
        if (status == FST_OK) {
            CHECK(memcmp(source, target, size) == 0);
        } else {
            CHECK_INT(status, FST_E_CORRUPT);
            refused++;
        }
    }
    CHECK(refused > 2800);
}

/// Fields that are invalid by themselves, each with the words of its message.
TEST(inconsistent_chunks_are_reported)
{
    static const struct {
        size_t at;
        unsigned char value;
        const char *words;
    } lies[] = {
        {0, 3, "number of planes"}, {1, 9, "unknown kind"},      {2, 1, "has a table"},
        {9, 1, "wrong size"},       {4, 0x10, "not smaller"},    {4, 5, "overlap, leave gaps"},
        {3, 0, "add up"},           {16, 1, "not a zstd frame"}, {20, 0x24, "not a zstd frame"},
        {21, 1, "zstd frame"}};
    fsti_chunk chunk;
    fst_error error;
    if (!have_room()) return;
    fill_weights(FST_DTYPE_BF16, 4000);
    CHECK(round_trip(FST_DTYPE_BF16, 4000, &chunk));
    CHECK(stored[1] == 2 && stored[7] == 0);
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        unsigned char before = stored[lies[i].at];
        stored[lies[i].at] = lies[i].value;
        fst_status status = fsti_chunk_decode(decoder, &chunk, target, &error);
        stored[lies[i].at] = before;
        CHECK_INT(status, FST_E_CORRUPT);
        CHECK_CONTAINS(error.message, lies[i].words);
    }
    chunk.crc ^= 1;
    CHECK_INT(fsti_chunk_decode(decoder, &chunk, target, &error), FST_E_CORRUPT);
    CHECK_CONTAINS(error.message, "CRC32C");
    chunk.crc ^= 1;
    chunk.is_raw = true;
    CHECK_INT(fsti_chunk_decode(decoder, &chunk, target, &error), FST_E_CORRUPT);
    CHECK_CONTAINS(error.message, "wrong size");
}
