// SPDX-License-Identifier: Apache-2.0
/// The routes of a load's files: chosen before anything is read, asked for every chunk, and left
/// for the next one when they fail.
#include <stdio.h>
#include <string.h>

#include "sink.h"

/// What buffers take of the address space: of all batches, or of as many as a budget lets in; with
/// what their alignment costs.
static uint64_t find_buffer_bytes(const fsti_job *job, bool is_view) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < job->plan->batch_count && !is_view; i++) {
        const fsti_plan_batch *batch = &job->plan->batches[i];
        if (!fsti_add(bytes, batch->buffer_bytes, &bytes) ||
            !fsti_add(bytes, batch->item_bytes + 2 * FSTI_HUGE_PAGE_BYTES, &bytes))
            return UINT64_MAX; // there is no such memory
    }
    return job->budget_bytes == 0 ? bytes : fsti_min(bytes, job->budget_bytes);
}

fst_status fsti_pipeline_choose_routes(fsti_pipeline *pipeline, fst_error *error) {
    const fsti_job *job = &pipeline->job;
    const fsti_plan *plan = job->plan;
    // What is verified is read, so that nobody can change it between its digest and its use; and
    // slots are filled by read calls: of a mapping every chunk's pages have to be found and given
    // back, while other threads do the same (docs/gpu.md has the figures).
    bool to_slots = pipeline->sink->has_slots;
    fsti_route_wish wish = {
        .engine = job->engine,
        .guard_allowed = job->guard_allowed && !to_slots && job->digests == NULL,
        .keeps_cache = job->keeps_cache,
        .clears_cache = job->clears_cache,
        .buffer_bytes = find_buffer_bytes(job, pipeline->sink->is_view),
        .is_small = fsti_policy_is_small(plan->bytes_planned, job->budget_bytes != 0)};
    for (size_t i = 0; i < plan->extent_count; i++) {
        uint32_t file = plan->extents[i].file;
        if (pipeline->routes[file].resident != NULL) continue;
        FST_TRY(fsti_route_choose(job->files[file], &wish, &pipeline->routes[file], error));
    }
    return FST_OK;
}

const fsti_io_engine *fsti_pipeline_engine(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan *plan = pipeline->job.plan;
    uint32_t file = plan->extents[plan->chunks[chunk].extent].file;
    return fsti_route_engine(&pipeline->routes[file], pipeline->chunks[chunk].is_resident);
}

bool fsti_pipeline_brings_in(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_file_route *route =
        &pipeline->routes[plan->extents[plan->chunks[chunk].extent].file];
    return route->forced == NULL && !pipeline->chunks[chunk].is_resident &&
           atomic_load_explicit(&route->absent, memory_order_relaxed) == FSTI_ROUTE_MAPPING;
}

void fsti_pipeline_clear_cache(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_job *job = &pipeline->job;
    const fsti_plan_chunk *range = &job->plan->chunks[chunk];
    if (!job->clears_cache || pipeline->chunks[chunk].is_resident) return;
    if (fsti_pipeline_engine(pipeline, chunk)->is_direct) return;
    fsti_file_let_go(job->files[job->plan->extents[range->extent].file], range->begin, range->end);
}

bool fsti_pipeline_demote(fsti_pipeline *pipeline, uint32_t file, fsti_route failed, bool in_setup,
                          int os_errno) {
    fsti_file_route *route = &pipeline->routes[file];
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
