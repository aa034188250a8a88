// SPDX-License-Identifier: Apache-2.0
/// The path to a device: a chunk is read into a pinned slot, copied on a stream, and complete when
/// its event is.
///
/// Invariants: slots complete in the order in which they were sent, so only the oldest is polled,
/// by one thread at a time. A slot is in exactly one state: free, being filled by one worker, or in
/// the queue `sent`. No thread waits per tensor.
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "copy_list.h"
#include "pipeline.h"

#define NO_SLOT UINT32_MAX
/// Slots queued for the bus: enough to keep it busy while a thread wakes and fills another (a fast
/// bus copies 16 MiB in 300 us). More free slots stay unused and unpinned, so that the used ones
/// stay in the CPU cache.
#define SENT_COUNT_MAX 8u
/// How many chunks to examine when deciding whether to load the kernel early.
#define CHUNKS_EXAMINED 64u

struct device_lane {
    fsti_device *device;
    fsti_staging_ring *ring;
    pthread_t kernel_thread; ///< loads the kernel during the first reads
    bool has_kernel_thread;
    atomic_bool lacks_kernels; ///< the device cannot run the kernel
    pthread_mutex_t lock;      ///< protects the fields below
    pthread_cond_t slot_changed;
    uint32_t free_slots[FSTI_STAGING_SLOT_COUNT_MAX];
    uint32_t free_count;
    uint32_t sent[FSTI_STAGING_SLOT_COUNT_MAX]; ///< a queue of slots, oldest at `sent_first`
    uint32_t sent_first, sent_count;
    bool is_reaping; ///< a thread is polling the driver for the oldest slot
    uint32_t chunks[FSTI_STAGING_SLOT_COUNT_MAX]; ///< chunk by slot
    char *data[FSTI_STAGING_SLOT_COUNT_MAX];
};

static uint32_t slots_wanted(const fsti_job *job) {
    uint64_t slots = job->staging_bytes / FSTI_STAGING_CHUNK_BYTES_MAX;
    // A small model needs no more slots than chunks.
    slots = fsti_min(fsti_max(slots, 2), fsti_max(job->plan->chunk_count, 2));
    return (uint32_t)fsti_min(slots, FSTI_STAGING_SLOT_COUNT_MAX);
}

static fst_status fill_lane(fsti_pipeline *pipeline, device_lane *lane, fst_error *error) {
    const fsti_job *job = &pipeline->job;
    FST_TRY(fsti_staging_acquire(job->device, &lane->ring, error));
    lane->free_count = slots_wanted(job);
    for (uint32_t i = 0; i < lane->free_count; i++) lane->free_slots[i] = lane->free_count - 1 - i;
    if (job->stream != 0) FST_TRY(fsti_staging_follow(lane->ring, job->stream, error));
    return FST_OK;
}

static fst_status follow_stream(fsti_pipeline *pipeline, fst_error *error) {
    const fsti_job *job = &pipeline->job;
    if (job->stream == 0) return FST_OK;
    FST_TRY(fsti_device_lane_begin(pipeline, error));
    fst_status status = fsti_staging_follow(pipeline->device_lane->ring, job->stream, error);
    fsti_device_lane_end(pipeline);
    return status;
}

/// Whether a chunk may need more than a few plain copies, and therefore the kernel. The kernel is
/// loaded only if it is needed, because that takes time.
static bool wants_kernel(const fsti_plan *plan, const fsti_plan_chunk *chunk) {
    const fsti_plan_extent *extent = &plan->extents[chunk->extent];
    if (extent->converts) return true;
    uint64_t pieces = 0;
    size_t end = extent->segment_first + extent->segment_count;
    for (size_t i = fsti_plan_first_segment(plan, extent, chunk->begin); i < end; i++) {
        const fsti_plan_segment *segment = &plan->segments[i];
        if (segment->file_offset >= chunk->end) break;
        if (segment->run_count > 1 || ++pieces > FSTI_STAGING_COPY_COUNT_MAX) return true;
    }
    return false;
}

static void *load_kernel(void *argument) {
    device_lane *lane = argument;
    if (fsti_device_enter(lane->device, NULL) != FST_OK) return NULL;
    fsti_device_has_kernels(
        lane->device); // a failure is reported to the next thread that needs the kernel
    fsti_device_leave(lane->device);
    return NULL;
}

/// Examines the first chunks: if one of them needs the kernel, starts loading it.
static void load_kernel_ahead(const fsti_pipeline *pipeline, device_lane *lane) {
    const fsti_plan *plan = pipeline->job.plan;
    sigset_t all, before;
    bool wanted = false;
    for (uint32_t i = 0; i < plan->chunk_count && i < CHUNKS_EXAMINED && !wanted; i++)
        wanted = !fsti_chunk_extent(pipeline, i)->linear && wants_kernel(plan, &plan->chunks[i]);
    if (!wanted || plan->chunk_count == 1) return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    lane->has_kernel_thread = pthread_create(&lane->kernel_thread, NULL, load_kernel, lane) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

fst_status fsti_device_lane_open(fsti_pipeline *pipeline, fst_error *error) {
    device_lane *lane = fsti_alloc_zeroed(1, sizeof *lane);
    if (lane == NULL) return fsti_error_memory(error, sizeof *lane);
    lane->device = pipeline->job.device;
    pthread_mutex_init(&lane->lock, NULL);
    pthread_cond_init(&lane->slot_changed, NULL);
    pipeline->device_lane = lane;
    pipeline->follow = follow_stream;
    FST_TRY(fsti_device_lane_begin(pipeline, error));
    fst_status status = fill_lane(pipeline, lane, error);
    fsti_device_lane_end(pipeline);
    if (status == FST_OK) load_kernel_ahead(pipeline, lane);
    return status;
}

void fsti_device_lane_close(fsti_pipeline *pipeline) {
    device_lane *lane = pipeline->device_lane;
    if (lane == NULL) return;
    if (lane->has_kernel_thread) pthread_join(lane->kernel_thread, NULL);
    // The ring of a device that cannot be entered is not freed: its pages may still be registered,
    // and the driver would mistake the next mapping at their address for them.
    if (lane->ring != NULL && fsti_device_enter_again(lane->device)) {
        fsti_staging_drain(lane->ring);
        fsti_staging_release(lane->ring);
        fsti_device_lane_end(pipeline);
    }
    pthread_mutex_destroy(&lane->lock);
    pthread_cond_destroy(&lane->slot_changed);
    fsti_free(lane);
    pipeline->device_lane = NULL;
    pipeline->follow = NULL;
}

void fsti_device_lane_wake(fsti_pipeline *pipeline) {
    device_lane *lane = pipeline->device_lane;
    pthread_mutex_lock(&lane->lock);
    pthread_cond_broadcast(&lane->slot_changed);
    pthread_mutex_unlock(&lane->lock);
}

fst_status fsti_device_lane_begin(fsti_pipeline *pipeline, fst_error *error) {
    return fsti_device_enter(pipeline->device_lane->device, error);
}

void fsti_device_lane_end(fsti_pipeline *pipeline) {
    fsti_device_leave(pipeline->device_lane->device);
}

static void free_slot(device_lane *lane, uint32_t slot) {
    pthread_mutex_lock(&lane->lock);
    lane->free_slots[lane->free_count++] = slot;
    pthread_cond_signal(&lane->slot_changed);
    pthread_mutex_unlock(&lane->lock);
}

/// Waits while another thread polls the oldest slot. True if it had to wait. The lock must be held.
static bool wait_for_reaper(fsti_pipeline *pipeline) {
    device_lane *lane = pipeline->device_lane;
    if (!lane->is_reaping || atomic_load(&pipeline->stop)) return lane->is_reaping;
    pthread_cond_wait(&lane->slot_changed, &lane->lock);
    return true;
}

/// Removes the oldest slot from the queue if its copy is complete, or failed; else returns NO_SLOT.
/// The lock must be held. It is released during driver calls, while is_reaping keeps other threads
/// from the head of the queue.
static uint32_t pop_arrived(device_lane *lane, bool wait, worker_counts *counts, fst_status *status,
                            fst_error *error) {
    bool arrived = false;
    if (lane->sent_count == 0) return NO_SLOT;
    uint32_t slot = lane->sent[lane->sent_first];
    pthread_mutex_unlock(&lane->lock);
    uint64_t start_ns = fsti_now_ns();
    *status = fsti_staging_arrived(lane->ring, slot, wait, &arrived, error);
    counts->device_wait_ns += fsti_now_ns() - start_ns;
    pthread_mutex_lock(&lane->lock);
    if (*status == FST_OK && !arrived) return NO_SLOT;
    lane->sent_first = (lane->sent_first + 1) % FSTI_STAGING_SLOT_COUNT_MAX;
    lane->sent_count--;
    return slot;
}

/// One thread at a time polls the oldest slot. Others fill free slots, or sleep until there is one.
fst_status fsti_device_lane_reap(fsti_pipeline *pipeline, bool wait, bool *any,
                                 worker_counts *counts, fst_error *error) {
    device_lane *lane = pipeline->device_lane;
    fst_status status = FST_OK;
    *any = false;
    pthread_mutex_lock(&lane->lock);
    if (lane->is_reaping) {
        *any = wait && wait_for_reaper(pipeline);
        pthread_mutex_unlock(&lane->lock);
        return FST_OK;
    }
    lane->is_reaping = true;
    while (status == FST_OK) {
        uint32_t slot = pop_arrived(lane, wait && !*any, counts, &status, error);
        if (slot == NO_SLOT) break;
        uint32_t chunk = lane->chunks[slot];
        lane->free_slots[lane->free_count++] = slot;
        pthread_cond_signal(&lane->slot_changed);
        if (status != FST_OK) break;
        pthread_mutex_unlock(&lane->lock);
        fsti_pipeline_finish(pipeline, chunk, counts);
        *any = true;
        pthread_mutex_lock(&lane->lock);
    }
    lane->is_reaping = false;
    pthread_cond_broadcast(&lane->slot_changed);
    pthread_mutex_unlock(&lane->lock);
    return status;
}

/// A free slot, or NO_SLOT. With `wait`, sleeps while all slots are being filled.
static uint32_t find_free(fsti_pipeline *pipeline, bool wait) {
    device_lane *lane = pipeline->device_lane;
    pthread_mutex_lock(&lane->lock);
    while (wait && lane->free_count == 0 && lane->sent_count == 0 && !atomic_load(&pipeline->stop))
        pthread_cond_wait(&lane->slot_changed, &lane->lock);
    bool has_slot = lane->free_count > 0 && lane->sent_count < SENT_COUNT_MAX;
    uint32_t slot = has_slot ? lane->free_slots[--lane->free_count] : NO_SLOT;
    pthread_mutex_unlock(&lane->lock);
    return slot;
}

fst_status fsti_device_lane_take(fsti_pipeline *pipeline, uint32_t chunk, bool wait, char **data,
                                 worker_counts *counts, fst_error *error) {
    device_lane *lane = pipeline->device_lane;
    bool any;
    *data = NULL;
    FST_TRY(fsti_device_lane_reap(pipeline, false, &any, counts, error));
    uint32_t slot = find_free(pipeline, false);
    while (slot == NO_SLOT && wait && !atomic_load(&pipeline->stop)) {
        FST_TRY(fsti_device_lane_reap(pipeline, true, &any, counts, error));
        slot = find_free(pipeline, !any);
    }
    if (slot == NO_SLOT) return FST_OK;
    fst_status status = fsti_staging_slot(lane->ring, slot, data, error);
    if (status != FST_OK) {
        free_slot(lane, slot);
        return status;
    }
    lane->data[slot] = *data;
    lane->chunks[slot] = chunk;
    pipeline->chunks[chunk].slot = (uint8_t)slot;
    return FST_OK;
}

char *fsti_device_lane_data(const fsti_pipeline *pipeline, uint32_t chunk) {
    return pipeline->device_lane->data[pipeline->chunks[chunk].slot];
}

/// Sends a linear extent as one copy, because its layout in the buffer equals the file's.
static fst_status send_linear(fsti_pipeline *pipeline, uint32_t chunk, uint32_t slot,
                              worker_counts *counts, fst_error *error) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_chunk *range = &plan->chunks[chunk];
    const fsti_plan_extent *extent = &plan->extents[range->extent];
    const fsti_buffer *buffer = pipeline->batches[extent->batch].buffer;
    fsti_copy_list list = {.copy_count = 1};
    list.copies[0].target =
        (uintptr_t)buffer->data + extent->buffer_offset + (range->begin - extent->begin);
    list.copies[0].source = (uint32_t)(range->begin - fsti_chunk_origin(range));
    list.copies[0].size = (uint32_t)(range->end - range->begin);
    counts->device_copies++;
    return fsti_staging_send(pipeline->device_lane->ring, slot, &list, error);
}

static fst_status send_scattered(fsti_pipeline *pipeline, uint32_t chunk, uint32_t slot,
                                 worker_counts *counts, fst_error *error) {
    device_lane *lane = pipeline->device_lane;
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_chunk *range = &plan->chunks[chunk];
    const fsti_plan_extent *extent = &plan->extents[range->extent];
    const fsti_buffer *buffer = pipeline->batches[extent->batch].buffer;
    uint64_t origin = fsti_chunk_origin(range);
    copy_list_builder *builder;
    bool wanted = wants_kernel(plan, range);
    bool has_kernels =
        wanted && fsti_device_has_kernels(lane->device) && fsti_staging_stage(lane->ring, slot);
    if (wanted && !has_kernels) atomic_store(&lane->lacks_kernels, true);
    FST_TRY(fsti_copy_list_open(lane->ring, slot, lane->data[slot], has_kernels, &builder, error));
    uint64_t end = extent->converts
                       ? fsti_min(range->end + FSTI_PLAN_UNIT_BYTES_MAX - 1, extent->end)
                       : range->end;
    fsti_copy_list_set_size(builder, end - origin);
    scatter_order order = {.plan = plan,
                           .extent = extent,
                           .buffer = buffer == NULL ? NULL : buffer->data,
                           .source = lane->data[slot] + (range->begin - origin),
                           .begin = range->begin,
                           .end = range->end,
                           .places = pipeline->places,
                           .emit = fsti_copy_list_add,
                           .emit_context = builder};
    fsti_scatter(&order);
    counts->bytes_converted += order.converted;
    return fsti_copy_list_close(builder, counts, error);
}

/// Queues a slot that was sent, or frees it after a failure.
static fst_status queue_slot(fsti_pipeline *pipeline, uint32_t slot, fst_status status,
                             worker_counts *counts, fst_error *error) {
    device_lane *lane = pipeline->device_lane;
    bool any;
    if (status != FST_OK) {
        free_slot(lane, slot);
        return status;
    }
    // Publish the counts first: the thread that finishes the last chunk reads the sums.
    fsti_pipeline_count(pipeline, counts);
    pthread_mutex_lock(&lane->lock);
    uint32_t last = (lane->sent_first + lane->sent_count++) % FSTI_STAGING_SLOT_COUNT_MAX;
    lane->sent[last] = slot;
    pthread_cond_signal(&lane->slot_changed);
    pthread_mutex_unlock(&lane->lock);
    // Reap now, so that tensors are returned soon after they arrive, even if the ring is not full.
    return fsti_device_lane_reap(pipeline, false, &any, counts, error);
}

fst_status fsti_device_lane_send(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                                 fst_error *error) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_chunk *range = &plan->chunks[chunk];
    uint32_t slot = pipeline->chunks[chunk].slot;
    counts->device_bytes += range->end - range->begin;
    fst_status status = plan->extents[range->extent].linear
                            ? send_linear(pipeline, chunk, slot, counts, error)
                            : send_scattered(pipeline, chunk, slot, counts, error);
    return queue_slot(pipeline, slot, status, counts, error);
}

fst_status fsti_device_lane_send_list(fsti_pipeline *pipeline, uint32_t chunk,
                                      const fsti_copy_list *list, worker_counts *counts,
                                      fst_error *error) {
    uint32_t slot = pipeline->chunks[chunk].slot;
    counts->device_copies += list->copy_count;
    fst_status status = fsti_staging_send(pipeline->device_lane->ring, slot, list, error);
    return queue_slot(pipeline, slot, status, counts, error);
}

void fsti_device_lane_explain(fsti_pipeline *pipeline, char *text, size_t size) {
    const device_lane *lane = pipeline->device_lane;
    text[0] = '\0';
    if (lane == NULL) return;
    snprintf(text, size, ", copied to the device through at most %u slots of %u MiB%s%s, gds: %s",
             (unsigned)slots_wanted(&pipeline->job), (unsigned)(FSTI_STAGING_CHUNK_BYTES_MAX >> 20),
             fsti_staging_is_pinned(lane->ring) ? "" : ", not all of them pinned (slower)",
             atomic_load(&lane->lacks_kernels) ? ", scattered by the CPU" : "",
             pipeline->gds_reason);
}
