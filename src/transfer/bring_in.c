// SPDX-License-Identifier: Apache-2.0
/// Absent chunks brought into the page cache, for views and for what is copied from a mapping.
#include "sink.h"

/// A first look at a page that takes longer found memory that the host had to find; seen so often,
/// it was no accident.
#define LOOK_NS_MAX 700u
#define DEAR_COUNT_MAX 2u

static bool is_dear(fsti_pipeline *pipeline) {
    return atomic_load(&pipeline->dear_count) >= DEAR_COUNT_MAX;
}

fsti_view_way fsti_bring_way(fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_extent *extent = &plan->extents[plan->chunks[chunk].extent];
    fsti_view_facts facts = {.begin = extent->begin,
                             .end = extent->end,
                             .file_bytes = fsti_file_size(pipeline->job.files[extent->file]),
                             .is_cached = pipeline->job.routes[extent->file].is_cached,
                             .fresh_is_dear = is_dear(pipeline)};
    return fsti_policy_view(&facts);
}

void fsti_bring_expect(fsti_pipeline *pipeline, uint32_t chunk, char *mapping) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    atomic_store(&pipeline->was_huge, true);
    fsti_file_expect(mapping, range->begin, range->end);
}

void fsti_bring_look(fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_file *file = pipeline->job.files[pipeline->job.plan->extents[range->extent].file];
    if (fsti_file_look_ns(file, range->begin, range->end) > LOOK_NS_MAX)
        atomic_fetch_add(&pipeline->dear_count, 1);
}

/// A chunk as a stream of its own.
static fst_status read_chunk(fsti_pipeline *pipeline, uint32_t chunk, fsti_file *file,
                             worker_counts *counts, fst_error *error) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    uint64_t end = pipeline->job.plan->extents[range->extent].end;
    fsti_file_stream *stream;
    atomic_store(&pipeline->was_read, true);
    FST_TRY(fsti_stream_open(file, end, &stream, error));
    fst_status status =
        fsti_stream_read(stream, range->begin, range->end, &counts->read_count, error);
    fsti_stream_close(stream);
    return status;
}

fst_status fsti_bring_chunk(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                            fst_error *error) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    fsti_file *file = pipeline->job.files[pipeline->job.plan->extents[range->extent].file];
    char *mapping = (char *)(uintptr_t)fsti_io_file_mapping(file);
    fsti_view_way way = fsti_bring_way(pipeline, chunk);
    uint64_t start_ns = fsti_now_ns();
    if (way == FSTI_VIEW_BY_HUGE_PAGES) fsti_bring_expect(pipeline, chunk, mapping);
    if (way == FSTI_VIEW_BY_READING) FST_TRY(read_chunk(pipeline, chunk, file, counts, error));
    FST_TRY(fsti_file_populate(file, mapping, range->begin, range->end, error));
    counts->read_ns += fsti_now_ns() - start_ns;
    if (way == FSTI_VIEW_BY_HUGE_PAGES) fsti_bring_look(pipeline, chunk);
    return FST_OK;
}

const char *fsti_bring_words(fsti_pipeline *pipeline) {
    if (!atomic_load(&pipeline->was_huge))
        return atomic_load(&pipeline->was_read) ? "in streams of reads" : "";
    return is_dear(pipeline) ? "in streams of reads, as huge pages are dear" : "in huge pages";
}
