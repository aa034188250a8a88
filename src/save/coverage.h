// SPDX-License-Identifier: Apache-2.0
/// Which bytes of a tensor have come: private to the save room. Streams that come in order are one
/// range; any other order is as many as there are holes.
#ifndef FSTI_COVERAGE_H
#define FSTI_COVERAGE_H

#include "base/base.h"

typedef struct byte_range {
    uint64_t begin, end;
} byte_range;

typedef struct byte_coverage {
    byte_range *ranges; ///< sorted, apart from each other
    size_t count, capacity;
    uint64_t size_bytes; ///< of all of them
} byte_coverage;

/// Takes `range`. FST_E_ARGUMENT when bytes of it have come before: *overlap are the first such.
/// FST_E_NO_MEMORY also for more holes than any writer leaves.
fst_status fsti_coverage_claim(byte_coverage *coverage, byte_range range, byte_range *overlap);
/// The first bytes below `size_bytes` that have not come; false when there are none.
bool fsti_coverage_gap(const byte_coverage *coverage, uint64_t size_bytes, byte_range *gap);
void fsti_coverage_clear(byte_coverage *coverage);

#endif
