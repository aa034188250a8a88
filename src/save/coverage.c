// SPDX-License-Identifier: Apache-2.0
/// Ranges of bytes: see coverage.h.
#include "coverage.h"

#include <string.h>

#define RANGE_COUNT_MAX ((size_t)1 << 20)

/// The first range that ends at or after `at`.
static size_t find_range(const byte_coverage *coverage, uint64_t at) {
    size_t low = 0, high = coverage->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (coverage->ranges[middle].end < at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/// Whether two ranges share bytes. *common: the shared range.
static bool intersect(byte_range a, byte_range b, byte_range *common) {
    *common = (byte_range){fsti_max(a.begin, b.begin), fsti_min(a.end, b.end)};
    return common->begin < common->end;
}

static void remove_range(byte_coverage *coverage, size_t at) {
    memmove(coverage->ranges + at, coverage->ranges + at + 1,
            (--coverage->count - at) * sizeof *coverage->ranges);
}

static bool insert_range(byte_coverage *coverage, size_t at, byte_range range) {
    if (!fsti_array_reserve((void **)&coverage->ranges, &coverage->capacity, coverage->count,
                            sizeof *coverage->ranges, RANGE_COUNT_MAX))
        return false;
    memmove(coverage->ranges + at + 1, coverage->ranges + at,
            (coverage->count++ - at) * sizeof *coverage->ranges);
    coverage->ranges[at] = range;
    return true;
}

fst_status fsti_coverage_claim(byte_coverage *coverage, byte_range range, byte_range *overlap) {
    if (range.begin == range.end) return FST_OK;
    size_t at = find_range(coverage, range.begin);
    // The range found may only touch this one; then the next one may overlap.
    for (size_t i = at; i < coverage->count && i < at + 2; i++)
        if (intersect(coverage->ranges[i], range, overlap)) return FST_E_ARGUMENT;
    uint64_t size = range.end - range.begin;
    if (at < coverage->count && coverage->ranges[at].end == range.begin) {
        range.begin = coverage->ranges[at].begin;
        remove_range(coverage, at);
    }
    if (at < coverage->count && coverage->ranges[at].begin == range.end) {
        range.end = coverage->ranges[at].end;
        remove_range(coverage, at);
    }
    if (!insert_range(coverage, at, range)) return FST_E_NO_MEMORY;
    coverage->size_bytes += size;
    return FST_OK;
}

bool fsti_coverage_gap(const byte_coverage *coverage, uint64_t size_bytes, byte_range *gap) {
    if (coverage->size_bytes == size_bytes) return false;
    bool starts_at_zero = coverage->count > 0 && coverage->ranges[0].begin == 0;
    gap->begin = starts_at_zero ? coverage->ranges[0].end : 0;
    gap->end = coverage->count > (starts_at_zero ? 1u : 0u) ? coverage->ranges[starts_at_zero].begin
                                                            : size_bytes;
    return true;
}

void fsti_coverage_clear(byte_coverage *coverage) {
    fsti_free(coverage->ranges);
    *coverage = (byte_coverage){0};
}
