// SPDX-License-Identifier: Apache-2.0
/// Reads Huffman tree descriptions (RFC 8878, 4.2.1) and builds the lookup table.
#include <string.h>

#include "fse_table.h"
#include "huffman.h"

#define WEIGHTS_MAX 255u ///< described weights; the last symbol's weight follows from them
#define STATE_BITS_MAX 6u

typedef struct tree_weights {
    uint8_t of[WEIGHTS_MAX + 1];
    uint32_t count;
} tree_weights;

/// Takes bits from the end of the remaining ones; past the start they are zero, and `left` is
/// negative.
static uint32_t read_backward(const unsigned char *bytes, size_t size, int64_t *left,
                              uint32_t count) {
    *left -= count;
    if (*left >= 0) return fse_bits_at(bytes, size, (uint64_t)*left, count);
    if (*left + (int64_t)count <= 0) return 0;
    return fse_bits_at(bytes, size, 0, (uint32_t)(*left + (int64_t)count)) << -*left;
}

/// Two states alternate until the bits are used up. The other state still holds one weight then.
static bool read_coded_weights(tree_weights *weights, const unsigned char *bytes, size_t size) {
    fse_counts counts;
    fse_table table;
    size_t used = fsti_fse_read_counts(&counts, bytes, size, STATE_BITS_MAX, HUFFMAN_BITS + 1);
    if (used == 0 || used >= size || bytes[size - 1] == 0) return false;
    fsti_fse_fill(&table, &counts);
    bytes += used;
    size -= used;
    int64_t left = (int64_t)size * 8 - 8 + fse_top_bit(bytes[size - 1]);
    uint32_t state[2];
    state[0] = read_backward(bytes, size, &left, table.log);
    state[1] = read_backward(bytes, size, &left, table.log);
    if (left < 0) return false;
    for (uint32_t side = 0; weights->count < WEIGHTS_MAX; side ^= 1) {
        const fse_cell *cell = &table.cells[state[side]];
        weights->of[weights->count++] = cell->symbol;
        state[side] = cell->base + read_backward(bytes, size, &left, cell->bits);
        if (left >= 0) continue;
        if (weights->count == WEIGHTS_MAX) return false;
        weights->of[weights->count++] = table.cells[state[side ^ 1]].symbol;
        return true;
    }
    return false;
}

static bool read_plain_weights(tree_weights *weights, const unsigned char *bytes, uint32_t count) {
    weights->count = count;
    for (uint32_t i = 0; i < count; i++)
        weights->of[i] = i % 2 == 0 ? bytes[i / 2] >> 4 : bytes[i / 2] & 15;
    return true;
}

/// Computes the last symbol's weight, which completes the tree. Returns the longest code's bits, or
/// 0. A weight w uses 2^(w-1) cells of the table, and a complete tree fills all of them. So the
/// cells that are left for the last symbol must be a power of two.
static uint32_t complete_tree(tree_weights *weights) {
    uint32_t sum = 0, longest = 0;
    for (uint32_t i = 0; i < weights->count; i++) {
        if (weights->of[i] > HUFFMAN_BITS) return 0;
        longest += weights->of[i] == 1;
        if (weights->of[i] > 0) sum += 1u << (weights->of[i] - 1);
    }
    if (sum == 0 || sum >= HUFFMAN_CELLS) return 0;
    uint32_t bits = fse_top_bit(sum) + 1, rest = (1u << bits) - sum;
    if ((rest & (rest - 1)) != 0) return 0;
    weights->of[weights->count++] = (uint8_t)(fse_top_bit(rest) + 1);
    return longest + (rest == 1) >= 2 ? bits : 0; // as libzstd: the longest codes have weight 1
}

/// Sorts symbols by code length (longest first), then by symbol.
static void sort_symbols(huffman_table *table, const tree_weights *weights, uint32_t bits,
                         uint8_t *sorted, uint32_t *sorted_count) {
    uint32_t starts[HUFFMAN_BITS + 2] = {0}, total = 0;
    for (uint32_t i = 0; i < weights->count; i++) starts[weights->of[i]]++;
    starts[0] = 0;
    for (uint32_t w = 1; w <= HUFFMAN_BITS; w++) {
        uint32_t count = starts[w];
        starts[w] = total;
        total += count;
    }
    memset(table->code_bits, 0, sizeof table->code_bits);
    for (uint32_t i = 0; i < weights->count; i++) {
        if (weights->of[i] == 0) continue;
        sorted[starts[weights->of[i]]++] = (uint8_t)i;
        table->code_bits[i] = (uint8_t)(bits + 1 - weights->of[i]);
    }
    *sorted_count = total;
}

/// A cell holds up to six symbols in its lower 48 bits (the first symbol lowest), the bits of their
/// codes in the next 8, and their number in the upper 8.
#define CELL_SYMBOLS ((uint64_t)0xffffffffffff)
#define CELL_ONE_MORE ((uint64_t)1 << 56)

/// Fills the cells of one symbol with `bits` bits after it: the symbol, followed by the symbols of
/// those bits. Where the rest alone has six symbols (codes of one bit), the cell of its first five
/// bits is used instead, which has five. One addition adds both cells' code bits and counts; the
/// rest's symbols move up by one.
static void fill_cells(const huffman_table *table, uint64_t *cells, uint32_t symbol,
                       uint32_t bits) {
    uint64_t own = symbol | (uint64_t)table->code_bits[symbol] << 48 | CELL_ONE_MORE;
    const uint64_t *rest = table->cells + ((size_t)1 << bits);
    const uint64_t *fewer = bits > 5 ? table->cells + ((size_t)1 << 5) : rest;
    uint32_t dropped_bits = bits > 5 ? bits - 5 : 0;
    for (size_t i = 0; i < (size_t)1 << bits; i++) {
        uint64_t next = rest[i];
        if (next >> 56 >= HUFFMAN_SYMBOLS) next = fewer[i >> dropped_bits];
        cells[i] = own + (next & ~CELL_SYMBOLS) + (next << 8 & CELL_SYMBOLS);
    }
}

/// The same if no code has one bit, so that ten bits never hold six symbols.
static void fill_cells_fast(const huffman_table *table, uint64_t *cells, uint32_t symbol,
                            uint32_t bits) {
    uint64_t own = symbol | (uint64_t)table->code_bits[symbol] << 48 | CELL_ONE_MORE;
    const uint64_t *rest = table->cells + ((size_t)1 << bits);
    for (size_t i = 0; i < (size_t)1 << bits; i++)
        cells[i] = own + (rest[i] & ~CELL_SYMBOLS) + (rest[i] << 8 & CELL_SYMBOLS);
}

/// The bit counts for which cells are needed: the bits of 11 that remain after a code, recursively.
static uint32_t needed_levels(const huffman_table *table, const uint8_t *sorted,
                              uint32_t sorted_count) {
    uint32_t lengths = 0, levels = 1u << HUFFMAN_BITS | 1u << 5;
    for (uint32_t i = 0; i < sorted_count; i++) lengths |= 1u << table->code_bits[sorted[i]];
    for (uint32_t k = HUFFMAN_BITS; k > 0; k--)
        for (uint32_t n = 1; n <= k; n++)
            if ((levels >> k & 1) != 0 && (lengths >> n & 1) != 0) levels |= 1u << (k - n);
    return levels;
}

static void fill_level(huffman_table *table, const uint8_t *sorted, uint32_t sorted_count,
                       uint32_t k) {
    uint64_t *cells = table->cells + ((size_t)1 << k), *end = cells + ((size_t)1 << k);
    bool is_fast = table->code_bits[sorted[sorted_count - 1]] > 1;
    // From the shortest code on, as long as codes fit.
    for (uint32_t i = sorted_count; i > 0 && table->code_bits[sorted[i - 1]] <= k; i--) {
        uint32_t bits = k - table->code_bits[sorted[i - 1]];
        if ((size_t)(end - cells) < (size_t)1 << bits) break; // not a complete tree
        end -= (size_t)1 << bits;
        if (is_fast)
            fill_cells_fast(table, end, sorted[i - 1], bits);
        else
            fill_cells(table, end, sorted[i - 1], bits);
    }
    memset(cells, 0, (size_t)(end - cells) * sizeof *cells);
}

static void fill_table(huffman_table *table, const uint8_t *sorted, uint32_t sorted_count) {
    uint32_t levels = needed_levels(table, sorted, sorted_count);
    huffman_codes *codes = &table->codes;
    const uint64_t *cells = table->cells + HUFFMAN_CELLS;
    for (uint32_t k = 0; k <= HUFFMAN_BITS; k++)
        if ((levels >> k & 1) != 0) fill_level(table, sorted, sorted_count, k);
    table->is_narrow = table->code_bits[sorted[sorted_count - 1]] >= HUFFMAN_NARROW_BITS;
    for (size_t i = 0; i < HUFFMAN_CELLS; i++) codes->taken[i] = (uint8_t)(cells[i] >> 48);
    for (size_t i = 0; i < HUFFMAN_CELLS && table->is_narrow; i++)
        codes->cells.narrow[i] = (uint32_t)((cells[i] & 0xffffff) | cells[i] >> 56 << 24);
    for (size_t i = 0; i < HUFFMAN_CELLS && !table->is_narrow; i++)
        codes->cells.wide[i] = cells[i] & ~((uint64_t)0xff << 48);
}

size_t fsti_huffman_table_read(huffman_table *table, const unsigned char *bytes, size_t size) {
    tree_weights weights = {.count = 0};
    uint8_t sorted[256];
    uint32_t sorted_count;
    table->is_filled = false;
    if (size == 0) return 0;
    size_t used = bytes[0] < 128 ? bytes[0] : (bytes[0] - 126u) / 2;
    if (used == 0 || used > size - 1) return 0;
    bool is_read = bytes[0] < 128 ? read_coded_weights(&weights, bytes + 1, used)
                                  : read_plain_weights(&weights, bytes + 1, bytes[0] - 127u);
    if (!is_read) return 0;
    uint32_t bits = complete_tree(&weights);
    if (bits == 0) return 0;
    sort_symbols(table, &weights, bits, sorted, &sorted_count);
    fill_table(table, sorted, sorted_count);
    table->is_filled = true;
    return 1 + used;
}
