// SPDX-License-Identifier: Apache-2.0
/// The sink of views: the bytes are where they belong; a chunk is done when its pages are there.
#include "sink.h"

/// How far the kernel is told of what comes, ahead of whoever waits for it: enough to keep a disk
/// busy. Huge pages are asked for piece by piece, so that what proves dear is not gone on with.
#define ADVICE_BYTES_AHEAD ((uint64_t)64 << 20)
#define HUGE_BYTES_AHEAD ((uint64_t)16 << 20)
/// A first look at a page that takes longer found memory that the host had to find; seen so often,
/// it was no accident.
#define LOOK_NS_MAX 700u
#define DEAR_COUNT_MAX 2u

static fsti_view_way way_of_chunk(fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_extent *extent = &plan->extents[plan->chunks[chunk].extent];
    return fsti_policy_view(extent->end - extent->begin,
                            atomic_load(&pipeline->dear_count) >= DEAR_COUNT_MAX);
}

/// Tells the kernel of a chunk that is absent. The lock is held.
static void tell_of_chunk(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_plan_extent *extent = &pipeline->job.plan->extents[range->extent];
    if (way_of_chunk(pipeline, chunk) == FSTI_VIEW_BY_ADVICE) {
        counts->read_count +=
            fsti_file_advise(pipeline->job.files[extent->file], range->begin, range->end);
        return;
    }
    if (range->begin < pipeline->huge_end && range->extent == pipeline->huge_extent) return;
    pipeline->huge_extent = range->extent;
    pipeline->huge_end = fsti_min(range->begin + HUGE_BYTES_AHEAD, extent->end);
    fsti_file_expect(pipeline->job.mappings[extent->file], range->begin, pipeline->huge_end);
}

/// Tells the kernel what is to be read up to some chunks behind `chunk`, in order: many small calls
/// that do not wait keep a disk busier than threads that each wait for their own.
static void look_ahead(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts) {
    const fsti_plan *plan = pipeline->job.plan;
    pthread_mutex_lock(&pipeline->advice_lock);
    bool by_advice = way_of_chunk(pipeline, chunk) == FSTI_VIEW_BY_ADVICE;
    uint64_t ahead = by_advice ? ADVICE_BYTES_AHEAD / plan->chunk_bytes : 0;
    uint64_t limit = fsti_min(chunk + 1 + ahead, plan->chunk_count);
    while (pipeline->advice_cursor < limit && !atomic_load(&pipeline->stop)) {
        uint32_t next = pipeline->advice_cursor++;
        if (atomic_load(&pipeline->chunks[next].step) != CHUNK_DONE &&
            !pipeline->chunks[next].is_resident)
            tell_of_chunk(pipeline, next, counts);
    }
    pthread_mutex_unlock(&pipeline->advice_lock);
}

/// An absent chunk has come in huge pages, as one: were they dear?
static void judge_pages(fsti_pipeline *pipeline, const fsti_file *file,
                        const fsti_plan_chunk *range, worker_counts *counts) {
    counts->read_count++;
    if (fsti_file_look_ns(file, range->begin, range->end) > LOOK_NS_MAX)
        atomic_fetch_add(&pipeline->dear_count, 1);
}

/// Makes a chunk's pages present, after having brought them into the page cache.
static fst_status prepare_view(fsti_pipeline *pipeline, uint32_t chunk, sink_room *room,
                               worker_counts *counts, fst_error *error) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_chunk *range = &plan->chunks[chunk];
    const fsti_plan_extent *extent = &plan->extents[range->extent];
    bool is_resident = pipeline->chunks[chunk].is_resident;
    uint64_t start_ns = fsti_now_ns(), size = range->end - range->begin;
    if (!is_resident) look_ahead(pipeline, chunk, counts);
    FST_TRY(fsti_file_populate(pipeline->job.files[extent->file],
                               pipeline->job.mappings[extent->file], range->begin, range->end,
                               error));
    if (!is_resident && way_of_chunk(pipeline, chunk) == FSTI_VIEW_BY_HUGE_PAGES)
        judge_pages(pipeline, pipeline->job.files[extent->file], range, counts);
    uint64_t spent_ns = fsti_now_ns() - start_ns;
    counts->bytes_mapped += size;
    if (!is_resident) counts->bytes_read += size;
    if (!is_resident) counts->cache_bytes += size;
    *(is_resident ? &counts->populate_ns : &counts->read_ns) += spent_ns;
    FST_TRY(fsti_pipeline_check_file(pipeline, extent, range->begin, error));
    fsti_verify_range view = {.begin = range->begin,
                              .end = range->end,
                              .bytes = pipeline->job.mappings[extent->file] + range->begin,
                              .is_mapped = true};
    FST_TRY(fsti_pipeline_verify(pipeline, extent, &view, counts, error));
    fsti_pipeline_finish(pipeline, chunk, counts);
    room->answer = SINK_DONE;
    return FST_OK;
}

const char *fsti_sink_view_explain(fsti_pipeline *pipeline) {
    pthread_mutex_lock(&pipeline->advice_lock);
    bool was_huge = pipeline->huge_end > 0, was_told = pipeline->advice_cursor > 0;
    pthread_mutex_unlock(&pipeline->advice_lock);
    bool is_dear = atomic_load(&pipeline->dear_count) >= DEAR_COUNT_MAX;
    if (was_huge) return is_dear ? "in small pages, as huge ones are dear" : "in huge pages";
    return was_told ? "in small pages" : "";
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
