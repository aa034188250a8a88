// SPDX-License-Identifier: Apache-2.0
/// Tables of FSE, the entropy coder of Huffman weights and of sequences in zstd frames (RFC 8878,
/// 4.1). Private to the codec module.
#ifndef FSTI_FSE_TABLE_H
#define FSTI_FSE_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/// A table has at most 2^9 states: the format's limit for sequences.
#define FSE_LOG_MAX 9u
#define FSE_SYMBOLS_MAX 53u

/// A state: its symbol, and the next state, which is `base` plus the next `bits` bits.
typedef struct fse_cell {
    uint16_t base;
    uint8_t symbol, bits;
} fse_cell;

typedef struct fse_table {
    fse_cell cells[1u << FSE_LOG_MAX];
    uint32_t log; ///< bits of a state
} fse_table;

/// How many states each symbol has; -1: one state, after which all bits of the next one are read.
typedef struct fse_counts {
    int16_t of[FSE_SYMBOLS_MAX];
    uint32_t symbol_count, log;
} fse_counts;

/// Reads the counts before coded data, for symbols below `symbols_max`. Returns the bytes read;
/// 0: invalid.
size_t fsti_fse_read_counts(fse_counts *counts, const unsigned char *bytes, size_t size,
                            uint32_t log_max, uint32_t symbols_max);
void fsti_fse_fill(fse_table *table, const fse_counts *counts);
/// A table whose only state has this symbol.
void fsti_fse_fill_one(fse_table *table, uint8_t symbol);

/// `count` bits, at most 16, from bit `at` on; bits past the end are zero.
static inline uint32_t fse_bits_at(const unsigned char *bytes, size_t size, uint64_t at,
                                   uint32_t count) {
    uint32_t value = 0;
    for (uint32_t i = 0; i < 3 && at / 8 + i < size; i++)
        value |= (uint32_t)bytes[at / 8 + i] << 8 * i;
    return value >> at % 8 & ((1u << count) - 1);
}

static inline uint32_t fse_top_bit(uint32_t value) { return 31 - (uint32_t)__builtin_clz(value); }

#endif
