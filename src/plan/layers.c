// SPDX-License-Identifier: Apache-2.0
/// Separates segments that overlap.
#include <string.h>

#include "plan_build.h"

/// A layer with less than this fraction of the remaining bytes does not justify a separate pass.
/// Its segments are then read one by one.
#define LAYER_DIVISOR 8u

/// Whether a segment starts before `end`, which an earlier segment has reached.
static bool overlaps(const fsti_plan *plan, const fsti_plan_segment *segment, uint32_t file,
                     uint64_t end) {
    return plan->items[segment->item].file == file && segment->file_offset < end;
}

static bool has_overlaps(const fsti_plan *plan, size_t first) {
    for (size_t i = first + 1; i < plan->segment_count; i++) {
        const fsti_plan_segment *before = &plan->segments[i - 1];
        if (overlaps(plan, &plan->segments[i], plan->items[before->item].file,
                     fsti_plan_segment_end(before)))
            return true;
    }
    return false;
}

/// Moves the segments of one layer to the beginning and keeps the order of both groups. Returns the
/// index of the second group.
static size_t split_layer(fsti_plan *plan, size_t first, fsti_plan_segment *others) {
    size_t kept = first, other_count = 0;
    uint32_t file = UINT32_MAX;
    uint64_t end = 0;
    for (size_t i = first; i < plan->segment_count; i++) {
        const fsti_plan_segment segment = plan->segments[i];
        if (overlaps(plan, &segment, file, end)) {
            others[other_count++] = segment;
            continue;
        }
        file = plan->items[segment.item].file;
        end = fsti_plan_segment_end(&segment);
        plan->segments[kept++] = segment;
    }
    if (other_count > 0) memcpy(plan->segments + kept, others, other_count * sizeof *others);
    return kept;
}

fst_status fsti_plan_sort_layers(plan_build *build, size_t segment_first) {
    fsti_plan *plan = build->plan;
    size_t first = segment_first, count = plan->segment_count - first;
    if (!has_overlaps(plan, first)) return FST_OK;
    fsti_plan_segment *others = fsti_alloc(count * sizeof *others);
    if (others == NULL) return fsti_error_memory(build->error, count * sizeof *others);
    while (first < plan->segment_count) {
        size_t next = split_layer(plan, first, others);
        bool is_thin = next - first < (plan->segment_count - first) / LAYER_DIVISOR;
        first = is_thin ? plan->segment_count : next;
    }
    fsti_free(others);
    return FST_OK;
}
