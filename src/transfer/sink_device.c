// SPDX-License-Identifier: Apache-2.0
/// The device sink: a chunk is read into a pinned slot, or by GPUDirect; device_lane.c sends slots.
/// The device's context is current only within each call.
#include "sink.h"

/// Takes a free slot as the chunk's target.
static fst_status take_slot(fsti_pipeline *pipeline, uint32_t chunk, sink_target *target,
                            worker_counts *counts, fst_error *error) {
    char *data = NULL;
    FST_TRY(fsti_device_lane_take(pipeline, chunk, target->wait, &data, counts, error));
    target->base = data;
    target->origin = fsti_chunk_origin(&pipeline->job.plan->chunks[chunk]);
    target->answer = data != NULL                   ? SINK_READY
                     : atomic_load(&pipeline->stop) ? SINK_DONE
                                                    : SINK_BUSY;
    return FST_OK;
}

/// Takes a slot or, with GPUDirect, reads the whole chunk.
static fst_status find_target(fsti_pipeline *pipeline, uint32_t chunk, sink_target *target,
                              worker_counts *counts, fst_error *error) {
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    if (!fsti_device_lane_uses_gds(pipeline, chunk))
        return take_slot(pipeline, chunk, target, counts, error);
    bool has_edges = (range->begin | range->end) % FSTI_IO_PAGE_BYTES != 0, done = false;
    if (has_edges) {
        FST_TRY(take_slot(pipeline, chunk, target, counts, error));
        if (target->answer != SINK_READY) return FST_OK;
    }
    void *lane;
    FST_TRY(fsti_io_engine_gds.lane_open(1, &lane, error));
    counts->used[FSTI_ENGINE_GDS] = true;
    fst_status status = fsti_device_lane_read(pipeline, chunk, lane, &done, counts, error);
    fsti_io_engine_gds.lane_close(lane);
    FST_TRY(status);
    if (done) target->answer = SINK_DONE;
    // A refused chunk goes through the staging ring.
    return done || has_edges ? FST_OK : take_slot(pipeline, chunk, target, counts, error);
}

static fst_status prepare_target(fsti_pipeline *pipeline, uint32_t chunk, sink_target *target,
                                 worker_counts *counts, fst_error *error) {
    FST_TRY(fsti_device_lane_begin(pipeline, error));
    fst_status status = find_target(pipeline, chunk, target, counts, error);
    fsti_device_lane_end(pipeline);
    return status;
}

/// A block of a mapping being copied to a slot.
typedef struct slot_copy {
    char *target;
    const char *source;
    size_t size;
} slot_copy;

static void fill_slot(void *context) {
    const slot_copy *copy = context;
    fsti_copy_bytes(copy->target, copy->source, copy->size);
}

/// Reads have filled the slot already; only mapped pages are copied.
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

/// Opens the staging ring and checks for GPUDirect.
static fst_status open_engines(fsti_pipeline *pipeline, fst_error *error) {
    FST_TRY(fsti_device_lane_open(pipeline, error));
    fsti_device_lane_check_gds(pipeline);
    return FST_OK;
}

const fsti_sink fsti_sink_device = {
    .has_slots = true,
    .classifies_ahead = true,
    .prepare = prepare_target,
    .place = place_in_slot,
    .complete = send_slot,
    .reap = reap_slot,
    .wake = wake_lane,
    .populate = fsti_sink_populate,
    .open = open_engines,
    .probe = fsti_device_lane_probe,
    .close = fsti_device_lane_close,
    .explain = fsti_device_lane_explain,
};
