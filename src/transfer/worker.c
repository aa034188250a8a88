// SPDX-License-Identifier: Apache-2.0
/// A worker takes chunks, reads them block by block through an engine's lane, and places the bytes.
/// The slots of an asynchronous engine's lane stay in the CPU cache, so copying from them is cheap.
///
/// Invariants: a block is on its lane's free list, in flight, or being processed. A worker finishes
/// the chunks that it took, because reads in flight write to their memory until they are reaped.
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "sink.h"

/// Reads in flight per lane, and their size. 16 MiB of slots saturate the measured disks
/// (docs/benchmarks) and fit the CPU cache.
#define RING_DEPTH 16u
#define RING_BLOCK_BYTES ((uint64_t)1 << 20)
/// Requests take long, but many run in parallel: up to the limit of connections. The second limit
/// bounds the memory of slots for them.
#define REQUEST_DEPTH 64u
#define REQUEST_SLOT_DEPTH 32u

/// One read in flight, and its purpose.
typedef struct io_block {
    fsti_io_op read; ///< first member: a read pointer is a block pointer
    uint32_t chunk;
    uint64_t begin, end; ///< requested bytes of the file
    uint64_t needed_end; ///< end of the bytes to read; a conversion unit may extend past `end`
    uint64_t read_begin; ///< start of the read (at a page boundary for direct engines)
    char *target;        ///< of the read: a slot, or the destination
    char *slot;
    uint32_t retry_count; ///< consecutive retries without progress
    bool is_buffered;     ///< a failed direct read was repeated through the page cache
    bool has_slot_pages;  ///< the slot was used before, so the system counts its pages
    struct io_block *next_free;
} io_block;

/// A worker's lane of one engine.
typedef struct io_lane {
    const fsti_io_engine *engine;
    void *handle;
    fsti_buffer *slots;
    io_block *blocks, *free_blocks; ///< all blocks, and the unused ones
    uint32_t depth, in_flight;
} io_lane;

typedef struct worker {
    fsti_pipeline *pipeline;
    io_lane lanes[FSTI_ENGINE_COUNT]; ///< by engine, opened on first use
    worker_counts counts;
    bool is_lane_worker;
    fst_error read_error; ///< why a remote or derived file could not be read
    fst_ring last_method; ///< method and time of the chunk that io_uring finished last
    uint64_t last_ns;
} worker;

/// Whether some chunks must be scattered, which is done from slots.
static bool has_scattered(const fsti_plan *plan) {
    for (size_t i = 0; i < plan->extent_count; i++)
        if (!plan->extents[i].linear) return true;
    return false;
}

static fst_status open_handle(worker *self, io_lane *lane, const fsti_io_engine *engine,
                              bool *needs_slots, fst_error *error) {
    *needs_slots = !engine->is_mapped && !self->pipeline->sink->has_slots;
    lane->depth = engine->is_async ? RING_DEPTH : 1;
    // With these engines only scattered chunks are read to slots.
    if (!engine->is_async || engine->is_network)
        *needs_slots = *needs_slots && has_scattered(self->pipeline->job.plan);
    if (engine->is_network) lane->depth = *needs_slots ? REQUEST_SLOT_DEPTH : REQUEST_DEPTH;
    lane->blocks = fsti_alloc_zeroed(lane->depth, sizeof *lane->blocks);
    if (lane->blocks == NULL) return fsti_error_memory(error, lane->depth * sizeof *lane->blocks);
    return engine->lane_open(lane->depth, &lane->handle, error);
}

static fst_status open_lane(worker *self, io_lane *lane, const fsti_io_engine *engine,
                            fst_error *error) {
    bool needs_slots;
    fst_status opened = open_handle(self, lane, engine, &needs_slots, error);
    uint32_t depth = lane->depth;
    if (opened != FST_OK) {
        fsti_free(lane->blocks);
        lane->blocks = NULL;
        return opened;
    }
    // A small load needs smaller slots.
    uint64_t planned = fsti_align_up(self->pipeline->job.plan->bytes_planned, FSTI_IO_PAGE_BYTES);
    uint64_t slot_bytes = fsti_min(RING_BLOCK_BYTES, planned) + 2 * FSTI_IO_PAGE_BYTES;
    if (needs_slots) {
        fst_status status = fsti_buffer_arena(depth * slot_bytes, &lane->slots, error);
        if (status != FST_OK) {
            engine->lane_close(lane->handle);
            lane->handle = NULL;
            fsti_free(lane->blocks);
            lane->blocks = NULL;
            return status;
        }
        self->counts.bounce_bytes += lane->slots->size_bytes;
    }
    lane->engine = engine;
    for (uint32_t i = 0; i < depth; i++) {
        io_block *block = &lane->blocks[i];
        if (lane->slots != NULL) block->slot = lane->slots->data + i * slot_bytes;
        block->next_free = lane->free_blocks;
        lane->free_blocks = block;
    }
    return FST_OK;
}

static void close_lanes(worker *self) {
    for (unsigned i = 0; i < FSTI_ENGINE_COUNT; i++) {
        io_lane *lane = &self->lanes[i];
        if (lane->handle != NULL) lane->engine->lane_close(lane->handle);
        fsti_buffer_unref(lane->slots);
        fsti_free(lane->blocks);
    }
}

/// Whether a chunk's blocks are read to the sink's target instead of the lane's slots: if the sink
/// has its own slots, with blocking engines, and for chunks that io_uring reads directly.
static bool reads_to_target(const fsti_pipeline *pipeline, const io_lane *lane, uint32_t chunk,
                            const sink_target *target) {
    if (pipeline->sink->has_slots) return true;
    if (target->base == NULL || lane->engine->is_mapped) return false;
    return !lane->engine->is_async || pipeline->chunks[chunk].method == FST_RING_PLACE;
}

/// The method for a chunk that io_uring reads.
static fst_ring choose_ring_method(const fsti_pipeline *pipeline, const fsti_io_engine *engine,
                                   uint32_t chunk) {
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, chunk);
    if (!extent->linear) return FST_RING_SLOTS;
    if (engine->is_network) return FST_RING_PLACE;
    if (pipeline->job.ring != FST_RING_AUTO) return pipeline->job.ring;
    return fsti_uring_choose(fsti_file_device(pipeline->job.files[extent->file].file));
}

/// Records the speed of a chunk: the time since the previous chunk was finished, if both used the
/// same method and the ring was full.
static void measure_method(worker *self, uint32_t chunk) {
    const fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, chunk);
    if (!extent->linear || pipeline->job.ring != FST_RING_AUTO ||
        fsti_file_is_object(pipeline->job.files[extent->file].file))
        return;
    fst_ring method = (fst_ring)pipeline->chunks[chunk].method;
    uint64_t now = fsti_now_ns();
    if (self->last_method == method && self->last_ns != 0)
        fsti_uring_measured(fsti_file_device(pipeline->job.files[extent->file].file), method,
                            range->end - range->begin, now - self->last_ns);
    self->last_method = method;
    self->last_ns = now;
}

static uint64_t slot_size(const io_lane *lane) { return lane->slots->size_bytes / lane->depth; }

/// Starts the read of a block into the chunk's target, or into the block's slot if `target` is
/// NULL.
static void submit_block(worker *self, io_lane *lane, io_block *block, const sink_target *target) {
    fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, block->chunk);
    uint64_t begin = block->begin, end = block->needed_end;
    if (lane->engine->is_direct) {
        begin = fsti_align_down(begin, FSTI_IO_PAGE_BYTES);
        end = fsti_align_up(end, FSTI_IO_PAGE_BYTES);
    }
    block->read_begin = begin;
    // A page boundary before the origin makes the unsigned difference wrap; the cast undoes that.
    block->target = target == NULL ? block->slot : target->base + (int64_t)(begin - target->origin);
    if (target == NULL && lane->slots != NULL && !block->has_slot_pages) {
        // Memory with pages is no longer a reservation; otherwise it would count twice.
        fsti_buffer_use(lane->slots, slot_size(lane));
        block->has_slot_pages = true;
    }
    block->read = (fsti_io_op){.file = pipeline->job.files[extent->file].file,
                               .offset = begin,
                               .size = (size_t)(end - begin),
                               .buffer = block->target,
                               .engine = lane->engine->number,
                               .stop = &pipeline->stop,
                               .bypasses_cache = !pipeline->job.policy->keeps_cache &&
                                                 pipeline->job.routes[extent->file].forced == NULL,
                               .error = &self->read_error};
    self->counts.read_count++;
    self->counts.used[lane->engine->number] = true;
    lane->in_flight++;
    lane->engine->submit(lane->handle, &block->read);
}

/// The address of the block's first requested byte.
static const char *block_source(const io_lane *lane, const io_block *block) {
    // After a short read, offset and data have advanced, so compute where the first attempt began.
    const char *read_start = lane->engine->is_mapped ? (const char *)block->read.data -
                                                           (block->read.offset - block->read_begin)
                                                     : block->target;
    return read_start + (block->begin - block->read_begin);
}

/// Whether a block was read through the page cache and stays there.
static bool leaves_cached(const fsti_pipeline *pipeline, const io_lane *lane,
                          const io_block *block) {
    const chunk_state *state = &pipeline->chunks[block->chunk];
    fsti_file *file = pipeline->job.files[fsti_chunk_extent(pipeline, block->chunk)->file].file;
    return !state->is_resident && !state->is_dropped && !lane->engine->is_network &&
           !(block->read.bypasses_cache && fsti_file_derived_bypasses_cache(file));
}

static fst_status place_block(worker *self, const io_lane *lane, const io_block *block,
                              fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    uint64_t size = block->end - block->begin, start_ns;
    sink_block placed = {.chunk = block->chunk,
                         .begin = block->begin,
                         .end = block->end,
                         .needed_end = block->needed_end,
                         .source = block_source(lane, block),
                         .is_mapped = lane->engine->is_mapped};
    fsti_verify_range range = {.begin = block->begin, .end = block->end, .bytes = placed.source};
    FST_TRY(fsti_pipeline_verify(pipeline, fsti_chunk_extent(pipeline, block->chunk), &range,
                                 &self->counts, error));
    start_ns = fsti_now_ns();
    fst_status status = pipeline->sink->place(pipeline, &placed, &self->counts, error);
    self->counts.copy_ns += fsti_now_ns() - start_ns;
    FST_TRY(status);
    self->counts.bytes_read += size;
    self->counts.stored_bytes += block->read.stored_bytes;
    self->counts.decoded_bytes += block->read.decoded_bytes;
    self->counts.decode_ns += block->read.decode_ns;
    self->counts.verified_bytes += block->read.verified_bytes;
    self->counts.digest_ns += block->read.digest_ns;
    if (lane->engine->is_direct && !block->is_buffered)
        self->counts.bytes_direct += size;
    else if (leaves_cached(pipeline, lane, block))
        self->counts.cache_bytes += size;
    if (lane->engine->is_mapped) {
        self->counts.bytes_mapped += size;
        fsti_page_in_leave(pipeline, block->chunk, block->begin, block->end);
    }
    return FST_OK;
}

static fst_status short_read(const fsti_pipeline *pipeline, const io_block *block, uint64_t have,
                             fst_error *error) {
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, block->chunk);
    // The file may have shrunk, which explains more than "short read".
    FST_TRY(fsti_pipeline_check_file(pipeline, extent, have, error));
    fsti_pipeline_describe(pipeline, extent, have, FST_E_SHORT_READ, 0, error);
    return FST_E_SHORT_READ;
}

/// Whether to repeat a read unchanged, a limited number of times.
static bool may_retry(io_block *block) {
    if (block->read.result > 0) block->retry_count = 0;
    return fsti_io_should_retry(block->read.result, &block->retry_count);
}

/// Repeats a block from its beginning, through the page cache.
static fst_status read_buffered(worker *self, io_block *block, fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, block->chunk);
    uint64_t size = block->needed_end - block->begin;
    size_t got;
    fst_error cause;
    char *target = block->target + (block->begin - block->read_begin);
    fst_status status = fsti_file_read(pipeline->job.files[extent->file].file, target, (size_t)size,
                                       block->begin, &got, &cause);
    self->counts.read_count++;
    self->counts.used[FST_ENGINE_PREAD] = true;
    block->is_buffered = true;
    if (status == FST_OK)
        return got < size ? short_read(pipeline, block, block->begin + got, error) : FST_OK;
    fsti_pipeline_describe(pipeline, extent, block->begin + got, status, cause.os_errno, error);
    return status;
}

/// Whether a failed direct read can be repeated through the page cache, as can all later reads of
/// the file. The failure may be specific to direct reads (alignment, driver, missing kernel
/// operation).
static bool may_fall_back(worker *self, const io_lane *lane, const io_block *block, int os_errno) {
    fsti_route route = lane->engine->is_async ? FSTI_ROUTE_RING : FSTI_ROUTE_DIRECT;
    return lane->engine->is_direct &&
           fsti_pipeline_demote(self->pipeline,
                                fsti_chunk_extent(self->pipeline, block->chunk)->file, route, false,
                                os_errno);
}

/// Handles a failed read.
static fst_status recover_read(worker *self, const io_lane *lane, io_block *block,
                               fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, block->chunk);
    int os_errno = (int)-block->read.result;
    if (self->read_error.status != FST_OK) {
        if (error != NULL) *error = self->read_error;
        return self->read_error.status;
    }
    if (may_fall_back(self, lane, block, os_errno)) return read_buffered(self, block, error);
    fsti_pipeline_describe(pipeline, extent, fsti_max(block->read.offset, block->begin), FST_E_IO,
                           os_errno, error);
    return FST_E_IO;
}

/// Examines a finished read. *must_repeat: all or part of it must be read again.
static fst_status check_result(worker *self, const io_lane *lane, io_block *block,
                               bool *must_repeat, fst_error *error) {
    fsti_io_op *read = &block->read;
    *must_repeat = may_retry(block);
    if (*must_repeat) return FST_OK;
    if (read->result < 0) return recover_read(self, lane, block, error);
    uint64_t have = read->offset + (uint64_t)read->result;
    if (have >= block->needed_end) return FST_OK;
    uint64_t advance = (uint64_t)read->result;
    if (lane->engine->is_direct) advance = fsti_align_down(advance, FSTI_IO_PAGE_BYTES);
    // A direct read cannot continue within a page; a buffered read can.
    if (advance == 0 && may_fall_back(self, lane, block, ENODATA))
        return read_buffered(self, block, error);
    if (advance == 0) return short_read(self->pipeline, block, have, error);
    read->offset += advance;
    read->size -= advance;
    read->buffer = (char *)read->buffer + advance;
    *must_repeat = true;
    return FST_OK;
}

/// Waits for one read of the lane and processes it.
static fst_status finish_block(worker *self, io_lane *lane, fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    io_block *block = (void *)lane->engine->reap(lane->handle);
    self->counts.read_ns += fsti_now_ns() - start_ns;
    lane->in_flight--;
    fsti_http_count(&self->counts.net, &block->read.net); // also if it failed
    bool must_repeat = false;
    fst_status status = check_result(self, lane, block, &must_repeat, error);
    if (status == FST_OK && must_repeat && !atomic_load(&self->pipeline->stop)) {
        self->counts.read_count++;
        lane->in_flight++;
        lane->engine->submit(lane->handle, &block->read);
        return FST_OK;
    }
    if (status == FST_OK && !must_repeat) status = place_block(self, lane, block, error);
    block->next_free = lane->free_blocks;
    lane->free_blocks = block;
    FST_TRY(status);
    if (must_repeat) return FST_OK; // the pipeline stops
    chunk_state *state = &self->pipeline->chunks[block->chunk];
    if (--state->blocks_left > 0) return FST_OK;
    // A write or truncation before this moment changes size or time.
    FST_TRY(fsti_pipeline_check_file(
        self->pipeline, fsti_chunk_extent(self->pipeline, block->chunk), block->begin, error));
    if (state->method != FST_RING_AUTO) measure_method(self, block->chunk);
    fsti_pipeline_clear_cache(self->pipeline, block->chunk);
    return self->pipeline->sink->complete(self->pipeline, block->chunk, &self->counts, error);
}

/// Finishes one read of any lane. False if none is in flight.
static bool finish_any(worker *self, fst_status *status, fst_error *error) {
    for (unsigned i = 0; i < FSTI_ENGINE_COUNT; i++) {
        io_lane *lane = &self->lanes[i];
        if (lane->in_flight == 0) continue;
        *status = finish_block(self, lane, error);
        return true;
    }
    return false;
}

/// Adds tensor and byte to an error of reading into the page cache, if missing.
static fst_status locate_failure(const fsti_pipeline *pipeline, uint32_t chunk, fst_error *cause,
                                 fst_error *error) {
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, chunk);
    uint64_t offset = cause->byte_offset;
    bool has_position = offset >= extent->begin && offset < extent->end;
    if (!has_position) offset = pipeline->job.plan->chunks[chunk].begin;
    bool lacks_tensor = cause->status == FST_E_IO || cause->status == FST_E_FILE_CHANGED;
    if (lacks_tensor && cause->tensor[0] == '\0') {
        fsti_error_location location = fsti_pipeline_locate(pipeline, extent, offset);
        if (has_position) location.byte_offset = FST_NO_OFFSET; // the message already has it
        fsti_error_locate(cause, &location);
    }
    if (error != NULL) *error = *cause;
    return cause->status;
}

/// Gets a target for a chunk. While this worker has reads in flight it finishes those instead of
/// waiting for other workers, because they hold memory.
static fst_status find_target(worker *self, uint32_t chunk, sink_target *target, fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    *target = (sink_target){.answer = SINK_DONE};
    while (!atomic_load(&pipeline->stop)) {
        fst_status status = FST_OK;
        fst_error cause;
        if (pipeline->sink->prepare(pipeline, chunk, target, &self->counts, &cause) != FST_OK)
            return locate_failure(pipeline, chunk, &cause, error);
        if (target->answer != SINK_BUSY) return FST_OK;
        target->wait = !finish_any(self, &status, error);
        FST_TRY(status);
    }
    target->answer = SINK_DONE;
    return FST_OK;
}

/// The open lane for a chunk. If io_uring is unavailable, another engine is used.
static fst_status lane_of_chunk(worker *self, uint32_t chunk, io_lane **out, fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    for (;;) {
        const fsti_io_engine *engine = fsti_pipeline_engine(pipeline, chunk);
        fst_error cause;
        io_lane *lane = *out = &self->lanes[engine->number];
        if (lane->handle != NULL) return FST_OK;
        fst_status status = open_lane(self, lane, engine, &cause);
        if (status == FST_OK) return FST_OK;
        uint32_t file = fsti_chunk_extent(pipeline, chunk)->file;
        if (!engine->is_async ||
            !fsti_pipeline_demote(pipeline, file, FSTI_ROUTE_RING, true,
                                  cause.status == FST_E_NO_MEMORY ? ENOMEM : cause.os_errno)) {
            if (error != NULL) *error = cause;
            return status;
        }
    }
}

/// Takes a free block of the lane, finishing others if all are in use.
static fst_status take_block(worker *self, io_lane *lane, uint32_t chunk, io_block **out,
                             fst_error *error) {
    while (lane->free_blocks == NULL) FST_TRY(finish_block(self, lane, error));
    *out = lane->free_blocks;
    lane->free_blocks = (*out)->next_free;
    (*out)->chunk = chunk;
    (*out)->retry_count = 0;
    (*out)->is_buffered = false;
    return FST_OK;
}

/// Queues the blocks of a chunk that has a target.
static fst_status submit_blocks(worker *self, io_lane *lane, uint32_t chunk,
                                const sink_target *target, fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    const fsti_plan_chunk *range = &pipeline->job.plan->chunks[chunk];
    const fsti_plan_extent *extent = fsti_chunk_extent(pipeline, chunk);
    bool to_target = reads_to_target(pipeline, lane, chunk, target);
    // Digest in blocks, while the bytes are in the CPU cache.
    bool by_chunk = lane->engine->is_mapped || (lane->engine->is_network && to_target) ||
                    (!lane->engine->is_async && to_target && !pipeline->job.verifies);
    uint64_t step = by_chunk ? FSTI_PLAN_CHUNK_BYTES : RING_BLOCK_BYTES;
    uint64_t origin = fsti_align_down(range->begin, FSTI_IO_PAGE_BYTES);
    pipeline->chunks[chunk].blocks_left = (uint16_t)((range->end - origin + step - 1) / step);
    for (uint64_t begin = range->begin; begin < range->end;) {
        uint64_t end = fsti_min(origin + ((begin - origin) / step + 1) * step, range->end);
        io_block *block;
        FST_TRY(take_block(self, lane, chunk, &block, error));
        block->begin = begin;
        block->end = block->needed_end = end;
        // In a target for the whole chunk, the next block provides the bytes that a unit needs.
        if (extent->converts && (!pipeline->sink->has_slots || end == range->end))
            block->needed_end = fsti_min(end + FSTI_PLAN_UNIT_BYTES_MAX - 1, extent->end);
        uint64_t start_ns = fsti_now_ns();
        submit_block(self, lane, block, to_target ? target : NULL);
        self->counts.read_ns += fsti_now_ns() - start_ns;
        begin = end;
        if (atomic_load_explicit(&pipeline->stop, memory_order_relaxed)) return FST_OK;
    }
    return FST_OK;
}

static fst_status submit_chunk(worker *self, uint32_t chunk, fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    sink_target target;
    FST_TRY(find_target(self, chunk, &target, error));
    if (target.answer == SINK_DONE) return FST_OK;
    io_lane *lane;
    FST_TRY(lane_of_chunk(self, chunk, &lane, error));
    fsti_page_in_before_read(pipeline, chunk, &self->counts);
    bool is_ring = lane->engine->is_async && !pipeline->sink->has_slots;
    pipeline->chunks[chunk].method =
        (uint8_t)(is_ring ? choose_ring_method(pipeline, lane->engine, chunk) : FST_RING_AUTO);
    // Earlier readahead may have left a marked page, and reading it would start more readahead
    // megabytes past this chunk, whatever was advised.
    fsti_pipeline_clear_cache(pipeline, chunk);
    return submit_blocks(self, lane, chunk, &target, error);
}

/// Lanes prefer absent chunks and then help copying. Copiers leave absent chunks to the lanes,
/// whose rings are full, and prefault memory ahead of them. Without lanes all threads do both.
static chunk_request request_for(const worker *self, bool may_wait) {
    bool has_lanes = self->pipeline->lane_count > 0;
    return (chunk_request){.preferred = self->is_lane_worker ? QUEUE_ASYNC : QUEUE_BLOCKING,
                           .may_steal = self->is_lane_worker || !has_lanes,
                           .may_wait = may_wait,
                           .may_populate = has_lanes && !self->is_lane_worker};
}

/// Waits for a chunk in flight. False: no chunk is in flight.
static bool reap_chunk(worker *self, fst_status *status, fst_error *error) {
    bool any = false;
    *status = self->pipeline->sink->reap(self->pipeline, &any, &self->counts, error);
    return any;
}

/// How long a worker works: until the end, or for the time that a waiting thread allows.
typedef struct work_limit {
    bool is_waiter;
    uint32_t first, end;
    uint64_t until_ns;
} work_limit;

/// Whether to take another chunk.
static bool may_continue(const worker *self, work_limit *limit) {
    return !limit->is_waiter ||
           (!fsti_pipeline_chunks_done(self->pipeline, &limit->first, limit->end) &&
            fsti_now_ns() < limit->until_ns);
}

static fst_status work(worker *self, work_limit *limit, fst_error *error) {
    fsti_pipeline *pipeline = self->pipeline;
    fst_status status = FST_OK;
    bool busy = false,
         advances = true; // a waiting thread with timeout 0 still completes one chunk
    for (; status == FST_OK && !atomic_load(&pipeline->stop);
         advances = may_continue(self, limit)) {
        uint32_t populate = UINT32_MAX, chunk = UINT32_MAX;
        if (advances)
            chunk = fsti_pipeline_take(pipeline, request_for(self, !busy && !limit->is_waiter),
                                       &populate);
        if (chunk != UINT32_MAX) {
            status = submit_chunk(self, chunk, error);
            busy = true;
        } else if (populate != UINT32_MAX) {
            pipeline->sink->populate(pipeline, populate, &self->counts);
        } else if (!busy) {
            break; // no chunk left and no read in flight
        } else {
            busy = finish_any(self, &status, error) || reap_chunk(self, &status, error);
        }
    }
    return status;
}

/// Reads in flight write to this worker's memory, so wait for them before it is freed.
static void drain(worker *self) {
    for (unsigned i = 0; i < FSTI_ENGINE_COUNT; i++)
        for (io_lane *lane = &self->lanes[i]; lane->in_flight > 0; lane->in_flight--)
            lane->engine->reap(lane->handle);
}

static void run_worker(fsti_pipeline *pipeline, uint32_t index, work_limit limit) {
    worker *self = fsti_alloc_zeroed(1, sizeof *self);
    fst_error error;
    if (self == NULL) {
        fsti_error_memory(&error, sizeof *self);
        fsti_pipeline_fail(pipeline, &error);
        return;
    }
    self->pipeline = pipeline;
    self->is_lane_worker = index < pipeline->lane_count;
    fst_status status = work(self, &limit, &error);
    if (status != FST_OK) fsti_pipeline_fail(pipeline, &error);
    drain(self);
    close_lanes(self);
    fsti_pipeline_count(pipeline, &self->counts);
    fsti_free(self);
}

void fsti_worker_run(fsti_pipeline *pipeline, uint32_t index) {
    run_worker(pipeline, index, (work_limit){.is_waiter = false});
}

void fsti_worker_help(fsti_pipeline *pipeline, uint32_t first, uint32_t end, uint64_t until_ns) {
    run_worker(pipeline, 0, (work_limit){true, first, end, until_ns});
}
