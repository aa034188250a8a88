// SPDX-License-Identifier: Apache-2.0
/// Tracks which bytes of a tensor have been written. Private to the save module. A stream in order
/// is one range; other orders have one range per gap.
#ifndef FSTI_COVERAGE_H
#define FSTI_COVERAGE_H

#include "base/primitives.h"

typedef struct byte_range {
    uint64_t begin, end;
} byte_range;

typedef struct byte_coverage {
    byte_range *ranges; ///< sorted and disjoint
    size_t count, capacity;
    uint64_t size_bytes; ///< of all ranges
} byte_coverage;

/// Adds `range`. FST_E_ARGUMENT if some bytes were added before: *overlap is the first such range.
/// FST_E_NO_MEMORY also for an unreasonable number of gaps.
fst_status fsti_coverage_claim(byte_coverage *coverage, byte_range range, byte_range *overlap);
/// The first missing range below `size_bytes`. False if nothing is missing.
bool fsti_coverage_gap(const byte_coverage *coverage, uint64_t size_bytes, byte_range *gap);
void fsti_coverage_clear(byte_coverage *coverage);

#endif
