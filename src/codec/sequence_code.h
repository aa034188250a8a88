// SPDX-License-Identifier: Apache-2.0
/// Encodes the sequences of a zstd block (RFC 8878, 3.1.1.3.2) whose matches all repeat the byte
/// before them. Private to the codec module.
#ifndef FSTI_SEQUENCE_CODE_H
#define FSTI_SEQUENCE_CODE_H

#include "fse_code.h"

/// The shortest match of the format.
#define MATCH_MIN ((uint32_t)3)
/// Maximum size of a section, in bytes.
#define SEQUENCES_SECTION_BYTES(count) (7 * (size_t)(count) + 256)
/// Lengths below have their codes in a table.
#define SHORT_LITERALS 64u
#define SHORT_MATCHES 1027u

/// How many literals there are (1 or more), and how often the last one is repeated (MATCH_MIN or
/// more). Less than 2^17 together, a block.
typedef struct literal_run {
    uint32_t literals, repeats;
} literal_run;

/// Memory for encoding.
typedef struct sequence_coder {
    fse_code literals, matches;
    uint8_t literal_codes[SHORT_LITERALS], match_codes[SHORT_MATCHES]; ///< by length
} sequence_coder;

/// Longer lengths have a code for each power of two.
static inline uint32_t literal_code(const sequence_coder *coder, uint32_t length) {
    return length < SHORT_LITERALS ? coder->literal_codes[length] : fse_top_bit(length) + 19;
}
static inline uint32_t match_code(const sequence_coder *coder, uint32_t length) {
    return length < SHORT_MATCHES ? coder->match_codes[length]
                                  : fse_top_bit(length - MATCH_MIN) + 36;
}

void fsti_sequence_coder_open(sequence_coder *coder);
/// Writes the section of 1 or more runs, at most 65,535. Returns its end.
unsigned char *fsti_sequences_encode(sequence_coder *coder, const literal_run *runs, uint32_t count,
                                     unsigned char *target);

#endif
