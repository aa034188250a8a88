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
    uint32_t file = fsti_chunk_extent(pipeline, chunk)->file;
    return fsti_route_engine(&pipeline->job.routes[file], pipeline->chunks[chunk].is_resident);
}

bool fsti_pipeline_pages_in(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_file_route *route = &pipeline->job.routes[fsti_chunk_extent(pipeline, chunk)->file];
    const chunk_state *state = &pipeline->chunks[chunk];
    return route->forced == NULL && !state->is_resident && !state->is_read &&
           atomic_load_explicit(&route->absent, memory_order_relaxed) == FSTI_ROUTE_MAPPING;
}

/// Logs that a file's reads failed and what replaces them. No lock may be held.
static void log_demotion(const fsti_pipeline *pipeline, uint32_t file, int os_errno,
                         const char *given_up, const char *instead) {
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
    if (gds_has_ended)
        log_demotion(pipeline, file, os_errno, "GPUDirect Storage reads",
                     "reads through host memory");
    if (is_demoted && next == FSTI_ROUTE_CACHE)
        log_demotion(pipeline, file, os_errno, "direct reads", "reads through the page cache");
    else if (is_demoted)
        log_demotion(pipeline, file, os_errno, "io_uring reads", "direct reads by threads");
    return true;
}
