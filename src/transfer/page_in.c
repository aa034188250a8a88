// SPDX-License-Identifier: Apache-2.0
/// Reads absent chunks into the page cache, for views and for copies from a mapping.
#include "sink.h"

/// A first access that takes longer hit memory that the hypervisor had to allocate. After two such
/// chunks in a row, or one that took twice as long, huge pages count as slow.
#define FAULT_NS_MAX 700u
#define SLOW_FAULT_COUNT_MAX 2u
/// Then they are tried again after this time. It spans many small loads, such as those of slices,
/// which would otherwise find out anew in each.
#define RETRY_NS ((uint64_t)2000000000)

/// A load of one tensor or slice leaves its pages mapped up to this size.
#define KEPT_LOAD_BYTES_MAX ((uint64_t)32 << 20)

/// Of all loads of the process.
static atomic_uint slow_fault_count;
static atomic_ullong retry_at_ns;

static bool are_huge_pages_slow(void) {
    if (atomic_load(&slow_fault_count) < SLOW_FAULT_COUNT_MAX) return false;
    if (fsti_now_ns() < atomic_load(&retry_at_ns)) return true;
    atomic_store(&slow_fault_count, SLOW_FAULT_COUNT_MAX - 1); // one more slow chunk is enough
    return false;
}

static void note_fault(uint64_t fault_ns) {
    if (fault_ns <= FAULT_NS_MAX) {
        atomic_store(&slow_fault_count, 0);
        return;
    }
    atomic_store(&retry_at_ns, fsti_now_ns() + RETRY_NS);
    atomic_fetch_add(&slow_fault_count, fault_ns > 2 * FAULT_NS_MAX ? 2 : 1);
}

fsti_page_in_method fsti_page_in_choose(fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_extent *extent = &plan->extents[plan->chunks[chunk].extent];
    fsti_page_in_facts facts = {.begin = extent->begin,
                                .end = extent->end,
                                .file_bytes =
                                    fsti_file_size(pipeline->job.files[extent->file].file),
                                .is_cached = pipeline->job.routes[extent->file].is_cached,
                                .fresh_is_slow = are_huge_pages_slow()};
    fsti_page_in_method method = fsti_policy_page_in(&facts);
    if (method == FSTI_PAGE_IN_BY_READING && facts.fresh_is_slow)
        atomic_store(&pipeline->avoids_huge, true);
    return method;
}

void fsti_page_in_advise(fsti_pipeline *pipeline, uint32_t chunk, char *mapping) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    atomic_store(&pipeline->was_huge, true);
    pipeline->chunks[chunk].is_huge = true;
    fsti_file_advise_huge_pages(mapping, range->begin, range->end);
}

void fsti_page_in_measure(fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_file *file =
        pipeline->job.files[pipeline->job.plan->extents[range->extent].file].file;
    note_fault(fsti_file_fault_ns(file, range->begin, range->end));
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
    // The copy maps the pages that it needs, 16 at a time, which is faster than all of them.
    FST_TRY(method == FSTI_PAGE_IN_BY_READING
                ? read_chunk(pipeline, chunk, file, counts, error)
                : fsti_file_populate(file, mapping, range->begin, range->end, error));
    counts->read_ns += fsti_now_ns() - start_ns;
    if (method == FSTI_PAGE_IN_BY_HUGE_PAGES) fsti_page_in_measure(pipeline, chunk);
    return FST_OK;
}

void fsti_page_in_leave(fsti_pipeline *pipeline, uint32_t chunk, uint64_t begin, uint64_t end) {
    const fsti_job *job = &pipeline->job;
    fsti_file *file = job->files[job->plan->extents[job->plan->chunks[chunk].extent].file].file;
    // Mapped pages cannot be dropped from the page cache.
    bool may_keep = pipeline->device_lane == NULL && job->policy->keeps_cache &&
                    job->plan->item_count == 1 && job->plan->bytes_planned <= KEPT_LOAD_BYTES_MAX;
    if (!may_keep || !fsti_io_keep_mapped(file, begin, end)) fsti_io_drop_mapped(file, begin, end);
}

const char *fsti_page_in_text(fsti_pipeline *pipeline) {
    if (atomic_load(&pipeline->avoids_huge))
        return "in streams of reads, because huge pages are slow";
    if (atomic_load(&pipeline->was_huge)) return "in huge pages";
    return atomic_load(&pipeline->was_read) ? "in streams of reads" : "";
}
