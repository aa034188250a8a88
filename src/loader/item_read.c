// SPDX-License-Identifier: Apache-2.0
/// Items that are read by themselves, beside the load: what the stream has let go of or not come
/// to, and what of a map no view can serve. The same work as a load's, so it waits no longer than
/// it is told, can be cancelled, and is counted. A read that was not waited for to its end goes on:
/// who asks again finds it further on.
#include <string.h>
#include <unistd.h>

#include "load.h"

struct item_read {
    item_read *next;
    uint32_t item;
    uint32_t waiter_count; ///< 0: it is parked, and nobody waits for it now
    uint64_t parked_ns;    ///< since when
    fsti_plan plan;
    load_ways ways;
    fsti_pipeline *pipeline; ///< NULL: it could not be opened
};

/// So many that nobody waits for may go on: they hold memory beside the load's.
#define PARKED_COUNT_MAX 8u
/// Who has not come back for so long has forgotten it.
#define FORGOTTEN_NS ((uint64_t)10 * 1000000000)
/// So long sleeps who waits for one of the others to be fetched.
#define ROOM_SLEEP_US 2000

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

/// The read of an item that was parked, or, where it is to be the only one, any; NULL: there is
/// none.
static item_read *join_read(fst_loader *loader, uint32_t item, bool is_only) {
    pthread_mutex_lock(&loader->lock);
    item_read *read = loader->reads;
    while (read != NULL && (read->item != item || (read->waiter_count > 0 && !is_only)))
        read = read->next;
    if (read != NULL) read->waiter_count++;
    pthread_mutex_unlock(&loader->lock);
    return read;
}

/// Begins to read an item, as one of memory, whatever the load is.
static fst_status begin_read(fst_loader *loader, uint32_t item, int64_t timeout_ms, item_read **out,
                             fst_error *error) {
    fsti_file *file = loader->files[loader->wants[item].file];
    item_read *read = fsti_alloc_zeroed(1, sizeof *read);
    if (read == NULL) return fsti_error_memory(error, sizeof *read);
    read->item = item;
    read->waiter_count = 1;
    fst_status status =
        fsti_loader_plan(loader, &loader->wants[item], 1, false, &read->plan, error);
    if (status == FST_OK)
        status = fsti_loader_find_ways(loader, &read->plan, false, &read->ways, error);
    if (status == FST_OK) {
        fsti_job job = fsti_loader_job(loader, &read->plan, &read->ways);
        job.mappings = NULL;
        job.budget_bytes = 0;
        job.progress = NULL;
        // What a program gives, or a server, may take its time, and is to be cancelled meanwhile.
        job.may_wait =
            timeout_ms < 0 && fsti_file_identity(file) >= 0 && !fsti_file_is_object(file);
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

/// FST_E_CANCELLED when the load was cancelled, by the program or by its callback of progress.
static fst_status check_cancelled(fst_loader *loader, fst_error *error) {
    pthread_mutex_lock(&loader->lock);
    bool cancelled = loader->is_cancelled;
    pthread_mutex_unlock(&loader->lock);
    if (fsti_pipeline_cancelled(loader->pipeline, error)) return FST_E_CANCELLED;
    if (!cancelled) return FST_OK;
    return fsti_error_set(error, FST_E_CANCELLED, FSTI_NOWHERE, "the load was cancelled");
}

/// Puts a read that nobody waits for first on the list. The lock is held.
static void park_read(fst_loader *loader, item_read *read) {
    unlist(loader, read);
    read->parked_ns = fsti_now_ns();
    read->next = loader->reads;
    loader->reads = read;
}

/// Whether one more may be parked; where too many are, one that is over and was forgotten goes,
/// *out: for the caller to end. None goes that somebody comes back for: of many that are asked for
/// by turns none would ever arrive. And none that is still read: that would have to be waited for.
static bool make_room(fst_loader *loader, item_read **out) {
    uint64_t now_ns = fsti_now_ns();
    size_t count = 0;
    *out = NULL;
    pthread_mutex_lock(&loader->lock);
    for (item_read *read = loader->reads; read != NULL; read = read->next) {
        if (read->waiter_count > 0) continue;
        count++;
        if (now_ns - read->parked_ns >= FORGOTTEN_NS && fsti_pipeline_is_over(read->pipeline))
            *out = read;
    }
    bool is_full = count >= PARKED_COUNT_MAX;
    if (!is_full) *out = NULL;
    if (*out != NULL) {
        unlist(loader, *out);
        fsti_pipeline_add_counts((*out)->pipeline, &loader->read_counts);
    }
    pthread_mutex_unlock(&loader->lock);
    return !is_full || *out != NULL;
}

/// Waits until a read that its caller may leave can be begun.
static fst_status wait_for_room(fst_loader *loader, int64_t timeout_ms, fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    item_read *forgotten;
    while (!make_room(loader, &forgotten)) {
        if (fsti_loader_time_left(timeout_ms, start_ns) == 0)
            return fsti_error_set(error, FST_E_TIMEOUT, FSTI_NOWHERE,
                                  "not there after %lld ms: %u other items are read already",
                                  (long long)timeout_ms, PARKED_COUNT_MAX);
        FST_TRY(check_cancelled(loader, error));
        usleep(ROOM_SLEEP_US);
    }
    if (forgotten != NULL) end_read(forgotten);
    return FST_OK;
}

/// The caller waits no longer. What has come to an end goes with the last who waited.
static void leave_read(fst_loader *loader, item_read *read, bool is_over) {
    pthread_mutex_lock(&loader->lock);
    bool is_last = --read->waiter_count == 0;
    if (is_last && is_over) {
        unlist(loader, read);
        fsti_pipeline_add_counts(read->pipeline, &loader->read_counts);
    } else if (is_last) {
        park_read(loader, read);
    }
    pthread_mutex_unlock(&loader->lock);
    if (is_last && is_over) end_read(read);
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

/// Memory of the caller's is written once: whoever else wants the item waits for that read. *out is
/// NULL when it is there.
static fst_status begin_only_read(fst_loader *loader, uint32_t item, int64_t timeout_ms,
                                  item_read **out, fst_error *error) {
    fst_status status = FST_OK;
    pthread_mutex_lock(&loader->place_lock);
    bool is_filled = fsti_pipeline_place_step(loader->pipeline, item) == PLACE_FILLED;
    *out = is_filled ? NULL : join_read(loader, item, true);
    if (!is_filled && *out == NULL) status = begin_read(loader, item, timeout_ms, out, error);
    pthread_mutex_unlock(&loader->place_lock);
    return status;
}

/// A read to join or, where there is none, a new one; NULL: the item is in its place.
static fst_status get_read(fst_loader *loader, uint32_t item, int64_t timeout_ms, item_read **out,
                           fst_error *error) {
    bool is_only = loader->plan.items[item].destination != NULL;
    *out = join_read(loader, item, is_only);
    if (*out != NULL) return FST_OK;
    FST_TRY(check_cancelled(loader, error));
    if (timeout_ms >= 0) FST_TRY(wait_for_room(loader, timeout_ms, error));
    if (is_only) return begin_only_read(loader, item, timeout_ms, out, error);
    return begin_read(loader, item, timeout_ms, out, error);
}

/// Waits for a read; the tensor, if it ends well.
static fst_status wait_read(fst_loader *loader, item_read *read, int64_t timeout_ms,
                            fst_tensor **out, fst_error *error) {
    // Cancelling reaches what is on the list; what came there later looks here. What is in place
    // can still be had.
    if (!fsti_pipeline_is_done(read->pipeline)) FST_TRY(check_cancelled(loader, error));
    FST_TRY(
        fsti_pipeline_wait(read->pipeline, 0, (uint32_t)read->plan.chunk_count, timeout_ms, error));
    fsti_pipeline_fill(loader->pipeline, read->item);
    return hand_out(loader, read, out, error);
}

/// The tensor of an item that is in its place.
static fst_status take_placed(fst_loader *loader, uint32_t item, fst_tensor **out,
                              fst_error *error) {
    tensor_source there = {.item = &loader->plan.items[item], .want = &loader->wants[item]};
    return fsti_tensor_make(loader, &there, out, error);
}

fst_status fsti_loader_read_item(fst_loader *loader, uint32_t item, int64_t timeout_ms,
                                 fst_tensor **out, fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    item_read *read = NULL;
    if (fsti_pipeline_place_step(loader->pipeline, item) == PLACE_FILLED)
        return take_placed(loader, item, out, error);
    fst_status status = get_read(loader, item, timeout_ms, &read, error);
    if (status == FST_OK && read == NULL) return take_placed(loader, item, out, error);
    if (status == FST_OK) {
        int64_t left_ms = fsti_loader_time_left(timeout_ms, start_ns);
        status = wait_read(loader, read, left_ms, out, error);
        leave_read(loader, read, status != FST_E_TIMEOUT);
    }
    fsti_loader_add_wait(loader, start_ns);
    return status;
}

void fsti_loader_add_read_counts(fst_loader *loader, fst_load_stats *stats) {
#define ADD_READS(name) stats->name += loader->read_counts.name;
    FST_LOAD_COUNTERS(ADD_READS)
#undef ADD_READS
    for (item_read *read = loader->reads; read != NULL; read = read->next)
        fsti_pipeline_add_counts(read->pipeline, stats);
}

void fsti_loader_cancel_reads(fst_loader *loader) {
    pthread_mutex_lock(&loader->lock);
    loader->is_cancelled = true;
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
