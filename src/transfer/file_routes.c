// SPDX-License-Identifier: Apache-2.0
/// The routes of a load's files: asked for every chunk, and left for the next one when they fail.
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

bool fsti_pipeline_brings_in(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_file_route *route =
        &pipeline->job.routes[plan->extents[plan->chunks[chunk].extent].file];
    return route->forced == NULL && !pipeline->chunks[chunk].is_resident &&
           atomic_load_explicit(&route->absent, memory_order_relaxed) == FSTI_ROUTE_MAPPING;
}

/// Pages that have a word of a chunk's bits.
#define WORD_PAGES 64u

/// The pages of a word, those within the chunk.
static fsti_plan_chunk word_range(const fsti_plan_chunk *chunk, uint64_t word) {
    uint64_t size = WORD_PAGES * fsti_page_bytes();
    uint64_t begin = fsti_align_down(chunk->begin, fsti_page_bytes()) + word * size;
    return (fsti_plan_chunk){.begin = begin, .end = fsti_min(begin + size, chunk->end)};
}

/// Which pages of a word's range are in the page cache; what is not told counts as there.
static uint64_t look_at_pages(fsti_file *file, const fsti_plan_chunk *range) {
    uint64_t bits = 0, resident, page = fsti_page_bytes();
    if (fsti_file_resident(file, range->begin, range->end, &resident) && resident == 0) return 0;
    for (uint64_t i = 0, at = range->begin; at < range->end; i++, at += page) {
        bool is_known = fsti_file_resident(file, at, fsti_min(at + page, range->end), &resident);
        if (!is_known || resident > 0) bits |= (uint64_t)1 << i;
    }
    return bits;
}

bool fsti_pipeline_note_kept(fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    fsti_file *file = pipeline->job.files[pipeline->job.plan->extents[range->extent].file];
    // Nothing will be dropped; and should direct reads fail later, nobody knows what was there.
    if (fsti_pipeline_engine(pipeline, chunk)->is_direct) return false;
    uint64_t count = (range->end - range->begin) / fsti_page_bytes() / WORD_PAGES + 2;
    uint64_t *words = fsti_alloc_zeroed((size_t)count, sizeof *words);
    if (words == NULL) return false;
    for (uint64_t i = 0; i < count; i++) {
        fsti_plan_chunk part = word_range(range, i);
        if (part.begin < part.end) words[i] = look_at_pages(file, &part);
    }
    pipeline->chunks[chunk].kept_pages = words;
    return true;
}

/// Drops the pages of a word's range that were not there.
static void drop_pages(const fsti_file *file, const fsti_plan_chunk *range, uint64_t kept) {
    uint64_t page = fsti_page_bytes(), from = range->begin;
    for (uint64_t i = 0, at = range->begin; at < range->end; i++, at += page) {
        if ((kept >> i & 1) == 0) continue;
        if (from < at) fsti_file_let_go(file, from, at);
        from = at + page;
    }
    if (from < range->end) fsti_file_let_go(file, from, range->end);
}

void fsti_pipeline_clear_cache(const fsti_pipeline *pipeline, uint32_t chunk) {
    const chunk_state *state = &pipeline->chunks[chunk];
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_file *file = pipeline->job.files[pipeline->job.plan->extents[range->extent].file];
    if (!state->is_dropped || fsti_pipeline_engine(pipeline, chunk)->is_direct) return;
    if (state->kept_pages == NULL) {
        fsti_file_let_go(file, range->begin, range->end);
        return;
    }
    for (uint64_t i = 0;; i++) {
        fsti_plan_chunk part = word_range(range, i);
        if (part.begin >= part.end) return;
        drop_pages(file, &part, state->kept_pages[i]);
    }
}

bool fsti_pipeline_demote(fsti_pipeline *pipeline, uint32_t file, fsti_route failed, bool in_setup,
                          int os_errno) {
    fsti_file_route *route = &pipeline->job.routes[file];
    bool was_far = failed == FSTI_ROUTE_FAR;
    if (was_far ? pipeline->job.gds == FST_GDS_STRICT : route->forced != NULL) return false;
    fsti_route next = fsti_policy_demote(failed, in_setup);
    pthread_mutex_lock(&pipeline->lock);
    if (was_far && atomic_exchange(&route->is_far, false))
        snprintf(
            pipeline->gds_reason, sizeof pipeline->gds_reason, "given up: a read %s%s",
            os_errno == 0 ? "ended early" : "failed: ", os_errno == 0 ? "" : strerror(os_errno));
    if (atomic_load(&route->absent) < (int)next) {
        atomic_store(&route->absent, (int)next);
        snprintf(pipeline->demotion_reason, sizeof pipeline->demotion_reason, ", then by %s: %s",
                 next == FSTI_ROUTE_CACHE ? "pread, as a direct read failed"
                                          : "direct, as io_uring failed",
                 strerror(os_errno));
    }
    pipeline->is_demoted = true;
    pthread_cond_broadcast(&pipeline->work_changed);
    pthread_mutex_unlock(&pipeline->lock);
    return true;
}
