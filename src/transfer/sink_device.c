// SPDX-License-Identifier: Apache-2.0
/// The sink of a device: a chunk gets a slot of locked memory, or is read straight to the device;
/// slots are sent by device_lane.c. The device's context is the thread's within each call only.
#include "sink.h"

/// A free slot for a chunk, as its room.
static fst_status take_slot(fsti_pipeline *pipeline, uint32_t chunk, sink_room *room,
                            worker_counts *counts, fst_error *error) {
    char *data = NULL;
    FST_TRY(fsti_device_lane_take(pipeline, chunk, room->wait, &data, counts, error));
    room->base = data;
    room->origin = fsti_chunk_origin(&pipeline->job.plan->chunks[chunk]);
    room->answer = data != NULL ? SINK_READY : atomic_load(&pipeline->stop) ? SINK_DONE : SINK_BUSY;
    return FST_OK;
}

/// A slot, or, where files can be read straight to the device, the whole chunk there.
static fst_status find_room(fsti_pipeline *pipeline, uint32_t chunk, sink_room *room,
                            worker_counts *counts, fst_error *error) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    if (!fsti_device_lane_reads_far(pipeline, chunk))
        return take_slot(pipeline, chunk, room, counts, error);
    bool has_edges = (range->begin | range->end) % FSTI_IO_PAGE_BYTES != 0, done = false;
    if (has_edges) {
        FST_TRY(take_slot(pipeline, chunk, room, counts, error));
        if (room->answer != SINK_READY) return FST_OK;
    }
    void *lane;
    FST_TRY(fsti_io_engine_gds.lane_open(1, &lane, error));
    counts->used[FST_ENGINE_GDS] = true;
    fst_status status = fsti_device_lane_read(pipeline, chunk, lane, &done, counts, error);
    fsti_io_engine_gds.lane_close(lane);
    FST_TRY(status);
    if (done) room->answer = SINK_DONE;
    // What was refused takes the way through the ring.
    return done || has_edges ? FST_OK : take_slot(pipeline, chunk, room, counts, error);
}

static fst_status prepare_room(fsti_pipeline *pipeline, uint32_t chunk, sink_room *room,
                               worker_counts *counts, fst_error *error) {
    FST_TRY(fsti_device_lane_begin(pipeline, error));
    fst_status status = find_room(pipeline, chunk, room, counts, error);
    fsti_device_lane_end(pipeline);
    return status;
}

/// A block of a mapping on its way to a slot.
typedef struct slot_copy {
    char *target;
    const char *source;
    size_t size;
} slot_copy;

static void fill_slot(void *context) {
    const slot_copy *copy = context;
    fsti_copy(copy->target, copy->source, copy->size);
}

/// Reads have put it in the slot already; pages of a mapping are copied there.
static fst_status place_in_slot(fsti_pipeline *pipeline, const sink_block *block,
                                worker_counts *counts, fst_error *error) {
    if (!block->is_mapped) return FST_OK;
    uint64_t origin = fsti_chunk_origin(&pipeline->job.plan->chunks[block->chunk]);
    slot_copy copy = {.target =
                          fsti_device_lane_data(pipeline, block->chunk) + (block->begin - origin),
                      .source = block->source,
                      .size = (size_t)(block->needed_end - block->begin)};
    counts->bytes_copied += block->end - block->begin;
    return fsti_sink_copy(pipeline, block, fill_slot, &copy, error);
}

static fst_status send_slot(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                            fst_error *error) {
    FST_TRY(fsti_device_lane_begin(pipeline, error));
    fst_status status = fsti_device_lane_send(pipeline, chunk, counts, error);
    fsti_device_lane_end(pipeline);
    return status;
}

static fst_status reap_slot(fsti_pipeline *pipeline, bool *any, worker_counts *counts,
                            fst_error *error) {
    *any = false;
    FST_TRY(fsti_device_lane_begin(pipeline, error));
    fst_status status = fsti_device_lane_reap(pipeline, true, any, counts, error);
    fsti_device_lane_end(pipeline);
    return status;
}

static void wake_lane(fsti_pipeline *pipeline) {
    if (pipeline->device_lane != NULL) fsti_device_lane_wake(pipeline);
}

/// The ring, and whether there is a way around it.
static fst_status open_ways(fsti_pipeline *pipeline, fst_error *error) {
    FST_TRY(fsti_device_lane_open(pipeline, error));
    fsti_device_lane_look_far(pipeline);
    return FST_OK;
}

const fsti_sink fsti_sink_device = {
    .has_slots = true,
    .looks_ahead = true,
    .prepare = prepare_room,
    .place = place_in_slot,
    .complete = send_slot,
    .reap = reap_slot,
    .wake = wake_lane,
    .open = open_ways,
    .probe = fsti_device_lane_probe,
    .close = fsti_device_lane_close,
    .explain = fsti_device_lane_explain,
};
