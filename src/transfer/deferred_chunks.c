// SPDX-License-Identifier: Apache-2.0
/// Deferred work: chunks that another process is reading into shared memory, and pages of views
/// that are mapped last.
#include "pipeline.h"

/// How often deferred chunks are tried, and how many of them, because their reader may have ended.
#define DEFERRED_TRY_MS 20
#define DEFERRED_TRY_COUNT 16u

void fsti_pipeline_defer(fsti_pipeline *pipeline, uint32_t chunk) {
    pthread_mutex_lock(&pipeline->lock);
    atomic_store_explicit(&pipeline->chunks[chunk].step, CHUNK_DEFERRED, memory_order_relaxed);
    pipeline->chunks_taken--;
    pipeline->chunks_deferred++;
    pthread_mutex_unlock(&pipeline->lock);
}

void fsti_pipeline_poll_deferred(fsti_pipeline *pipeline) {
    uint64_t now_ns = fsti_now_ns();
    if (pipeline->chunks_deferred == 0 ||
        now_ns - pipeline->deferred_polled_ns < (uint64_t)FSTI_DEFERRED_PAUSE_MS * 1000000)
        return;
    pipeline->deferred_polled_ns = now_ns;
    bool may_try = now_ns - pipeline->deferred_tried_ns >= (uint64_t)DEFERRED_TRY_MS * 1000000;
    if (may_try) pipeline->deferred_tried_ns = now_ns;
    uint32_t tries_left = may_try ? DEFERRED_TRY_COUNT : 0, try_from = pipeline->deferred_try_from;
    if (may_try) pipeline->deferred_try_from = 0; // unless there are more than can be tried now
    for (uint32_t i = 0; i < pipeline->chunks_known && pipeline->chunks_deferred > 0; i++) {
        chunk_state *state = &pipeline->chunks[i];
        if (atomic_load_explicit(&state->step, memory_order_relaxed) != CHUNK_DEFERRED) continue;
        if (!fsti_share_is_done(pipeline->job.share, i)) {
            if (tries_left == 0 || i < try_from) continue;
            if (--tries_left == 0) pipeline->deferred_try_from = i + 1;
        }
        atomic_store_explicit(&state->step, CHUNK_PENDING, memory_order_relaxed);
        pipeline->chunks_deferred--;
        uint32_t *cursor = &pipeline->cursor[state->queue];
        *cursor = (uint32_t)fsti_min(*cursor, i);
        pthread_cond_broadcast(&pipeline->work_changed);
    }
}

void fsti_pipeline_map_later(fsti_pipeline *pipeline, uint32_t chunk) {
    pthread_mutex_lock(&pipeline->lock);
    pipeline->chunks[chunk].is_unmapped = true;
    pipeline->chunks_unmapped++;
    pipeline->unmapped_cursor = (uint32_t)fsti_min(pipeline->unmapped_cursor, chunk);
    pthread_mutex_unlock(&pipeline->lock);
}

uint32_t fsti_pipeline_take_unmapped(fsti_pipeline *pipeline) {
    uint32_t *cursor = &pipeline->unmapped_cursor;
    if (pipeline->chunks_unmapped == 0) return UINT32_MAX;
    while (*cursor < pipeline->chunks_known && !pipeline->chunks[*cursor].is_unmapped) ++*cursor;
    if (*cursor == pipeline->chunks_known) return UINT32_MAX;
    pipeline->chunks[*cursor].is_unmapped = false;
    return *cursor;
}

void fsti_pipeline_note_mapped(fsti_pipeline *pipeline) {
    pthread_mutex_lock(&pipeline->lock);
    pipeline->chunks_unmapped--;
    pthread_cond_broadcast(&pipeline->chunk_finished);
    pthread_mutex_unlock(&pipeline->lock);
}
