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
