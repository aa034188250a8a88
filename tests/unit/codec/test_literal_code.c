// SPDX-License-Identifier: Apache-2.0
/// Encoding of literals: they come back, whatever tree the block before left, and all instruction
/// sets write the same bytes. Decoding is tested against libzstd elsewhere.
#include <stdlib.h>
#include <string.h>

#include "all_kernels.h"
#include "check.h"
#include "codec/codec.h"
#include "codec/fse_code.h"
#include "codec/huffman.h"
#include "codec/huffman_code.h"
#include "fixture.h"

static unsigned char literals[LITERALS_MAX + 16], stored[LITERALS_SECTION_BYTES],
    back[LITERALS_MAX + 16], first_stored[LITERALS_SECTION_BYTES];
static literal_coder coder;
static huffman_table table;

/// The kinds of literals.
typedef enum content {
    FEW_VALUES,
    MANY_VALUES,
    EVERY_OTHER_IS_ZERO,
    EVERY_OTHER_IS_NEARLY_ZERO,
    ONE_VALUE,
    RANDOM,
    CONTENT_COUNT
} content;

static void fill(content kind, size_t size, uint64_t *seed) {
    for (size_t i = 0; i < size; i++) {
        uint64_t number = fixture_random(seed) >> 8, small = number % 100 < 70 ? 0 : number % 7;
        bool is_odd = i % 2 != 0;
        switch (kind) {
        case FEW_VALUES: literals[i] = (unsigned char)small; break;
        case MANY_VALUES: literals[i] = (unsigned char)(number % (1 + number / 256 % 256)); break;
        case EVERY_OTHER_IS_ZERO: literals[i] = (unsigned char)(is_odd ? 0 : small); break;
        case EVERY_OTHER_IS_NEARLY_ZERO:
            literals[i] = (unsigned char)(is_odd ? number % 50 == 0 : number % 200);
            break;
        case ONE_VALUE: literals[i] = 9; break;
        default: literals[i] = (unsigned char)number; break;
        }
    }
}

/// Encodes the next block of a frame, and decodes it. Returns the stored bytes; 0: something else
/// came back.
static size_t send(size_t size) {
    size_t got = size;
    memset(stored, 0xee, sizeof stored);
    size_t bytes = (size_t)(fsti_literals_encode(&coder, literals, size, stored) - stored);
    size_t used = fsti_literals_decode(&table, stored, bytes, back, &got);
    bool is_same = used == bytes && got == size && memcmp(back, literals, size) == 0;
    return is_same ? bytes : 0;
}

TEST(literals_come_back_with_trees_of_earlier_blocks)
{
    static const size_t sizes[] = {1,    31,   32,   33,   200,   255,   256,   1000,
                                   1023, 1024, 4095, 4096, 16383, 16384, 77777, LITERALS_MAX};
    uint64_t seed = 1;
    for (size_t k = 0; k < KERNEL_COUNT; k++) {
        if (!fsti_codec_usable(all_kernels[k])) continue;
        fsti_codec_use(all_kernels[k]);
        for (int round = 0; round < 60; round++) {
            fsti_literals_begin(&coder);
            table.is_filled = false;
            for (int block = 0; block < 8; block++) {
                size_t size = sizes[fixture_random(&seed) % (sizeof sizes / sizeof *sizes)];
                fill((content)(fixture_random(&seed) % CONTENT_COUNT), size, &seed);
                CHECK(send(size) > 0);
            }
        }
    }
    fsti_codec_use(NULL);
}

TEST(all_instruction_sets_write_the_same_bytes)
{
    for (content kind = FEW_VALUES; kind < CONTENT_COUNT; kind++)
        for (size_t size = 30; size <= LITERALS_MAX; size = size * 3 + 1) {
            size_t first_bytes = 0;
            for (size_t k = 0; k < KERNEL_COUNT; k++) {
                uint64_t seed = size;
                if (!fsti_codec_usable(all_kernels[k])) continue;
                fsti_codec_use(all_kernels[k]);
                fsti_literals_begin(&coder);
                table.is_filled = false;
                fill(kind, size, &seed);
                size_t bytes = send(size);
                CHECK(bytes > 0);
                if (first_bytes != 0) {
                    CHECK_INT(bytes, first_bytes);
                    CHECK(memcmp(stored, first_stored, bytes) == 0);
                }
                first_bytes = bytes;
                memcpy(first_stored, stored, bytes);
            }
        }
    fsti_codec_use(NULL);
}

/// A tree is described once for blocks that it suits, and made again for others.
TEST(a_tree_is_used_as_long_as_it_suits)
{
    uint64_t seed = 2;
    size_t size = 20000, with_tree, later;
    fsti_literals_begin(&coder);
    table.is_filled = false;
    fill(FEW_VALUES, size, &seed);
    with_tree = send(size);
    CHECK_INT(stored[0] & 3, 2);
    fill(FEW_VALUES, size, &seed);
    later = send(size);
    CHECK_INT(stored[0] & 3, 3); // the tree of the block before
    CHECK(later > 0 && later < with_tree + with_tree / 20);
    literals[777] = 200; // a value without a code
    CHECK(send(size) > 0);
    CHECK_INT(stored[0] & 3, 2);
    fill(EVERY_OTHER_IS_NEARLY_ZERO, size, &seed);
    CHECK(send(size) > 0);
    CHECK_INT(stored[0] & 3, 2);
    // What has a code, but was rare, needs another tree to be small.
    for (size_t i = 0; i < size; i++) literals[i] = i % 8 == 0 ? 0 : 200;
    later = send(size);
    CHECK(later > 0 && later < size / 4);
    fsti_literals_begin(&coder); // another frame does not have the tree
    table.is_filled = false;
    CHECK(send(size) > 0);
    CHECK_INT(stored[0] & 3, 2);
}

static void check_code(const uint32_t *counts) {
    static huffman_code code;
    uint32_t cells = 0;
    if (!fsti_huffman_code_make(&code, counts)) return;
    for (size_t s = 0; s < HUFFMAN_SYMBOL_COUNT; s++) {
        CHECK((code.bits[s] > 0) == (counts[s] > 0));
        CHECK(code.bits[s] <= HUFFMAN_CODE_BITS);
        if (code.bits[s] > 0) cells += 1u << (HUFFMAN_CODE_BITS - code.bits[s]);
        for (size_t t = 0; t < HUFFMAN_SYMBOL_COUNT; t++)
            if (counts[s] > counts[t] && counts[t] > 0) CHECK(code.bits[s] <= code.bits[t]);
    }
    CHECK_INT(cells, 1u << HUFFMAN_CODE_BITS); // a complete tree
    CHECK_INT(fsti_huffman_table_read(&table, code.tree, code.tree_bytes), code.tree_bytes);
    CHECK(memcmp(table.code_bits, code.bits, sizeof code.bits) == 0);
}

TEST(codes_for_any_counts)
{
    uint32_t counts[HUFFMAN_SYMBOL_COUNT] = {0};
    uint64_t seed = 3;
    static huffman_code code;
    CHECK(!fsti_huffman_code_make(&code, counts));
    counts[255] = 7;
    CHECK(!fsti_huffman_code_make(&code, counts)); // one symbol has no code
    counts[254] = UINT32_MAX;
    check_code(counts);
    // Fibonacci's numbers would have codes of one bit more each.
    memset(counts, 0, sizeof counts);
    counts[0] = counts[1] = 1;
    for (size_t s = 2; s < 40; s++) counts[s] = counts[s - 1] + counts[s - 2];
    check_code(counts);
    for (uint32_t symbols = 2; symbols <= HUFFMAN_SYMBOL_COUNT; symbols++)
        for (uint32_t skew = 0; skew < 30; skew += 5) {
            memset(counts, 0, sizeof counts);
            for (uint32_t s = 0; s < symbols; s++)
                counts[fixture_random(&seed) % HUFFMAN_SYMBOL_COUNT] =
                    1 +
                    (uint32_t)(fixture_random(&seed) % (1u << fixture_random(&seed) % (skew + 1)));
            check_code(counts);
        }
}

TEST(counts_of_symbols_come_back)
{
    uint64_t seed = 4;
    for (int round = 0; round < 20000; round++) {
        uint32_t frequencies[FSE_SYMBOLS_MAX] = {0}, present = 0, sum = 0;
        uint32_t symbols = 2 + (uint32_t)(fixture_random(&seed) % (FSE_SYMBOLS_MAX - 1));
        uint32_t log_max = 6 + (uint32_t)(fixture_random(&seed) % 3);
        unsigned char bytes[2 * FSE_SYMBOLS_MAX + 16];
        fse_counts counts, read;
        for (uint32_t s = 0; s < symbols; s++) {
            uint32_t limit = 1u << fixture_random(&seed) % 20;
            frequencies[s] = (uint32_t)fixture_random(&seed) % limit;
            present += frequencies[s] > 0;
        }
        if (present < 2) continue;
        fsti_fse_scale(&counts, frequencies, symbols, log_max);
        for (uint32_t s = 0; s < counts.symbol_count; s++) {
            CHECK((counts.of[s] > 0) == (frequencies[s] > 0));
            sum += (uint32_t)(uint16_t)counts.of[s];
        }
        CHECK_INT(sum, 1u << counts.log);
        size_t size = (size_t)(fsti_fse_write_counts(&counts, bytes) - bytes);
        CHECK(size <= sizeof bytes - BIT_WRITER_SPARE_BYTES);
        CHECK_INT(fsti_fse_read_counts(&read, bytes, size, log_max, FSE_SYMBOLS_MAX), size);
        CHECK_INT(read.symbol_count, counts.symbol_count);
        CHECK(memcmp(read.of, counts.of, counts.symbol_count * sizeof *counts.of) == 0);
    }
}

/// libzstd refuses trees whose longest codes do not have weight 1.
TEST(trees_without_a_longest_code_are_refused)
{
    static const unsigned char good[] = {127 + 2, 0x11}, bad[] = {127 + 2, 0x22};
    CHECK_INT(fsti_huffman_table_read(&table, good, sizeof good), sizeof good);
    CHECK_INT(fsti_huffman_table_read(&table, bad, sizeof bad), 0);
}
