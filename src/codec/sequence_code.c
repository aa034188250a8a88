// SPDX-License-Identifier: Apache-2.0
/// Writes the sections of sequences. Offsets need no bits: each is the distance that a frame's
/// decoder remembers first, 1.
#include "sequence_code.h"

#include "codec_kernels.h"
#include "length_codes.h"

void fsti_sequence_coder_open(sequence_coder *coder) {
    uint8_t code = 0;
    for (uint32_t length = 0; length < SHORT_LITERALS; length++) {
        while (fsti_literal_lengths[code + 1].base <= length) code++;
        coder->literal_codes[length] = code;
    }
    code = 0;
    for (uint32_t length = 0; length < SHORT_MATCHES; length++) {
        while (fsti_match_lengths[code + 1].base <= length) code++;
        coder->match_codes[length] = code;
    }
}

/// How often each code occurs, counted in two tables, because neighbours are often equal.
typedef struct code_frequencies {
    uint32_t literals[2][LITERAL_CODES], matches[2][MATCH_CODES];
} code_frequencies;

static void count_codes(const sequence_coder *coder, const literal_run *runs, uint32_t count,
                        code_frequencies *frequencies) {
    *frequencies = (code_frequencies){0};
    for (uint32_t i = 0; i < count; i++) {
        frequencies->literals[i % 2][literal_code(coder, runs[i].literals)]++;
        frequencies->matches[i % 2][match_code(coder, runs[i].repeats)]++;
    }
}

/// Makes a code, and writes the description of its table. Returns how it is given.
static uint32_t make_code(fse_code *code, const uint32_t *frequencies, uint32_t symbol_count,
                          unsigned char **target) {
    fse_counts counts;
    uint32_t sum[FSE_SYMBOLS_MAX], present = 0, last = 0;
    for (uint32_t s = 0; s < symbol_count; s++) {
        sum[s] = frequencies[s] + frequencies[symbol_count + s];
        present += sum[s] > 0;
        if (sum[s] > 0) last = s;
    }
    if (present == 1) {
        fsti_fse_code_fill_one(code, (uint8_t)last);
        *(*target)++ = (uint8_t)last;
        return TABLE_ONE;
    }
    fsti_fse_scale(&counts, sum, symbol_count, FSE_CODE_LOG_MAX);
    fsti_fse_code_fill(code, &counts);
    *target = fsti_fse_write_counts(&counts, *target);
    return TABLE_COUNTS;
}

static unsigned char *put_count(unsigned char *target, uint32_t count) {
    if (count < 128) {
        *target++ = (unsigned char)count;
    } else if (count < 0x7f00) {
        *target++ = (unsigned char)(128 + (count >> 8));
        *target++ = (unsigned char)count;
    } else {
        *target++ = 255;
        *target++ = (unsigned char)(count - 0x7f00);
        *target++ = (unsigned char)((count - 0x7f00) >> 8);
    }
    return target;
}

unsigned char *fsti_sequences_encode(sequence_coder *coder, const literal_run *runs, uint32_t count,
                                     unsigned char *target) {
    code_frequencies frequencies;
    count_codes(coder, runs, count, &frequencies);
    target = put_count(target, count);
    unsigned char *modes = target++;
    uint32_t literals =
        make_code(&coder->literals, frequencies.literals[0], LITERAL_CODES, &target);
    *target++ = 0; // the only code of offsets: the distance that is remembered first
    uint32_t matches = make_code(&coder->matches, frequencies.matches[0], MATCH_CODES, &target);
    *modes = (unsigned char)(literals << 6 | TABLE_ONE << 4 | matches << 2);
    return fsti_codec_kernels()->put_runs(coder, runs, count, target);
}
