// SPDX-License-Identifier: Apache-2.0
/// Encodes with FSE (RFC 8878, 4.1), the counterpart of fse_table.h. Private to the codec module.
#ifndef FSTI_FSE_CODE_H
#define FSTI_FSE_CODE_H

#include "bit_writer.h"
#include "fse_table.h"

/// The largest table that is made here: larger ones take longer than they save.
#define FSE_CODE_LOG_MAX 8u

/// How a symbol is encoded in a state, a number of 2^log up to 2^(log + 1): the state's lowest bits
/// are written, (state + bits_term) >> 16 of them; the rest of the state plus next_term is the
/// index of the next state.
typedef struct fse_symbol {
    uint32_t bits_term;
    int32_t next_term;
} fse_symbol;

typedef struct fse_code {
    uint32_t log;
    uint16_t states[1u << FSE_CODE_LOG_MAX];
    fse_symbol symbols[FSE_SYMBOLS_MAX];
    uint16_t first[FSE_SYMBOLS_MAX]; ///< a state of each symbol, to begin with
} fse_code;

/// Makes counts that add up to 2^log, about in the proportion of `frequencies`, each symbol that
/// occurs with at least 1. At least two symbols occur; `log` is at most `log_max`.
void fsti_fse_scale(fse_counts *counts, const uint32_t *frequencies, uint32_t symbol_count,
                    uint32_t log_max);
/// Writes the counts as fsti_fse_read_counts() reads them. Returns the end of the bytes. The target
/// has room for 2 bytes per symbol and BIT_WRITER_SPARE_BYTES.
unsigned char *fsti_fse_write_counts(const fse_counts *counts, unsigned char *target);
void fsti_fse_code_fill(fse_code *code, const fse_counts *counts);
/// The code of a table whose only state has this symbol: no bits.
void fsti_fse_code_fill_one(fse_code *code, uint8_t symbol);

/// Writes the bits that lead from `state` back to the state of `symbol`, which is returned.
static inline uint32_t fse_put(const fse_code *code, bit_writer *writer, uint32_t state,
                               uint32_t symbol) {
    fse_symbol of = code->symbols[symbol];
    uint32_t bits = (state + of.bits_term) >> 16;
    bits_put(writer, state & ((1u << bits) - 1), bits);
    return code->states[(int32_t)(state >> bits) + of.next_term];
}

/// Writes the state in which a decoder begins.
static inline void fse_put_state(const fse_code *code, bit_writer *writer, uint32_t state) {
    bits_put(writer, state & ((1u << code->log) - 1), code->log);
}

#endif
