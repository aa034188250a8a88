// SPDX-License-Identifier: Apache-2.0
/// Items that are read by themselves, beside the load: what the stream has let go of or not come
/// to, and what of a map no view can serve. The same work as a load's, so it waits no longer than
/// it is told, can be cancelled, and is counted. A read that was not waited for to its end goes on:
/// who asks again finds it further on.
#include <string.h>

#include "load.h"

struct item_read {
    item_read *next;
    uint32_t item;
    bool is_parked; ///< nobody waits for it now
    fsti_plan plan;
    load_ways ways;
    fsti_pipeline *pipeline; ///< NULL: it could not be opened
};

/// So many that nobody waits for may go on: they hold memory beside the load's.
#define PARKED_COUNT_MAX 8u

static void end_read(item_read *read) {
    fsti_pipeline_close(read->pipeline);
    fsti_free(read->ways.routes);
    fsti_plan_clear(&read->plan);
    fsti_free(read);
}

/// Takes a read off the list. The lock is held.
static void unlist(fst_loader *loader, const item_read *read) {
    item_read **link = &loader->reads;
    while (*link != NULL && *link != read) link = &(*link)->next;
    if (*link != NULL) *link = read->next;
}

/// The read of an item that was parked, now the caller's; NULL: there is none.
static item_read *resume_read(fst_loader *loader, uint32_t item) {
    pthread_mutex_lock(&loader->lock);
    item_read *read = loader->reads;
    while (read != NULL && (read->item != item || !read->is_parked)) read = read->next;
    if (read != NULL) read->is_parked = false;
    pthread_mutex_unlock(&loader->lock);
    return read;
}

/// Begins to read an item, as one of memory, whatever the load is.
static fst_status begin_read(fst_loader *loader, uint32_t item, item_read **out, fst_error *error) {
    item_read *read = fsti_alloc_zeroed(1, sizeof *read);
    if (read == NULL) return fsti_error_memory(error, sizeof *read);
    read->item = item;
    fst_status status =
        fsti_loader_plan(loader, &loader->wants[item], 1, false, &read->plan, error);
    if (status == FST_OK)
        status = fsti_loader_find_ways(loader, &read->plan, false, &read->ways, error);
    if (status == FST_OK) {
        fsti_job job = fsti_loader_job(loader, &read->plan, &read->ways);
        job.mappings = NULL;
        job.budget_bytes = 0;
        job.progress = NULL;
        status = fsti_pipeline_open(&job, &read->pipeline, error);
    }
    if (status != FST_OK) {
        end_read(read);
        return status;
    }
    pthread_mutex_lock(&loader->lock);
    read->next = loader->reads;
    loader->reads = read;
    pthread_mutex_unlock(&loader->lock);
    *out = read;
    return FST_OK;
}

/// Leaves a read to itself, and ends the one that was left longest ago where there are too many.
static void park_read(fst_loader *loader, item_read *read) {
    item_read *oldest = NULL;
    size_t count = 0;
    pthread_mutex_lock(&loader->lock);
    read->is_parked = true;
    unlist(loader, read);
    read->next = loader->reads;
    loader->reads = read;
    for (item_read *other = loader->reads; other != NULL; other = other->next) {
        if (!other->is_parked) continue;
        count++;
        oldest = other;
    }
    if (count <= PARKED_COUNT_MAX) oldest = NULL;
    if (oldest != NULL) unlist(loader, oldest);
    pthread_mutex_unlock(&loader->lock);
    if (oldest != NULL) end_read(oldest);
}

/// The tensor of a read whose bytes are in place.
static fst_status hand_out(fst_loader *loader, item_read *read, fst_tensor **out,
                           fst_error *error) {
    tensor_source source = {.item = read->plan.items, .want = &loader->wants[read->item]};
    fsti_pipeline_buffer(read->pipeline, 0, &source.buffer);
    fst_status status = fsti_tensor_make(loader, &source, out, error);
    fsti_buffer_unref(source.buffer);
    return status;
}

fst_status fsti_loader_read_item(fst_loader *loader, uint32_t item, int64_t timeout_ms,
                                 fst_tensor **out, fst_error *error) {
    if (fsti_pipeline_cancelled(loader->pipeline, error)) return FST_E_CANCELLED;
    item_read *read = resume_read(loader, item);
    if (read == NULL) FST_TRY(begin_read(loader, item, &read, error));
    // Cancelling reaches what is on the list; what came there later looks here.
    fst_status status = fsti_pipeline_cancelled(loader->pipeline, error) ? FST_E_CANCELLED : FST_OK;
    if (status == FST_OK)
        status = fsti_pipeline_wait(read->pipeline, 0, (uint32_t)read->plan.chunk_count, timeout_ms,
                                    error);
    if (status == FST_E_TIMEOUT) {
        park_read(loader, read);
        return status;
    }
    if (status == FST_OK) status = hand_out(loader, read, out, error);
    if (status == FST_OK) fsti_pipeline_fill(loader->pipeline, item);
    pthread_mutex_lock(&loader->lock);
    unlist(loader, read);
    fsti_pipeline_add_counts(read->pipeline, &loader->read_counts);
    pthread_mutex_unlock(&loader->lock);
    end_read(read);
    return status;
}

void fsti_loader_cancel_reads(fst_loader *loader) {
    pthread_mutex_lock(&loader->lock);
    for (item_read *read = loader->reads; read != NULL; read = read->next)
        fsti_pipeline_cancel(read->pipeline);
    pthread_mutex_unlock(&loader->lock);
}

void fsti_loader_end_reads(fst_loader *loader) {
    while (loader->reads != NULL) {
        item_read *read = loader->reads;
        loader->reads = read->next;
        end_read(read);
    }
}
