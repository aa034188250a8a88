// SPDX-License-Identifier: Apache-2.0
/// Fuzzes planning: tensors of any dtype and shape, and arbitrary requests. A resulting plan must
/// cover every requested byte and give every item its own memory.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dtype/dtype_info.h"
#include "fuzz_input.h"
#include "fuzz_target.h"
#include "plan/plan.h"

#define TENSOR_COUNT_MAX 10
#define WANT_COUNT_MAX 12
#define RANK_MAX 4
#define FILE_BYTES_MAX ((uint64_t)1 << 34)

/// Large dimensions only where nothing is sliced within: a plan describes every piece of a slice.
static bool is_large;

static uint64_t take_dimension(fuzz_input *input) {
    uint8_t kind = fuzz_byte(input);
    if (kind < 200) return kind % 12;
    return (uint64_t)1 << (kind % (is_large ? 24 : 8));
}

/// A header of consecutive tensors; NULL if they would be too large.
static fsti_header *make_header(fuzz_input *input) {
    char text[8192] = "{";
    size_t used = 1;
    uint64_t at = 0;
    uint32_t count = 1 + fuzz_below(input, TENSOR_COUNT_MAX);
    for (uint32_t i = 0; i < count; i++) {
        fst_dtype dtype = (fst_dtype)fuzz_below(input, FST_DTYPE_COUNT);
        uint32_t rank = fuzz_below(input, RANK_MAX + 1);
        uint64_t elements = 1, bytes;
        used += (size_t)snprintf(text + used, sizeof text - used,
                                 "%s\"t%u\":{\"dtype\":\"%s\",\"shape\":[", i == 0 ? "" : ",", i,
                                 fsti_dtype_name(dtype));
        for (uint32_t d = 0; d < rank; d++) {
            uint64_t size = take_dimension(input);
            elements *= size;
            if (elements > FILE_BYTES_MAX) return NULL;
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%llu", d == 0 ? "" : ",",
                                     (unsigned long long)size);
        }
        if (fsti_dtype_size(dtype, elements, &bytes) != FST_OK) return NULL;
        used += (size_t)snprintf(text + used, sizeof text - used, "],\"data_offsets\":[%llu,%llu]}",
                                 (unsigned long long)at, (unsigned long long)(at + bytes));
        at += bytes;
        if (at > (is_large ? FILE_BYTES_MAX : FILE_BYTES_MAX >> 13)) return NULL;
    }
    text[used++] = '}';
    for (uint32_t odd = fuzz_below(input, 8); odd > 0; odd--) text[used++] = ' ';
    char *bytes = fsti_alloc_zeroed(used + FSTI_FORMAT_PADDING_BYTES, 1);
    require(bytes != NULL);
    memcpy(bytes, text, used);
    fsti_header_rules rules = {.path = "fuzz", .file_size = 8 + used + at, .hash_key = 1};
    fsti_header *header = NULL;
    require(fsti_header_parse(bytes, used, &rules, &header, NULL) == FST_OK);
    return header;
}

typedef struct request {
    fsti_plan_want wants[WANT_COUNT_MAX];
    uint64_t numbers[WANT_COUNT_MAX * 2 * RANK_MAX];
    size_t want_count;
    fsti_plan_rules rules;
} request;

static void take_request(fuzz_input *input, const fsti_header *header, request *out) {
    memset(out, 0, sizeof *out);
    out->want_count = fuzz_below(input, WANT_COUNT_MAX + 1);
    for (size_t i = 0; i < out->want_count; i++) {
        fsti_plan_want *want = &out->wants[i];
        uint64_t *numbers = out->numbers + i * 2 * RANK_MAX;
        want->tensor = fuzz_below(input, (uint32_t)header->tensor_count);
        const fsti_tensor *tensor = &header->tensors[want->tensor];
        const uint64_t *shape = fsti_header_shape(header, tensor);
        want->dtype = (fst_dtype)tensor->dtype;
        uint8_t flags = fuzz_byte(input);
        if (flags & 1) {
            for (uint32_t d = 0; d < tensor->rank; d++) {
                numbers[d] = is_large && d > 0 ? 0 : fuzz_below(input, 14);
                numbers[RANK_MAX + d] = (flags & 2) || (is_large && d > 0)
                                            ? shape[d]
                                            : numbers[d] + fuzz_below(input, 9);
            }
            want->slice_begin = numbers;
            want->slice_end = numbers + RANK_MAX;
        }
        fst_dtype other = (fst_dtype)fuzz_below(input, FST_DTYPE_COUNT);
        if ((flags & 4) && fsti_dtype_convertible(want->dtype, other)) want->dtype = other;
        if (flags & 8) {
            want->destination = (char *)16 + fuzz_byte(input);
            want->destination_bytes = flags & 16 ? fuzz_byte(input) : tensor->end - tensor->begin;
        }
    }
    static const uint64_t limits[] = {UINT64_MAX, 1, 100, 5000, 1 << 20};
    static const uint64_t gaps[] = {0, 1, 64, 4096, 65536};
    out->rules.order = (fst_order)fuzz_below(input, FST_ORDER_COUNT);
    out->rules.batch_bytes_max = limits[fuzz_below(input, 5)];
    out->rules.gaps = (fsti_gaps){gaps[fuzz_below(input, 5)], gaps[fuzz_below(input, 5)]};
    out->rules.is_view = !fuzz_below(input, 2);
    out->rules.chunk_bytes_max = out->rules.is_view ? 0 : (uint64_t)4 << 20;
}

static void check_items(const fsti_plan *plan) {
    for (size_t i = 0; i < plan->item_count; i++) {
        const fsti_plan_item *item = &plan->items[i];
        const fsti_plan_batch *batch = &plan->batches[item->batch];
        require(item->batch < plan->batch_count);
        if (item->size_bytes == 0) continue;
        require(item->chunk_first < item->chunk_end && item->chunk_end <= plan->chunk_count);
        require(item->chunk_first >= batch->chunk_first && item->chunk_end <= batch->chunk_end);
        if (item->destination != NULL) continue;
        require(item->buffer_offset + item->size_bytes <= batch->buffer_bytes);
        for (size_t k = 0; k < i; k++) {
            const fsti_plan_item *other = &plan->items[k];
            bool apart = other->batch != item->batch || other->destination != NULL ||
                         other->size_bytes == 0 ||
                         other->buffer_offset + other->size_bytes <= item->buffer_offset ||
                         item->buffer_offset + item->size_bytes <= other->buffer_offset;
            require(apart);
        }
    }
}

static void check_extents(const fsti_plan *plan, uint64_t file_bytes) {
    uint64_t of_items = 0, of_segments = 0, planned = 0;
    for (size_t i = 0; i < plan->item_count; i++) of_items += plan->items[i].source_bytes;
    for (size_t i = 0; i < plan->extent_count; i++) {
        const fsti_plan_extent *extent = &plan->extents[i];
        require(extent->begin < extent->end && extent->end <= file_bytes);
        require(extent->segment_first + extent->segment_count <= plan->segment_count);
        planned += extent->end - extent->begin;
        for (size_t k = 0; k < extent->segment_count; k++) {
            const fsti_plan_segment *segment = &plan->segments[extent->segment_first + k];
            uint64_t end = segment->file_offset + (segment->run_count - 1) * segment->stride_bytes +
                           segment->run_bytes;
            require(segment->file_offset >= extent->begin && end <= extent->end);
            of_segments += segment->run_bytes * segment->run_count;
        }
    }
    require(of_items == of_segments && planned == plan->bytes_planned);
    for (size_t i = 0; i < plan->chunk_count; i++) {
        const fsti_plan_chunk *chunk = &plan->chunks[i];
        const fsti_plan_extent *extent = &plan->extents[chunk->extent];
        bool first = i == 0 || plan->chunks[i - 1].extent != chunk->extent;
        bool last = i + 1 == plan->chunk_count || plan->chunks[i + 1].extent != chunk->extent;
        require(chunk->begin == (first ? extent->begin : plan->chunks[i - 1].end));
        require(!last || chunk->end == extent->end);
        require(chunk->begin < chunk->end && chunk->end - chunk->begin <= plan->chunk_bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input input = {data, size};
    is_large = fuzz_below(&input, 2) != 0;
    fsti_header *header = make_header(&input);
    if (header == NULL) return 0;
    request asked;
    take_request(&input, header, &asked);
    fsti_plan_file files[] = {{.header = header}};
    fsti_plan plan;
    fst_error error = {0};
    fst_status status =
        fsti_plan_make(files, asked.wants, asked.want_count, &asked.rules, &plan, &error);
    if (status == FST_OK) {
        check_items(&plan);
        check_extents(&plan, header->data_begin + FILE_BYTES_MAX);
    } else {
        require(error.message[0] != '\0' && plan.items == NULL);
    }
    fsti_plan_clear(&plan);
    fsti_header_unref(header);
    return 0;
}
