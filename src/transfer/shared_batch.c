// SPDX-License-Identifier: Apache-2.0
/// Memory of batches that the processes of a node share.
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "sink.h"

static void release_mapping(fsti_buffer *buffer) {
    munmap(buffer->data, buffer->size_bytes);
    fsti_share_unref(buffer->allocator.context);
}

/// Records why a batch is in private memory of this process.
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

static batch_state *batch_of(fsti_pipeline *pipeline, uint32_t chunk) {
    return &pipeline->batches[fsti_chunk_extent(pipeline, chunk)->batch];
}

/// From now on, the chunks of the batch that are not done are written to the private mapping that
/// its tensors will lie in. The first store to a page copies it, so what the stalled owner writes
/// later reaches none of these pages. A copied page also gets no bytes of its other chunks any
/// more, so all of them are done now or become private too. The lock must be held.
static void make_private(fsti_pipeline *pipeline, batch_state *batch) {
    const fsti_plan_batch *range = &pipeline->job.plan->batches[batch - pipeline->batches];
    for (uint32_t i = range->chunk_first; i < range->chunk_end; i++)
        pipeline->chunks[i].is_left = !fsti_share_is_done(pipeline->job.share, i);
    batch->base = batch->buffer->data;
    batch->place = BATCH_OWN;
}

fsti_shared_turn fsti_shared_begin(fsti_pipeline *pipeline, uint32_t chunk) {
    batch_state *batch = batch_of(pipeline, chunk);
    fsti_shared_turn turn = FSTI_TURN_LATER;
    pthread_mutex_lock(&pipeline->lock);
    if (batch->place == BATCH_LEAVING && batch->claims == 0) make_private(pipeline, batch);
    if (batch->place == BATCH_SHARED) {
        batch->claims++;
        turn = FSTI_TURN_CLAIM;
    } else if (batch->place == BATCH_OWN) {
        // The buffer of a batch that was never in the segment is no mapping of it.
        bool was_shared = batch->buffer != NULL && batch->buffer->release == release_mapping;
        turn = was_shared && !pipeline->chunks[chunk].is_left ? FSTI_TURN_DONE : FSTI_TURN_READ;
    }
    pthread_mutex_unlock(&pipeline->lock);
    return turn;
}

void fsti_shared_end_claim(fsti_pipeline *pipeline, uint32_t chunk) {
    pthread_mutex_lock(&pipeline->lock);
    batch_of(pipeline, chunk)->claims--;
    pthread_mutex_unlock(&pipeline->lock);
}

fst_status fsti_shared_leave(fsti_pipeline *pipeline, uint32_t chunk, fst_error *error) {
    batch_state *batch = batch_of(pipeline, chunk);
    fsti_buffer *buffer = batch->buffer;
    // Each private page takes memory in addition to the segment's.
    FST_TRY(fsti_memory_check(buffer->size_bytes, error));
    if (mprotect(buffer->data, buffer->size_bytes, PROT_READ | PROT_WRITE) != 0)
        return fsti_error_memory(error, buffer->size_bytes);
    note_own_batch(pipeline, "the process that reads it is stopped or slow");
    pthread_mutex_lock(&pipeline->lock);
    if (batch->place == BATCH_SHARED) batch->place = BATCH_LEAVING;
    pthread_mutex_unlock(&pipeline->lock);
    return FST_OK;
}
