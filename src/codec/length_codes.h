// SPDX-License-Identifier: Apache-2.0
/// The codes of sequences (RFC 8878, 3.1.1.3.2). Private to the codec module.
#ifndef FSTI_LENGTH_CODES_H
#define FSTI_LENGTH_CODES_H

#include <stdint.h>

#define LITERAL_CODES 36u
#define OFFSET_CODES 32u
#define MATCH_CODES 53u

/// How the table of a code is given.
enum { TABLE_PREDEFINED, TABLE_ONE, TABLE_COUNTS, TABLE_AS_BEFORE };

/// The lengths of a code: `base` plus the next `bits` bits (3.1.1.3.2.1.1).
typedef struct length_code {
    uint32_t base;
    uint8_t bits;
} length_code;
extern const length_code fsti_literal_lengths[LITERAL_CODES], fsti_match_lengths[MATCH_CODES];

#endif
