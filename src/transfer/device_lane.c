// SPDX-License-Identifier: Apache-2.0
/// The way to a device: a chunk is read into a slot of locked memory, sent on a stream, and done
/// when its event says so. Slots go round in the order in which they were sent: workers fill them,
/// whoever needs one waits for the oldest. Nothing is awaited per tensor.
#include <stdio.h>
#include <string.h>

#include "parcel.h"
#include "pipeline.h"

#define NO_SLOT UINT32_MAX

struct device_lane {
    fsti_device *device;
    fsti_ring *ring;
    atomic_bool lacks_kernels; ///< the device could not do what was asked of it
    pthread_mutex_t lock;      ///< for what follows
    pthread_cond_t slot_changed;
    uint32_t free_slots[FSTI_RING_SLOT_COUNT_MAX];
    uint32_t free_count;
    uint32_t sent[FSTI_RING_SLOT_COUNT_MAX]; ///< a queue of slots, oldest at `sent_first`
    uint32_t sent_first, sent_count;
    uint32_t chunks[FSTI_RING_SLOT_COUNT_MAX]; ///< by slot
    char *data[FSTI_RING_SLOT_COUNT_MAX];
};

static uint32_t slots_wanted(const fsti_job *job) {
    uint64_t slots = job->ring_bytes / FSTI_RING_CHUNK_BYTES_MAX;
    // A small model needs no more than it has chunks.
    return (uint32_t)fsti_min(fsti_max(slots, 2), fsti_max(job->plan->chunk_count, 2));
}

static fst_status fill_lane(fsti_pipeline *pipeline, device_lane *lane, fst_error *error) {
    const fsti_job *job = &pipeline->job;
    FST_TRY(fsti_ring_take(job->device, slots_wanted(job), &lane->ring, error));
    lane->free_count = fsti_ring_slot_count(lane->ring);
    // A kept ring may have more slots than this load may use.
    lane->free_count = (uint32_t)fsti_min(lane->free_count, slots_wanted(job));
    for (uint32_t i = 0; i < lane->free_count; i++) lane->free_slots[i] = lane->free_count - 1 - i;
    if (job->stream != 0) FST_TRY(fsti_ring_follow(lane->ring, job->stream, error));
    return FST_OK;
}

fst_status fsti_device_lane_open(fsti_pipeline *pipeline, fst_error *error) {
    device_lane *lane = fsti_alloc_zeroed(1, sizeof *lane);
    if (lane == NULL) return fsti_error_memory(error, sizeof *lane);
    lane->device = pipeline->job.device;
    pthread_mutex_init(&lane->lock, NULL);
    pthread_cond_init(&lane->slot_changed, NULL);
    pipeline->device_lane = lane;
    FST_TRY(fsti_device_lane_begin(pipeline, error));
    fst_status status = fill_lane(pipeline, lane, error);
    fsti_device_lane_end(pipeline);
    return status;
}

void fsti_device_lane_close(fsti_pipeline *pipeline) {
    device_lane *lane = pipeline->device_lane;
    if (lane == NULL) return;
    if (lane->ring != NULL && fsti_device_lane_begin(pipeline, NULL) == FST_OK) {
        fsti_ring_drain(lane->ring);
        fsti_ring_give(lane->ring);
        fsti_device_lane_end(pipeline);
    }
    pthread_mutex_destroy(&lane->lock);
    pthread_cond_destroy(&lane->slot_changed);
    fsti_free(lane);
    pipeline->device_lane = NULL;
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

/// Takes the oldest slot that was sent out of the queue; NO_SLOT when none is. The lock is held.
static uint32_t pop_sent(device_lane *lane) {
    if (lane->sent_count == 0) return NO_SLOT;
    uint32_t slot = lane->sent[lane->sent_first];
    lane->sent_first = (lane->sent_first + 1) % FSTI_RING_SLOT_COUNT_MAX;
    lane->sent_count--;
    return slot;
}

/// Puts it back as the oldest: it has not arrived.
static void unpop_sent(device_lane *lane, uint32_t slot) {
    pthread_mutex_lock(&lane->lock);
    lane->sent_first = (lane->sent_first + FSTI_RING_SLOT_COUNT_MAX - 1) % FSTI_RING_SLOT_COUNT_MAX;
    lane->sent[lane->sent_first] = slot;
    lane->sent_count++;
    pthread_cond_signal(&lane->slot_changed);
    pthread_mutex_unlock(&lane->lock);
}

fst_status fsti_device_lane_reap(fsti_pipeline *pipeline, bool wait, bool *any,
                                 worker_counts *counts, fst_error *error) {
    device_lane *lane = pipeline->device_lane;
    *any = false;
    for (;;) {
        bool arrived = false;
        pthread_mutex_lock(&lane->lock);
        uint32_t slot = pop_sent(lane);
        pthread_mutex_unlock(&lane->lock);
        if (slot == NO_SLOT) return FST_OK;
        uint64_t start_ns = fsti_now_ns();
        fst_status status = fsti_ring_arrived(lane->ring, slot, wait && !*any, &arrived, error);
        counts->device_wait_ns += fsti_now_ns() - start_ns;
        if (status == FST_OK && !arrived) {
            unpop_sent(lane, slot);
            return FST_OK;
        }
        uint32_t chunk = lane->chunks[slot];
        free_slot(lane, slot);
        FST_TRY(status);
        fsti_pipeline_finish(pipeline, chunk, counts);
        *any = true;
    }
}

/// A free slot, or NO_SLOT. With `wait` it sleeps while others fill all of them.
static uint32_t find_free(fsti_pipeline *pipeline, bool wait) {
    device_lane *lane = pipeline->device_lane;
    pthread_mutex_lock(&lane->lock);
    while (wait && lane->free_count == 0 && lane->sent_count == 0 && !atomic_load(&pipeline->stop))
        pthread_cond_wait(&lane->slot_changed, &lane->lock);
    uint32_t slot = lane->free_count == 0 ? NO_SLOT : lane->free_slots[--lane->free_count];
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
    fst_status status = fsti_ring_slot(lane->ring, slot, data, error);
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

/// A linear extent lies in the buffer as it lies in the file.
static fst_status send_linear(fsti_pipeline *pipeline, uint32_t chunk, uint32_t slot,
                              worker_counts *counts, fst_error *error) {
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_chunk *range = &plan->chunks[chunk];
    const fsti_plan_extent *extent = &plan->extents[range->extent];
    const fsti_buffer *buffer = pipeline->batches[extent->batch].buffer;
    fsti_ring_parcel parcel = {.copy_count = 1};
    parcel.copies[0].target =
        (uintptr_t)buffer->data + extent->buffer_offset + (range->begin - extent->begin);
    parcel.copies[0].source = (uint32_t)(range->begin - fsti_chunk_origin(range));
    parcel.copies[0].size = (uint32_t)(range->end - range->begin);
    counts->device_copies++;
    return fsti_ring_send(pipeline->device_lane->ring, slot, &parcel, error);
}

/// Whether a chunk of the extent may be more than a few plain copies. The kernel is compiled by the
/// driver when it is first wanted, which takes longer than many a load.
static bool wants_kernel(const fsti_plan *plan, const fsti_plan_extent *extent) {
    if (extent->converts || extent->segment_count > FSTI_RING_COPY_COUNT_MAX) return true;
    for (size_t i = 0; i < extent->segment_count; i++)
        if (plan->segments[extent->segment_first + i].run_count > 1) return true;
    return false;
}

static fst_status send_scattered(fsti_pipeline *pipeline, uint32_t chunk, uint32_t slot,
                                 worker_counts *counts, fst_error *error) {
    device_lane *lane = pipeline->device_lane;
    const fsti_plan *plan = pipeline->job.plan;
    const fsti_plan_chunk *range = &plan->chunks[chunk];
    const fsti_plan_extent *extent = &plan->extents[range->extent];
    const fsti_buffer *buffer = pipeline->batches[extent->batch].buffer;
    uint64_t origin = fsti_chunk_origin(range);
    parcel_maker *maker;
    bool wanted = wants_kernel(plan, extent);
    bool has_kernels = wanted && fsti_device_has_kernels(lane->device);
    if (wanted && !has_kernels) atomic_store(&lane->lacks_kernels, true);
    FST_TRY(fsti_parcel_open(lane->ring, slot, lane->data[slot], has_kernels, &maker, error));
    uint64_t end = extent->converts
                       ? fsti_min(range->end + FSTI_PLAN_UNIT_BYTES_MAX - 1, extent->end)
                       : range->end;
    fsti_parcel_filled(maker, end - origin);
    scatter_order order = {.plan = plan,
                           .extent = extent,
                           .buffer = buffer == NULL ? NULL : buffer->data,
                           .source = lane->data[slot] + (range->begin - origin),
                           .begin = range->begin,
                           .end = range->end,
                           .settled = pipeline->settled,
                           .emit = fsti_parcel_emit,
                           .emit_context = maker};
    fsti_scatter(&order);
    counts->bytes_converted += order.converted;
    return fsti_parcel_close(maker, counts, error);
}

/// Queues a slot that was sent, or frees it where that failed.
static fst_status queue_slot(fsti_pipeline *pipeline, uint32_t slot, fst_status status,
                             worker_counts *counts, fst_error *error) {
    device_lane *lane = pipeline->device_lane;
    bool any;
    if (status != FST_OK) {
        free_slot(lane, slot);
        return status;
    }
    pthread_mutex_lock(&lane->lock);
    uint32_t last = (lane->sent_first + lane->sent_count++) % FSTI_RING_SLOT_COUNT_MAX;
    lane->sent[last] = slot;
    pthread_cond_signal(&lane->slot_changed);
    pthread_mutex_unlock(&lane->lock);
    // Tensors are to be had soon after they have arrived, also while the ring is not full.
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

fst_status fsti_device_lane_send_parcel(fsti_pipeline *pipeline, uint32_t chunk,
                                        const fsti_ring_parcel *parcel, worker_counts *counts,
                                        fst_error *error) {
    uint32_t slot = pipeline->chunks[chunk].slot;
    counts->device_copies += parcel->copy_count;
    fst_status status = fsti_ring_send(pipeline->device_lane->ring, slot, parcel, error);
    return queue_slot(pipeline, slot, status, counts, error);
}

void fsti_device_lane_explain(const fsti_pipeline *pipeline, char *text, size_t size) {
    const device_lane *lane = pipeline->device_lane;
    text[0] = '\0';
    if (lane == NULL) return;
    snprintf(text, size, ", copied to the device through %u slots of %u MiB%s%s, gds: %s",
             (unsigned)fsti_min(slots_wanted(&pipeline->job), fsti_ring_slot_count(lane->ring)),
             (unsigned)(FSTI_RING_CHUNK_BYTES_MAX >> 20),
             fsti_ring_is_locked(lane->ring) ? "" : ", not all of them locked (slower)",
             atomic_load(&lane->lacks_kernels) ? ", taken apart by the processors" : "",
             pipeline->gds_reason);
}
