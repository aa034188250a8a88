// SPDX-License-Identifier: Apache-2.0
/// A worker: takes chunks, reads them block by block through an engine's lane, and puts the bytes
/// in their place. A lane of an asynchronous engine keeps a ring of slots in flight; the slots are
/// small enough to stay in the cache, so that the copy out of them costs little.
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "pipeline.h"

/// Reads in flight per lane, and their size: 16 MiB of slots saturate what was measured
/// (docs/benchmarks) and fit the cache.
#define RING_DEPTH 16u
#define RING_BLOCK_BYTES ((uint64_t)1 << 20)

/// One read in flight and what it is for.
typedef struct io_block {
    fsti_io_op read; ///< first: a finished read is its block
    uint32_t chunk;
    uint64_t begin, end; ///< bytes of the file wanted of it
    uint64_t needed_end; ///< what must be read: a unit of a conversion may reach beyond `end`
    uint64_t read_begin; ///< where the whole read began (page below `begin` for direct engines)
    char *target;        ///< of the whole read: a slot, or the place in the buffer
    char *slot;
    uint32_t retry_count; ///< in a row, without a byte read
    bool is_buffered;     ///< what a direct read did not do was read through the page cache
    struct io_block *next_free;
} io_block;

/// A worker's use of one engine.
typedef struct io_lane {
    const fsti_io_engine *engine;
    void *handle;
    fsti_buffer *slots;
    io_block blocks[RING_DEPTH];
    io_block *free_blocks;
    uint32_t depth, in_flight;
} io_lane;

typedef struct worker {
    fsti_pipeline *pipeline;
    io_lane lanes[FST_ENGINE_COUNT]; ///< by engine, opened on first use
    worker_counts counts;
    bool is_lane_worker;
    fst_ring last_way; ///< of the chunk that a ring finished last, and when
    uint64_t last_ns;
} worker;

static const fsti_plan_extent *chunk_extent(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan *plan = pipeline->job.plan;
    return &plan->extents[plan->chunks[chunk].extent];
}

static fst_status open_lane(worker *self, io_lane *lane, const fsti_io_engine *engine,
                            fst_error *error) {
    uint32_t depth = engine->is_async ? RING_DEPTH : 1;
    FST_TRY(engine->lane_open(depth, &lane->handle, error));
    // A small load needs no slot of full size.
    uint64_t planned = fsti_align_up(self->pipeline->job.plan->bytes_planned, FSTI_IO_PAGE_BYTES);
    uint64_t slot_bytes = fsti_min(RING_BLOCK_BYTES, planned) + 2 * FSTI_IO_PAGE_BYTES;
    if (!engine->is_mapped && self->pipeline->device_lane == NULL) {
        fst_status status = fsti_buffer_arena(depth * slot_bytes, &lane->slots, error);
        if (status != FST_OK) {
            engine->lane_close(lane->handle);
            lane->handle = NULL;
            return status;
        }
        self->counts.bounce_bytes += lane->slots->size_bytes;
    }
    lane->engine = engine;
    lane->depth = depth;
    for (uint32_t i = 0; i < depth; i++) {
        io_block *block = &lane->blocks[i];
        if (lane->slots != NULL) block->slot = lane->slots->data + i * slot_bytes;
        block->next_free = lane->free_blocks;
        lane->free_blocks = block;
    }
    return FST_OK;
}

static void close_lanes(worker *self) {
    for (unsigned i = 0; i < FST_ENGINE_COUNT; i++) {
        io_lane *lane = &self->lanes[i];
        if (lane->handle != NULL) lane->engine->lane_close(lane->handle);
        fsti_buffer_unref(lane->slots);
    }
}

/// True when the bytes of a chunk are read straight to their place: of a linear extent, by blocking
/// engines always, by a ring when that is its way.
static bool reads_to_place(const fsti_pipeline *pipeline, const io_lane *lane, uint32_t chunk) {
    if (pipeline->device_lane != NULL) return false;
    if (!chunk_extent(pipeline, chunk)->linear || lane->engine->is_mapped) return false;
    return !lane->engine->is_async || pipeline->chunks[chunk].way == FST_RING_PLACE;
}

static uint64_t block_bytes(const fsti_pipeline *pipeline, const io_lane *lane, uint32_t chunk) {
    bool at_once = lane->engine->is_mapped || !lane->engine->is_async;
    // A slot of the device's ring holds a chunk.
    bool whole = at_once && (lane->engine->is_mapped || pipeline->device_lane != NULL ||
                             reads_to_place(pipeline, lane, chunk));
    return whole ? FSTI_PLAN_CHUNK_BYTES : RING_BLOCK_BYTES;
}

/// The way of a chunk that a ring reads.
static fst_ring choose_way(const fsti_pipeline *pipeline, uint32_t chunk) {
    const fsti_plan_extent *extent = chunk_extent(pipeline, chunk);
    if (!extent->linear) return FST_RING_SLOTS;
    if (pipeline->job.ring != FST_RING_AUTO) return pipeline->job.ring;
    return fsti_ring_choose(fsti_file_device(pipeline->job.files[extent->file]));
}

/// Tells how fast a chunk came: from the end of the one before it, if that came the same way (the
/// ring was full of such reads meanwhile).
static void measure_way(worker *self, uint32_t chunk) {
    const fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_plan_extent *extent = chunk_extent(pipeline, chunk);
    if (!extent->linear || pipeline->job.ring != FST_RING_AUTO) return;
    fst_ring way = (fst_ring)pipeline->chunks[chunk].way;
    uint64_t now = fsti_now_ns();
    if (self->last_way == way && self->last_ns != 0)
        fsti_ring_measured(fsti_file_device(pipeline->job.files[extent->file]), way,
                           range->end - range->begin, now - self->last_ns);
    self->last_way = way;
    self->last_ns = now;
}

static void submit_block(worker *self, io_lane *lane, io_block *block) {
    fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan_extent *extent = chunk_extent(pipeline, block->chunk);
    uint64_t begin = block->begin, end = block->needed_end;
    if (lane->engine->is_direct) {
        begin = fsti_align_down(begin, FSTI_IO_PAGE_BYTES);
        end = fsti_align_up(end, FSTI_IO_PAGE_BYTES);
    }
    block->read_begin = begin;
    block->target = block->slot;
    if (pipeline->device_lane != NULL)
        block->target = fsti_device_lane_data(pipeline, block->chunk) +
                        (begin - fsti_chunk_origin(&pipeline->job.plan->chunks[block->chunk]));
    else if (reads_to_place(pipeline, lane, block->chunk))
        block->target = pipeline->batches[extent->batch].buffer->data +
                        (extent->buffer_offset + begin - extent->begin);
    block->read = (fsti_io_op){.file = pipeline->job.files[extent->file],
                               .offset = begin,
                               .size = (size_t)(end - begin),
                               .buffer = block->target,
                               .engine = lane->engine->number};
    self->counts.read_count++;
    self->counts.used[lane->engine->number] = true;
    lane->in_flight++;
    lane->engine->submit(lane->handle, &block->read);
}

static void carry_out(void *order) { fsti_scatter(order); }

/// A block of a mapping on its way to a device's slot.
typedef struct slot_copy {
    char *target;
    const char *source;
    size_t size;
} slot_copy;

static void fill_slot(void *context) {
    const slot_copy *copy = context;
    fsti_copy(copy->target, copy->source, copy->size);
}

/// Where the block's first wanted byte was read to.
static const char *block_source(const io_lane *lane, const io_block *block) {
    // A read that took several attempts has moved on; where it began is where the block begins.
    const char *whole = lane->engine->is_mapped ? (const char *)block->read.data -
                                                      (block->read.offset - block->read_begin)
                                                : block->target;
    return whole + (block->begin - block->read_begin);
}

/// Runs what reads `source`; FST_E_IO or FST_E_FILE_CHANGED when its pages could not be had.
static fst_status run_copy(worker *self, const io_lane *lane, const io_block *block,
                           void (*copy)(void *context), void *context, fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan_extent *extent = chunk_extent(pipeline, block->chunk);
    uint64_t start_ns = fsti_now_ns();
    bool good = true;
    if (lane->engine->is_mapped)
        good = fsti_io_guarded(copy, context, block_source(lane, block),
                               block->needed_end - block->begin);
    else
        copy(context);
    self->counts.copy_ns += fsti_now_ns() - start_ns;
    if (good) return FST_OK;
    FST_TRY(fsti_pipeline_check_file(pipeline, extent, block->begin, error));
    fsti_pipeline_describe(pipeline, extent, block->begin, FST_E_IO, EIO, error);
    return FST_E_IO;
}

/// Brings the block to the chunk's slot, where reads have put it already.
static fst_status slot_block(worker *self, const io_lane *lane, const io_block *block,
                             fst_error *error) {
    const fsti_pipeline *pipeline = self->pipeline;
    uint64_t origin = fsti_chunk_origin(&pipeline->job.plan->chunks[block->chunk]);
    slot_copy copy = {.target =
                          fsti_device_lane_data(pipeline, block->chunk) + (block->begin - origin),
                      .source = block_source(lane, block),
                      .size = (size_t)(block->needed_end - block->begin)};
    if (!lane->engine->is_mapped) return FST_OK;
    self->counts.bytes_copied += block->end - block->begin;
    return run_copy(self, lane, block, fill_slot, &copy, error);
}

static fst_status scatter_block(worker *self, const io_lane *lane, const io_block *block,
                                fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan_extent *extent = chunk_extent(pipeline, block->chunk);
    fsti_buffer *buffer = pipeline->batches[extent->batch].buffer;
    scatter_order order = {.plan = pipeline->job.plan,
                           .extent = extent,
                           .buffer = buffer == NULL ? NULL : buffer->data,
                           .source = block_source(lane, block),
                           .begin = block->begin,
                           .end = block->end,
                           .settled = pipeline->settled};
    FST_TRY(run_copy(self, lane, block, carry_out, &order, error));
    self->counts.bytes_copied += order.copied;
    self->counts.bytes_converted += order.converted;
    return FST_OK;
}

static fst_status place_block(worker *self, const io_lane *lane, const io_block *block,
                              fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    uint64_t size = block->end - block->begin;
    FST_TRY(pipeline->device_lane != NULL ? slot_block(self, lane, block, error)
                                          : scatter_block(self, lane, block, error));
    self->counts.bytes_read += size;
    bool is_direct = lane->engine->is_direct && !block->is_buffered;
    if (is_direct) self->counts.bytes_direct += size;
    if (!is_direct && !pipeline->chunks[block->chunk].is_resident) self->counts.cache_bytes += size;
    if (lane->engine->is_mapped) {
        self->counts.bytes_mapped += size;
        fsti_io_forget(pipeline->job.files[chunk_extent(pipeline, block->chunk)->file],
                       block->begin, block->end);
    }
    return FST_OK;
}

static fst_status short_read(const fsti_pipeline *pipeline, const io_block *block, uint64_t have,
                             fst_error *error) {
    const fsti_plan_extent *extent = chunk_extent(pipeline, block->chunk);
    // The file may have shrunk: that says more than "short".
    FST_TRY(fsti_pipeline_check_file(pipeline, extent, have, error));
    fsti_pipeline_describe(pipeline, extent, have, FST_E_SHORT_READ, 0, error);
    return FST_E_SHORT_READ;
}

/// Whether a read is to be tried once more as it is; not for ever.
static bool is_worth_a_retry(io_block *block) {
    int64_t result = block->read.result;
    if (result > 0) block->retry_count = 0;
    if (result != -EINTR && result != -EAGAIN) return false;
    if (result == -EAGAIN && block->retry_count > 8) usleep(1000);
    return block->retry_count++ < FSTI_READ_RETRIES_MAX;
}

/// Reads a block, once more from its beginning, through the page cache.
static fst_status read_buffered(worker *self, io_block *block, fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan_extent *extent = chunk_extent(pipeline, block->chunk);
    uint64_t size = block->needed_end - block->begin;
    size_t got;
    fst_error cause;
    char *target = block->target + (block->begin - block->read_begin);
    fst_status status = fsti_file_read(pipeline->job.files[extent->file], target, (size_t)size,
                                       block->begin, &got, &cause);
    self->counts.read_count++;
    self->counts.used[FST_ENGINE_PREAD] = true;
    block->is_buffered = true;
    if (status == FST_OK)
        return got < size ? short_read(pipeline, block, block->begin + got, error) : FST_OK;
    fsti_pipeline_describe(pipeline, extent, block->begin + got, status, cause.os_errno, error);
    return status;
}

/// A read has failed. One past the page cache may be refused for reasons of its own (alignment, a
/// driver, a kernel without the operation): then the file is read through the cache.
static fst_status recover_read(worker *self, const io_lane *lane, io_block *block,
                               fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan_extent *extent = chunk_extent(pipeline, block->chunk);
    int os_errno = (int)-block->read.result;
    if (lane->engine->is_direct &&
        fsti_pipeline_demote(pipeline, extent->file,
                             lane->engine->is_async ? FSTI_ROUTE_RING : FSTI_ROUTE_DIRECT, false,
                             os_errno))
        return read_buffered(self, block, error);
    fsti_pipeline_describe(pipeline, extent, fsti_max(block->read.offset, block->begin), FST_E_IO,
                           os_errno, error);
    return FST_E_IO;
}

/// Looks at a finished read. *again: part of it, or all of it, has to be read once more.
static fst_status check_result(worker *self, const io_lane *lane, io_block *block, bool *again,
                               fst_error *error) {
    fsti_io_op *read = &block->read;
    *again = is_worth_a_retry(block);
    if (*again) return FST_OK;
    if (read->result < 0) return recover_read(self, lane, block, error);
    uint64_t have = read->offset + (uint64_t)read->result;
    if (have >= block->needed_end) return FST_OK;
    uint64_t advance = (uint64_t)read->result;
    if (lane->engine->is_direct) advance = fsti_align_down(advance, FSTI_IO_PAGE_BYTES);
    if (advance == 0) return short_read(self->pipeline, block, have, error);
    read->offset += advance;
    read->size -= advance;
    read->buffer = (char *)read->buffer + advance;
    *again = true;
    return FST_OK;
}

/// Waits for one read of the lane and deals with it.
static fst_status finish_block(worker *self, io_lane *lane, fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    io_block *block = (void *)lane->engine->reap(lane->handle);
    self->counts.read_ns += fsti_now_ns() - start_ns;
    lane->in_flight--;
    bool again = false;
    fst_status status = check_result(self, lane, block, &again, error);
    if (status == FST_OK && again && !atomic_load(&self->pipeline->stop)) {
        self->counts.read_count++;
        lane->in_flight++;
        lane->engine->submit(lane->handle, &block->read);
        return FST_OK;
    }
    if (status == FST_OK && !again) status = place_block(self, lane, block, error);
    block->next_free = lane->free_blocks;
    lane->free_blocks = block;
    FST_TRY(status);
    if (again) return FST_OK; // stopping
    chunk_state *state = &self->pipeline->chunks[block->chunk];
    if (--state->blocks_left > 0) return FST_OK;
    // Any write or truncation before this moment shows in size or time.
    FST_TRY(fsti_pipeline_check_file(self->pipeline, chunk_extent(self->pipeline, block->chunk),
                                     block->begin, error));
    if (self->pipeline->device_lane != NULL)
        return fsti_device_lane_send(self->pipeline, block->chunk, &self->counts, error);
    if (lane->engine->is_async) measure_way(self, block->chunk);
    fsti_pipeline_finish(self->pipeline, block->chunk, &self->counts);
    return FST_OK;
}

/// How far the kernel is told of reads through the page cache ahead of whoever waits for them:
/// enough to keep a disk busy.
#define ADVICE_CHUNKS_AHEAD 8u

/// Tells the kernel what is to be read up to some chunks behind `chunk`, in order: many small calls
/// that do not wait keep a disk busier than threads that each wait for their own.
static void advise_ahead(worker *self, uint32_t chunk) {
    fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan *plan = pipeline->job.plan;
    pthread_mutex_lock(&pipeline->advice_lock);
    uint64_t limit = fsti_min((uint64_t)chunk + 1 + ADVICE_CHUNKS_AHEAD, plan->chunk_count);
    while (pipeline->advice_cursor < limit && !atomic_load(&pipeline->stop)) {
        uint32_t next = pipeline->advice_cursor++;
        const fsti_plan_chunk *range = &plan->chunks[next];
        // Only chunks of batches that are admitted have been looked at; later ones stay absent.
        if (atomic_load(&pipeline->chunks[next].step) == CHUNK_DONE) continue;
        if (pipeline->chunks[next].is_resident) continue;
        self->counts.read_count += fsti_file_advise(
            pipeline->job.files[plan->extents[range->extent].file], range->begin, range->end);
    }
    pthread_mutex_unlock(&pipeline->advice_lock);
}

/// Views: pages of a chunk are made present, after having been brought into the page cache.
static fst_status populate_mapping(worker *self, uint32_t chunk, fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    uint32_t file = chunk_extent(pipeline, chunk)->file;
    bool is_resident = pipeline->chunks[chunk].is_resident;
    uint64_t start_ns = fsti_now_ns(), size = range->end - range->begin;
    if (!is_resident) advise_ahead(self, chunk);
    FST_TRY(fsti_file_populate(pipeline->job.files[file], pipeline->job.mappings[file],
                               range->begin, range->end, error));
    uint64_t spent_ns = fsti_now_ns() - start_ns;
    self->counts.bytes_mapped += size;
    if (!is_resident) self->counts.bytes_read += size;
    if (!is_resident) self->counts.cache_bytes += size;
    *(is_resident ? &self->counts.populate_ns : &self->counts.read_ns) += spent_ns;
    FST_TRY(fsti_pipeline_check_file(pipeline, chunk_extent(pipeline, chunk), range->begin, error));
    fsti_pipeline_finish(pipeline, chunk, &self->counts);
    return FST_OK;
}

/// Finishes one read of any lane; false when none is in flight.
static bool finish_any(worker *self, fst_status *status, fst_error *error) {
    for (unsigned i = 0; i < FST_ENGINE_COUNT; i++) {
        io_lane *lane = &self->lanes[i];
        if (lane->in_flight == 0) continue;
        *status = finish_block(self, lane, error);
        return true;
    }
    return false;
}

/// A slot of the device's ring for a chunk. While reads of this worker are in flight it goes on
/// with them instead of waiting for others: they hold slots.
static fst_status take_slot(worker *self, uint32_t chunk, fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    char *data = NULL;
    while (!atomic_load(&pipeline->stop)) {
        fst_status status = FST_OK;
        FST_TRY(fsti_device_lane_take(pipeline, chunk, false, &data, &self->counts, error));
        if (data != NULL) return FST_OK;
        bool had_reads = finish_any(self, &status, error);
        FST_TRY(status);
        if (had_reads) continue;
        FST_TRY(fsti_device_lane_take(pipeline, chunk, true, &data, &self->counts, error));
        if (data != NULL) return FST_OK;
    }
    return FST_OK;
}

/// Reads a chunk straight to the device, if that is its way. *done is false when it has to be read
/// to a slot; it may have one by then.
static fst_status read_far(worker *self, uint32_t chunk, bool *done, fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    *done = false;
    if (!fsti_device_lane_reads_far(pipeline, chunk)) return take_slot(self, chunk, error);
    io_lane *lane = &self->lanes[FST_ENGINE_GDS];
    if (lane->handle == NULL) FST_TRY(open_lane(self, lane, &fsti_io_engine_gds, error));
    self->counts.used[FST_ENGINE_GDS] = true;
    bool has_edges = (range->begin | range->end) % FSTI_IO_PAGE_BYTES != 0;
    if (has_edges) FST_TRY(take_slot(self, chunk, error));
    FST_TRY(fsti_device_lane_read(pipeline, chunk, lane->handle, done, &self->counts, error));
    return *done || has_edges ? FST_OK : take_slot(self, chunk, error);
}

/// The lane that reads a chunk, open. A ring that the system does not give is done without.
static fst_status lane_of_chunk(worker *self, uint32_t chunk, io_lane **out, fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    for (;;) {
        const fsti_io_engine *engine = fsti_pipeline_engine(pipeline, chunk);
        fst_error cause;
        io_lane *lane = *out = &self->lanes[engine->number];
        if (lane->handle != NULL) return FST_OK;
        fst_status status = open_lane(self, lane, engine, &cause);
        if (status == FST_OK) return FST_OK;
        uint32_t file = chunk_extent(pipeline, chunk)->file;
        if (!engine->is_async ||
            !fsti_pipeline_demote(pipeline, file, FSTI_ROUTE_RING, true, cause.os_errno)) {
            if (error != NULL) *error = cause;
            return status;
        }
    }
}

/// Queues the blocks of a chunk, finishing others when the lane is full.
static fst_status submit_chunk(worker *self, uint32_t chunk, fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    if (pipeline->job.mappings != NULL) return populate_mapping(self, chunk, error);
    bool has_slot = pipeline->device_lane != NULL, done = false;
    if (has_slot) FST_TRY(read_far(self, chunk, &done, error));
    if (done || atomic_load_explicit(&pipeline->stop, memory_order_relaxed)) return FST_OK;
    io_lane *lane;
    FST_TRY(lane_of_chunk(self, chunk, &lane, error));
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_plan_extent *extent = chunk_extent(pipeline, chunk);
    if (lane->engine->is_async && !has_slot)
        pipeline->chunks[chunk].way = (uint8_t)choose_way(pipeline, chunk);
    uint64_t step = block_bytes(pipeline, lane, chunk);
    uint64_t origin = fsti_align_down(range->begin, FSTI_IO_PAGE_BYTES);
    pipeline->chunks[chunk].blocks_left = (uint16_t)((range->end - origin + step - 1) / step);
    for (uint64_t begin = range->begin; begin < range->end;) {
        uint64_t end = fsti_min(origin + ((begin - origin) / step + 1) * step, range->end);
        while (lane->free_blocks == NULL) FST_TRY(finish_block(self, lane, error));
        io_block *block = lane->free_blocks;
        lane->free_blocks = block->next_free;
        block->chunk = chunk;
        block->retry_count = 0;
        block->is_buffered = false;
        block->begin = begin;
        block->end = block->needed_end = end;
        if (extent->converts && (!has_slot || end == range->end))
            block->needed_end = fsti_min(end + FSTI_PLAN_UNIT_BYTES_MAX - 1, extent->end);
        uint64_t start_ns = fsti_now_ns();
        submit_block(self, lane, block);
        self->counts.read_ns += fsti_now_ns() - start_ns;
        begin = end;
        if (atomic_load_explicit(&pipeline->stop, memory_order_relaxed)) return FST_OK;
    }
    return FST_OK;
}

static void populate_place(worker *self, uint32_t chunk) {
    fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_plan_extent *extent = chunk_extent(pipeline, chunk);
    uint64_t shift = extent->buffer_offset - extent->begin; // wraps when negative; so does the sum
    uint64_t start_ns = fsti_now_ns();
    fsti_buffer *buffer;
    // The batch may be read, handed out and released meanwhile: hold its memory.
    fsti_pipeline_buffer(pipeline, extent->batch, &buffer);
    if (buffer == NULL) return;
    fsti_buffer_populate(buffer, range->begin + shift, range->end + shift);
    fsti_buffer_unref(buffer);
    self->counts.populate_ns += fsti_now_ns() - start_ns;
    // Counted at once: a helper finishes no chunk, and statistics are read when the last one is.
    fsti_pipeline_count(pipeline, &self->counts);
}

/// Lanes prefer what must be read and then help copying. Copiers leave absent chunks to the
/// lanes, whose ring is full already, and make memory ahead of them instead; without lanes
/// everybody does everything.
static chunk_wish wish_of(const worker *self, bool block) {
    bool has_lanes = self->pipeline->lane_count > 0;
    return (chunk_wish){.preferred = self->is_lane_worker ? QUEUE_RING : QUEUE_BLOCKING,
                        .may_steal = self->is_lane_worker || !has_lanes,
                        .block = block,
                        .may_populate = has_lanes && !self->is_lane_worker};
}

/// Waits for a chunk on its way to the device; false when there is none.
static bool reap_device(worker *self, fst_status *status, fst_error *error) {
    bool any = false;
    if (self->pipeline->device_lane == NULL) return false;
    *status = fsti_device_lane_reap(self->pipeline, true, &any, &self->counts, error);
    return any;
}

static fst_status work(worker *self, fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    fst_status status = FST_OK;
    bool busy = false;
    while (status == FST_OK && !atomic_load(&pipeline->stop)) {
        uint32_t populate, chunk = fsti_pipeline_take(pipeline, wish_of(self, !busy), &populate);
        if (chunk != UINT32_MAX) {
            status = submit_chunk(self, chunk, error);
            busy = true;
        } else if (populate != UINT32_MAX) {
            populate_place(self, populate);
        } else if (!busy) {
            break; // nothing left, and nothing in flight
        } else {
            busy = finish_any(self, &status, error) || reap_device(self, &status, error);
        }
    }
    return status;
}

/// Reads in flight write to our memory: they must be over before it goes.
static void drain(worker *self) {
    for (unsigned i = 0; i < FST_ENGINE_COUNT; i++)
        for (io_lane *lane = &self->lanes[i]; lane->in_flight > 0; lane->in_flight--)
            lane->engine->reap(lane->handle);
}

void fsti_worker_run(fsti_pipeline *pipeline, uint32_t index) {
    worker *self = fsti_alloc_zeroed(1, sizeof *self);
    fst_error error;
    if (self == NULL) {
        fsti_error_memory(&error, sizeof *self);
        fsti_pipeline_fail(pipeline, &error);
        return;
    }
    self->pipeline = pipeline;
    self->is_lane_worker = index < pipeline->lane_count;
    bool has_device = pipeline->device_lane != NULL;
    fst_status status = has_device ? fsti_device_lane_begin(pipeline, &error) : FST_OK;
    bool has_context = has_device && status == FST_OK;
    if (status == FST_OK) status = work(self, &error);
    if (status != FST_OK) fsti_pipeline_fail(pipeline, &error);
    drain(self);
    close_lanes(self);
    if (has_context) fsti_device_lane_end(pipeline);
    fsti_pipeline_count(pipeline, &self->counts);
    fsti_free(self);
}
