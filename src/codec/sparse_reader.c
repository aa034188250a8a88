// SPDX-License-Identifier: Apache-2.0
/// Reads literals and sequences (RFC 8878, 3.1.1.3). Never reads outside the block and its spare
/// bytes, or writes outside the target.
#include "sparse_reader.h"

#include <string.h>

#include "codec_kernels.h"
#include "length_codes.h"

const length_code fsti_literal_lengths[LITERAL_CODES] = {
    {0, 0},     {1, 0},      {2, 0},      {3, 0},     {4, 0},   {5, 0},     {6, 0},     {7, 0},
    {8, 0},     {9, 0},      {10, 0},     {11, 0},    {12, 0},  {13, 0},    {14, 0},    {15, 0},
    {16, 1},    {18, 1},     {20, 1},     {22, 1},    {24, 2},  {28, 2},    {32, 3},    {40, 3},
    {48, 4},    {64, 6},     {128, 7},    {256, 8},   {512, 9}, {1024, 10}, {2048, 11}, {4096, 12},
    {8192, 13}, {16384, 14}, {32768, 15}, {65536, 16}};
const length_code fsti_match_lengths[MATCH_CODES] = {
    {3, 0},     {4, 0},     {5, 0},      {6, 0},      {7, 0},     {8, 0},   {9, 0},     {10, 0},
    {11, 0},    {12, 0},    {13, 0},     {14, 0},     {15, 0},    {16, 0},  {17, 0},    {18, 0},
    {19, 0},    {20, 0},    {21, 0},     {22, 0},     {23, 0},    {24, 0},  {25, 0},    {26, 0},
    {27, 0},    {28, 0},    {29, 0},     {30, 0},     {31, 0},    {32, 0},  {33, 0},    {34, 0},
    {35, 1},    {37, 1},    {39, 1},     {41, 1},     {43, 2},    {47, 2},  {51, 3},    {59, 3},
    {67, 4},    {83, 4},    {99, 5},     {131, 7},    {259, 8},   {515, 9}, {1027, 10}, {2051, 11},
    {4099, 12}, {8195, 13}, {16387, 14}, {32771, 15}, {65539, 16}};

/// The tables that need no description (RFC 8878, 3.1.1.3.2.2).
static const fse_counts literal_counts = {{4, 3, 2, 2, 2, 2, 2, 2, 2,  2,  2,  2,
                                           2, 1, 1, 1, 2, 2, 2, 2, 2,  2,  2,  2,
                                           2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1},
                                          36,
                                          6};
static const fse_counts offset_counts = {
    {1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1},
    29,
    5};
static const fse_counts match_counts = {{1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1,  1,  1,  1,  1,  1,  1, 1,
                                         1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,  1,  1,  1, 1,
                                         1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1},
                                        53,
                                        6};

/// A kind of code: its number of codes, the largest table, and the table without description.
typedef struct code_kind {
    uint32_t codes, log_max;
    const fse_counts *predefined;
} code_kind;
static const code_kind literal_kind = {LITERAL_CODES, 9, &literal_counts};
static const code_kind offset_kind = {OFFSET_CODES, 8, &offset_counts};
static const code_kind match_kind = {MATCH_CODES, 9, &match_counts};

/// The part of a block that was not read yet.
typedef struct block_bytes {
    const unsigned char *at, *end;
} block_bytes;

static size_t bytes_left(const block_bytes *block) { return (size_t)(block->end - block->at); }

void fsti_sparse_reader_reset(sparse_reader *reader, size_t content_max) {
    reader->content_max = content_max;
    reader->huffman.is_filled = false;
    reader->huffman.ahead = (huffman_ahead){0};
    reader->literal_at = reader->literal_end = 0;
    reader->sequences.left = 0;
    reader->copies = reader->repeats = 0;
    reader->last = 0;
}

/// The next `count` bits, at most 56, from the end backwards.
static uint64_t take_bits(sparse_sequences *sequences, uint32_t count) {
    uint64_t word;
    sequences->bits_left -= count;
    if (sequences->bits_left < 0) return 0;
    memcpy(&word, sequences->bits + sequences->bits_left / 8, sizeof word);
    return word >> sequences->bits_left % 8 & (((uint64_t)1 << count) - 1);
}

static bool read_table(block_bytes *block, fse_table *table, uint32_t mode, const code_kind *kind) {
    fse_counts counts;
    if (mode == TABLE_AS_BEFORE) return false;
    if (mode == TABLE_PREDEFINED) {
        fsti_fse_fill(table, kind->predefined);
        return true;
    }
    if (mode == TABLE_ONE) {
        if (bytes_left(block) == 0 || *block->at >= kind->codes) return false;
        fsti_fse_fill_one(table, *block->at++);
        return true;
    }
    size_t used =
        fsti_fse_read_counts(&counts, block->at, bytes_left(block), kind->log_max, kind->codes);
    if (used == 0) return false;
    fsti_fse_fill(table, &counts);
    block->at += used;
    return true;
}

/// Reads the number of sequences (RFC 8878, 3.1.1.3.2.1).
static bool read_count(block_bytes *block, uint32_t *count) {
    if (bytes_left(block) == 0) return false;
    uint32_t first = *block->at++;
    *count = first;
    if (first < 128) return true;
    size_t more = first < 255 ? 1 : 2;
    if (bytes_left(block) < more) return false;
    *count = first < 255 ? ((first - 128) << 8) + block->at[0]
                         : (uint32_t)block->at[0] + ((uint32_t)block->at[1] << 8) + 0x7f00;
    block->at += more;
    return true;
}

static void fill_taken(uint8_t *taken, const fse_table *table, const length_code *lengths) {
    for (uint32_t i = 0; i < 1u << table->log; i++)
        taken[i] = (uint8_t)(table->cells[i].bits + lengths[table->cells[i].symbol].bits);
}

/// Reads the tables of the sequences and begins their bits, which end with a set bit and zeros.
static bool begin_sequences(sparse_sequences *sequences, block_bytes block) {
    if (!read_count(&block, &sequences->left)) return false;
    if (sequences->left == 0) return bytes_left(&block) == 0;
    if (bytes_left(&block) == 0) return false;
    uint32_t modes = *block.at++;
    if ((modes & 3) != 0 || !read_table(&block, &sequences->literals, modes >> 6, &literal_kind) ||
        !read_table(&block, &sequences->offsets, modes >> 4 & 3, &offset_kind) ||
        !read_table(&block, &sequences->matches, modes >> 2 & 3, &match_kind))
        return false;
    fill_taken(sequences->literal_taken, &sequences->literals, fsti_literal_lengths);
    fill_taken(sequences->match_taken, &sequences->matches, fsti_match_lengths);
    size_t size = bytes_left(&block);
    if (size == 0 || block.end[-1] == 0) return false;
    sequences->bits = block.at;
    sequences->bits_left = (int64_t)size * 8 - 8 + fse_top_bit(block.end[-1]);
    sequences->literal_state = (uint32_t)take_bits(sequences, sequences->literals.log);
    sequences->offset_state = (uint32_t)take_bits(sequences, sequences->offsets.log);
    sequences->match_state = (uint32_t)take_bits(sequences, sequences->matches.log);
    return sequences->bits_left >= 0;
}

bool fsti_sparse_reader_begin(sparse_reader *reader, sparse_kind kind, size_t size,
                              size_t repeated) {
    const unsigned char *stored = sparse_reader_block(reader);
    block_bytes block = {stored, stored + size};
    reader->sequences.left = 0;
    reader->copies = reader->repeats = 0;
    reader->literal_at = reader->literal_end = 0;
    reader->content_left = reader->content_max;
    if (kind == SPARSE_RAW) {
        memcpy(reader->literal, stored, size);
        reader->literal_end = size;
        return true;
    }
    if (kind == SPARSE_REPEATED) {
        reader->last = stored[0];
        reader->repeats = repeated;
        return true;
    }
    size_t literals = SPARSE_BLOCK_BYTES_MAX;
    size_t used =
        fsti_literals_decode(&reader->huffman, block.at, size, reader->literal, &literals);
    if (used == 0) return false;
    block.at += used;
    reader->literal_end = literals;
    return begin_sequences(&reader->sequences, block);
}

static uint32_t next_state(sparse_sequences *sequences, fse_cell cell) {
    return cell.base + (uint32_t)take_bits(sequences, cell.bits);
}

/// Whether the offset is 1, the distance that is remembered first when a frame begins: as "the
/// first that is remembered" (code 0) or as a number (code 2 and two zeros). Either leaves it
/// first.
static bool takes_offset_one(sparse_sequences *sequences, uint32_t code) {
    return code == 0 || (code == 2 && take_bits(sequences, 2) == 0);
}

/// Decodes the next sequence. Bits are in the order offset, match, literals; states in another.
static bool next_sequence(sparse_reader *reader) {
    sparse_sequences *all = &reader->sequences;
    fse_cell literal = all->literals.cells[all->literal_state];
    fse_cell offset = all->offsets.cells[all->offset_state];
    fse_cell match = all->matches.cells[all->match_state];
    if (!takes_offset_one(all, offset.symbol)) return false;
    const length_code *match_length = &fsti_match_lengths[match.symbol];
    const length_code *literal_length = &fsti_literal_lengths[literal.symbol];
    reader->repeats = match_length->base + take_bits(all, match_length->bits);
    reader->copies = literal_length->base + take_bits(all, literal_length->bits);
    if (--all->left > 0) {
        all->literal_state = next_state(all, literal);
        all->match_state = next_state(all, match);
        all->offset_state = next_state(all, offset);
    }
    // Without literals, code 0 means another distance.
    return all->bits_left >= 0 && (all->left > 0 || all->bits_left == 0) && reader->copies > 0 &&
           reader->copies <= reader->literal_end - reader->literal_at &&
           reader->copies + reader->repeats <= reader->content_left;
}

/// XORs `size` literals, of which there are usually a few: eight bytes at a time, if `room` allows
/// it. Bytes past the literals are masked.
static void xor_literals(unsigned char *restrict target, const unsigned char *restrict bytes,
                         size_t size, size_t room) {
    if (size < 8 && room >= 8) {
        uint64_t word, old;
        memcpy(&word, bytes, sizeof word);
        memcpy(&old, target, sizeof old);
        old ^= word & (((uint64_t)1 << 8 * size) - 1);
        memcpy(target, &old, sizeof old);
        return;
    }
    for (size_t i = 0; i < size; i++) target[i] ^= bytes[i];
}

/// XORs what is left of the current sequence. Returns the bytes of content.
static size_t xor_sequence(sparse_reader *reader, unsigned char *target, size_t size) {
    size_t copied = reader->copies < size ? reader->copies : size;
    if (copied > 0) {
        const unsigned char *from = reader->literal + reader->literal_at;
        if (target != NULL) xor_literals(target, from, copied, size);
        reader->last = from[copied - 1];
        reader->literal_at += copied;
        reader->copies -= copied;
    }
    if (reader->copies > 0) return copied;
    size_t repeated = reader->repeats < size - copied ? reader->repeats : size - copied;
    if (target != NULL && reader->last != 0)
        for (size_t i = 0; i < repeated; i++) target[copied + i] ^= reader->last;
    reader->repeats -= repeated;
    return copied + repeated;
}

bool fsti_sparse_reader_xor(sparse_reader *reader, unsigned char *target, size_t size,
                            size_t *done) {
    *done = 0;
    while (*done < size) {
        if (reader->copies == 0 && reader->repeats == 0) {
            if (target != NULL && reader->sequences.left > 1)
                *done += fsti_codec_kernels()->xor_runs(reader, target + *done, size - *done);
            if (*done == size) break; // the next sequence is checked when its content is wanted
            if (reader->sequences.left > 0) {
                if (!next_sequence(reader)) return false;
            } else {
                reader->copies = reader->literal_end - reader->literal_at;
                if (reader->copies > reader->content_left) return false;
            }
            if (reader->copies == 0 && reader->repeats == 0) return true;
            reader->content_left -= reader->copies + reader->repeats;
        }
        *done += xor_sequence(reader, target == NULL ? NULL : target + *done, size - *done);
    }
    return true;
}
