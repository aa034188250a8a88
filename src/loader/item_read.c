// SPDX-License-Identifier: Apache-2.0
/// Reads single items in parallel to the load: items that the stream has released or not reached,
/// and items of a mapped load that cannot be mapped. Each is a small load with its own plan and
/// pipeline: it honours timeouts, can be cancelled, and is counted. It continues after its caller's
/// timeout, so that a later call for the same item makes progress.
///
/// Every read is on the list loader->reads, which loader->lock protects, and in one of these
/// states:
///
///   state      waiter_count  is_abandoned  leaves the state when
///   waited for      > 0           no       its last caller leaves: freed if the read has ended,
///                                          parked otherwise
///   parked            0           no       a caller asks for its item (waited for again); or the
///                                          list is full, the read has ended, and no caller asked
///                                          for PARKED_NS_MAX (freed); or it was parked when
///                                          PARKED_COUNT_MAX reads were parked already (abandoned)
///   abandoned         0          yes       its cancelled pipeline is idle: freed by the next call
///
/// Closing the loader frees all of them. A destination of the caller's is written by at most one
/// read, which is never abandoned.
#include <string.h>
#include <unistd.h>

#include "load.h"

struct item_read {
    item_read *next;
    uint32_t item;
    uint32_t waiter_count; ///< 0: parked, no caller is waiting
    uint64_t parked_ns;    ///< since when
    bool is_abandoned;     ///< cancelled: freed when its threads have ended
    fsti_plan plan;
    load_methods methods;
    fsti_pipeline *pipeline; ///< NULL: opening failed
};

/// Maximum of parked reads that continue; they use memory outside the load's budget.
#define PARKED_COUNT_MAX 8u
/// Maximum of abandoned reads: cancelled, and not finished.
#define ABANDONED_COUNT_MAX 8u
/// A parked read that no caller asks for in this time may be replaced.
#define PARKED_NS_MAX ((uint64_t)10 * 1000000000)
/// Poll interval of a caller that waits for an abandoned read to end.
#define SLOT_SLEEP_US 2000

static void end_read(item_read *read) {
    fsti_pipeline_close(read->pipeline);
    fsti_free(read->methods.routes);
    fsti_plan_clear(&read->plan);
    fsti_free(read);
}

/// Removes a read from the list. The lock must be held.
static void unlist(fst_loader *loader, const item_read *read) {
    item_read **link = &loader->reads;
    while (*link != NULL && *link != read) link = &(*link)->next;
    if (*link != NULL) *link = read->next;
}

/// Joins the parked read of an item, or any read of it if there may be only one. NULL: there is no
/// such read.
static item_read *join_read(fst_loader *loader, uint32_t item, bool is_only) {
    pthread_mutex_lock(&loader->lock);
    item_read *read = loader->reads;
    while (read != NULL &&
           (read->item != item || read->is_abandoned || (read->waiter_count > 0 && !is_only)))
        read = read->next;
    if (read != NULL) read->waiter_count++;
    pthread_mutex_unlock(&loader->lock);
    return read;
}

/// Starts reading an item into memory, whatever the mode of the load.
static fst_status begin_read(fst_loader *loader, uint32_t item, int64_t timeout_ms, item_read **out,
                             fst_error *error) {
    fsti_file *file = loader->files[loader->wants[item].file].file;
    item_read *read = fsti_alloc_zeroed(1, sizeof *read);
    if (read == NULL) return fsti_error_memory(error, sizeof *read);
    read->item = item;
    read->waiter_count = 1;
    fst_status status =
        fsti_loader_plan(loader, &loader->wants[item], 1, false, &read->plan, error);
    if (status == FST_OK)
        status = fsti_loader_find_methods(loader, &read->plan, false, &read->methods, error);
    if (status == FST_OK) {
        fsti_job job = fsti_loader_job(loader, &read->plan, &read->methods);
        job.is_mapped = false;
        job.budget_bytes = 0;
        job.progress = NULL;
        // Read callbacks and servers may be slow, and the read must stay cancellable.
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

/// FST_E_CANCELLED if the program, or its progress callback, cancelled the load.
static fst_status check_cancelled(fst_loader *loader, fst_error *error) {
    pthread_mutex_lock(&loader->lock);
    bool cancelled = loader->is_cancelled;
    pthread_mutex_unlock(&loader->lock);
    if (fsti_pipeline_cancelled(loader->pipeline, error)) return FST_E_CANCELLED;
    if (!cancelled) return FST_OK;
    return fsti_error_set(error, FST_E_CANCELLED, FSTI_NO_LOCATION, "the load was cancelled");
}

/// Puts a parked read at the head of the list. The lock must be held.
static void park_read(fst_loader *loader, item_read *read) {
    unlist(loader, read);
    read->parked_ns = fsti_now_ns();
    read->next = loader->reads;
    loader->reads = read;
}

typedef struct parked_counts {
    size_t parked, abandoned;
} parked_counts;

static parked_counts count_parked(const fst_loader *loader) {
    parked_counts counts = {0};
    for (const item_read *read = loader->reads; read != NULL; read = read->next) {
        counts.abandoned += read->is_abandoned;
        counts.parked += !read->is_abandoned && read->waiter_count == 0;
    }
    return counts;
}

/// Removes a read that can be freed without waiting: an abandoned one or, if the list is full, a
/// complete one that no caller has asked for in time. New reads are at the head of the list, so
/// the last match is the oldest. Returns NULL without a match. The lock must be held.
static item_read *remove_replaceable(fst_loader *loader, bool is_full) {
    uint64_t now_ns = fsti_now_ns();
    item_read *found = NULL;
    for (item_read *read = loader->reads; read != NULL; read = read->next) {
        bool is_replaceable =
            read->is_abandoned || (is_full && now_ns - read->parked_ns >= PARKED_NS_MAX);
        if (is_replaceable && read->waiter_count == 0 && fsti_pipeline_is_idle(read->pipeline))
            found = read;
    }
    if (found != NULL) {
        unlist(loader, found);
        fsti_pipeline_add_counts(found->pipeline, &loader->read_counts);
    }
    return found;
}

/// Frees what is possible without waiting. Returns whether a caller with a timeout may start
/// another read: with timeout 0 it will be parked, otherwise it may be abandoned at the timeout.
static bool free_slots(fst_loader *loader, bool is_poll) {
    for (;;) {
        pthread_mutex_lock(&loader->lock);
        parked_counts counts = count_parked(loader);
        bool is_full = counts.parked >= PARKED_COUNT_MAX;
        item_read *removed = remove_replaceable(loader, is_full);
        pthread_mutex_unlock(&loader->lock);
        if (removed == NULL) return is_poll ? !is_full : counts.abandoned < ABANDONED_COUNT_MAX;
        end_read(removed);
    }
}

/// Waits until another read may be started.
static fst_status wait_for_slot(fst_loader *loader, int64_t timeout_ms, fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    while (!free_slots(loader, timeout_ms == 0)) {
        if (fsti_loader_time_left(timeout_ms, start_ns) == 0)
            return fsti_error_set(error, FST_E_TIMEOUT, FSTI_NO_LOCATION,
                                  "timed out after %lld ms: %u other items are being read",
                                  (long long)timeout_ms, PARKED_COUNT_MAX);
        FST_TRY(check_cancelled(loader, error));
        usleep(SLOT_SLEEP_US);
    }
    return FST_OK;
}

/// Abandons a read that was just parked if too many are parked. The reads parked earlier are kept,
/// so that of many items that a caller polls one after the other each one arrives. A read into the
/// caller's memory is always kept: it uses no memory of the load, and only one read may write
/// there. The lock must be held.
static void abandon_if_too_many(fst_loader *loader, item_read *read) {
    bool has_destination = loader->plan.items[read->item].destination != NULL;
    if (!has_destination && count_parked(loader).parked > PARKED_COUNT_MAX) {
        read->is_abandoned = true;
        fsti_pipeline_cancel(read->pipeline);
    }
}

/// The caller stops waiting. The last caller frees a read that has ended.
static void leave_read(fst_loader *loader, item_read *read, bool has_ended) {
    pthread_mutex_lock(&loader->lock);
    bool is_last = --read->waiter_count == 0;
    if (is_last && has_ended) {
        unlist(loader, read);
        fsti_pipeline_add_counts(read->pipeline, &loader->read_counts);
    } else if (is_last) {
        park_read(loader, read);
        abandon_if_too_many(loader, read);
    }
    pthread_mutex_unlock(&loader->lock);
    if (is_last && has_ended) end_read(read);
}

/// Makes the tensor of a finished read.
static fst_status deliver(fst_loader *loader, item_read *read, fst_tensor **out, fst_error *error) {
    tensor_source source = {.item = read->plan.items, .want = &loader->wants[read->item]};
    fsti_pipeline_buffer(read->pipeline, 0, &source.buffer);
    fst_status status = fsti_tensor_make(loader, &source, out, error);
    fsti_buffer_unref(source.buffer);
    return status;
}

/// Starts the only read into the caller's memory; other callers for the item join it. *out is NULL
/// if the item is already there. Lock order: place_lock, then loader->lock, which is not held while
/// the read is opened.
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

/// Joins a read, or starts one. NULL: the item is already at its destination.
static fst_status get_read(fst_loader *loader, uint32_t item, int64_t timeout_ms, item_read **out,
                           fst_error *error) {
    bool is_only = loader->plan.items[item].destination != NULL;
    *out = join_read(loader, item, is_only);
    if (*out != NULL) return FST_OK;
    FST_TRY(check_cancelled(loader, error));
    if (timeout_ms >= 0) FST_TRY(wait_for_slot(loader, timeout_ms, error));
    if (is_only) return begin_only_read(loader, item, timeout_ms, out, error);
    return begin_read(loader, item, timeout_ms, out, error);
}

/// Waits for a read and makes its tensor.
static fst_status wait_read(fst_loader *loader, item_read *read, int64_t timeout_ms,
                            fst_tensor **out, fst_error *error) {
    // fsti_loader_cancel_reads() only reaches reads on the list, so check here for later ones.
    // Finished items are still returned.
    if (!fsti_pipeline_is_done(read->pipeline)) FST_TRY(check_cancelled(loader, error));
    FST_TRY(
        fsti_pipeline_wait(read->pipeline, 0, (uint32_t)read->plan.chunk_count, timeout_ms, error));
    fsti_pipeline_mark_filled(loader->pipeline, read->item);
    return deliver(loader, read, out, error);
}

/// Makes the tensor of an item that is at its destination.
static fst_status make_placed_tensor(fst_loader *loader, uint32_t item, fst_tensor **out,
                                     fst_error *error) {
    tensor_source source = {.item = &loader->plan.items[item], .want = &loader->wants[item]};
    return fsti_tensor_make(loader, &source, out, error);
}

fst_status fsti_loader_read_item(fst_loader *loader, uint32_t item, int64_t timeout_ms,
                                 fst_tensor **out, fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    item_read *read = NULL;
    if (fsti_pipeline_place_step(loader->pipeline, item) == PLACE_FILLED)
        return make_placed_tensor(loader, item, out, error);
    fst_status status = get_read(loader, item, timeout_ms, &read, error);
    if (status == FST_OK && read == NULL) return make_placed_tensor(loader, item, out, error);
    if (status == FST_OK) {
        int64_t left_ms = fsti_loader_time_left(timeout_ms, start_ns);
        status = wait_read(loader, read, left_ms, out, error);
        leave_read(loader, read, status != FST_E_TIMEOUT);
    }
    fsti_loader_add_wait(loader, start_ns);
    return status;
}

void fsti_loader_add_read_counts(fst_loader *loader, fst_load_stats *stats) {
    size_t count;
    const fst_load_counter *counters = fsti_load_counters(&count);
    for (size_t i = 0; i < count; i++) {
        const char *from = (const char *)&loader->read_counts + counters[i].offset;
        *(uint64_t *)(void *)((char *)stats + counters[i].offset) +=
            *(const uint64_t *)(const void *)from;
    }
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
