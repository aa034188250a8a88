// SPDX-License-Identifier: Apache-2.0
/// Reads absent chunks into the page cache, for views and for copies from a mapping.
#include "sink.h"

/// A first access that takes longer hit memory that the hypervisor had to allocate. After several
/// such chunks, huge pages count as slow.
#define FAULT_NS_MAX 700u
#define SLOW_FAULT_COUNT_MAX 2u

static bool are_huge_pages_slow(fsti_pipeline *pipeline) {
    return atomic_load(&pipeline->slow_fault_count) >= SLOW_FAULT_COUNT_MAX;
}

fsti_page_in_method fsti_page_in_choose(fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_extent *extent = &plan->extents[plan->chunks[chunk].extent];
    fsti_page_in_facts facts = {.begin = extent->begin,
                                .end = extent->end,
                                .file_bytes =
                                    fsti_file_size(pipeline->job.files[extent->file].file),
                                .is_cached = pipeline->job.routes[extent->file].is_cached,
                                .fresh_is_slow = are_huge_pages_slow(pipeline)};
    return fsti_policy_page_in(&facts);
}

void fsti_page_in_advise(fsti_pipeline *pipeline, uint32_t chunk, char *mapping) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    atomic_store(&pipeline->was_huge, true);
    fsti_file_advise_huge_pages(mapping, range->begin, range->end);
}

void fsti_page_in_measure(fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_file *file =
        pipeline->job.files[pipeline->job.plan->extents[range->extent].file].file;
    if (fsti_file_fault_ns(file, range->begin, range->end) > FAULT_NS_MAX)
        atomic_fetch_add(&pipeline->slow_fault_count, 1);
}

/// Reads a chunk as one sequential stream.
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

fst_status fsti_page_in_chunk(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                              fst_error *error) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    fsti_file *file = pipeline->job.files[pipeline->job.plan->extents[range->extent].file].file;
    char *mapping = (char *)(uintptr_t)fsti_io_file_mapping(file);
    fsti_page_in_method method = fsti_page_in_choose(pipeline, chunk);
    uint64_t start_ns = fsti_now_ns();
    if (method == FSTI_PAGE_IN_BY_HUGE_PAGES) fsti_page_in_advise(pipeline, chunk, mapping);
    if (method == FSTI_PAGE_IN_BY_READING)
        FST_TRY(read_chunk(pipeline, chunk, file, counts, error));
    FST_TRY(fsti_file_populate(file, mapping, range->begin, range->end, error));
    counts->read_ns += fsti_now_ns() - start_ns;
    if (method == FSTI_PAGE_IN_BY_HUGE_PAGES) fsti_page_in_measure(pipeline, chunk);
    return FST_OK;
}

const char *fsti_page_in_text(fsti_pipeline *pipeline) {
    if (!atomic_load(&pipeline->was_huge))
        return atomic_load(&pipeline->was_read) ? "in streams of reads" : "";
    return are_huge_pages_slow(pipeline) ? "in streams of reads, because huge pages are slow"
                                         : "in huge pages";
}
