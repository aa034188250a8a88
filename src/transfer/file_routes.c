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

void fsti_pipeline_clear_cache(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_job *job = &pipeline->job;
    const fsti_plan_chunk *range = &job->plan->chunks[chunk];
    if (!job->policy->clears_cache || pipeline->chunks[chunk].is_resident) return;
    if (fsti_pipeline_engine(pipeline, chunk)->is_direct) return;
    fsti_file_let_go(job->files[job->plan->extents[range->extent].file], range->begin, range->end);
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
