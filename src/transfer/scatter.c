// SPDX-License-Identifier: Apache-2.0
/// Copies a block of an extent to its items.
#include "pipeline.h"

/// The part of a block that belongs to one run of a segment.
typedef struct run_part {
    uint64_t begin, until; ///< bytes of the file
    uint64_t item_place;   ///< position of `begin` in the item, in bytes of the file
} run_part;

/// A conversion unit belongs to the block where it starts; the block has enough bytes after its
/// end.
static void move_to_units(run_part *part, uint64_t run_begin, uint64_t run_end,
                          uint32_t unit_bytes) {
    uint64_t skip = (unit_bytes - (part->begin - run_begin) % unit_bytes) % unit_bytes;
    uint64_t more = (unit_bytes - (part->until - run_begin) % unit_bytes) % unit_bytes;
    part->begin += skip;
    part->item_place += skip;
    part->until = fsti_min(part->until + more, run_end);
}

/// Copies a part, or passes it to `emit`. Returns its size in the file.
static uint64_t place_part(const scatter_order *order, const fsti_plan_item *item,
                           const run_part *part) {
    uint64_t size = part->until - part->begin, item_offset = part->item_place;
    const fsti_conversion *conversion = &item->conversion;
    const char *source = order->source + (part->begin - order->begin);
    if (item->is_converted)
        item_offset = item_offset / conversion->from_bytes * conversion->to_bytes;
    char *target = fsti_plan_item_address(item, order->buffer) + item_offset;
    if (order->emit != NULL)
        order->emit(order->emit_context, item, target, source, size);
    else if (item->is_converted)
        fsti_dtype_convert(*conversion, target, source, size / conversion->from_bytes);
    else
        fsti_buffer_fill(order->memory, target, source, size);
    return size;
}

/// Copies the parts of one segment's runs that lie in the block.
static void scatter_segment(scatter_order *order, const fsti_plan_segment *segment) {
    const fsti_plan_item *item = &order->plan->items[segment->item];
    if (order->places != NULL && atomic_load(&order->places[segment->item])) return;
    uint32_t run = order->begin <= segment->file_offset
                       ? 0
                       : (uint32_t)((order->begin - segment->file_offset) / segment->stride_bytes);
    for (; run < segment->run_count; run++) {
        uint64_t run_begin = segment->file_offset + run * segment->stride_bytes;
        uint64_t run_end = run_begin + segment->run_bytes;
        if (run_begin >= order->end) break;
        run_part part = {.begin = fsti_max(order->begin, run_begin),
                         .until = fsti_min(order->end, run_end)};
        if (part.begin >= part.until) continue;
        part.item_place =
            segment->item_offset + run * segment->run_bytes + (part.begin - run_begin);
        if (item->is_converted)
            move_to_units(&part, run_begin, run_end, item->conversion.from_bytes);
        if (part.begin >= part.until) continue;
        uint64_t size = place_part(order, item, &part);
        order->copied += size;
        if (item->is_converted) order->converted += size;
    }
}

static void copy_linear(scatter_order *order) {
    const fsti_plan_extent *extent = order->extent;
    char *target = order->buffer + extent->buffer_offset + (order->begin - extent->begin);
    if (target == order->source) return;
    order->copied = order->end - order->begin;
    fsti_buffer_fill(order->memory, target, order->source, order->copied);
}

void fsti_scatter(scatter_order *order) {
    const fsti_plan *plan = order->plan;
    const fsti_plan_extent *extent = order->extent;
    order->copied = order->converted = 0;
    if (extent->linear) {
        copy_linear(order);
        return;
    }
    size_t segment_end_index = extent->segment_first + extent->segment_count;
    for (size_t i = fsti_plan_first_segment(plan, extent, order->begin); i < segment_end_index;
         i++) {
        const fsti_plan_segment *segment = &plan->segments[i];
        if (segment->file_offset >= order->end) break;
        scatter_segment(order, segment);
    }
}
