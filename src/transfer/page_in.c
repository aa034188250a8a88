// SPDX-License-Identifier: Apache-2.0
/// Reads absent chunks into the page cache: for views, for copies from a mapping, and before reads
/// from file systems that answer slowly.
#include "sink.h"

/// A load of one tensor or slice leaves its pages mapped up to this size.
#define KEPT_LOAD_BYTES_MAX ((uint64_t)32 << 20)

bool fsti_page_in_streams(const fsti_pipeline *pipeline, uint32_t chunk) {
    return !pipeline->job.routes[fsti_chunk_extent(pipeline, chunk)->file].has_own_readahead;
}

/// Reads chunks [chunk, end) as one stream. Each is returned, to be copied, if `returns`.
static fst_status stream_run(fsti_pipeline *pipeline, uint32_t chunk, uint32_t end, bool returns,
                             worker_counts *counts, fst_error *error) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, chunk);
    fsti_file_stream *stream;
    atomic_store(&pipeline->was_read, true);
    FST_TRY(fsti_stream_open(pipeline->job.files[extent->file].file, extent->end, &stream, error));
    fst_status status = FST_OK;
    for (; status == FST_OK && chunk < end && !atomic_load(&pipeline->stop); chunk++) {
        uint64_t start_ns = fsti_now_ns();
        const fsti_plan_chunk *range = &plan->chunks[chunk];
        status = fsti_stream_read(stream, range->begin, range->end, &counts->read_count, error);
        counts->read_ns += fsti_now_ns() - start_ns;
        if (status != FST_OK || !returns) continue;
        // Statistics are final when the last chunk is copied, perhaps by another thread.
        fsti_pipeline_count(pipeline, counts);
        fsti_pipeline_return_read(pipeline, chunk);
    }
    fsti_stream_close(stream);
    return status;
}

/// Maps a chunk, reading it by page faults.
static fst_status fault_chunk(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                              fst_error *error) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    fsti_file *file = pipeline->job.files[pipeline->job.plan->extents[range->extent].file].file;
    char *mapping = (char *)(uintptr_t)fsti_io_file_mapping(file);
    uint64_t start_ns = fsti_now_ns();
    FST_TRY(fsti_file_populate(file, mapping, range->begin, range->end, error));
    counts->read_ns += fsti_now_ns() - start_ns;
    return FST_OK;
}

fst_status fsti_page_in_chunk(fsti_pipeline *pipeline, uint32_t chunk, bool *is_returned,
                              worker_counts *counts, fst_error *error) {
    *is_returned = false;
    // The copy maps the pages that it needs, 16 at a time, which is faster than all of them.
    if (!fsti_page_in_streams(pipeline, chunk)) return fault_chunk(pipeline, chunk, counts, error);
    // Chunks of a segment are claimed one by one.
    if (pipeline->thread_count == 1 || pipeline->job.share != NULL)
        return stream_run(pipeline, chunk, chunk + 1, false, counts, error);
    *is_returned = true;
    uint32_t end = fsti_pipeline_begin_stream(pipeline, chunk);
    fst_status status = stream_run(pipeline, chunk, end, true, counts, error);
    fsti_pipeline_end_stream(pipeline);
    return status;
}

/// The mapping whose page faults read the file.
static char *find_mapping(const fsti_pipeline *pipeline, uint32_t index) {
    const fsti_job_file *file = &pipeline->job.files[index];
    return pipeline->sink->is_view ? file->view->data
                                   : (char *)(uintptr_t)fsti_io_file_mapping(file->file);
}

/// Below this size of a range, large reads do not pay off.
#define LARGE_RANGE_BYTES ((uint64_t)16 << 20)

/// Has page faults read large parts of the file's ranges, if its file system answers slowly.
static fsti_route_faults enlarge_reads(const fsti_pipeline *pipeline, uint32_t index) {
    const fsti_plan *plan = pipeline->job.plan;
    fsti_file *file = pipeline->job.files[index].file;
    fsti_route_faults result = FSTI_FAULTS_SMALL;
    for (size_t i = 0; i < plan->extent_count;) {
        uint32_t owner = plan->extents[i].file;
        uint64_t begin = plan->extents[i].begin, end = begin;
        // Neighbours are one range, or the end of each would be read in small parts.
        for (; i < plan->extent_count && plan->extents[i].file == owner &&
               plan->extents[i].begin - end < fsti_page_bytes();
             i++)
            end = plan->extents[i].end;
        if (owner != index || end - begin < LARGE_RANGE_BYTES ||
            !fsti_file_answers_slowly(file, begin, end))
            continue;
        char *mapping = find_mapping(pipeline, index);
        if (mapping == NULL) break;
        fsti_file_advise_large_reads(file, mapping, begin, end);
        result = FSTI_FAULTS_LARGE;
    }
    return result;
}

bool fsti_page_in_is_large(fsti_pipeline *pipeline, uint32_t chunk) {
    uint32_t index = fsti_chunk_extent(pipeline, chunk)->file;
    atomic_int *faults = &pipeline->job.routes[index].faults;
    if (atomic_load(faults) != FSTI_FAULTS_UNKNOWN) return atomic_load(faults) == FSTI_FAULTS_LARGE;
    pthread_mutex_lock(&pipeline->faults_lock);
    if (atomic_load(faults) == FSTI_FAULTS_UNKNOWN)
        atomic_store(faults, (int)enlarge_reads(pipeline, index));
    pthread_mutex_unlock(&pipeline->faults_lock);
    return atomic_load(faults) == FSTI_FAULTS_LARGE;
}

void fsti_page_in_before_read(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    if (pipeline->sink->is_view || pipeline->chunks[chunk].is_resident ||
        !fsti_page_in_is_large(pipeline, chunk))
        return;
    // Errors are left to the read, which adds where they are.
    (void)fault_chunk(pipeline, chunk, counts, NULL);
    fsti_io_drop_mapped(pipeline->job.files[pipeline->job.plan->extents[range->extent].file].file,
                        range->begin, range->end);
}

void fsti_page_in_leave(fsti_pipeline *pipeline, uint32_t chunk, uint64_t begin, uint64_t end) {
    const fsti_job *job = &pipeline->job;
    fsti_file *file = job->files[fsti_chunk_extent(pipeline, chunk)->file].file;
    // Mapped pages cannot be dropped from the page cache.
    bool may_keep = pipeline->device_lane == NULL && job->policy->keeps_cache &&
                    job->plan->item_count == 1 && job->plan->bytes_planned <= KEPT_LOAD_BYTES_MAX;
    if (!may_keep || !fsti_io_keep_mapped(file, begin, end)) fsti_io_drop_mapped(file, begin, end);
}

const char *fsti_page_in_text(fsti_pipeline *pipeline) {
    return atomic_load(&pipeline->was_read) ? "in streams of reads" : "";
}
