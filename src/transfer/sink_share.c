// SPDX-License-Identifier: Apache-2.0
/// The sink for memory that the processes of a node share. A chunk is claimed before it is read. If
/// another process has claimed it, it is deferred until that process has read it or ended.
#include "sink.h"

static bool is_shared(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan *plan = pipeline->job.plan;
    return pipeline->batches[plan->extents[plan->chunks[chunk].extent].batch].is_shared;
}

static fst_status prepare_shared(fsti_pipeline *pipeline, uint32_t chunk, sink_target *target,
                                 worker_counts *counts, fst_error *error) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    if (!is_shared(pipeline, chunk))
        return fsti_host_prepare(pipeline, chunk, target, counts, error);
    target->answer = SINK_DONE;
    switch (fsti_share_claim(pipeline->job.share, chunk)) {
    case FSTI_SHARE_CLAIMED: return fsti_host_prepare(pipeline, chunk, target, counts, error);
    case FSTI_SHARE_TAKEN: fsti_pipeline_defer(pipeline, chunk); return FST_OK;
    case FSTI_SHARE_DONE: break;
    }
    counts->shared_bytes += range->end - range->begin;
    return fsti_sink_finish(pipeline, chunk, counts, error);
}

static fst_status complete_shared(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                                  fst_error *error) {
    if (is_shared(pipeline, chunk)) fsti_share_finish(pipeline->job.share, chunk);
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
    .classifies_ahead = true,    .prepare = prepare_shared,   .place = fsti_host_place,
    .complete = complete_shared, .reap = fsti_sink_reap_none, .wake = fsti_sink_wake_none,
    .close = close_shared,       .explain = explain_shared,
};
