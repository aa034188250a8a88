// SPDX-License-Identifier: Apache-2.0
/// The sink for views: the bytes stay in the page cache, and a chunk is complete when its pages are
/// resident.
#include <stdio.h>

#include "sink.h"

typedef struct page_sample {
    const char *bytes;
    uint64_t size, step;
    char sum;
} page_sample;

/// The bytes are not used, so it does not matter that the program may write to them meanwhile.
__attribute__((no_sanitize("thread"))) static void fault_pages(void *context) {
    page_sample *pages = context;
    for (uint64_t at = 0; at < pages->size; at += pages->step)
        pages->sum ^= *(const volatile char *)(pages->bytes + at);
    // The range may begin within a page, and the last step before its last page.
    pages->sum ^= *(const volatile char *)(pages->bytes + pages->size - 1);
}

bool fsti_view_touch(const char *bytes, uint64_t size, uint64_t step) {
    page_sample pages = {.bytes = bytes, .size = size, .step = step};
    return fsti_io_guard_ready() && fsti_io_guarded(fault_pages, &pages, bytes, size);
}

static bool touch(const fsti_pipeline *pipeline, const char *bytes, uint64_t size, uint64_t step) {
    return pipeline->job.guard_allowed && fsti_view_touch(bytes, size, step);
}

/// Maps the pages of a chunk, and reads those that are absent.
static fst_status populate_range(fsti_pipeline *pipeline, uint32_t chunk, bool is_cached,
                                 fst_error *error) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_job_file *file =
        &pipeline->job.files[pipeline->job.plan->extents[range->extent].file];
    const char *bytes = file->view->data + range->begin;
    // Page faults take less CPU time than MADV_POPULATE_READ, but read by small requests.
    if (is_cached && touch(pipeline, bytes, range->end - range->begin, FSTI_VIEW_BLOCK_BYTES))
        return FST_OK;
    return fsti_file_populate(file->file, file->view->data, range->begin, range->end, error);
}

/// Prefaults the pages of a chunk, which are cached or are read now.
static fst_status populate_chunk(fsti_pipeline *pipeline, uint32_t chunk, bool is_cached,
                                 worker_counts *counts, fst_error *error) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_job_file *file =
        &pipeline->job.files[pipeline->job.plan->extents[range->extent].file];
    bool is_resident = pipeline->chunks[chunk].is_resident;
    uint64_t start_ns = fsti_now_ns(), size = range->end - range->begin;
    if (!is_cached) fsti_file_start_part(file->file, range->begin, range->end);
    FST_TRY(populate_range(pipeline, chunk, is_cached, error));
    // In a virtual machine the hypervisor allocates pages on first access, which can take longer
    // than a disk read. Do that here in parallel, not when the program accesses them. Errors of
    // pages are left to the program, as for all views.
    if (!is_resident)
        (void)touch(pipeline, file->view->data + range->begin, size, fsti_page_bytes());
    *(is_resident ? &counts->populate_ns : &counts->read_ns) += fsti_now_ns() - start_ns;
    counts->bytes_mapped += size;
    return FST_OK;
}

/// Checks that the file has not changed. In a network or user-space file system this can be a
/// request to its server, so there it is done once, after the file's last chunk.
static fst_status check_view(fsti_pipeline *pipeline, const fsti_plan_extent *extent,
                             uint64_t offset, fst_error *error) {
    fsti_file_route *route = &pipeline->job.routes[extent->file];
    bool is_last = atomic_fetch_sub(&route->views_left, 1) == 1;
    if (route->has_own_readahead && !is_last) return FST_OK;
    return fsti_pipeline_check_file(pipeline, extent, offset, error);
}

/// Finishes a chunk, whose pages are resident.
static fst_status finish_view(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                              fst_error *error) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_plan_extent *extent = &pipeline->job.plan->extents[range->extent];
    fsti_verify_range view = {.begin = range->begin,
                              .end = range->end,
                              .bytes = pipeline->job.files[extent->file].view->data + range->begin,
                              .is_mapped = true};
    if (!pipeline->chunks[chunk].is_resident) counts->bytes_read += range->end - range->begin;
    if (!pipeline->chunks[chunk].is_resident) counts->cache_bytes += range->end - range->begin;
    FST_TRY(check_view(pipeline, extent, range->begin, error));
    FST_TRY(fsti_pipeline_verify(pipeline, extent, &view, counts, error));
    fsti_pipeline_finish(pipeline, chunk, counts);
    return FST_OK;
}

static fst_status populate_view(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                                fst_error *error) {
    bool is_cached = pipeline->chunks[chunk].is_resident;
    FST_TRY(populate_chunk(pipeline, chunk, is_cached, counts, error));
    return finish_view(pipeline, chunk, counts, error);
}

/// Whether a chunk has come into the page cache since it was classified: the kernel has read it
/// ahead, or another process has read it. A load alone does not look if it has no threads that
/// could map the pages at the end.
static bool has_been_read(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    fsti_file *file = pipeline->job.files[pipeline->job.plan->extents[range->extent].file].file;
    if (pipeline->by_waiters && !pipeline->job.others_read) return false;
    return fsti_file_is_read(file, range->begin, range->end);
}

/// Finishes a chunk that has been read. While the disk reads, first accesses take longer, so its
/// pages are mapped after the last read, or by the program if other processes read the same files.
static fst_status finish_read(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                              fst_error *error) {
    if (!pipeline->job.others_read) fsti_pipeline_map_later(pipeline, chunk);
    return finish_view(pipeline, chunk, counts, error);
}

/// Maps a chunk that was finished before. Errors of pages are left to the program.
static void map_chunk(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    uint32_t index = pipeline->job.plan->extents[range->extent].file;
    char *mapping = pipeline->job.files[index].view->data;
    uint64_t start_ns = fsti_now_ns();
    if (!touch(pipeline, mapping + range->begin, range->end - range->begin, fsti_page_bytes()))
        (void)fsti_file_populate(pipeline->job.files[index].file, mapping, range->begin, range->end,
                                 NULL);
    counts->bytes_mapped += range->end - range->begin;
    counts->populate_ns += fsti_now_ns() - start_ns;
    fsti_pipeline_count(pipeline, counts);
    fsti_pipeline_note_mapped(pipeline);
}

/// Reads a chunk and the following ones as one stream, except those that have been read.
static fst_status read_run(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                           fst_error *error) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, chunk);
    fsti_file *file = pipeline->job.files[extent->file].file;
    uint32_t end = fsti_pipeline_take_run(pipeline, chunk);
    fsti_file_stream *stream;
    FST_TRY(fsti_stream_open(file, extent->end, &stream, error));
    fst_status status = FST_OK;
    atomic_store(&pipeline->was_read, true);
    for (uint32_t first = chunk; status == FST_OK && chunk < end && !atomic_load(&pipeline->stop);
         chunk++) {
        uint64_t start_ns = fsti_now_ns();
        bool is_read = chunk != first && has_been_read(pipeline, chunk);
        if (!is_read)
            status = fsti_stream_read(stream, plan->chunks[chunk].begin, plan->chunks[chunk].end,
                                      &counts->read_count, error);
        counts->read_ns += fsti_now_ns() - start_ns;
        if (status == FST_OK && !is_read)
            status = populate_chunk(pipeline, chunk, true, counts, error);
        if (status == FST_OK)
            status = (is_read ? finish_read : finish_view)(pipeline, chunk, counts, error);
    }
    fsti_stream_close(stream);
    return status;
}

/// Behind a smaller range, what the kernel reads ahead may be needed next.
#define START_BYTES_MIN ((uint64_t)16 << 20)

/// Has the kernel read a chunk by one call. Page faults would read it in several steps, each with a
/// wait.
static void start_reads(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, chunk);
    if (extent->end - extent->begin >= START_BYTES_MIN)
        fsti_file_start_reads(pipeline->job.files[extent->file].file, range->begin, range->end);
}

/// Reads a chunk into the page cache and faults its pages into the mapping.
static fst_status prepare_view(fsti_pipeline *pipeline, uint32_t chunk, sink_target *target,
                               worker_counts *counts, fst_error *error) {
    target->answer = SINK_DONE;
    if (pipeline->chunks[chunk].is_resident) return populate_view(pipeline, chunk, counts, error);
    if (has_been_read(pipeline, chunk)) return finish_read(pipeline, chunk, counts, error);
    if (fsti_page_in_streams(pipeline, chunk)) return read_run(pipeline, chunk, counts, error);
    if (!fsti_page_in_is_large(pipeline, chunk)) start_reads(pipeline, chunk);
    counts->read_count++;
    return populate_view(pipeline, chunk, counts, error);
}

static void explain_views(fsti_pipeline *pipeline, char *text, size_t size) {
    snprintf(text, size, "%s", fsti_page_in_text(pipeline));
}

/// Nothing is copied for views.
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
    .populate = map_chunk,
    .explain = explain_views,
};
