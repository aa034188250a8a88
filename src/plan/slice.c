// SPDX-License-Identifier: Apache-2.0
/// Resolves the requested tensors and slices to items, and N-dimensional slices to runs of bytes in
/// the file.
#include <inttypes.h>

#include "plan_build.h"

static fst_status refuse_want(const plan_build *build, const fsti_plan_want *want,
                              fst_status status, const char *what) {
    const fsti_header *header = build->files[want->file].header;
    const fsti_tensor *tensor = &header->tensors[want->tensor];
    fsti_error_location location = FSTI_NO_LOCATION;
    location.tensor = fsti_header_name(header, tensor);
    location.tensor_size = tensor->name_size;
    return fsti_error_set(build->error, status, location, "%s", what);
}

/// More than any address space.
#define PLAN_BYTES_MAX ((uint64_t)1 << 62)

/// Slices are computed in bits.
#define SLICED_BYTES_MAX ((uint64_t)1 << 60)

/// Computes the slice's shape and element count.
static fst_status resolve_slice(const plan_build *build, const fsti_plan_want *want,
                                uint64_t *shape, uint64_t *element_count) {
    const fsti_header *header = build->files[want->file].header;
    const fsti_tensor *tensor = &header->tensors[want->tensor];
    const uint64_t *full_shape = fsti_header_shape(header, tensor);
    *element_count = 1;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        uint64_t begin = want->slice_begin[i], end = want->slice_end[i];
        if (begin > end || end > full_shape[i])
            return refuse_want(build, want, FST_E_ARGUMENT, "slice out of range");
        shape[i] = end - begin;
        // In a valid header a product overflows only if a later dimension is zero.
        if (!fsti_mul(*element_count, shape[i], element_count))
            return refuse_want(build, want, FST_E_VALIDATION_OVERFLOW, "slice size overflows");
    }
    return FST_OK;
}

static bool is_whole(const fsti_plan_want *want) { return want->slice_begin == NULL; }

/// The conversion of a request. Tensors of one dtype usually follow each other, so the last one is
/// kept: a plan of many small tensors would spend a tenth of its time here.
static fsti_conversion find_conversion(plan_build *build, const fsti_tensor *tensor,
                                       const fsti_plan_want *want) {
    fst_dtype from = (fst_dtype)tensor->dtype, to = want->dtype;
    const fsti_conversion *last = &build->last_conversion;
    if (last->unit_elements == 0 || last->from != from || last->to != to)
        build->last_conversion = fsti_dtype_conversion(from, to);
    return build->last_conversion;
}

static fst_status resolve_item(plan_build *build, size_t index, uint64_t **shapes) {
    const fsti_plan_want *want = &build->wants[index];
    fsti_plan_item *item = &build->plan->items[index];
    const fsti_header *header = build->files[want->file].header;
    const fsti_tensor *tensor = &header->tensors[want->tensor];
    *item = (fsti_plan_item){.file = want->file,
                             .tensor = want->tensor,
                             .chunk_first = UINT32_MAX,
                             .segment_first = UINT32_MAX,
                             .destination = want->destination,
                             .source_bytes = tensor->end - tensor->begin,
                             .conversion = find_conversion(build, tensor, want),
                             .is_converted = (fst_dtype)tensor->dtype != want->dtype,
                             .shape = fsti_header_shape(header, tensor)};
    if (!is_whole(want)) {
        uint64_t element_count;
        if (item->source_bytes > SLICED_BYTES_MAX)
            return refuse_want(build, want, FST_E_VALIDATION_OVERFLOW,
                               "the tensor is too large to be sliced");
        item->shape = *shapes;
        FST_TRY(resolve_slice(build, want, *shapes, &element_count));
        *shapes += tensor->rank;
        if (fsti_dtype_size((fst_dtype)tensor->dtype, element_count, &item->source_bytes) != FST_OK)
            return refuse_want(build, want, FST_E_MISALIGNED_SLICE,
                               "the slice does not cover whole bytes");
    }
    // Bytes in the file to bytes in memory; both are whole numbers. A conversion can multiply the
    // size by 16, and sparse files can have 2^60 bytes.
    uint32_t unit_bytes = item->conversion.from_bytes;
    item->size_bytes = item->source_bytes;
    if (item->is_converted) {
        if (item->source_bytes % unit_bytes != 0)
            return refuse_want(build, want,
                               is_whole(want) ? FST_E_ARGUMENT : FST_E_MISALIGNED_SLICE,
                               "the elements do not fill whole bytes");
        if (!fsti_mul(item->source_bytes / unit_bytes, item->conversion.to_bytes,
                      &item->size_bytes))
            return refuse_want(build, want, FST_E_VALIDATION_OVERFLOW,
                               "the converted tensor's size overflows");
    }
    if (want->destination != NULL && want->destination_bytes != item->size_bytes)
        return refuse_want(build, want, FST_E_ARGUMENT, "the destination has a wrong size");
    // Sums of sizes, including partial pages, must not overflow either.
    if (item->size_bytes > PLAN_BYTES_MAX - build->plan->bytes_requested)
        return refuse_want(build, want, FST_E_VALIDATION_OVERFLOW, "the request's size overflows");
    build->plan->bytes_requested += item->size_bytes;
    return FST_OK;
}

fst_status fsti_plan_resolve_items(plan_build *build) {
    fsti_plan *plan = build->plan;
    uint64_t shape_count = 0;
    for (size_t i = 0; i < plan->item_count; i++) {
        const fsti_plan_want *want = &build->wants[i];
        if (!is_whole(want))
            shape_count += build->files[want->file].header->tensors[want->tensor].rank;
    }
    plan->shapes = fsti_alloc(shape_count * sizeof *plan->shapes);
    if (plan->shapes == NULL) return fsti_error_memory(build->error, shape_count * 8);
    uint64_t *shapes = plan->shapes;
    for (size_t i = 0; i < plan->item_count; i++) FST_TRY(resolve_item(build, i, &shapes));
    return FST_OK;
}

static fst_status push_segment(plan_build *build, const fsti_plan_segment *segment) {
    fsti_plan *plan = build->plan;
    if (!fsti_array_reserve((void **)&plan->segments, &build->segment_capacity, plan->segment_count,
                            sizeof *plan->segments, UINT32_MAX))
        return fsti_error_memory(build->error, plan->segment_count * sizeof *plan->segments);
    plan->segments[plan->segment_count++] = *segment;
    return FST_OK;
}

/// Rows too far apart for one read become separate segments.
static fst_status push_rows(plan_build *build, const fsti_plan_segment *rows) {
    bool dense = plan_reads_over(build, rows->stride_bytes - rows->run_bytes, rows->run_bytes,
                                 rows->stride_bytes);
    if (rows->run_count == 1 || dense) return push_segment(build, rows);
    fsti_plan_segment row = *rows;
    row.run_count = 1;
    row.stride_bytes = row.run_bytes;
    for (uint32_t i = 0; i < rows->run_count; i++) {
        FST_TRY(push_segment(build, &row));
        row.file_offset += rows->stride_bytes;
        row.item_offset += rows->run_bytes;
    }
    return FST_OK;
}

/// The shape of a slice in bytes: dimensions from `cut` on form one contiguous run.
typedef struct slice_geometry {
    uint32_t cut;
    uint64_t run_bytes, first_offset;
} slice_geometry;

/// Bits between neighbours along `dimension` in the full tensor.
static uint64_t pitch_bits(const fsti_tensor *tensor, const uint64_t *full_shape,
                           uint32_t dimension) {
    uint64_t bits = fsti_dtype_bits((fst_dtype)tensor->dtype);
    for (uint32_t i = tensor->rank; i-- > dimension + 1;) bits *= full_shape[i];
    return bits;
}

static fst_status measure_slice(const plan_build *build, const fsti_plan_want *want,
                                slice_geometry *out) {
    const fsti_header *header = build->files[want->file].header;
    const fsti_tensor *tensor = &header->tensors[want->tensor];
    const uint64_t *full_shape = fsti_header_shape(header, tensor);
    uint32_t cut = tensor->rank;
    while (cut > 0 && want->slice_begin[cut - 1] == 0 &&
           want->slice_end[cut - 1] == full_shape[cut - 1])
        cut--;
    // Dimension cut - 1 is the innermost one that is not complete: its elements form the run.
    uint64_t run_bits = 0, first_bits = 0;
    if (cut == 0) {
        run_bits = (tensor->end - tensor->begin) * 8;
    } else {
        run_bits = (want->slice_end[cut - 1] - want->slice_begin[cut - 1]) *
                   pitch_bits(tensor, full_shape, cut - 1);
        for (uint32_t i = 0; i < cut; i++) {
            uint64_t bits = want->slice_begin[i] * pitch_bits(tensor, full_shape, i);
            // An odd number of bits marks a slice that does not begin at whole bytes, or whose runs
            // do not. It is refused below, with runs that do not end at whole bytes.
            bool has_runs_in_bytes = i + 1 == cut || pitch_bits(tensor, full_shape, i) % 8 == 0;
            if (bits % 8 != 0 || !has_runs_in_bytes) run_bits |= 1;
            first_bits += bits;
        }
    }
    uint32_t unit_bytes = fsti_dtype_conversion((fst_dtype)tensor->dtype, want->dtype).from_bytes;
    if (want->dtype != (fst_dtype)tensor->dtype && run_bits / 8 % unit_bytes != 0)
        return refuse_want(build, want, FST_E_MISALIGNED_SLICE,
                           "the slice's elements do not fill whole bytes");
    if (run_bits % 8 != 0)
        return refuse_want(build, want, FST_E_MISALIGNED_SLICE,
                           "the slice begins or ends inside a byte");
    *out = (slice_geometry){cut == 0 ? 0 : cut - 1, run_bits / 8, first_bits / 8};
    return FST_OK;
}

/// Iterates over the dimensions outside the strided one, in row-major order.
typedef struct outer_walk {
    const fsti_plan_want *want;
    const fsti_tensor *tensor;
    const uint64_t *full_shape; ///< shape of the tensor
    uint64_t *counter;          ///< position in the slice, per dimension
    uint32_t count;
    uint64_t offset; ///< bytes from the slice's first element
} outer_walk;

/// Advances to the next position, like an odometer: the innermost dimension first. False at the
/// end.
static bool next_outer(outer_walk *walk) {
    for (uint32_t i = walk->count; i-- > 0;) {
        uint64_t pitch = pitch_bits(walk->tensor, walk->full_shape, i) / 8;
        uint64_t span = walk->want->slice_end[i] - walk->want->slice_begin[i];
        walk->offset += pitch;
        if (++walk->counter[i] < span) return true;
        walk->offset -= pitch * span;
        walk->counter[i] = 0;
    }
    return false;
}

/// Appends the rows at one position. A segment counts rows in 32 bits, so more are split.
static fst_status append_rows(plan_build *build, fsti_plan_segment *segment, uint64_t begin,
                              uint64_t row_count) {
    for (uint64_t done = 0; done < row_count; done += segment->run_count) {
        segment->run_count = (uint32_t)fsti_min(row_count - done, UINT32_MAX);
        segment->file_offset = begin + done * segment->stride_bytes;
        FST_TRY(push_rows(build, segment));
        segment->item_offset += segment->run_count * segment->run_bytes;
    }
    return FST_OK;
}

/// Maximum pieces of one slice. Each takes about 40 bytes in the plan, which would otherwise exceed
/// the requested data.
#define PIECE_COUNT_MAX ((size_t)1 << 22)

static fst_status check_pieces(const plan_build *build, const fsti_plan_want *want, size_t first) {
    if (build->plan->segment_count - first <= PIECE_COUNT_MAX) return FST_OK;
    return refuse_want(build, want, FST_E_ARGUMENT,
                       "the slice has more than 4194304 pieces. Slice fewer dimensions, or read "
                       "the full tensor");
}

static fst_status append_slice(plan_build *build, uint32_t item_index, fsti_plan_segment segment) {
    const fsti_plan_want *want = &build->wants[item_index];
    const fsti_header *header = build->files[want->file].header;
    const fsti_tensor *tensor = &header->tensors[want->tensor];
    slice_geometry geometry = {0};
    FST_TRY(measure_slice(build, want, &geometry));
    uint32_t rows = geometry.cut; // rows are counted along the dimension before the run
    outer_walk walk = {.want = want,
                       .tensor = tensor,
                       .full_shape = fsti_header_shape(header, tensor),
                       .count = rows == 0 ? 0 : rows - 1};
    segment.run_bytes = segment.stride_bytes = geometry.run_bytes;
    uint64_t row_count = 1;
    if (rows > 0) {
        row_count = want->slice_end[rows - 1] - want->slice_begin[rows - 1];
        segment.stride_bytes = pitch_bits(tensor, walk.full_shape, rows - 1) / 8;
    }
    walk.counter = fsti_alloc_zeroed(walk.count, sizeof *walk.counter);
    if (walk.counter == NULL) return fsti_error_memory(build->error, walk.count * 8u);
    uint64_t begin = segment.file_offset + geometry.first_offset;
    size_t first = build->plan->segment_count;
    fst_status status;
    do {
        status = append_rows(build, &segment, begin + walk.offset, row_count);
        if (status == FST_OK) status = check_pieces(build, want, first);
    } while (status == FST_OK && next_outer(&walk));
    fsti_free(walk.counter);
    return status;
}

fst_status fsti_plan_append_segments(plan_build *build, uint32_t item_index) {
    const fsti_plan_item *item = &build->plan->items[item_index];
    if (item->size_bytes == 0) return FST_OK;
    size_t first = build->plan->segment_count;
    fsti_plan_segment segment = {.file_offset = plan_tensor_offset(build, item),
                                 .run_bytes = item->source_bytes,
                                 .stride_bytes = item->source_bytes,
                                 .run_count = 1,
                                 .item = item_index};
    FST_TRY(is_whole(&build->wants[item_index]) ? push_segment(build, &segment)
                                                : append_slice(build, item_index, segment));
    // The segments array may have moved; this item's segments have not.
    const fsti_plan_segment *only = &build->plan->segments[first];
    bool one_piece = build->plan->segment_count == first + 1 && only->run_count == 1;
    build->plan->items[item_index].file_offset = one_piece ? only->file_offset : UINT64_MAX;
    return FST_OK;
}
