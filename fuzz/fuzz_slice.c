// SPDX-License-Identifier: Apache-2.0
/// Fuzzes slices and conversions by executing plans: the bytes must equal those of plain index
/// arithmetic, for any block size.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dtype/dtype_info.h"
#include "fuzz_input.h"
#include "fuzz_target.h"
#include "transfer/pipeline.h"

#define RANK_MAX 4
#define COUNT_MAX 4

typedef struct sample {
    fsti_header *header;
    char *file; ///< all of it
    uint64_t file_bytes;
} sample;

static bool make_sample(fuzz_input *input, sample *out) {
    char text[4096] = "{";
    size_t used = 1;
    uint64_t at = 0;
    for (uint32_t i = 0, count = 1 + fuzz_below(input, COUNT_MAX); i < count; i++) {
        fst_dtype dtype = (fst_dtype)fuzz_below(input, FST_DTYPE_COUNT);
        uint32_t rank = fuzz_below(input, RANK_MAX + 1);
        uint64_t elements = 1, bytes;
        used += (size_t)snprintf(text + used, sizeof text - used,
                                 "%s\"t%u\":{\"dtype\":\"%s\",\"shape\":[", i == 0 ? "" : ",", i,
                                 fsti_dtype_name(dtype));
        for (uint32_t d = 0; d < rank; d++) {
            uint32_t size = fuzz_below(input, 10);
            elements *= size;
            used +=
                (size_t)snprintf(text + used, sizeof text - used, "%s%u", d == 0 ? "" : ",", size);
        }
        if (fsti_dtype_size(dtype, elements, &bytes) != FST_OK) return false;
        used += (size_t)snprintf(text + used, sizeof text - used, "],\"data_offsets\":[%llu,%llu]}",
                                 (unsigned long long)at, (unsigned long long)(at + bytes));
        at += bytes;
    }
    text[used++] = '}';
    for (uint32_t odd = fuzz_below(input, 8); odd > 0; odd--) text[used++] = ' ';
    out->file_bytes = 8 + used + at;
    out->file = malloc(out->file_bytes + FSTI_PLAN_UNIT_BYTES_MAX);
    char *bytes = fsti_alloc_zeroed(used + FSTI_FORMAT_PADDING_BYTES, 1);
    require(out->file != NULL && bytes != NULL);
    for (uint64_t i = 0; i < out->file_bytes; i++) out->file[i] = (char)(i * 131 + i / 256 * 7);
    memcpy(bytes, text, used);
    fsti_header_rules rules = {.path = "fuzz", .file_size = out->file_bytes, .hash_key = 1};
    require(fsti_header_parse(bytes, used, &rules, &out->header, NULL) == FST_OK);
    return true;
}

/// The bytes of a slice, element by element; sub-byte types by rows, which slices never split.
static uint64_t copy_slice(const sample *from, const fsti_plan_want *want, char *target) {
    const fsti_tensor *tensor = &from->header->tensors[want->tensor];
    const uint64_t *shape = fsti_header_shape(from->header, tensor);
    const char *data = from->file + from->header->data_begin + tensor->begin;
    uint32_t bits = fsti_dtype_bits((fst_dtype)tensor->dtype);
    uint64_t count = 1, out_bits = 0;
    for (uint32_t d = 0; d < tensor->rank; d++) count *= shape[d];
    memset(target, 0, (count * bits + 7) / 8 + 1);
    for (uint64_t element = 0; element < count; element++) {
        bool inside = true;
        uint64_t left = element;
        for (uint32_t d = tensor->rank; want->slice_begin != NULL && d-- > 0; left /= shape[d]) {
            uint64_t place = left % shape[d];
            inside = inside && place >= want->slice_begin[d] && place < want->slice_end[d];
        }
        for (uint32_t bit = 0; inside && bit < bits; bit++, out_bits++) {
            uint64_t at = element * bits + bit;
            target[out_bits / 8] |= (char)((data[at / 8] >> at % 8 & 1) << out_bits % 8);
        }
    }
    return out_bits / 8;
}

static void check_item(const sample *from, const fsti_plan_want *want, const fsti_plan_item *item,
                       const char *arrived) {
    static char expected[65536], converted[65536 * 8];
    uint64_t size = copy_slice(from, want, expected);
    require(size == item->source_bytes);
    if (!item->is_converted) {
        require(size == item->size_bytes && memcmp(arrived, expected, size) == 0);
        return;
    }
    fsti_dtype_convert(item->conversion, converted, expected, size / item->conversion.from_bytes);
    require(memcmp(arrived, converted, item->size_bytes) == 0);
}

static void carry_out(fuzz_input *input, const sample *from, const fsti_plan *plan,
                      char **buffers) {
    for (size_t i = 0; i < plan->extent_count; i++) {
        const fsti_plan_extent *extent = &plan->extents[i];
        for (uint64_t begin = extent->begin; begin < extent->end;) {
            uint64_t end = fsti_min(begin + 1 + fuzz_below(input, 3000), extent->end);
            scatter_order order = {.plan = plan,
                                   .extent = extent,
                                   .buffer = buffers[extent->batch],
                                   .source = from->file + begin,
                                   .begin = begin,
                                   .end = end};
            fsti_scatter(&order);
            begin = end;
        }
    }
}

static void try_request(fuzz_input *input, const sample *from) {
    fsti_plan_want wants[COUNT_MAX] = {0};
    uint64_t numbers[COUNT_MAX][2][RANK_MAX];
    size_t count = 1 + fuzz_below(input, COUNT_MAX);
    for (size_t i = 0; i < count; i++) {
        wants[i].tensor = fuzz_below(input, (uint32_t)from->header->tensor_count);
        const fsti_tensor *tensor = &from->header->tensors[wants[i].tensor];
        const uint64_t *shape = fsti_header_shape(from->header, tensor);
        bool sliced = fuzz_below(input, 4) > 0;
        for (uint32_t d = 0; sliced && d < tensor->rank; d++) {
            numbers[i][0][d] = fuzz_below(input, (uint32_t)shape[d] + 1);
            numbers[i][1][d] =
                numbers[i][0][d] + fuzz_below(input, (uint32_t)(shape[d] - numbers[i][0][d]) + 1);
        }
        wants[i].slice_begin = sliced ? numbers[i][0] : NULL;
        wants[i].slice_end = sliced ? numbers[i][1] : NULL;
        fst_dtype other = (fst_dtype)fuzz_below(input, FST_DTYPE_COUNT);
        wants[i].dtype = fsti_dtype_convertible((fst_dtype)tensor->dtype, other)
                             ? other
                             : (fst_dtype)tensor->dtype;
    }
    fsti_plan_rules rules = {.order = (fst_order)fuzz_below(input, 2),
                             .batch_bytes_max = fuzz_below(input, 2) ? UINT64_MAX : 700,
                             .gaps = {fuzz_below(input, 300), fuzz_below(input, 600)}};
    fsti_plan_file files[] = {{.header = from->header}};
    fsti_plan plan;
    if (fsti_plan_make(files, wants, count, &rules, &plan, NULL) != FST_OK) return;
    char *buffers[COUNT_MAX] = {0};
    require(plan.batch_count <= COUNT_MAX);
    for (size_t i = 0; i < plan.batch_count; i++)
        buffers[i] = calloc(1, plan.batches[i].buffer_bytes + 1);
    carry_out(input, from, &plan, buffers);
    for (size_t i = 0; i < count; i++)
        if (plan.items[i].size_bytes > 0)
            check_item(from, &wants[i], &plan.items[i],
                       fsti_plan_item_address(&plan.items[i], buffers[plan.items[i].batch]));
    for (size_t i = 0; i < plan.batch_count; i++) free(buffers[i]);
    fsti_plan_clear(&plan);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input input = {data, size};
    sample from = {0};
    if (!make_sample(&input, &from)) return 0;
    try_request(&input, &from);
    free(from.file);
    fsti_header_unref(from.header);
    return 0;
}
