// SPDX-License-Identifier: Apache-2.0
/// Runs of absent chunks that one thread reads as one stream.
#include "pipeline.h"

/// The longer a stream, the larger the pages that the kernel allocates, and the fewer descriptors
/// are opened.
#define LONG_RUN_BYTES ((uint64_t)32 << 20)
#define SHORT_RUN_BYTES ((uint64_t)8 << 20)

/// The lock must be held.
static uint32_t take_run(fsti_pipeline *pipeline, uint32_t chunk, uint64_t bytes_max) {
    const fsti_plan *plan = pipeline->job.plan;
    uint32_t end = chunk + 1;
    // This thread's share of the remaining chunks. The tail is split again, so that threads end
    // together.
    uint64_t share = (plan->chunk_count - pipeline->chunks_taken) / pipeline->thread_count;
    uint64_t limit = chunk + fsti_max(fsti_min(share + 1, bytes_max / plan->chunk_bytes), 1);
    for (; end < fsti_min(limit, pipeline->chunks_known); end++) {
        chunk_state *state = &pipeline->chunks[end];
        if (plan->chunks[end].extent != plan->chunks[chunk].extent || state->is_resident ||
            state->is_read ||
            atomic_load_explicit(&state->step, memory_order_relaxed) != CHUNK_PENDING)
            break;
        atomic_store_explicit(&state->step, CHUNK_TAKEN, memory_order_relaxed);
        pipeline->chunks_taken++;
    }
    return end;
}

uint32_t fsti_pipeline_take_run(fsti_pipeline *pipeline, uint32_t chunk) {
    pthread_mutex_lock(&pipeline->lock);
    uint32_t end = take_run(pipeline, chunk, LONG_RUN_BYTES);
    pthread_mutex_unlock(&pipeline->lock);
    return end;
}

uint32_t fsti_pipeline_begin_stream(fsti_pipeline *pipeline, uint32_t chunk) {
    pthread_mutex_lock(&pipeline->lock);
    bool is_only = pipeline->stream_count++ == 0;
    uint32_t end = take_run(pipeline, chunk, is_only ? LONG_RUN_BYTES : SHORT_RUN_BYTES);
    pthread_mutex_unlock(&pipeline->lock);
    return end;
}

void fsti_pipeline_return_read(fsti_pipeline *pipeline, uint32_t chunk) {
    chunk_state *state = &pipeline->chunks[chunk];
    pthread_mutex_lock(&pipeline->lock);
    state->is_read = true;
    atomic_store_explicit(&state->step, CHUNK_PENDING, memory_order_relaxed);
    uint32_t *cursor = &pipeline->cursor[state->queue];
    *cursor = (uint32_t)fsti_min(*cursor, chunk);
    pthread_cond_broadcast(&pipeline->work_changed);
    pthread_mutex_unlock(&pipeline->lock);
}

void fsti_pipeline_end_stream(fsti_pipeline *pipeline) {
    pthread_mutex_lock(&pipeline->lock);
    pipeline->stream_count--;
    // Threads that waited for more chunks of the run may end.
    pthread_cond_broadcast(&pipeline->work_changed);
    pthread_mutex_unlock(&pipeline->lock);
}
