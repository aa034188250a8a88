// SPDX-License-Identifier: Apache-2.0
/// GPUDirect reads: the whole pages of a chunk are read directly to the device. The bytes before
/// and after them, and failed reads, go through the staging ring.
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "pipeline.h"

/// Whole pages of load memory that have not been written yet; NULL: all pages were written.
static void *find_pages(const fsti_pipeline *pipeline) {
    for (uint32_t i = 0; i < pipeline->batches_admitted; i++) {
        const fsti_buffer *buffer = pipeline->batches[i].buffer;
        if (buffer == NULL) continue;
        uintptr_t begin = fsti_align_up((uintptr_t)buffer->data, FSTI_IO_PAGE_BYTES);
        if (begin + FSTI_GDS_PROBE_BYTES <= (uintptr_t)buffer->data + buffer->size_bytes)
            return (void *)begin;
    }
    return NULL;
}

/// Whether a file is worth probing: cached bytes do not use GPUDirect. Checks the file's end,
/// because reading the header has cached its beginning.
static bool is_absent(const fsti_pipeline *pipeline, const fsti_plan_extent *extent) {
    uint64_t bytes, size = fsti_min(FSTI_GDS_PROBE_BYTES, extent->end - extent->begin);
    return !fsti_file_resident(pipeline->job.files[extent->file].file, extent->end - size,
                               extent->end, &bytes) ||
           2 * bytes < size;
}

/// The verdict for a file: a stored one, or the result of a test read into memory of this load.
static bool check_gds_file(fsti_pipeline *pipeline, const fsti_plan_extent *extent) {
    bool is_hip = fsti_device_id(pipeline->job.device).kind == FST_DEVICE_HIP;
    fsti_file *file = pipeline->job.files[extent->file].file;
    char *words = pipeline->gds_reason;
    size_t size = sizeof pipeline->gds_reason;
    fsti_gds_facts facts = {.requested = pipeline->job.gds};
    void *pages = NULL;
    const char *reason;
    facts.is_known = fsti_gds_find_verdict(file, is_hip, &facts.is_good, words, size);
    if (!facts.is_known) {
        facts.is_cached = !is_absent(pipeline, extent);
        facts.has_space = (pages = find_pages(pipeline)) != NULL;
    }
    fsti_gds_decision method = fsti_policy_gds(&facts, &reason);
    if (reason != NULL) snprintf(words, size, "%s", reason);
    if (method != FSTI_GDS_IF_PROBED) return method == FSTI_GDS_YES;
    return fsti_gds_probe(file, is_hip, pages, words, size);
}

/// Probes the plan's files until one is refused, because they usually share a file system. Also
/// false if all their bytes must be scattered, for example because of alignment.
static bool check_gds_files(fsti_pipeline *pipeline) {
    const fsti_plan *plan = pipeline->job.plan;
    bool any = plan->extent_count == 0;
    for (size_t i = 0; i < plan->extent_count; i++) {
        fsti_file_route *route = &pipeline->job.routes[plan->extents[i].file];
        if (!plan->extents[i].linear || atomic_load(&route->uses_gds)) continue;
        if (!check_gds_file(pipeline, &plan->extents[i])) return false;
        atomic_store(&route->uses_gds, true);
        any = true;
    }
    if (!any)
        snprintf(pipeline->gds_reason, sizeof pipeline->gds_reason,
                 "all tensors are converted, divided, or begin at 8 modulo 16 in their file");
    return any;
}

void fsti_device_lane_check_gds(fsti_pipeline *pipeline) {
    bool is_hip = fsti_device_id(pipeline->job.device).kind == FST_DEVICE_HIP;
    char *reason = pipeline->gds_reason;
    size_t size = sizeof pipeline->gds_reason;
    if (pipeline->job.gds == FST_GDS_OFF)
        snprintf(reason, size, "switched off");
    else if (pipeline->job.gds == FST_GDS_AUTO && pipeline->job.policy->must_keep_cache)
        snprintf(reason, size, "switched off, because the page cache is to be filled");
    else
        pipeline->may_use_gds =
            fsti_gds_usable(is_hip, pipeline->job.gds == FST_GDS_STRICT, reason, size);
}

fst_status fsti_device_lane_probe(fsti_pipeline *pipeline, fst_error *error) {
    bool good = false;
    if (pipeline->may_use_gds) {
        FST_TRY(fsti_device_lane_begin(pipeline, error));
        good = check_gds_files(pipeline);
        fsti_device_lane_end(pipeline);
    }
    if (good || pipeline->job.gds != FST_GDS_STRICT) return FST_OK;
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                          "gds (GPUDirect Storage) can't be used: %s", pipeline->gds_reason);
}

bool fsti_device_lane_uses_gds(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, chunk);
    if (!extent->linear) return false;
    if (pipeline->chunks[chunk].is_resident && pipeline->job.gds != FST_GDS_STRICT)
        return false; // copying from the page cache is faster
    // Caller memory may have any alignment; the library's buffer is aligned like the file.
    const char *data = pipeline->batches[extent->batch].buffer->data;
    if ((uintptr_t)data % FSTI_IO_PAGE_BYTES != 0) return false;
    return atomic_load_explicit(&pipeline->job.routes[extent->file].uses_gds, memory_order_relaxed);
}

/// The device address of a byte of the chunk.
static char *gds_address(const fsti_pipeline *pipeline, uint32_t chunk, uint64_t offset) {
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, chunk);
    return pipeline->batches[extent->batch].buffer->data + extent->buffer_offset +
           (offset - extent->begin);
}

/// The whole pages of a chunk.
typedef struct page_range {
    uint64_t begin, end;
} page_range;

static page_range whole_pages(const fsti_plan_chunk *chunk) {
    return (page_range){fsti_align_up(chunk->begin, FSTI_IO_PAGE_BYTES),
                        fsti_align_down(chunk->end, FSTI_IO_PAGE_BYTES)};
}

/// Reads the whole pages of a chunk. Returns the bytes read. *os_errno: of the last read, or 0.
static uint64_t read_pages(fsti_pipeline *pipeline, uint32_t chunk, void *engine_lane,
                           worker_counts *counts, int *os_errno) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, chunk);
    page_range pages = whole_pages(&plan->chunks[chunk]);
    uint64_t at = pages.begin, end = pages.end;
    uint32_t retries = 0;
    *os_errno = 0;
    while (at < end && !atomic_load(&pipeline->stop)) {
        fsti_io_op op = {.file = pipeline->job.files[extent->file].file,
                         .offset = at,
                         .size = (size_t)(end - at),
                         .buffer = gds_address(pipeline, chunk, at)};
        uint64_t start_ns = fsti_now_ns();
        fsti_io_engine_gds.submit(engine_lane, &op);
        fsti_io_engine_gds.reap(engine_lane);
        counts->read_ns += fsti_now_ns() - start_ns;
        counts->read_count++;
        if (fsti_io_should_retry(op.result, &retries)) continue;
        uint64_t got = op.result < 0 ? 0 : (uint64_t)op.result;
        *os_errno = op.result < 0 ? (int)-op.result : 0;
        at += at + got >= end ? end - at : fsti_align_down(got, FSTI_IO_PAGE_BYTES);
        if (got < FSTI_IO_PAGE_BYTES) break;
    }
    return at - pages.begin;
}

/// Reads the bytes outside the whole pages into the slot and sends them.
static fst_status send_edges(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                             fst_error *error) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_chunk *range = &plan->chunks[chunk];
    const fsti_plan_extent *extent = &plan->extents[range->extent];
    page_range pages = whole_pages(range);
    const uint64_t edges[2][2] = {{range->begin, pages.begin}, {pages.end, range->end}};
    fsti_copy_list list = {.copy_count = 0};
    char *data = fsti_device_lane_data(pipeline, chunk);
    for (size_t i = 0; i < 2; i++) {
        uint64_t size = edges[i][1] - edges[i][0],
                 chunk_offset = edges[i][0] - fsti_chunk_origin(range);
        size_t got = 0;
        if (size == 0) continue;
        FST_TRY(fsti_file_read(pipeline->job.files[extent->file].file, data + chunk_offset,
                               (size_t)size, edges[i][0], &got, error));
        counts->read_count++;
        if (got < size) {
            fsti_pipeline_describe(pipeline, extent, edges[i][0] + got, FST_E_SHORT_READ, 0, error);
            return FST_E_SHORT_READ;
        }
        uint32_t index = list.copy_count++;
        list.copies[index].target = (uintptr_t)gds_address(pipeline, chunk, edges[i][0]);
        list.copies[index].source = (uint32_t)chunk_offset;
        list.copies[index].size = (uint32_t)size;
        counts->device_bytes += size;
    }
    return fsti_device_lane_send_list(pipeline, chunk, &list, counts, error);
}

fst_status fsti_device_lane_read(fsti_pipeline *pipeline, uint32_t chunk, void *engine_lane,
                                 bool *done, worker_counts *counts, fst_error *error) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_chunk *range = &plan->chunks[chunk];
    const fsti_plan_extent *extent = &plan->extents[range->extent];
    page_range pages = whole_pages(range);
    uint64_t begin = pages.begin, end = pages.end;
    *done = false;
    if (begin >= end) return FST_OK; // less than a page
    int os_errno;
    uint64_t got = read_pages(pipeline, chunk, engine_lane, counts, &os_errno);
    if (atomic_load(&pipeline->stop)) return FST_OK;
    if (got < end - begin) {
        FST_TRY(fsti_pipeline_check_file(pipeline, extent, begin + got, error));
        // After one failure, do not try again for every chunk.
        if (!fsti_pipeline_demote(pipeline, extent->file, FSTI_ROUTE_GDS, false, os_errno))
            return fsti_error_set(
                error, FST_E_IO,
                (fsti_error_location){.byte_offset = begin + got,
                                      .file =
                                          fsti_file_path(pipeline->job.files[extent->file].file)},
                "gds (GPUDirect Storage): a read %s%s", os_errno == 0 ? "ended early" : "failed: ",
                os_errno == 0 ? "" : strerror(os_errno));
        return FST_OK;
    }
    *done = true;
    counts->gds_bytes += got;
    counts->bytes_read += range->end - range->begin;
    counts->bytes_direct += got;
    FST_TRY(fsti_pipeline_check_file(pipeline, extent, range->begin, error));
    if (begin == range->begin && end == range->end) {
        fsti_pipeline_finish(pipeline, chunk, counts);
        return FST_OK;
    }
    return send_edges(pipeline, chunk, counts, error);
}
