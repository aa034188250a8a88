// SPDX-License-Identifier: Apache-2.0
/// The sink of views: the bytes are where they belong; a chunk is done when its pages are there.
#include "sink.h"

/// How far the kernel is told of what comes, ahead of whoever waits for it: enough to keep a disk
/// busy.
#define ADVICE_CHUNKS_AHEAD 8u

/// Tells the kernel what is to be read up to some chunks behind `chunk`, in order: many small calls
/// that do not wait keep a disk busier than threads that each wait for their own.
static void advise_ahead(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts) {
    const fsti_plan *plan = pipeline->job.plan;
    pthread_mutex_lock(&pipeline->advice_lock);
    uint64_t limit = fsti_min((uint64_t)chunk + 1 + ADVICE_CHUNKS_AHEAD, plan->chunk_count);
    while (pipeline->advice_cursor < limit && !atomic_load(&pipeline->stop)) {
        uint32_t next = pipeline->advice_cursor++;
        const fsti_plan_chunk *range = &plan->chunks[next];
        if (atomic_load(&pipeline->chunks[next].step) == CHUNK_DONE ||
            pipeline->chunks[next].is_resident)
            continue;
        counts->read_count += fsti_file_advise(
            pipeline->job.files[plan->extents[range->extent].file], range->begin, range->end);
    }
    pthread_mutex_unlock(&pipeline->advice_lock);
}

/// Makes a chunk's pages present, after having brought them into the page cache.
static fst_status prepare_view(fsti_pipeline *pipeline, uint32_t chunk, sink_room *room,
                               worker_counts *counts, fst_error *error) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_chunk *range = &plan->chunks[chunk];
    const fsti_plan_extent *extent = &plan->extents[range->extent];
    bool is_resident = pipeline->chunks[chunk].is_resident;
    uint64_t start_ns = fsti_now_ns(), size = range->end - range->begin;
    if (!is_resident) advise_ahead(pipeline, chunk, counts);
    FST_TRY(fsti_file_populate(pipeline->job.files[extent->file],
                               pipeline->job.mappings[extent->file], range->begin, range->end,
                               error));
    uint64_t spent_ns = fsti_now_ns() - start_ns;
    counts->bytes_mapped += size;
    if (!is_resident) counts->bytes_read += size;
    if (!is_resident) counts->cache_bytes += size;
    *(is_resident ? &counts->populate_ns : &counts->read_ns) += spent_ns;
    FST_TRY(fsti_pipeline_check_file(pipeline, extent, range->begin, error));
    fsti_pipeline_finish(pipeline, chunk, counts);
    room->answer = SINK_DONE;
    return FST_OK;
}

/// Nothing is read to views.
static fst_status place_none(fsti_pipeline *pipeline, const sink_block *block,
                             worker_counts *counts, fst_error *error) {
    (void)pipeline;
    (void)block;
    (void)counts;
    (void)error;
    return FST_OK;
}

const fsti_sink fsti_sink_view = {
    .is_view = true,
    .has_slots = true,
    .prepare = prepare_view,
    .place = place_none,
    .complete = fsti_sink_finish,
    .reap = fsti_sink_reap_none,
    .wake = fsti_sink_wake_none,
};
