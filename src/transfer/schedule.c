// SPDX-License-Identifier: Apache-2.0
/// Scheduling: admits batches to memory, classifies chunks, assigns them to threads, and counts
/// finished ones.
///
/// Invariants (all under the pipeline's lock): batches are admitted in order, and chunks below
/// chunk_limit belong to admitted batches. Chunks below chunks_known are classified, and only those
/// are taken. cursor[q] never passes a pending chunk of queue q. `is_admitting` makes one thread at
/// a time allocate or classify while the lock is released.
#include <stdio.h>

#include "sink.h"

/// How far ahead of the reads a helper prefaults memory.
#define POPULATE_AHEAD_CHUNKS 8u

/// For a device: classify more chunks when fewer than this many are classified and not taken.
#define CLASSIFY_AHEAD_CHUNKS 4u
/// For a device: chunks that are classified at a time.
#define CLASSIFY_STEP_CHUNKS 4u

/// If the kernel reports no residency, this many single bytes of a chunk are read to probe it.
#define SAMPLE_COUNT 4u

/// Whether all chunks of a batch are classified when it is admitted.
static bool classifies_at_once(const fsti_pipeline *pipeline) {
    return !pipeline->sink->classifies_ahead;
}

/// Whether a view's chunk is probably resident, for a file whose residency the kernel hides. Reads
/// single bytes without waiting. An absent byte makes the kernel read ahead in small pages, so the
/// rest of the file then counts as absent. Only for views, whose bytes must be in the page cache
/// anyway.
static bool is_resident_probe(fsti_pipeline *pipeline, fsti_file *file,
                              const fsti_plan_chunk *chunk) {
    if (!pipeline->sink->is_view || !pipeline->job.policy->keeps_cache) return false;
    for (uint64_t i = 0; i < SAMPLE_COUNT; i++) {
        if (atomic_load(&pipeline->found_absent)) return false;
        uint64_t at = chunk->begin + (chunk->end - chunk->begin - 1) / (SAMPLE_COUNT - 1) * i;
        if (!fsti_file_is_resident_at(file, at)) atomic_store(&pipeline->found_absent, true);
    }
    return !atomic_load(&pipeline->found_absent);
}

/// Classifies a chunk by its residency. Partly resident chunks count as absent; their resident
/// pages are recorded, so that they are not dropped.
static void classify_mapped_chunk(fsti_pipeline *pipeline, uint32_t index) {
    const fsti_plan_chunk *chunk = &pipeline->job.plan->chunks[index];
    uint32_t file_index = pipeline->job.plan->extents[chunk->extent].file;
    const fsti_file_route *route = &pipeline->job.routes[file_index];
    fsti_file *file = pipeline->job.files[file_index].file;
    chunk_state *state = &pipeline->chunks[index];
    bool is_view = pipeline->sink->is_view, clears = pipeline->job.policy->clears_cache;
    uint64_t resident;
    state->is_resident = state->is_dropped = false;
    if (!is_view && !clears && !fsti_pipeline_pages_in(pipeline, index) &&
        fsti_route_engine(route, true) == fsti_route_engine(route, false))
        return;
    bool has_residency = fsti_file_resident(file, chunk->begin, chunk->end, &resident);
    state->is_resident = has_residency ? resident == chunk->end - chunk->begin
                                       : is_resident_probe(pipeline, file, chunk);
    // If residency is unknown, pages may have been cached before and are kept.
    if (!clears || state->is_resident) return;
    state->is_dropped = has_residency || fsti_file_derived_uses_cache(file);
    if (has_residency && resident > 0)
        state->is_dropped = fsti_pipeline_note_resident(pipeline, index);
}

/// Classifies a chunk. True if it is resident.
static bool classify_chunk(fsti_pipeline *pipeline, uint32_t index) {
    chunk_state *state = &pipeline->chunks[index];
    bool is_view = pipeline->sink->is_view;
    classify_mapped_chunk(pipeline, index);
    state->queue =
        !is_view && fsti_pipeline_engine(pipeline, index)->is_async ? QUEUE_ASYNC : QUEUE_BLOCKING;
    // A resident chunk of a view needs no work, except prefaulting if requested.
    bool needs_no_read =
        is_view && !pipeline->job.verifies &&
        (state->is_resident ? !pipeline->job.populate : !pipeline->job.policy->keeps_cache);
    atomic_store_explicit(&state->step, needs_no_read ? CHUNK_DONE : CHUNK_PENDING,
                          memory_order_release);
    return state->is_resident;
}

/// Allocates with the caller's allocator. For a device, each batch is ordered after the caller's
/// stream, because queued work there may still use returned tensors.
static fst_status use_callers_memory(fsti_pipeline *pipeline, const fsti_plan_batch *batch,
                                     fsti_buffer **out, fst_error *error) {
    const fsti_job *job = &pipeline->job;
    const fsti_foreign foreign = {.allocator = job->allocator,
                                  .device = job->device,
                                  .size_bytes = batch->buffer_bytes,
                                  .at_page = pipeline->may_use_gds};
    fst_status status = fsti_pipeline_call_allocator(pipeline, &foreign, out, error);
    if (job->device == NULL || pipeline->follow == NULL) return status;
    if (status == FST_E_NO_MEMORY) {
        status = fsti_device_full(job->device, batch->buffer_bytes, error);
        if (error != NULL)
            fsti_append(error->message, sizeof error->message, ", from the caller's allocator");
        return status;
    }
    FST_TRY(status);
    status = pipeline->follow(pipeline, error);
    if (status == FST_OK) return FST_OK;
    fsti_buffer_unref(*out);
    *out = NULL;
    return status;
}

/// Whether the first bytes of a batch are remote. Requests should then start before memory is
/// prefaulted.
static bool is_remote_batch(const fsti_pipeline *pipeline, const fsti_plan_batch *batch) {
    if (batch->chunk_first == batch->chunk_end) return false;
    uint32_t file = fsti_chunk_extent(pipeline, batch->chunk_first)->file;
    return fsti_file_is_object(pipeline->job.files[file].file);
}

/// The memory of a batch.
typedef struct batch_memory {
    fsti_buffer *buffer;
    char *base;     ///< batch_state.base
    bool is_placed; ///< the buffer has a NUMA policy
} batch_memory;

static fst_status make_own_buffer(fsti_pipeline *pipeline, const fsti_plan_batch *batch,
                                  batch_memory *memory, fst_error *error) {
    const fsti_job *job = &pipeline->job;
    fsti_buffer **out = &memory->buffer;
    switch (job->policy->memory) {
    case FSTI_MEMORY_CALLERS: return use_callers_memory(pipeline, batch, out, error);
    case FSTI_MEMORY_PINNED:
        return fsti_buffer_registered(job->device, batch->buffer_bytes, out, error);
    case FSTI_MEMORY_DEVICE:
        return fsti_buffer_device(job->device, batch->buffer_bytes, out, error);
    case FSTI_MEMORY_ARENA: break;
    }
    FST_TRY(fsti_buffer_arena(batch->buffer_bytes, out, error));
    // Existing pages cannot be moved.
    if (!(*out)->is_fresh) return FST_OK;
    memory->is_placed = fsti_numa_set_policy((*out)->data, (*out)->size_bytes, job->numa);
    // A small load's sink may choose without a measurement, when the batch begins.
    bool is_small = job->plan->bytes_requested <= FSTI_UNMEASURED_LOAD_BYTES;
    bool waits =
        is_remote_batch(pipeline, batch) || (is_small && pipeline->sink->begin_batch != NULL);
    fsti_buffer_choose_pages(*out, !waits);
    return FST_OK;
}

static fst_status make_buffer(fsti_pipeline *pipeline, const fsti_plan_batch *batch,
                              batch_memory *out, fst_error *error) {
    *out = (batch_memory){.buffer = NULL};
    if (batch->buffer_bytes == 0 || pipeline->sink->is_view) return FST_OK;
    if (pipeline->job.share != NULL)
        fsti_shared_batch(pipeline, (uint32_t)(batch - pipeline->job.plan->batches), &out->buffer,
                          &out->base);
    if (out->buffer != NULL) return FST_OK;
    FST_TRY(make_own_buffer(pipeline, batch, out, error));
    out->base = out->buffer->data;
    return FST_OK;
}

/// At least this much memory per thread is needed for read buffers.
#define SPARE_BYTES_PER_THREAD ((uint64_t)1 << 20 | (uint64_t)16 << 10)

/// Later batches leave memory for read buffers, without which no batch could complete.
static fst_status check_spare(const fsti_pipeline *pipeline, const fsti_plan_batch *batch,
                              fst_error *error) {
    bool uses_arena = !pipeline->sink->is_view && pipeline->job.policy->memory == FSTI_MEMORY_ARENA;
    if (pipeline->job.budget_bytes == 0 || !uses_arena) return FST_OK;
    uint64_t spare = pipeline->thread_count * SPARE_BYTES_PER_THREAD;
    return fsti_memory_check(fsti_buffer_arena_bytes(batch->buffer_bytes) + spare, error);
}

static bool fits_budget(const fsti_pipeline *pipeline, const fsti_plan_batch *batch) {
    uint64_t budget = pipeline->job.budget_bytes;
    uint64_t bytes =
        fsti_buffer_arena_bytes(batch->buffer_bytes); // the real size of the allocation
    return budget == 0 || pipeline->bytes_in_flight == 0 ||
           bytes <= budget - fsti_min(budget, pipeline->bytes_in_flight);
}

/// Counts complete tensors in delivery order, which is cheap and suits progress bars. Remembers the
/// position within the first incomplete one.
static void count_items(fsti_pipeline *pipeline) {
    const fsti_plan *plan = pipeline->job.plan;
    while (pipeline->items_done < plan->item_count) {
        const fsti_plan_item *item = &plan->items[plan->delivery[pipeline->items_done]];
        if (pipeline->item_chunk < item->chunk_first) pipeline->item_chunk = item->chunk_first;
        if (!fsti_pipeline_chunks_done(pipeline, &pipeline->item_chunk, item->chunk_end)) return;
        pipeline->items_done++;
        pipeline->item_chunk = 0;
    }
}

/// Publishes a batch whose memory is allocated. The lock must be held.
static void publish_batch(fsti_pipeline *pipeline, const batch_memory *memory,
                          uint32_t resident_count) {
    batch_state *state = &pipeline->batches[pipeline->batches_admitted];
    fsti_buffer *buffer = memory->buffer;
    uint64_t bytes = buffer == NULL ? 0 : buffer->size_bytes;
    pipeline->bytes_allocated += bytes;
    pipeline->bytes_in_flight += bytes;
    pipeline->bytes_peak = fsti_max(pipeline->bytes_peak, pipeline->bytes_in_flight);
    pipeline->chunks_resident += resident_count;
    const fsti_plan_batch *batch = &pipeline->job.plan->batches[pipeline->batches_admitted];
    state->chunks_left = batch->chunk_end - batch->chunk_first;
    for (uint32_t i = batch->chunk_first; i < batch->chunk_end; i++) {
        if (atomic_load_explicit(&pipeline->chunks[i].step, memory_order_relaxed) != CHUNK_DONE)
            continue;
        const fsti_plan_chunk *range = &pipeline->job.plan->chunks[i];
        pipeline->chunks_done++;
        pipeline->chunks_taken++;
        pipeline->bytes_done += range->end - range->begin;
        state->chunks_left--;
    }
    state->buffer = buffer;
    state->base = memory->base;
    state->place = buffer != NULL && memory->base != buffer->data ? BATCH_SHARED : BATCH_OWN;
    state->step = BATCH_ADMITTED;
    pipeline->chunk_limit = pipeline->job.plan->batches[pipeline->batches_admitted].chunk_end;
    if (classifies_at_once(pipeline)) pipeline->chunks_known = pipeline->chunk_limit;
    pipeline->batches_admitted++;
    count_items(pipeline);
    pthread_cond_broadcast(&pipeline->work_changed);
}

/// How long to wait for others (another load, the program) to free memory while this load has no
/// read in flight and the program waits for it, and the pause between attempts.
#define MEMORY_WAIT_NS ((uint64_t)500 * 1000000)
#define MEMORY_PAUSE_MS 20

/// Whether missing memory may become free: reads in flight hold memory that is temporarily counted
/// twice, and with a budget the stream frees delivered batches. The lock must be held.
static bool memory_will_return(fsti_pipeline *pipeline) {
    if (pipeline->by_waiters) return false;
    if (pipeline->job.budget_bytes != 0 && pipeline->bytes_in_flight > 0) return true;
    if (pipeline->chunks_taken > pipeline->chunks_done) return true;
    if (pipeline->chunks_done == 0) return false;
    uint64_t now_ns = fsti_now_ns();
    // A program that does not wait may be using the tensors that it has, and free them later.
    if (pipeline->waiter_count == 0 && !pipeline->has_polled) {
        pipeline->memory_missed_ns = 0;
        return true;
    }
    if (pipeline->memory_missed_ns == 0) pipeline->memory_missed_ns = now_ns;
    return now_ns - pipeline->memory_missed_ns < MEMORY_WAIT_NS;
}

/// Memory for a batch is missing. Fails the load unless memory may become free; then the batch is
/// admitted later. The lock is held, except while the load fails.
static void note_memory_shortage(fsti_pipeline *pipeline, const fst_error *cause) {
    const fsti_plan *plan = pipeline->job.plan;
    fst_error error = *cause;
    uint64_t needed = 0;
    pipeline->lacks_memory = cause->status == FST_E_NO_MEMORY && memory_will_return(pipeline);
    if (pipeline->lacks_memory) return;
    pthread_mutex_unlock(&pipeline->lock);
    for (size_t i = 0; i < plan->batch_count; i++) needed += plan->batches[i].buffer_bytes;
    char advice[96];
    snprintf(advice, sizeof advice, ". The load needs %llu bytes in total. Set a budget, or %s",
             (unsigned long long)needed,
             pipeline->job.device != NULL ? "load fewer tensors" : "map the files");
    if (cause->status == FST_E_NO_MEMORY && pipeline->job.budget_bytes == 0)
        fsti_append(error.message, sizeof error.message, advice);
    fsti_pipeline_fail(pipeline, &error);
    pthread_mutex_lock(&pipeline->lock);
}

/// Waits for a change. Only briefly if memory is missing, and one thread while another process
/// reads chunks, because that process cannot wake a thread of this one. The lock must be held.
static void wait_for_change(fsti_pipeline *pipeline) {
    // The lock may have been released since the caller looked.
    if (atomic_load(&pipeline->stop)) return;
    bool polls = pipeline->chunks_deferred > 0 && !pipeline->is_polling;
    if (pipeline->lacks_memory || polls) {
        struct timespec until =
            fsti_deadline_after(polls ? FSTI_DEFERRED_PAUSE_MS : MEMORY_PAUSE_MS);
        pipeline->is_polling |= polls;
        pthread_cond_timedwait(&pipeline->work_changed, &pipeline->lock, &until);
        if (polls) pipeline->is_polling = false;
    } else {
        pthread_cond_wait(&pipeline->work_changed, &pipeline->lock);
    }
}

/// Admits the next batch if memory allows. The lock must be held; it is released during the
/// allocation.
static bool admit_batch(fsti_pipeline *pipeline) {
    const fsti_plan *plan = pipeline->job.plan;
    if (pipeline->is_admitting || pipeline->batches_admitted == plan->batch_count ||
        pipeline->has_failed)
        return false;
    const fsti_plan_batch *batch = &plan->batches[pipeline->batches_admitted];
    if (!fits_budget(pipeline, batch)) return false;
    bool is_first = pipeline->bytes_in_flight == 0;
    pipeline->is_admitting = true;
    pthread_mutex_unlock(&pipeline->lock);
    batch_memory memory;
    uint32_t resident_count = 0;
    fst_error error;
    fst_status status = is_first ? FST_OK : check_spare(pipeline, batch, &error);
    if (status == FST_OK) status = make_buffer(pipeline, batch, &memory, &error);
    for (uint32_t i = batch->chunk_first; classifies_at_once(pipeline) && i < batch->chunk_end; i++)
        resident_count += status == FST_OK && classify_chunk(pipeline, i);
    pthread_mutex_lock(&pipeline->lock);
    pipeline->lacks_memory = false;
    // Releases the lock before the load has failed: no other thread may allocate meanwhile.
    if (status != FST_OK) note_memory_shortage(pipeline, &error);
    pipeline->is_admitting = false;
    if (status != FST_OK) return false;
    pipeline->memory_missed_ns = 0;
    pipeline->has_polled = false;
    pipeline->is_placed |= memory.is_placed;
    publish_batch(pipeline, &memory, resident_count);
    return true;
}

/// Classifies the next chunks of admitted batches. The lock must be held; it is released during
/// system calls.
static bool classify_next(fsti_pipeline *pipeline) {
    uint32_t first = pipeline->chunks_known;
    uint32_t end = (uint32_t)fsti_min(first + CLASSIFY_STEP_CHUNKS, pipeline->chunk_limit);
    if (pipeline->is_admitting || first == end) return false;
    uint32_t resident_count = 0;
    pipeline->is_admitting = true;
    pthread_mutex_unlock(&pipeline->lock);
    for (uint32_t i = first; i < end; i++) resident_count += classify_chunk(pipeline, i);
    pthread_mutex_lock(&pipeline->lock);
    pipeline->is_admitting = false;
    pipeline->chunks_known = end;
    pipeline->chunks_resident += resident_count;
    pthread_cond_broadcast(&pipeline->work_changed);
    return true;
}

/// Classifies more chunks, or admits the next batch. For a device only when few classified chunks
/// are left, because its bus is idle until the first chunk is read.
static bool classify_ahead(fsti_pipeline *pipeline) {
    if (classifies_at_once(pipeline)) return admit_batch(pipeline);
    return classify_next(pipeline) || admit_batch(pipeline);
}

/// The next pending chunk of a queue in admitted batches, or UINT32_MAX. The lock must be held; it
/// orders the accesses to `step`, so relaxed loads suffice. Only CHUNK_DONE is loaded without it.
static uint32_t find_pending(fsti_pipeline *pipeline, chunk_queue queue) {
    uint32_t *cursor = &pipeline->cursor[queue];
    for (; *cursor < pipeline->chunks_known; ++*cursor) {
        const chunk_state *state = &pipeline->chunks[*cursor];
        if (state->queue == queue &&
            atomic_load_explicit(&state->step, memory_order_relaxed) == CHUNK_PENDING)
            return *cursor;
    }
    return UINT32_MAX;
}

/// Whether reads leave their memory untouched for a while: remote reads wait for the server, so
/// prefaulting in parallel pays off. Disk reads write at once, and the kernel faults pages as
/// needed.
static bool leaves_memory_idle(const fsti_pipeline *pipeline, uint32_t chunk) {
    uint32_t file = fsti_chunk_extent(pipeline, chunk)->file;
    return fsti_file_is_object(pipeline->job.files[file].file) &&
           atomic_load_explicit(&pipeline->chunks[chunk].step, memory_order_relaxed) != CHUNK_DONE;
}

/// A chunk shortly ahead of the reads whose fresh memory is not prefaulted yet.
static uint32_t find_unpopulated(fsti_pipeline *pipeline) {
    uint32_t *cursor = &pipeline->populate_cursor;
    uint32_t reads_at = pipeline->cursor[QUEUE_ASYNC];
    while (*cursor < reads_at && !leaves_memory_idle(pipeline, *cursor)) ++*cursor;
    uint32_t limit = (uint32_t)fsti_min(pipeline->chunks_known, reads_at + POPULATE_AHEAD_CHUNKS);
    while (*cursor < limit) {
        uint32_t index = (*cursor)++;
        const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, index);
        const fsti_buffer *buffer = pipeline->batches[extent->batch].buffer;
        if (pipeline->chunks[index].queue == QUEUE_ASYNC && extent->linear && buffer != NULL &&
            buffer->is_fresh)
            return index;
    }
    return UINT32_MAX;
}

/// Before the first chunk of a batch is read. Page sizes are chosen as late as that, because huge
/// pages may become slow while earlier batches are filled.
static void start_batch(fsti_pipeline *pipeline, uint32_t batch) {
    if (pipeline->batches[batch].is_started) return;
    pipeline->batches[batch].is_started = true;
    if (pipeline->sink->begin_batch != NULL) pipeline->sink->begin_batch(pipeline, batch);
}

static uint32_t take_pending(fsti_pipeline *pipeline, const chunk_request *request) {
    uint32_t chunk = find_pending(pipeline, request->preferred);
    if (chunk == UINT32_MAX && (request->may_steal || pipeline->is_demoted)) {
        chunk_queue other = request->preferred == QUEUE_ASYNC ? QUEUE_BLOCKING : QUEUE_ASYNC;
        chunk = find_pending(pipeline, other);
    }
    if (chunk == UINT32_MAX) return chunk;
    chunk_state *state = &pipeline->chunks[chunk];
    atomic_store_explicit(&state->step, CHUNK_TAKEN, memory_order_relaxed);
    if (!state->is_read) pipeline->chunks_taken++;
    start_batch(pipeline, fsti_chunk_extent(pipeline, chunk)->batch);
    // A helper may be waiting for the reads to advance.
    pthread_cond_broadcast(&pipeline->work_changed);
    return chunk;
}

void fsti_pipeline_admit(fsti_pipeline *pipeline) {
    pthread_mutex_lock(&pipeline->lock);
    while (admit_batch(pipeline) && classifies_at_once(pipeline)) continue;
    pthread_mutex_unlock(&pipeline->lock);
}

/// Before taking a chunk: classifies all that memory allows, or for a device a few more than are in
/// progress.
static void classify_before(fsti_pipeline *pipeline) {
    if (classifies_at_once(pipeline))
        while (admit_batch(pipeline)) continue;
    else if (pipeline->chunks_known - pipeline->chunks_taken < CLASSIFY_AHEAD_CHUNKS)
        classify_ahead(pipeline);
}

uint32_t fsti_pipeline_take(fsti_pipeline *pipeline, chunk_request request, uint32_t *populate) {
    uint32_t chunk = UINT32_MAX;
    *populate = UINT32_MAX;
    pthread_mutex_lock(&pipeline->lock);
    while (!atomic_load(&pipeline->stop)) {
        fsti_pipeline_poll_deferred(pipeline);
        classify_before(pipeline);
        // The lock was released, so the stop may have been signalled meanwhile.
        if (atomic_load(&pipeline->stop)) break;
        chunk = take_pending(pipeline, &request);
        if (chunk != UINT32_MAX) break;
        if (classify_ahead(pipeline)) continue;
        *populate = request.may_populate ? find_unpopulated(pipeline)
                                         : fsti_pipeline_take_unmapped(pipeline);
        if (*populate != UINT32_MAX || !request.may_wait) break;
        if (pipeline->chunks_taken == pipeline->job.plan->chunk_count &&
            pipeline->stream_count == 0)
            break;
        wait_for_change(pipeline);
    }
    pthread_mutex_unlock(&pipeline->lock);
    return chunk;
}

void fsti_pipeline_fail(fsti_pipeline *pipeline, const fst_error *error) {
    pthread_mutex_lock(&pipeline->lock);
    if (!pipeline->has_failed) { // the first error is reported, not its consequences
        pipeline->has_failed = true;
        pipeline->error = *error;
    }
    atomic_store(&pipeline->stop, true);
    pthread_cond_broadcast(&pipeline->work_changed);
    pthread_cond_broadcast(&pipeline->chunk_finished);
    pthread_mutex_unlock(&pipeline->lock);
    pipeline->sink->wake(pipeline);
}

void fsti_pipeline_cancel(fsti_pipeline *pipeline) {
    fst_error error;
    fsti_error_set(&error, FST_E_CANCELLED, FSTI_NO_LOCATION, "the load was cancelled");
    fsti_pipeline_fail(pipeline, &error);
}

/// Calls the progress callback. only_first: skip if a report was made before. Lock order:
/// progress_lock, then lock. The first serialises the callback, so that its numbers never decrease.
static void report_progress(fsti_pipeline *pipeline, bool only_first) {
    const fsti_job *job = &pipeline->job;
    if (job->progress == NULL) return;
    // Without the state's lock, because the callback may be slow.
    pthread_mutex_lock(&pipeline->progress_lock);
    if (only_first && pipeline->was_reported) {
        pthread_mutex_unlock(&pipeline->progress_lock);
        return;
    }
    pipeline->was_reported = true;
    pthread_mutex_lock(&pipeline->lock);
    uint64_t bytes = pipeline->bytes_done;
    size_t items = pipeline->items_done;
    bool is_complete = pipeline->chunks_done == job->plan->chunk_count;
    pthread_mutex_unlock(&pipeline->lock);
    // A load that is closed immediately after completion still reports it.
    if ((is_complete || !atomic_load(&pipeline->stop)) &&
        job->progress(job->progress_context, bytes, job->plan->bytes_planned, items,
                      job->plan->item_count) != 0)
        fsti_pipeline_cancel(pipeline);
    pthread_mutex_unlock(&pipeline->progress_lock);
}

void fsti_pipeline_report_first(fsti_pipeline *pipeline) { report_progress(pipeline, true); }

static void add_counts(worker_counts *sum, worker_counts *counts) {
#define ADD_COUNTER(name) sum->name += counts->name;
    LOAD_COUNTERS(ADD_COUNTER)
#undef ADD_COUNTER
    fsti_http_count(&sum->net, &counts->net);
    for (unsigned i = 0; i < FSTI_ENGINE_COUNT; i++) sum->used[i] |= counts->used[i];
    *counts = (worker_counts){0};
}

void fsti_pipeline_count(fsti_pipeline *pipeline, worker_counts *counts) {
    pthread_mutex_lock(&pipeline->lock);
    add_counts(&pipeline->counts, counts);
    pthread_mutex_unlock(&pipeline->lock);
}

void fsti_pipeline_finish(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    batch_state *batch = &pipeline->batches[pipeline->job.plan->extents[range->extent].batch];
    pthread_mutex_lock(&pipeline->lock);
    add_counts(&pipeline->counts, counts);
    bool is_last = --batch->chunks_left == 0;
    if (is_last) fsti_buffer_end_fill(batch->buffer); // before a waiting thread sees the end
    // The release store publishes the chunk's bytes: fsti_pipeline_chunks_done() loads it with
    // acquire and without the lock.
    atomic_store_explicit(&pipeline->chunks[chunk].step, CHUNK_DONE, memory_order_release);
    pipeline->chunks_done++;
    pipeline->bytes_done += range->end - range->begin;
    // The batch cannot be released before this chunk is done. Conversion may change sizes, so the
    // exact total is set with the last chunk.
    fsti_buffer_use(batch->buffer, is_last ? UINT64_MAX : range->end - range->begin);
    count_items(pipeline);
    uint64_t now = fsti_now_ns();
    if (pipeline->first_ns == 0 && pipeline->items_done > 0) pipeline->first_ns = now;
    if (pipeline->chunks_done == pipeline->job.plan->chunk_count) pipeline->finished_ns = now;
    pthread_cond_broadcast(&pipeline->chunk_finished);
    pthread_mutex_unlock(&pipeline->lock);
    report_progress(pipeline, false);
}

bool fsti_pipeline_chunks_done(const fsti_pipeline *pipeline, uint32_t *first, uint32_t end) {
    while (*first < end &&
           atomic_load_explicit(&pipeline->chunks[*first].step, memory_order_acquire) == CHUNK_DONE)
        ++*first;
    return *first >= end;
}

fsti_batch_step fsti_pipeline_buffer(fsti_pipeline *pipeline, uint32_t batch, fsti_buffer **out) {
    pthread_mutex_lock(&pipeline->lock);
    fsti_batch_step step = pipeline->batches[batch].step;
    *out = step == BATCH_ADMITTED ? fsti_buffer_ref(pipeline->batches[batch].buffer) : NULL;
    pthread_mutex_unlock(&pipeline->lock);
    return step;
}

fsti_place_step fsti_pipeline_place_step(const fsti_pipeline *pipeline, uint32_t item) {
    return pipeline->places == NULL ? PLACE_STREAMED
                                    : (fsti_place_step)atomic_load(&pipeline->places[item]);
}

void fsti_pipeline_claim(fsti_pipeline *pipeline, uint32_t item) {
    unsigned char streamed = PLACE_STREAMED;
    pthread_mutex_lock(&pipeline->lock);
    const batch_state *state = &pipeline->batches[pipeline->job.plan->items[item].batch];
    // Another thread may be allocating its memory now; its chunks are taken after this lock is
    // released.
    if (state->step == BATCH_WAITING && pipeline->places != NULL)
        atomic_compare_exchange_strong(&pipeline->places[item], &streamed, PLACE_CLAIMED);
    pthread_mutex_unlock(&pipeline->lock);
}

void fsti_pipeline_mark_filled(fsti_pipeline *pipeline, uint32_t item) {
    unsigned char claimed = PLACE_CLAIMED;
    if (pipeline->places != NULL)
        atomic_compare_exchange_strong(&pipeline->places[item], &claimed, PLACE_FILLED);
}

void fsti_pipeline_release(fsti_pipeline *pipeline, uint32_t batch) {
    pthread_mutex_lock(&pipeline->lock);
    batch_state *state = &pipeline->batches[batch];
    fsti_buffer *buffer = state->step == BATCH_ADMITTED ? state->buffer : NULL;
    uint64_t size_bytes = buffer == NULL ? 0 : buffer->size_bytes;
    if (state->step == BATCH_ADMITTED) {
        state->step = BATCH_RELEASED;
        state->buffer = NULL;
    }
    pthread_mutex_unlock(&pipeline->lock);
    fsti_buffer_end_fill(buffer);
    // Free the memory before waking the threads that wait to allocate the next batch.
    fsti_buffer_unref(buffer);
    pthread_mutex_lock(&pipeline->lock);
    pipeline->bytes_in_flight -= size_bytes;
    pthread_cond_broadcast(&pipeline->work_changed);
    pthread_mutex_unlock(&pipeline->lock);
}
