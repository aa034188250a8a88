// SPDX-License-Identifier: Apache-2.0
/// Who works on what: admission of batches to memory, handing out chunks, counting them in.
#include "sink.h"

/// How far a helper makes pages ahead of the reads.
#define POPULATE_AHEAD_CHUNKS 8u

/// Of a load to a device: chunks that are looked at when fewer than that many are known and not
/// taken.
#define LOOK_AHEAD_CHUNKS 4u
#define LOOK_STEP_CHUNKS 4u

/// Of a chunk whose pages nobody tells of, so many single bytes are asked for.
#define SAMPLE_COUNT 4u

/// Whether all chunks of a batch are looked at when it gets its memory.
static bool looks_once(const fsti_pipeline *pipeline) { return !pipeline->sink->looks_ahead; }

/// Whether a view's chunk is taken to be there, of a file of whose pages the kernel tells nothing:
/// single bytes are read, if that takes no waiting. Where one is absent the kernel starts reading,
/// in pages as small as they come; so the rest is taken to be absent as well. Views alone: their
/// bytes are wanted in the page cache.
static bool is_at_hand(fsti_pipeline *pipeline, fsti_file *file, const fsti_plan_chunk *chunk) {
    if (!pipeline->sink->is_view || !pipeline->job.policy->keeps_cache) return false;
    for (uint64_t i = 0; i < SAMPLE_COUNT; i++) {
        if (atomic_load(&pipeline->found_absent)) return false;
        uint64_t at = chunk->begin + (chunk->end - chunk->begin - 1) / (SAMPLE_COUNT - 1) * i;
        if (!fsti_file_reads_at_once(file, at)) atomic_store(&pipeline->found_absent, true);
    }
    return !atomic_load(&pipeline->found_absent);
}

/// Looks at what the page cache holds of a chunk now, where that decides how it comes: all of it,
/// or it counts as absent; what it holds of an absent one nobody drops.
static void look_at_chunk(fsti_pipeline *pipeline, uint32_t index) {
    const fsti_plan_chunk *chunk = &pipeline->job.plan->chunks[index];
    uint32_t file_index = pipeline->job.plan->extents[chunk->extent].file;
    const fsti_file_route *route = &pipeline->job.routes[file_index];
    fsti_file *file = pipeline->job.files[file_index];
    chunk_state *state = &pipeline->chunks[index];
    bool is_view = pipeline->sink->is_view, clears = pipeline->job.policy->clears_cache;
    uint64_t resident;
    state->is_resident = state->is_dropped = false;
    if (!is_view && !clears && !fsti_pipeline_brings_in(pipeline, index) &&
        fsti_route_engine(route, true) == fsti_route_engine(route, false))
        return;
    bool is_known = fsti_file_resident(file, chunk->begin, chunk->end, &resident);
    state->is_resident =
        is_known ? resident == chunk->end - chunk->begin : is_at_hand(pipeline, file, chunk);
    // What nobody tells of may be there, and stays; what a file is made of was not looked at.
    if (!clears || state->is_resident) return;
    state->is_dropped = is_known || fsti_file_is_made_by_cache(file);
    if (is_known && resident > 0) state->is_dropped = fsti_pipeline_note_kept(pipeline, index);
}

/// Classifies a chunk. True when it is resident.
static bool classify_chunk(fsti_pipeline *pipeline, uint32_t index) {
    chunk_state *state = &pipeline->chunks[index];
    bool is_view = pipeline->sink->is_view;
    look_at_chunk(pipeline, index);
    state->queue =
        !is_view && fsti_pipeline_engine(pipeline, index)->is_async ? QUEUE_RING : QUEUE_BLOCKING;
    // What a view has in memory needs nothing, unless it is to be made present.
    bool is_there =
        is_view && pipeline->job.digests == NULL &&
        (state->is_resident ? !pipeline->job.populate : !pipeline->job.policy->keeps_cache);
    atomic_store_explicit(&state->step, is_there ? CHUNK_DONE : CHUNK_PENDING,
                          memory_order_release);
    return state->is_resident;
}

/// Memory of the caller's allocator; of a device in order with the caller's stream, batch by batch:
/// what is handed out may be in use by work that is queued there.
static fst_status take_callers_memory(fsti_pipeline *pipeline, const fsti_plan_batch *batch,
                                      fsti_buffer **out, fst_error *error) {
    const fsti_job *job = &pipeline->job;
    const fsti_foreign wish = {.allocator = job->allocator,
                               .device = job->device,
                               .size_bytes = batch->buffer_bytes,
                               .at_page = pipeline->may_read_far};
    pthread_mutex_lock(job->allocator_lock);
    fst_status status = fsti_buffer_foreign(&wish, out, error);
    pthread_mutex_unlock(job->allocator_lock);
    if (job->device == NULL || pipeline->follow == NULL) return status;
    if (status == FST_E_NO_MEMORY) {
        fst_device id = fsti_device_id(job->device);
        return fsti_error_set(error, status, FSTI_NOWHERE,
                              "out of device memory: %llu bytes needed of the caller's allocator "
                              "on %s:%d",
                              (unsigned long long)batch->buffer_bytes,
                              id.kind == FST_DEVICE_CUDA ? "cuda" : "hip", (int)id.index);
    }
    FST_TRY(status);
    status = pipeline->follow(pipeline, error);
    if (status == FST_OK) return FST_OK;
    fsti_buffer_unref(*out);
    *out = NULL;
    return status;
}

/// Whether the first bytes of a batch come from a server, which is to be asked at once.
static bool is_far(const fsti_pipeline *pipeline, const fsti_plan_batch *batch) {
    const fsti_plan *plan = pipeline->job.plan;
    if (batch->chunk_first == batch->chunk_end) return false;
    uint32_t file = plan->extents[plan->chunks[batch->chunk_first].extent].file;
    return fsti_file_is_object(pipeline->job.files[file]);
}

/// *placed: it was given a NUMA policy.
static fst_status make_buffer(fsti_pipeline *pipeline, const fsti_plan_batch *batch,
                              fsti_buffer **out, bool *placed, fst_error *error) {
    const fsti_job *job = &pipeline->job;
    *out = NULL;
    *placed = false;
    if (batch->buffer_bytes == 0 || pipeline->sink->is_view) return FST_OK;
    switch (job->policy->memory) {
    case FSTI_MEMORY_CALLERS: return take_callers_memory(pipeline, batch, out, error);
    case FSTI_MEMORY_LOCKED:
        return fsti_buffer_registered(job->device, batch->buffer_bytes, out, error);
    case FSTI_MEMORY_DEVICE:
        return fsti_buffer_device(job->device, batch->buffer_bytes, out, error);
    case FSTI_MEMORY_ARENA: break;
    }
    FST_TRY(fsti_buffer_arena(batch->buffer_bytes, out, error));
    // Pages that are there already stay where they are.
    if (!(*out)->is_fresh) return FST_OK;
    *placed = fsti_numa_place((*out)->data, (*out)->size_bytes, job->numa);
    fsti_buffer_choose_pages(*out, !is_far(pipeline, batch));
    return FST_OK;
}

static bool fits_budget(const fsti_pipeline *pipeline, const fsti_plan_batch *batch) {
    uint64_t budget = pipeline->job.budget_bytes;
    uint64_t bytes = fsti_buffer_arena_bytes(batch->buffer_bytes); // what it will really take
    return budget == 0 || pipeline->bytes_in_flight == 0 ||
           bytes <= budget - fsti_min(budget, pipeline->bytes_in_flight);
}

/// Counts tensors as complete in the order of delivery: cheap, and what a progress bar wants. Of
/// the one that is not, it is known how far it is.
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

/// Publishes a batch whose memory is there. The lock is held.
static void publish_batch(fsti_pipeline *pipeline, fsti_buffer *buffer, uint32_t resident_count) {
    batch_state *state = &pipeline->batches[pipeline->batches_admitted];
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
    state->step = BATCH_ADMITTED;
    pipeline->chunk_limit = pipeline->job.plan->batches[pipeline->batches_admitted].chunk_end;
    if (looks_once(pipeline)) pipeline->chunks_known = pipeline->chunk_limit;
    pipeline->batches_admitted++;
    count_items(pipeline);
    pthread_cond_broadcast(&pipeline->work_changed);
}

/// Admits the next batch if memory allows. The lock is held, but not while memory is made.
static bool admit_batch(fsti_pipeline *pipeline) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_batch *batch = &plan->batches[pipeline->batches_admitted];
    if (pipeline->is_admitting || pipeline->batches_admitted == plan->batch_count ||
        pipeline->has_failed || !fits_budget(pipeline, batch))
        return false;
    pipeline->is_admitting = true;
    pthread_mutex_unlock(&pipeline->lock);
    fsti_buffer *buffer;
    bool placed;
    uint32_t resident_count = 0;
    fst_error error;
    fst_status status = make_buffer(pipeline, batch, &buffer, &placed, &error);
    if (status != FST_OK) fsti_pipeline_fail(pipeline, &error);
    for (uint32_t i = batch->chunk_first; looks_once(pipeline) && i < batch->chunk_end; i++)
        resident_count += status == FST_OK && classify_chunk(pipeline, i);
    pthread_mutex_lock(&pipeline->lock);
    pipeline->is_admitting = false;
    if (status != FST_OK) return false;
    pipeline->is_placed |= placed;
    publish_batch(pipeline, buffer, resident_count);
    return true;
}

/// Classifies the next chunks of admitted batches. The lock is held, but not while the system is
/// asked.
static bool classify_next(fsti_pipeline *pipeline) {
    uint32_t first = pipeline->chunks_known;
    uint32_t end = (uint32_t)fsti_min(first + LOOK_STEP_CHUNKS, pipeline->chunk_limit);
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

/// Learns of more chunks, of those that have memory or of the next batch: for a device only when
/// what is known runs short, as its bus stands still until the first chunk comes.
static bool look_ahead(fsti_pipeline *pipeline) {
    if (looks_once(pipeline)) return admit_batch(pipeline);
    return classify_next(pipeline) || admit_batch(pipeline);
}

/// The next pending chunk of a queue among the admitted ones, or UINT32_MAX. The lock is held.
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

/// Whether reads leave memory alone for a while after they have begun: what is on its way from a
/// server. Disks write to it at once, and who asks them makes it.
static bool arrives_late(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan *plan = pipeline->job.plan;
    uint32_t file = plan->extents[plan->chunks[chunk].extent].file;
    return fsti_file_is_object(pipeline->job.files[file]) &&
           atomic_load_explicit(&pipeline->chunks[chunk].step, memory_order_relaxed) != CHUNK_DONE;
}

/// A chunk not far ahead of the reads whose fresh memory nobody has made yet.
static uint32_t find_unpopulated(fsti_pipeline *pipeline) {
    const fsti_plan *plan = pipeline->job.plan;
    uint32_t *cursor = &pipeline->populate_cursor;
    uint32_t reads_at = pipeline->cursor[QUEUE_RING];
    while (*cursor < reads_at && !arrives_late(pipeline, *cursor)) ++*cursor;
    uint32_t limit = (uint32_t)fsti_min(pipeline->chunks_known, reads_at + POPULATE_AHEAD_CHUNKS);
    while (*cursor < limit) {
        uint32_t index = (*cursor)++;
        const fsti_plan_extent *extent = &plan->extents[plan->chunks[index].extent];
        const fsti_buffer *buffer = pipeline->batches[extent->batch].buffer;
        if (pipeline->chunks[index].queue == QUEUE_RING && extent->linear && buffer != NULL &&
            buffer->is_fresh)
            return index;
    }
    return UINT32_MAX;
}

static uint32_t take_now(fsti_pipeline *pipeline, const chunk_wish *wish) {
    uint32_t chunk = find_pending(pipeline, wish->preferred);
    if (chunk == UINT32_MAX && (wish->may_steal || pipeline->is_demoted)) {
        chunk_queue other = wish->preferred == QUEUE_RING ? QUEUE_BLOCKING : QUEUE_RING;
        chunk = find_pending(pipeline, other);
    }
    if (chunk == UINT32_MAX) return chunk;
    atomic_store_explicit(&pipeline->chunks[chunk].step, CHUNK_TAKEN, memory_order_relaxed);
    pipeline->chunks_taken++;
    // A helper may be waiting for the reads to move on.
    pthread_cond_broadcast(&pipeline->work_changed);
    return chunk;
}

void fsti_pipeline_admit(fsti_pipeline *pipeline) {
    pthread_mutex_lock(&pipeline->lock);
    while (admit_batch(pipeline) && looks_once(pipeline)) continue;
    pthread_mutex_unlock(&pipeline->lock);
}

/// Before a chunk is taken: all that memory allows, or a few chunks more than are being worked on.
static void look_before(fsti_pipeline *pipeline) {
    if (looks_once(pipeline))
        while (admit_batch(pipeline)) continue;
    else if (pipeline->chunks_known - pipeline->chunks_taken < LOOK_AHEAD_CHUNKS)
        look_ahead(pipeline);
}

uint32_t fsti_pipeline_take(fsti_pipeline *pipeline, chunk_wish wish, uint32_t *populate) {
    uint32_t chunk = UINT32_MAX;
    *populate = UINT32_MAX;
    pthread_mutex_lock(&pipeline->lock);
    while (!atomic_load(&pipeline->stop)) {
        look_before(pipeline);
        // The lock was let go of: whoever has stopped the work meanwhile will not wake us again.
        if (atomic_load(&pipeline->stop)) break;
        chunk = take_now(pipeline, &wish);
        if (chunk != UINT32_MAX) break;
        if (look_ahead(pipeline)) continue;
        if (wish.may_populate) *populate = find_unpopulated(pipeline);
        if (*populate != UINT32_MAX || !wish.block) break;
        if (pipeline->chunks_taken == pipeline->job.plan->chunk_count) break;
        pthread_cond_wait(&pipeline->work_changed, &pipeline->lock);
    }
    pthread_mutex_unlock(&pipeline->lock);
    return chunk;
}

uint32_t fsti_pipeline_take_run(fsti_pipeline *pipeline, uint32_t chunk, uint64_t bytes_max) {
    const fsti_plan *plan = pipeline->job.plan;
    uint32_t end = chunk + 1;
    pthread_mutex_lock(&pipeline->lock);
    // What is each thread's of what is left: what goes on longest is shared again at the end.
    uint64_t share = (plan->chunk_count - pipeline->chunks_taken) / pipeline->thread_count;
    uint64_t limit = chunk + fsti_max(fsti_min(share + 1, bytes_max / plan->chunk_bytes), 1);
    for (; end < fsti_min(limit, pipeline->chunks_known); end++) {
        chunk_state *state = &pipeline->chunks[end];
        if (plan->chunks[end].extent != plan->chunks[chunk].extent || state->is_resident ||
            atomic_load_explicit(&state->step, memory_order_relaxed) != CHUNK_PENDING)
            break;
        atomic_store_explicit(&state->step, CHUNK_TAKEN, memory_order_relaxed);
        pipeline->chunks_taken++;
    }
    pthread_mutex_unlock(&pipeline->lock);
    return end;
}

void fsti_pipeline_fail(fsti_pipeline *pipeline, const fst_error *error) {
    pthread_mutex_lock(&pipeline->lock);
    if (!pipeline->has_failed) {
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
    fsti_error_set(&error, FST_E_CANCELLED, FSTI_NOWHERE, "the load was cancelled");
    fsti_pipeline_fail(pipeline, &error);
}

/// Only first: unless it was told before.
static void report_progress(fsti_pipeline *pipeline, bool only_first) {
    const fsti_job *job = &pipeline->job;
    if (job->progress == NULL) return;
    // Outside of the state's lock: the callback may take its time.
    pthread_mutex_lock(&pipeline->progress_lock);
    if (only_first && pipeline->was_told) {
        pthread_mutex_unlock(&pipeline->progress_lock);
        return;
    }
    pipeline->was_told = true;
    pthread_mutex_lock(&pipeline->lock);
    uint64_t bytes = pipeline->bytes_done;
    size_t items = pipeline->items_done;
    bool is_complete = pipeline->chunks_done == job->plan->chunk_count;
    pthread_mutex_unlock(&pipeline->lock);
    // A load that is closed at once when it is complete still reports that it was.
    if ((is_complete || !atomic_load(&pipeline->stop)) &&
        job->progress(job->progress_context, bytes, job->plan->bytes_planned, items,
                      job->plan->item_count) != 0)
        fsti_pipeline_cancel(pipeline);
    pthread_mutex_unlock(&pipeline->progress_lock);
}

void fsti_pipeline_tell_first(fsti_pipeline *pipeline) { report_progress(pipeline, true); }

static void add_counts(worker_counts *sum, worker_counts *counts) {
#define ADD_COUNTER(name) sum->name += counts->name;
    LOAD_COUNTERS(ADD_COUNTER)
#undef ADD_COUNTER
    for (unsigned i = 0; i < FST_ENGINE_COUNT; i++) sum->used[i] |= counts->used[i];
    *counts = (worker_counts){0};
}

void fsti_pipeline_count(fsti_pipeline *pipeline, worker_counts *counts) {
    pthread_mutex_lock(&pipeline->lock);
    add_counts(&pipeline->counts, counts);
    pthread_mutex_unlock(&pipeline->lock);
}

void fsti_pipeline_finish(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    pthread_mutex_lock(&pipeline->lock);
    add_counts(&pipeline->counts, counts);
    atomic_store_explicit(&pipeline->chunks[chunk].step, CHUNK_DONE, memory_order_release);
    pipeline->chunks_done++;
    pipeline->bytes_done += range->end - range->begin;
    // The batch can't be released before this chunk is done. What its bytes have become may be
    // more than they were: all of it is there with the last one.
    batch_state *batch = &pipeline->batches[pipeline->job.plan->extents[range->extent].batch];
    bool is_last = --batch->chunks_left == 0;
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

void fsti_pipeline_settle(fsti_pipeline *pipeline, uint32_t item) {
    unsigned char streamed = PLACE_STREAMED;
    pthread_mutex_lock(&pipeline->lock);
    const batch_state *state = &pipeline->batches[pipeline->job.plan->items[item].batch];
    // Somebody may be making its memory now: its chunks are taken after this lock.
    if (state->step == BATCH_WAITING && pipeline->places != NULL)
        atomic_compare_exchange_strong(&pipeline->places[item], &streamed, PLACE_SETTLED);
    pthread_mutex_unlock(&pipeline->lock);
}

void fsti_pipeline_fill(fsti_pipeline *pipeline, uint32_t item) {
    unsigned char settled = PLACE_SETTLED;
    if (pipeline->places != NULL)
        atomic_compare_exchange_strong(&pipeline->places[item], &settled, PLACE_FILLED);
}

void fsti_pipeline_release(fsti_pipeline *pipeline, uint32_t batch) {
    pthread_mutex_lock(&pipeline->lock);
    batch_state *state = &pipeline->batches[batch];
    fsti_buffer *buffer = state->step == BATCH_ADMITTED ? state->buffer : NULL;
    if (state->step == BATCH_ADMITTED) {
        state->step = BATCH_RELEASED;
        state->buffer = NULL;
        if (buffer != NULL) pipeline->bytes_in_flight -= buffer->size_bytes;
    }
    pthread_cond_broadcast(&pipeline->work_changed);
    pthread_mutex_unlock(&pipeline->lock);
    fsti_buffer_unref(buffer);
}
