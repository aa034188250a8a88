// SPDX-License-Identifier: Apache-2.0
/// The sink for memory that the processes of a node share. A chunk is claimed before it is read. If
/// another process has claimed it, it is deferred until that process has read it or ended. If that
/// process is stalled, the unfinished chunks of the batch are read into private pages instead.
#include "sink.h"

static fst_status finish_done(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                              fst_error *error) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    counts->shared_bytes += range->end - range->begin;
    return fsti_sink_finish(pipeline, chunk, counts, error);
}

/// Claims a chunk. If that is impossible for now, it is deferred.
static fst_status claim(fsti_pipeline *pipeline, uint32_t chunk, sink_target *target,
                        worker_counts *counts, fst_error *error) {
    fsti_share_step step = fsti_share_claim(pipeline->job.share, chunk);
    pipeline->chunks[chunk].is_claimed = step == FSTI_SHARE_CLAIMED;
    if (step == FSTI_SHARE_CLAIMED)
        return fsti_host_prepare(pipeline, chunk, target, counts, error);
    fsti_shared_end_claim(pipeline, chunk);
    if (step == FSTI_SHARE_DONE) return finish_done(pipeline, chunk, counts, error);
    if (step == FSTI_SHARE_STALLED) FST_TRY(fsti_shared_leave(pipeline, chunk, error));
    fsti_pipeline_defer(pipeline, chunk);
    return FST_OK;
}

static fst_status prepare_shared(fsti_pipeline *pipeline, uint32_t chunk, sink_target *target,
                                 worker_counts *counts, fst_error *error) {
    target->answer = SINK_DONE;
    switch (fsti_shared_begin(pipeline, chunk)) {
    case FSTI_TURN_CLAIM: return claim(pipeline, chunk, target, counts, error);
    case FSTI_TURN_READ: return fsti_host_prepare(pipeline, chunk, target, counts, error);
    case FSTI_TURN_DONE: return finish_done(pipeline, chunk, counts, error);
    case FSTI_TURN_LATER: break;
    }
    fsti_pipeline_defer(pipeline, chunk);
    return FST_OK;
}

static fst_status complete_shared(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                                  fst_error *error) {
    if (pipeline->chunks[chunk].is_claimed) {
        fsti_share_finish(pipeline->job.share, chunk);
        fsti_shared_end_claim(pipeline, chunk);
    }
    return fsti_sink_finish(pipeline, chunk, counts, error);
}

/// All threads have ended, so their remaining claims are released for other processes.
static void close_shared(fsti_pipeline *pipeline) { fsti_share_end_writes(pipeline->job.share); }

static void explain_shared(fsti_pipeline *pipeline, char *text, size_t size) {
    fsti_host_explain(pipeline, text, size);
    fsti_append(text, size, pipeline->share_reason);
}

const fsti_sink fsti_sink_share = {
    // Memory is reserved batch by batch while earlier ones are read.
    .classifies_ahead = true,       .prepare = prepare_shared,   .place = fsti_host_place,
    .complete = complete_shared,    .reap = fsti_sink_reap_none, .wake = fsti_sink_wake_none,
    .populate = fsti_sink_populate, .close = close_shared,       .explain = explain_shared,
};
