// SPDX-License-Identifier: Apache-2.0
/// Reads the counts of FSE tables and builds the tables (RFC 8878, 4.1).
#include "fse_table.h"

/// A count is stored as count + 1, so that -1 fits. Its width depends on `left`, the states that
/// have no symbol yet plus one. Small values take one bit less than large ones.
static int read_count(const unsigned char *bytes, size_t size, uint64_t *at, int left) {
    uint32_t width = fse_top_bit((uint32_t)left) + 1;
    uint32_t short_values = (1u << width) - 1 - (uint32_t)left;
    uint32_t value = fse_bits_at(bytes, size, *at, width - 1);
    if (value < short_values) {
        *at += width - 1;
    } else {
        value = fse_bits_at(bytes, size, *at, width);
        *at += width;
        if (value >= 1u << (width - 1)) value -= short_values;
    }
    return (int)value - 1;
}

/// After a count of zero follow two-bit numbers of further zeros; a number of 3 means that another
/// one follows. Returns false if there are more symbols than `symbols_max`.
static bool skip_zeros(fse_counts *counts, const unsigned char *bytes, size_t size, uint64_t *at,
                       uint32_t symbols_max) {
    uint32_t skip = 3;
    while (skip == 3) {
        skip = fse_bits_at(bytes, size, *at, 2);
        *at += 2;
        if (counts->symbol_count + skip > symbols_max) return false;
        for (uint32_t i = 0; i < skip; i++) counts->of[counts->symbol_count++] = 0;
    }
    return true;
}

size_t fsti_fse_read_counts(fse_counts *counts, const unsigned char *bytes, size_t size,
                            uint32_t log_max, uint32_t symbols_max) {
    uint64_t at = 4;
    if (size == 0) return 0;
    counts->symbol_count = 0;
    counts->log = (bytes[0] & 15u) + 5;
    if (counts->log > log_max) return 0;
    int left = (1 << counts->log) + 1;
    while (left > 1) {
        if (counts->symbol_count >= symbols_max) return 0;
        int count = read_count(bytes, size, &at, left);
        counts->of[counts->symbol_count++] = (int16_t)count;
        left -= count < 0 ? 1 : count;
        if (count == 0 && !skip_zeros(counts, bytes, size, &at, symbols_max)) return 0;
    }
    return left == 1 && (at + 7) / 8 <= size ? (size_t)(at + 7) / 8 : 0;
}

/// Symbols with a count of -1 get one state each at the end; the others are spread with a step that
/// is coprime to the table's size and therefore reaches every state once.
void fsti_fse_fill(fse_table *table, const fse_counts *counts) {
    uint32_t size = 1u << counts->log, high = size, at = 0, next[FSE_SYMBOLS_MAX];
    uint32_t step = (size >> 1) + (size >> 3) + 3;
    fse_cell *cells = table->cells;
    table->log = counts->log;
    for (uint32_t s = 0; s < counts->symbol_count; s++) {
        next[s] = counts->of[s] < 0 ? 1 : (uint32_t)counts->of[s];
        if (counts->of[s] < 0) cells[--high].symbol = (uint8_t)s;
    }
    for (uint32_t s = 0; s < counts->symbol_count; s++)
        for (int i = 0; i < counts->of[s]; i++) {
            cells[at].symbol = (uint8_t)s;
            do at = (at + step) & (size - 1);
            while (at >= high);
        }
    for (uint32_t i = 0; i < size; i++) {
        uint32_t number = next[cells[i].symbol]++;
        cells[i].bits = (uint8_t)(counts->log - fse_top_bit(number));
        cells[i].base = (uint16_t)((number << cells[i].bits) - size);
    }
}

void fsti_fse_fill_one(fse_table *table, uint8_t symbol) {
    table->log = 0;
    table->cells[0] = (fse_cell){.symbol = symbol};
}
