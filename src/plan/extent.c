// SPDX-License-Identifier: Apache-2.0
/// Groups the segments of a batch into extents, assigns buffer offsets, and cuts chunks.
#include "plan_build.h"

/// Smaller pieces are cheaper to copy again than to read separately.
#define SMALL_BYTES ((uint64_t)1 << 20)
/// A linear extent takes whole pages. Smaller amounts are scattered instead.
#define LINEAR_BYTES_MIN ((uint64_t)64 << 10)

/// Smaller loads to a device are not worth three more copies.
#define SMALL_START_BYTES_MIN ((uint64_t)32 << 20)
#define SMALL_START_SHIFT 3u

/// Whether the item can have the layout of the file in the buffer: one piece, without a
/// destination, and at a file offset that satisfies the alignment of its dtype or device.
static bool may_be_linear(const plan_build *build, const fsti_plan_segment *segment) {
    const fsti_plan_item *item = &build->plan->items[segment->item];
    if (item->destination != NULL || item->is_converted) return false;
    if (segment->run_bytes != item->size_bytes) return false;
    uint32_t alignment = fsti_dtype_alignment((fst_dtype)plan_tensor(build, item)->dtype);
    bool is_vector = build->rules->to_device && item->size_bytes >= FSTI_PLAN_VECTOR_BYTES;
    if (is_vector && alignment < FSTI_PLAN_VECTOR_BYTES) alignment = FSTI_PLAN_VECTOR_BYTES;
    return segment->file_offset % alignment == 0;
}

/// A linear extent keeps gaps in memory, so at most this fraction of its requested bytes may be
/// gaps.
#define UNWANTED_PART 16u

/// Extends an extent to the boundaries of digested pieces.
static void widen_extent(const plan_build *build, fsti_plan_extent *extent) {
    uint64_t unit = build->rules->verify_bytes;
    if (unit == 0) return;
    extent->begin = fsti_align_down(extent->begin, unit);
    extent->end = fsti_min(fsti_align_up(extent->end, unit), build->files[extent->file].size_bytes);
}

static fst_status push_extent(plan_build *build, fsti_plan_extent *extent) {
    fsti_plan *plan = build->plan;
    widen_extent(build, extent);
    uint64_t unwanted = extent->end - extent->begin - extent->wanted_bytes;
    if (unwanted > extent->wanted_bytes / UNWANTED_PART) extent->linear = false;
    if (!fsti_array_reserve((void **)&plan->extents, &build->extent_capacity, plan->extent_count,
                            sizeof *plan->extents, UINT32_MAX))
        return fsti_error_memory(build->error, plan->extent_count * sizeof *plan->extents);
    plan->extents[plan->extent_count++] = *extent;
    return FST_OK;
}

/// Whether both need the same digested piece, which must be read only once.
static bool shares_digest(const plan_build *build, const fsti_plan_extent *extent,
                          const fsti_plan_segment *segment) {
    uint64_t unit = build->rules->verify_bytes;
    return unit != 0 && (extent->end - 1) / unit == segment->file_offset / unit;
}

/// Adds the segment to the extent if it follows closely and reading over the gap pays off.
static bool join_extent(const plan_build *build, fsti_plan_extent *extent,
                        const fsti_plan_segment *segment, uint32_t file, bool linear) {
    if (extent->segment_count == 0 || extent->file != file) return false;
    if (segment->file_offset < extent->end) return false;
    uint64_t gap = segment->file_offset - extent->end, end = fsti_plan_segment_end(segment);
    uint64_t wanted = extent->wanted_bytes + segment->run_count * segment->run_bytes;
    if (!plan_reads_over(build, gap, wanted, end - extent->begin) &&
        !shares_digest(build, extent, segment))
        return false;
    if (linear != extent->linear || (linear && gap > FSTI_PLAN_PAGE_BYTES)) {
        // Keep a large linear part separate, because scattering it would add a copy. In a linear
        // extent a gap also takes memory, so only small ones are read over.
        uint64_t linear_bytes =
            extent->linear ? extent->end - extent->begin : end - segment->file_offset;
        if (linear_bytes >= SMALL_BYTES) return false;
        extent->linear = false;
    }
    extent->end = end;
    extent->wanted_bytes = wanted;
    extent->segment_count++;
    return true;
}

/// Groups the segments from `segment_first` on, which are in file order, into extents: each joins
/// the extent before it if reading over the gap pays off, or else starts a new one.
static fst_status cut_extents(plan_build *build, uint32_t batch_index, size_t segment_first) {
    const fsti_plan *plan = build->plan;
    fsti_plan_extent extent = {0};
    for (size_t i = segment_first; i < plan->segment_count; i++) {
        const fsti_plan_segment *segment = &plan->segments[i];
        uint32_t file = plan->items[segment->item].file;
        bool linear = may_be_linear(build, segment);
        if (join_extent(build, &extent, segment, file, linear)) continue;
        if (extent.segment_count > 0) FST_TRY(push_extent(build, &extent));
        extent = (fsti_plan_extent){.begin = segment->file_offset,
                                    .end = fsti_plan_segment_end(segment),
                                    .wanted_bytes = segment->run_count * segment->run_bytes,
                                    .segment_first = i,
                                    .segment_count = 1,
                                    .file = file,
                                    .batch = batch_index,
                                    .linear = linear};
    }
    return extent.segment_count > 0 ? push_extent(build, &extent) : FST_OK;
}

/// A linear extent keeps its offset within the page and owns the pages at its ends.
static uint64_t place_linear(fsti_plan *plan, fsti_plan_extent *extent, uint64_t cursor) {
    extent->buffer_offset =
        fsti_align_up(cursor, FSTI_PLAN_PAGE_BYTES) + extent->begin % FSTI_PLAN_PAGE_BYTES;
    for (size_t i = 0; i < extent->segment_count; i++) {
        const fsti_plan_segment *segment = &plan->segments[extent->segment_first + i];
        plan->items[segment->item].buffer_offset =
            extent->buffer_offset + (segment->file_offset - extent->begin);
    }
    uint64_t end = extent->buffer_offset + (extent->end - extent->begin);
    return fsti_align_up(end, FSTI_PLAN_PAGE_BYTES);
}

/// Packs items of other extents. An item with several segments is placed at its first.
static uint64_t place_scattered(const plan_build *build, const fsti_plan_extent *extent,
                                uint64_t cursor) {
    fsti_plan *plan = build->plan;
    uint32_t alignment = plan_alignment(build);
    for (size_t i = 0; i < extent->segment_count; i++) {
        const fsti_plan_segment *segment = &plan->segments[extent->segment_first + i];
        fsti_plan_item *item = &plan->items[segment->item];
        if (segment->item_offset != 0 || item->destination != NULL) continue;
        item->buffer_offset = fsti_align_up(cursor, alignment);
        cursor = item->buffer_offset + item->size_bytes;
    }
    return cursor;
}

static void mark_conversions(const fsti_plan *plan, fsti_plan_extent *extent) {
    for (size_t i = 0; i < extent->segment_count && !extent->converts && !extent->linear; i++)
        extent->converts = plan->items[plan->segments[extent->segment_first + i].item].is_converted;
}

/// The last segment of an extent that starts at or before `offset`; the first one starts there.
static const fsti_plan_segment *segment_at(const fsti_plan *plan, const fsti_plan_extent *extent,
                                           uint64_t offset) {
    size_t low = extent->segment_first, high = low + extent->segment_count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (plan->segments[middle].file_offset <= offset)
            low = middle;
        else
            high = middle;
    }
    return &plan->segments[low];
}

/// A device's bus is idle until the first chunk is read, so the first ones are small: an eighth of
/// a chunk, and then twice as far each time. Chunks of verified loads end where digested pieces do.
static uint64_t chunk_step(const plan_build *build) {
    const fsti_plan *plan = build->plan;
    bool starts_small = build->rules->to_device && build->rules->verify_bytes == 0 &&
                        plan->bytes_requested >= SMALL_START_BYTES_MIN;
    if (!starts_small || plan->chunk_count >= SMALL_START_SHIFT) return plan->chunk_bytes;
    return plan->chunk_bytes >> (SMALL_START_SHIFT - plan->chunk_count);
}

/// The end of a chunk that starts at `begin`: a multiple of the chunk size counted from `origin`.
/// For derived files, the end of a piece that is decoded as a unit.
static uint64_t end_of_chunk(const plan_build *build, const fsti_plan_extent *extent,
                             uint64_t origin, uint64_t begin) {
    const fsti_plan *plan = build->plan;
    uint64_t made = build->files[extent->file].made_bytes;
    uint64_t step = made == 0 ? chunk_step(build) : plan->chunk_bytes;
    if (made == 0)
        return fsti_min(fsti_align_down(begin - origin, step) + step + origin, extent->end);
    // One page less, because reads start at the page boundary before a chunk.
    uint64_t end = begin + step - FSTI_PLAN_PAGE_BYTES;
    if (end >= extent->end) return extent->end;
    const fsti_plan_item *item = &plan->items[segment_at(plan, extent, end)->item];
    uint64_t tensor = plan_tensor_offset(build, item);
    uint64_t cut = end < tensor ? end : tensor + (end - tensor) / made * made;
    return cut > begin ? cut : end;
}

/// The chunk, from `first` on, that contains byte `offset` of the file; usually `first`.
static uint32_t chunk_of(const fsti_plan *plan, uint32_t first, uint64_t offset) {
    uint32_t low = first, high = (uint32_t)plan->chunk_count;
    if (offset < plan->chunks[first].end) return first;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (plan->chunks[middle].begin <= offset)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/// Cuts an extent at multiples of the chunk size, counted from its first page (for views from the
/// start of the file), and stores in each item which chunks have its bytes.
static fst_status cut_chunks(plan_build *build, uint32_t extent_index) {
    fsti_plan *plan = build->plan;
    const fsti_plan_extent *extent = &plan->extents[extent_index];
    uint64_t origin = fsti_align_down(extent->begin, build->rules->is_view ? plan->chunk_bytes
                                                                           : FSTI_PLAN_PAGE_BYTES);
    uint32_t low = (uint32_t)plan->chunk_count;
    for (uint64_t begin = extent->begin; begin < extent->end;) {
        uint64_t end = end_of_chunk(build, extent, origin, begin);
        if (!fsti_array_reserve((void **)&plan->chunks, &build->chunk_capacity, plan->chunk_count,
                                sizeof *plan->chunks, UINT32_MAX))
            return fsti_error_memory(build->error, plan->chunk_count * sizeof *plan->chunks);
        plan->chunks[plan->chunk_count++] = (fsti_plan_chunk){begin, end, extent_index};
        begin = end;
    }
    for (size_t i = 0; i < extent->segment_count; i++) {
        const fsti_plan_segment *segment = &plan->segments[extent->segment_first + i];
        fsti_plan_item *item = &plan->items[segment->item];
        uint32_t number = (uint32_t)(extent->segment_first + i);
        if (number < item->segment_first) item->segment_first = number;
        item->segment_end = number + 1;
        low = chunk_of(plan, low, segment->file_offset); // segments are in file order
        uint32_t high = chunk_of(plan, low, fsti_plan_segment_end(segment) - 1);
        if (low < item->chunk_first) item->chunk_first = low;
        if (high + 1 > item->chunk_end) item->chunk_end = high + 1;
    }
    plan->bytes_planned += extent->end - extent->begin;
    return FST_OK;
}

fst_status fsti_plan_build_extents(plan_build *build, uint32_t batch_index, size_t segment_first) {
    fsti_plan *plan = build->plan;
    fsti_plan_batch *batch = &plan->batches[batch_index];
    size_t extent_first = plan->extent_count;
    FST_TRY(cut_extents(build, batch_index, segment_first));
    batch->chunk_first = (uint32_t)plan->chunk_count;
    uint64_t cursor = 0;
    // Linear extents first, so that their 2 MiB boundaries coincide with the buffer's.
    for (size_t i = extent_first; i < plan->extent_count; i++) {
        fsti_plan_extent *extent = &plan->extents[i];
        if (extent->end - extent->begin < LINEAR_BYTES_MIN) extent->linear = false;
        if (extent->linear) cursor = place_linear(plan, extent, cursor);
    }
    for (size_t i = extent_first; i < plan->extent_count; i++) {
        mark_conversions(plan, &plan->extents[i]);
        if (!plan->extents[i].linear) cursor = place_scattered(build, &plan->extents[i], cursor);
        FST_TRY(cut_chunks(build, (uint32_t)i));
    }
    batch->chunk_end = (uint32_t)plan->chunk_count;
    batch->buffer_bytes = fsti_align_up(cursor, FSTI_PLAN_PAGE_BYTES);
    return FST_OK;
}

size_t fsti_plan_first_segment(const fsti_plan *plan, const fsti_plan_extent *extent,
                               uint64_t begin) {
    size_t low = extent->segment_first, high = low + extent->segment_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (fsti_plan_segment_end(&plan->segments[middle]) <= begin)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}
