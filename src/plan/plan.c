// SPDX-License-Identifier: Apache-2.0
/// Builds a complete plan: items, delivery order and batches, then extents and chunks per batch.
#include "plan.h"

#include <stdlib.h> // qsort_r: the order depends on the plan, without global state

#include "plan_build.h"

void fsti_plan_clear(fsti_plan *plan) {
    fsti_free(plan->items);
    fsti_free(plan->delivery);
    fsti_free(plan->segments);
    fsti_free(plan->extents);
    fsti_free(plan->chunks);
    fsti_free(plan->batches);
    fsti_free(plan->shapes);
    *plan = (fsti_plan){0};
}

/// Orders items by file and tensor index, which follows file order. Equal positions keep the order
/// of the request.
static int compare_items(const void *a, const void *b, void *context) {
    const fsti_plan *plan = context;
    uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    const fsti_plan_item *x = &plan->items[left], *y = &plan->items[right];
    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    if (x->tensor != y->tensor) return x->tensor < y->tensor ? -1 : 1;
    return left < right ? -1 : left > right;
}

static int compare_segments(const void *a, const void *b, void *context) {
    const fsti_plan *plan = context;
    const fsti_plan_segment *x = a, *y = b;
    uint32_t file_x = plan->items[x->item].file, file_y = plan->items[y->item].file;
    if (file_x != file_y) return file_x < file_y ? -1 : 1;
    if (x->file_offset != y->file_offset) return x->file_offset < y->file_offset ? -1 : 1;
    return x->item < y->item ? -1 : x->item > y->item;
}

static void sort_indices(fsti_plan *plan, uint32_t *indices, size_t count) {
    for (size_t i = 1; i < count; i++) {
        if (compare_items(&indices[i - 1], &indices[i], plan) > 0) {
            qsort_r(indices, count, sizeof *indices, compare_items, plan);
            return;
        }
    }
}

static void sort_segments(fsti_plan *plan, size_t first) {
    size_t count = plan->segment_count - first;
    if (count == 0) return; // without segments there is no array
    fsti_plan_segment *segments = plan->segments + first;
    for (size_t i = 1; i < count; i++) {
        if (compare_segments(&segments[i - 1], &segments[i], plan) > 0) {
            qsort_r(segments, count, sizeof *segments, compare_segments, plan);
            return;
        }
    }
}

/// Bytes of an item in the batch's buffer, including alignment.
static uint64_t buffer_bytes_of(const plan_build *build, const fsti_plan_item *item) {
    return fsti_align_up(item->size_bytes, plan_alignment(build));
}

/// A batch ends before the limit would be exceeded or, without a limit, at the end of its file.
static bool ends_batch(const plan_build *build, const fsti_plan_batch *batch,
                       uint64_t workspace_bytes, size_t position) {
    const fsti_plan *plan = build->plan;
    const fsti_plan_item *item = &plan->items[plan->delivery[position]];
    if (batch->delivery_count == 0) return false;
    uint64_t limit = build->rules->batch_bytes_max;
    if (limit == UINT64_MAX) return item->file != plan->items[plan->delivery[position - 1]].file;
    // A linear extent can add two pages.
    return workspace_bytes + buffer_bytes_of(build, item) + 2 * FSTI_PLAN_PAGE_BYTES > limit;
}

static fst_status push_batch(plan_build *build, const fsti_plan_batch *batch) {
    fsti_plan *plan = build->plan;
    if (!fsti_array_reserve((void **)&plan->batches, &build->batch_capacity, plan->batch_count,
                            sizeof *plan->batches, UINT32_MAX))
        return fsti_error_memory(build->error, plan->batch_count * sizeof *plan->batches);
    plan->batches[plan->batch_count++] = *batch;
    return FST_OK;
}

static fst_status cut_batches(plan_build *build) {
    fsti_plan *plan = build->plan;
    fsti_plan_batch batch = {0};
    uint64_t workspace_bytes = 0;
    for (size_t i = 0; i < plan->item_count; i++) {
        if (ends_batch(build, &batch, workspace_bytes, i)) {
            FST_TRY(push_batch(build, &batch));
            batch = (fsti_plan_batch){.delivery_first = i};
            workspace_bytes = 0;
        }
        fsti_plan_item *item = &plan->items[plan->delivery[i]];
        item->batch = (uint32_t)plan->batch_count;
        batch.delivery_count++;
        batch.item_bytes += item->size_bytes;
        workspace_bytes += buffer_bytes_of(build, item);
    }
    return batch.delivery_count > 0 ? push_batch(build, &batch) : FST_OK;
}

/// Builds extents and chunks of one batch. Reads are in file order, whatever the delivery order.
static fst_status build_batch(plan_build *build, uint32_t batch_index, uint32_t *scratch) {
    fsti_plan *plan = build->plan;
    const fsti_plan_batch *batch = &plan->batches[batch_index];
    size_t count = batch->delivery_count, segment_first = plan->segment_count;
    for (size_t i = 0; i < count; i++) scratch[i] = plan->delivery[batch->delivery_first + i];
    // In file order the whole delivery is sorted already.
    if (build->rules->order != FST_ORDER_FILE) sort_indices(plan, scratch, count);
    for (size_t i = 0; i < count; i++) FST_TRY(fsti_plan_append_segments(build, scratch[i]));
    sort_segments(plan, segment_first);
    FST_TRY(fsti_plan_sort_layers(build, segment_first));
    return fsti_plan_build_extents(build, batch_index, segment_first);
}

static fst_status size_chunks(plan_build *build) {
    fsti_plan *plan = build->plan;
    uint64_t bytes = plan->bytes_requested, limit = build->rules->chunk_bytes_max;
    plan->chunk_bytes =
        bytes < FSTI_PLAN_SMALL_REQUEST_BYTES ? FSTI_PLAN_SMALL_CHUNK_BYTES : FSTI_PLAN_CHUNK_BYTES;
    bool is_view = build->rules->is_view;
    if (is_view) plan->chunk_bytes = FSTI_PLAN_VIEW_CHUNK_BYTES;
    if (limit != 0) plan->chunk_bytes = fsti_min(plan->chunk_bytes, limit);
    if (bytes / plan->chunk_bytes <= FSTI_PLAN_CHUNK_COUNT_MAX) return FST_OK;
    if (!is_view) return fsti_error_memory(build->error, bytes);
    while (bytes / plan->chunk_bytes > FSTI_PLAN_CHUNK_COUNT_MAX) plan->chunk_bytes *= 2;
    return FST_OK;
}

static fst_status build_plan(plan_build *build) {
    fsti_plan *plan = build->plan;
    size_t count = plan->item_count;
    plan->items = fsti_alloc_filled(count * sizeof *plan->items);
    plan->delivery = fsti_alloc(count * sizeof *plan->delivery);
    // A whole tensor has one segment; slices make the array grow.
    plan->segments = fsti_alloc_filled(count * sizeof *plan->segments);
    build->segment_capacity = count;
    uint32_t *scratch = fsti_alloc(count * sizeof *scratch);
    fst_status status = FST_OK;
    if (plan->items == NULL || plan->delivery == NULL || plan->segments == NULL || scratch == NULL)
        status = fsti_error_memory(build->error, count * sizeof *plan->items);
    if (status == FST_OK) status = fsti_plan_resolve_items(build);
    if (status == FST_OK) {
        for (size_t i = 0; i < count; i++) plan->delivery[i] = (uint32_t)i;
        if (build->rules->order == FST_ORDER_FILE) sort_indices(plan, plan->delivery, count);
        status = size_chunks(build);
    }
    if (status == FST_OK) {
        const fsti_gaps *gaps = &build->rules->gaps;
        build->gaps.any_bytes = fsti_min(gaps->any_bytes, plan->chunk_bytes - 1);
        build->gaps.most_bytes = fsti_min(gaps->most_bytes, plan->chunk_bytes - 1);
        status = cut_batches(build);
    }
    for (uint32_t i = 0; status == FST_OK && i < plan->batch_count; i++)
        status = build_batch(build, i, scratch);
    fsti_free(scratch);
    return status;
}

fst_status fsti_plan_make(const fsti_plan_file *files, const fsti_plan_want *wants,
                          size_t want_count, const fsti_plan_rules *rules, fsti_plan *out,
                          fst_error *error) {
    *out = (fsti_plan){.item_count = want_count};
    plan_build build = {
        .plan = out, .files = files, .wants = wants, .rules = rules, .error = error};
    if (want_count >= UINT32_MAX)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "too many tensors requested");
    fst_status status = build_plan(&build);
    if (status != FST_OK) fsti_plan_clear(out);
    return status;
}
