// SPDX-License-Identifier: Apache-2.0
/// The steps of planning. Private to the plan module.
#ifndef FSTI_PLAN_BUILD_H
#define FSTI_PLAN_BUILD_H

#include "plan.h"

typedef struct plan_build {
    fsti_plan *plan;
    const fsti_plan_file *files;
    const fsti_plan_want *wants;
    const fsti_plan_rules *rules;
    fst_error *error;
    fsti_gaps gaps;
    size_t segment_capacity, extent_capacity, chunk_capacity, batch_capacity;
    fsti_conversion last_conversion; ///< of the item before; unit_elements 0: none
} plan_build;

static inline const fsti_tensor *plan_tensor(const plan_build *build, const fsti_plan_item *item) {
    return &build->files[item->file].header->tensors[item->tensor];
}

/// The offset of an item's tensor in its file.
static inline uint64_t plan_tensor_offset(const plan_build *build, const fsti_plan_item *item) {
    return build->files[item->file].header->data_begin + plan_tensor(build, item)->begin;
}

/// Alignment of scattered tensors.
static inline uint32_t plan_alignment(const plan_build *build) {
    return build->rules->to_device ? FSTI_PLAN_DEVICE_ALIGNMENT : FSTI_PLAN_TENSOR_ALIGNMENT;
}

/// Whether to read over a gap, in a read of `wanted_bytes` that grows to `read_bytes`.
static inline bool plan_reads_over(const plan_build *build, uint64_t gap_bytes,
                                   uint64_t wanted_bytes, uint64_t read_bytes) {
    if (gap_bytes <= build->gaps.any_bytes) return true;
    return gap_bytes <= build->gaps.most_bytes && read_bytes / FSTI_GAPS_READ_MAX <= wanted_bytes;
}

/// Fills items (sizes, shapes) from the requests and checks slices and destinations.
fst_status fsti_plan_resolve_items(plan_build *build);
/// Appends the segments of one item, in file order.
fst_status fsti_plan_append_segments(plan_build *build, uint32_t item_index);
/// Sorts segments [first, end) into layers without overlaps, so that each layer needs as few reads
/// as it would alone. Bytes requested twice are in two layers. (layers.c)
fst_status fsti_plan_sort_layers(plan_build *build, size_t segment_first);
/// Groups segments [first, end) of a batch into extents, places them and cuts chunks.
fst_status fsti_plan_build_extents(plan_build *build, uint32_t batch_index, size_t segment_first);

#endif
