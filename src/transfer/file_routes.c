// SPDX-License-Identifier: Apache-2.0
/// The routes of a load's files: consulted for every chunk, and replaced when they fail.
#include <stdio.h>
#include <string.h>

#include "sink.h"

const fsti_io_engine *fsti_route_reader(fsti_route route) {
    static const fsti_io_engine *const readers[] = {[FSTI_ROUTE_RING] = &fsti_io_engine_uring,
                                                    [FSTI_ROUTE_DIRECT] = &fsti_io_engine_direct,
                                                    [FSTI_ROUTE_MAPPING] = &fsti_io_engine_mmap,
                                                    [FSTI_ROUTE_CACHE] = &fsti_io_engine_pread};
    return readers[route];
}

const fsti_io_engine *fsti_route_engine(const fsti_file_route *route, bool is_resident) {
    if (route->forced != NULL || is_resident) return route->resident;
    return fsti_route_reader(
        (fsti_route)atomic_load_explicit(&route->absent, memory_order_relaxed));
}

const fsti_io_engine *fsti_pipeline_engine(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan *plan = pipeline->job.plan;
    uint32_t file = plan->extents[plan->chunks[chunk].extent].file;
    return fsti_route_engine(&pipeline->job.routes[file], pipeline->chunks[chunk].is_resident);
}

bool fsti_pipeline_pages_in(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_file_route *route =
        &pipeline->job.routes[plan->extents[plan->chunks[chunk].extent].file];
    const chunk_state *state = &pipeline->chunks[chunk];
    return route->forced == NULL && !state->is_resident && !state->is_read &&
           atomic_load_explicit(&route->absent, memory_order_relaxed) == FSTI_ROUTE_MAPPING;
}

/// Pages covered by one 64-bit word of a chunk's bitmap.
#define BITS_PAGES 64u

/// The pages of one word that lie within the chunk.
static fsti_plan_chunk bits_range(const fsti_plan_chunk *chunk, uint64_t word) {
    uint64_t size = BITS_PAGES * fsti_page_bytes();
    uint64_t begin = fsti_align_down(chunk->begin, fsti_page_bytes()) + word * size;
    return (fsti_plan_chunk){.begin = begin, .end = fsti_min(begin + size, chunk->end)};
}

/// Which pages of a word's range are resident. Unknown pages count as resident, so that they are
/// never dropped.
static uint64_t classify_pages(fsti_file *file, const fsti_plan_chunk *range) {
    uint64_t bits = 0, resident, page = fsti_page_bytes();
    if (fsti_file_resident(file, range->begin, range->end, &resident) && resident == 0) return 0;
    for (uint64_t i = 0, at = range->begin; at < range->end; i++, at += page) {
        bool has_residency =
            fsti_file_resident(file, at, fsti_min(at + page, range->end), &resident);
        if (!has_residency || resident > 0) bits |= (uint64_t)1 << i;
    }
    return bits;
}

bool fsti_pipeline_note_resident(fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    fsti_file *file = pipeline->job.files[pipeline->job.plan->extents[range->extent].file].file;
    // Direct reads cache nothing, so nothing will be dropped. If they fail later, the earlier
    // residency is unknown.
    if (fsti_pipeline_engine(pipeline, chunk)->is_direct) return false;
    uint64_t count = (range->end - range->begin) / fsti_page_bytes() / BITS_PAGES + 2;
    uint64_t *words = fsti_alloc_zeroed((size_t)count, sizeof *words);
    if (words == NULL) return false;
    for (uint64_t i = 0; i < count; i++) {
        fsti_plan_chunk part = bits_range(range, i);
        if (part.begin < part.end) words[i] = classify_pages(file, &part);
    }
    pipeline->chunks[chunk].resident_pages = words;
    return true;
}

/// Drops pages of a word's range that were not resident before.
static void drop_pages(const fsti_file *file, const fsti_plan_chunk *range, uint64_t kept) {
    uint64_t page = fsti_page_bytes(), from = range->begin;
    for (uint64_t i = 0, at = range->begin; at < range->end; i++, at += page) {
        if ((kept >> i & 1) == 0) continue;
        if (from < at) fsti_file_drop_cached(file, from, at);
        from = at + page;
    }
    if (from < range->end) fsti_file_drop_cached(file, from, range->end);
}

void fsti_pipeline_clear_cache(const fsti_pipeline *pipeline, uint32_t chunk) {
    const chunk_state *state = &pipeline->chunks[chunk];
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_file *file =
        pipeline->job.files[pipeline->job.plan->extents[range->extent].file].file;
    if (!state->is_dropped || fsti_pipeline_engine(pipeline, chunk)->is_direct) return;
    if (state->resident_pages == NULL) {
        fsti_file_drop_cached(file, range->begin, range->end);
        return;
    }
    for (uint64_t i = 0;; i++) {
        fsti_plan_chunk part = bits_range(range, i);
        if (part.begin >= part.end) return;
        drop_pages(file, &part, state->resident_pages[i]);
    }
}

/// Logs that the file uses another route from now on. `next`: that route, or FSTI_ROUTE_GDS if
/// GPUDirect reads ended. No lock may be held.
static void report_demotion(const fsti_pipeline *pipeline, uint32_t file, fsti_route next,
                            int os_errno) {
    const char *given_up = next == FSTI_ROUTE_GDS     ? "GPUDirect Storage reads"
                           : next == FSTI_ROUTE_CACHE ? "direct reads"
                                                      : "io_uring reads";
    const char *instead = next == FSTI_ROUTE_GDS     ? "reads through host memory"
                          : next == FSTI_ROUTE_CACHE ? "reads through the page cache"
                                                     : "direct reads by threads";
    fsti_log(FST_LOG_WARNING, "%s: %s failed (%s), continuing with %s",
             fsti_file_path(pipeline->job.files[file].file), given_up,
             os_errno == 0 ? "a read ended early" : strerror(os_errno), instead);
}

bool fsti_pipeline_demote(fsti_pipeline *pipeline, uint32_t file, fsti_route failed, bool in_setup,
                          int os_errno) {
    fsti_file_route *route = &pipeline->job.routes[file];
    bool used_gds = failed == FSTI_ROUTE_GDS;
    if (used_gds ? pipeline->job.gds == FST_GDS_STRICT : route->forced != NULL) return false;
    fsti_route next = fsti_policy_demote(failed, in_setup);
    bool gds_has_ended = false, is_demoted = false;
    pthread_mutex_lock(&pipeline->lock);
    gds_has_ended = used_gds && atomic_exchange(&route->uses_gds, false);
    if (gds_has_ended)
        snprintf(
            pipeline->gds_reason, sizeof pipeline->gds_reason, "stopped: a read %s%s",
            os_errno == 0 ? "ended early" : "failed: ", os_errno == 0 ? "" : strerror(os_errno));
    // Routes are numbered by preference. Reads of several threads may fail at the same time, so a
    // route is only ever replaced by one with a higher number.
    is_demoted = atomic_load(&route->absent) < (int)next;
    if (is_demoted) {
        atomic_store(&route->absent, (int)next);
        snprintf(pipeline->demotion_reason, sizeof pipeline->demotion_reason, ", then by %s: %s",
                 next == FSTI_ROUTE_CACHE ? "pread, because a direct read failed"
                                          : "direct, because io_uring failed",
                 strerror(os_errno));
    }
    pipeline->is_demoted = true;
    pthread_cond_broadcast(&pipeline->work_changed);
    pthread_mutex_unlock(&pipeline->lock);
    if (gds_has_ended) report_demotion(pipeline, file, FSTI_ROUTE_GDS, os_errno);
    if (is_demoted) report_demotion(pipeline, file, next, os_errno);
    return true;
}
