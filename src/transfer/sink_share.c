// SPDX-License-Identifier: Apache-2.0
/// The sink for memory that the processes of a node share. A chunk is claimed before it is read. If
/// another process has it, it is put off until that process has read it, or has ended.
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "sink.h"

static void release_mapping(fsti_buffer *buffer) {
    munmap(buffer->data, buffer->size_bytes);
    fsti_share_unref(buffer->allocator.context);
}

/// Notes why a batch is this process's own.
static void note_own_batch(fsti_pipeline *pipeline, const char *words) {
    pthread_mutex_lock(&pipeline->lock);
    if (pipeline->share_reason[0] == '\0')
        snprintf(pipeline->share_reason, sizeof pipeline->share_reason,
                 ", partly in memory of this process: %s", words);
    pthread_mutex_unlock(&pipeline->lock);
}

/// Whether the segment has memory for the batch. A cgroup's limit is checked first: exceeding it
/// would end processes.
static bool reserve(fsti_pipeline *pipeline, uint32_t batch) {
    fsti_share *share = pipeline->job.share;
    uint64_t bytes = pipeline->job.plan->batches[batch].buffer_bytes;
    if (fsti_share_is_reserved(share, batch)) return true;
    if (fsti_memory_check(bytes, NULL) != FST_OK) {
        note_own_batch(pipeline, "the memory that is left is too small for a shared segment");
        return false;
    }
    if (fsti_share_reserve(share, batch)) return true;
    note_own_batch(pipeline, strerror(errno));
    return false;
}

void fsti_shared_batch(fsti_pipeline *pipeline, uint32_t batch, fsti_buffer **out, char **base) {
    fsti_share *share = pipeline->job.share;
    uint64_t bytes = pipeline->job.plan->batches[batch].buffer_bytes;
    *out = NULL;
    if (!reserve(pipeline, batch)) return;
    *base = fsti_share_map_shared(share, batch);
    char *data = fsti_share_map_private(share, batch, pipeline->job.share_is_writable);
    if (*base == NULL || data == NULL ||
        fsti_buffer_wrap(data, bytes, release_mapping, out, NULL) != FST_OK) {
        if (data != NULL) munmap(data, bytes);
        note_own_batch(pipeline, strerror(ENOMEM));
        return;
    }
    (*out)->allocator.context = fsti_share_ref(share);
    (*out)->writable = pipeline->job.share_is_writable;
}

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

/// All threads have ended: what they claimed is free for other processes.
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
