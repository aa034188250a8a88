// SPDX-License-Identifier: Apache-2.0
/// Makes the counts and tables to encode with FSE (RFC 8878, 4.1).
#include "fse_code.h"

/// A table with fewer states than this is not allowed.
#define LOG_MIN 5u

/// About four states for each 16 symbols of the data, and one at least for each that occurs.
static uint32_t choose_log(uint64_t total, uint32_t present, uint32_t log_max) {
    uint32_t log = log_max;
    while (log > LOG_MIN && (uint64_t)4 << log > total && 1u << (log - 1) >= present) log--;
    return log;
}

/// The symbol with the largest count.
static uint32_t find_largest(const fse_counts *counts) {
    uint32_t largest = 0;
    for (uint32_t s = 1; s < counts->symbol_count; s++)
        if (counts->of[s] > counts->of[largest]) largest = s;
    return largest;
}

void fsti_fse_scale(fse_counts *counts, const uint32_t *frequencies, uint32_t symbol_count,
                    uint32_t log_max) {
    uint64_t total = 0;
    uint32_t present = 0;
    counts->symbol_count = 0;
    for (uint32_t s = 0; s < symbol_count; s++) {
        total += frequencies[s];
        present += frequencies[s] > 0;
        if (frequencies[s] > 0) counts->symbol_count = s + 1;
    }
    counts->log = choose_log(total, present, log_max);
    int left = 1 << counts->log;
    for (uint32_t s = 0; s < counts->symbol_count; s++) {
        uint64_t scaled = (((uint64_t)frequencies[s] << counts->log) + total / 2) / total;
        counts->of[s] = (int16_t)(scaled == 0 && frequencies[s] > 0 ? 1 : scaled);
        left -= counts->of[s];
    }
    // Rounding left states over, or used too many. The largest counts change least in proportion.
    for (; left < 0; left++) counts->of[find_largest(counts)]--;
    counts->of[find_largest(counts)] += (int16_t)left;
}

/// Writes a number of 0 to `left`: numbers below a limit take one bit less than the others.
static void put_number(bit_writer *writer, uint32_t value, uint32_t left) {
    uint32_t width = fse_top_bit(left) + 1, short_values = (1u << width) - 1 - left;
    if (value < short_values)
        bits_put(writer, value, width - 1);
    else
        bits_put(writer, value < 1u << (width - 1) ? value : value + short_values, width);
    bits_store(writer);
}

/// Writes how many zeros follow a zero, two bits at a time; 3 means that another number follows.
static void put_zeros(bit_writer *writer, uint32_t zeros) {
    for (; zeros >= 3; zeros -= 3) {
        bits_put(writer, 3, 2);
        bits_store(writer);
    }
    bits_put(writer, zeros, 2);
    bits_store(writer);
}

unsigned char *fsti_fse_write_counts(const fse_counts *counts, unsigned char *target) {
    bit_writer writer = {.at = target};
    uint32_t left = (1u << counts->log) + 1;
    bits_put(&writer, counts->log - LOG_MIN, 4);
    for (uint32_t s = 0; s < counts->symbol_count; s++) {
        put_number(&writer, (uint32_t)counts->of[s] + 1, left);
        left -= (uint32_t)(uint16_t)counts->of[s];
        if (counts->of[s] > 0) continue;
        uint32_t zeros = 0; // the last symbol's count is not 0
        while (counts->of[s + 1 + zeros] == 0) zeros++;
        put_zeros(&writer, zeros);
        s += zeros;
    }
    return bits_end(&writer);
}

void fsti_fse_code_fill(fse_code *code, const fse_counts *counts) {
    fse_table table;
    uint32_t size = 1u << counts->log, begin = 0, used[FSE_SYMBOLS_MAX];
    fsti_fse_fill(&table, counts);
    code->log = counts->log;
    for (uint32_t s = 0; s < counts->symbol_count; s++) {
        used[s] = begin;
        if (counts->of[s] == 0) continue;
        uint32_t count = (uint32_t)counts->of[s], bits_max = counts->log - fse_top_bit(count);
        code->symbols[s] =
            (fse_symbol){(bits_max << 16) - (count << bits_max), (int32_t)begin - (int32_t)count};
        begin += count;
    }
    for (uint32_t i = 0; i < size; i++)
        code->states[used[table.cells[i].symbol]++] = (uint16_t)(size + i);
    // The first of a symbol's states reads the most bits.
    for (uint32_t s = 0; s < counts->symbol_count; s++)
        if (counts->of[s] > 0) code->first[s] = code->states[used[s] - (uint16_t)counts->of[s]];
}

void fsti_fse_code_fill_one(fse_code *code, uint8_t symbol) {
    code->log = 0;
    code->states[0] = code->first[symbol] = 1;
    code->symbols[symbol] = (fse_symbol){(uint32_t)-1, -1};
}
