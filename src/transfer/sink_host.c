// SPDX-License-Identifier: Apache-2.0
/// The sink for CPU memory: a linear chunk can be read in place, others are scattered from the read
/// buffer.
#include <errno.h>
#include <stdio.h>

#include "sink.h"

/// Allocates pages where a chunk's bytes will be written: about the same part of the batch's memory
/// as the chunk is of the batch.
static void prepare_memory(fsti_pipeline *pipeline, uint32_t chunk, uint32_t batch) {
    fsti_buffer *buffer = pipeline->batches[batch].buffer;
    if (buffer == NULL || !buffer->is_fresh) return;
    const fsti_plan_batch *part = &pipeline->job.plan->batches[batch];
    uint64_t bytes = part->buffer_bytes / (part->chunk_end - part->chunk_first);
    uint64_t begin = bytes * (chunk - part->chunk_first);
    fsti_buffer_prepare(buffer, begin, begin + bytes);
}

/// Fewer bytes at a time are not written faster by a fill.
#define FILL_RUN_BYTES_MIN ((uint64_t)1 << 20)

/// Number of pieces in which a batch's bytes are copied; 0: some are converted, or engines write
/// them, so that a fill is impossible or not faster.
static uint64_t count_pieces(const fsti_pipeline *pipeline, const fsti_plan_batch *batch) {
    const fsti_plan *plan = pipeline->job.plan;
    uint64_t count = 0;
    for (uint32_t i = batch->chunk_first; i < batch->chunk_end; i++) {
        const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, i);
        bool is_first = plan->chunks[i].begin == extent->begin;
        if (extent->converts || !fsti_pipeline_engine(pipeline, i)->is_mapped) return 0;
        count++;
        for (size_t k = 0; is_first && !extent->linear && k < extent->segment_count; k++)
            count += plan->segments[extent->segment_first + k].run_count;
    }
    return count;
}

/// Begins a fill of a batch's memory if that is faster: for small pages and bytes that are copied
/// from mappings. In a small load such bytes get small pages at once.
static void begin_fill(fsti_pipeline *pipeline, uint32_t batch) {
    const fsti_plan_batch *part = &pipeline->job.plan->batches[batch];
    fsti_buffer *buffer = pipeline->batches[batch].buffer;
    // For bytes from a network, pages are chosen when the first ones have arrived.
    if (buffer == NULL || !buffer->is_fresh ||
        fsti_pipeline_engine(pipeline, part->chunk_first)->is_network)
        return;
    bool is_small = pipeline->job.plan->bytes_requested <= FSTI_UNMEASURED_LOAD_BYTES;
    uint64_t pieces = count_pieces(pipeline, part);
    bool may_fill = pieces > 0 && part->buffer_bytes / pieces >= FILL_RUN_BYTES_MIN &&
                    (is_small || fsti_buffer_has_small_pages(buffer));
    if (may_fill && pipeline->fill_fd < 0) pipeline->fill_fd = fsti_fill_open();
    may_fill = may_fill && pipeline->fill_fd >= 0;
    fsti_buffer_choose_late(buffer, may_fill);
    if (may_fill && fsti_buffer_has_small_pages(buffer))
        fsti_buffer_begin_fill(buffer, pipeline->fill_fd);
}

fst_status fsti_host_prepare(fsti_pipeline *pipeline, uint32_t chunk, sink_target *target,
                             worker_counts *counts, fst_error *error) {
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, chunk);
    bool is_returned = false;
    target->answer = SINK_DONE;
    if (fsti_pipeline_pages_in(pipeline, chunk))
        FST_TRY(fsti_page_in_chunk(pipeline, chunk, &is_returned, counts, error));
    if (is_returned) return FST_OK;
    prepare_memory(pipeline, chunk, extent->batch);
    target->answer = SINK_READY;
    target->base = NULL;
    if (!extent->linear) return FST_OK;
    target->base = pipeline->batches[extent->batch].base + extent->buffer_offset;
    target->origin = extent->begin;
    return FST_OK;
}

/// Copies a block; from a mapping with a guard against truncated files.
fst_status fsti_sink_copy(fsti_pipeline *pipeline, const sink_block *block,
                          void (*copy)(void *context), void *context, fst_error *error) {
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, block->chunk);
    bool good = true;
    if (block->is_mapped)
        good = fsti_io_guarded(copy, context, block->source, block->needed_end - block->begin);
    else
        copy(context);
    if (good) return FST_OK;
    FST_TRY(fsti_pipeline_check_file(pipeline, extent, block->begin, error));
    fsti_pipeline_describe(pipeline, extent, block->begin, FST_E_IO, EIO, error);
    return FST_E_IO;
}

static void run_scatter(void *order) { fsti_scatter(order); }

fst_status fsti_host_place(fsti_pipeline *pipeline, const sink_block *block, worker_counts *counts,
                           fst_error *error) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, block->chunk);
    scatter_order order = {.plan = plan,
                           .extent = extent,
                           .buffer = pipeline->batches[extent->batch].base,
                           .memory = pipeline->batches[extent->batch].buffer,
                           .source = block->source,
                           .begin = block->begin,
                           .end = block->end,
                           .places = pipeline->places};
    FST_TRY(fsti_sink_copy(pipeline, block, run_scatter, &order, error));
    counts->bytes_copied += order.copied;
    counts->bytes_converted += order.converted;
    return FST_OK;
}

fst_status fsti_sink_finish(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                            fst_error *error) {
    (void)error;
    fsti_pipeline_finish(pipeline, chunk, counts);
    return FST_OK;
}

fst_status fsti_sink_reap_none(fsti_pipeline *pipeline, bool *any, worker_counts *counts,
                               fst_error *error) {
    (void)pipeline;
    (void)counts;
    (void)error;
    *any = false;
    return FST_OK;
}

void fsti_sink_populate(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_plan_extent *extent = &pipeline->job.plan->extents[range->extent];
    uint64_t shift = extent->buffer_offset - extent->begin; // may wrap; the sums wrap back
    uint64_t start_ns = fsti_now_ns();
    fsti_buffer *buffer;
    // The batch may be completed, returned and released meanwhile, so hold its memory.
    fsti_pipeline_buffer(pipeline, extent->batch, &buffer);
    if (buffer == NULL) return;
    fsti_buffer_populate(buffer, range->begin + shift, range->end + shift);
    fsti_buffer_unref(buffer);
    counts->populate_ns += fsti_now_ns() - start_ns;
    // Publish counts now: a helper finishes no chunk, and statistics are read after the last one.
    fsti_pipeline_count(pipeline, counts);
}

void fsti_sink_wake_none(fsti_pipeline *pipeline) { (void)pipeline; }

void fsti_host_explain(fsti_pipeline *pipeline, char *text, size_t size) {
    const char *words = fsti_page_in_text(pipeline);
    snprintf(text, size, "%s%s", words[0] != '\0' ? ", " : "", words);
}

const fsti_sink fsti_sink_host = {
    .prepare = fsti_host_prepare,
    .begin_batch = begin_fill,
    .place = fsti_host_place,
    .complete = fsti_sink_finish,
    .reap = fsti_sink_reap_none,
    .wake = fsti_sink_wake_none,
    .populate = fsti_sink_populate,
    .explain = fsti_host_explain,
};
