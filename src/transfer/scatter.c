// SPDX-License-Identifier: Apache-2.0
/// From a block of an extent to the places of its items.
#include "pipeline.h"

static uint64_t segment_end(const fsti_plan_segment *segment) {
    return segment->file_offset + (segment->run_count - 1) * segment->stride_bytes +
           segment->run_bytes;
}

/// The first segment of the extent that ends behind `begin`. Segments are ordered and disjoint.
static size_t first_segment(const fsti_plan *plan, const fsti_plan_extent *extent, uint64_t begin) {
    size_t low = extent->segment_first, high = low + extent->segment_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (segment_end(&plan->segments[middle]) <= begin)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/// Copies the part of one segment's runs that lies in [begin, end); returns its bytes.
static uint64_t scatter_segment(const fsti_plan_segment *segment, char *target, const char *source,
                                uint64_t begin, uint64_t end) {
    uint64_t copied = 0;
    uint32_t run = begin <= segment->file_offset
                       ? 0
                       : (uint32_t)((begin - segment->file_offset) / segment->stride_bytes);
    for (; run < segment->run_count; run++) {
        uint64_t run_begin = segment->file_offset + run * segment->stride_bytes;
        uint64_t from = fsti_max(begin, run_begin);
        uint64_t until = fsti_min(end, run_begin + segment->run_bytes);
        if (run_begin >= end) break;
        if (from >= until) continue;
        uint64_t place = segment->item_offset + run * segment->run_bytes + (from - run_begin);
        fsti_copy(target + place, source + (from - begin), until - from);
        copied += until - from;
    }
    return copied;
}

static void copy_linear(scatter_order *order) {
    const fsti_plan_extent *extent = order->extent;
    char *target = order->buffer + extent->buffer_offset + (order->begin - extent->begin);
    if (target == order->source) return;
    order->copied = order->end - order->begin;
    fsti_copy(target, order->source, order->copied);
}

void fsti_scatter(scatter_order *order) {
    const fsti_plan *plan = order->plan;
    const fsti_plan_extent *extent = order->extent;
    order->copied = 0;
    if (extent->linear) {
        copy_linear(order);
        return;
    }
    size_t segment_end_index = extent->segment_first + extent->segment_count;
    for (size_t i = first_segment(plan, extent, order->begin); i < segment_end_index; i++) {
        const fsti_plan_segment *segment = &plan->segments[i];
        if (segment->file_offset >= order->end) break;
        char *target = fsti_plan_item_address(&plan->items[segment->item], order->buffer);
        order->copied += scatter_segment(segment, target, order->source, order->begin, order->end);
    }
}

void fsti_pipeline_describe(const fsti_pipeline *pipeline, const fsti_plan_extent *extent,
                            uint64_t offset, fst_status status, int os_errno, fst_error *error) {
    const fsti_job *job = &pipeline->job;
    fsti_error_place place = {.file = fsti_file_path(job->files[extent->file]),
                              .byte_offset = offset,
                              .os_errno = os_errno};
    size_t index = first_segment(job->plan, extent, offset);
    if (index < extent->segment_first + extent->segment_count) {
        const fsti_header *header = job->headers[extent->file];
        const fsti_plan_item *item = &job->plan->items[job->plan->segments[index].item];
        const fsti_tensor *tensor = &header->tensors[item->tensor];
        place.tensor = fsti_header_name(header, tensor);
        place.tensor_size = tensor->name_size;
    }
    fsti_error_set(error, status, place, "%s", fsti_status_meaning(status));
}
