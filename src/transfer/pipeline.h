// SPDX-License-Identifier: Apache-2.0
/// The pipeline's state: private to the transfer room.
#ifndef FSTI_PIPELINE_H
#define FSTI_PIPELINE_H

#include <pthread.h>
#include <sys/types.h>

#include "transfer.h"

/// Who works on a chunk: one that a ring keeps in flight, or any thread, with calls that block
/// (copies from a mapping, plain reads).
typedef enum chunk_queue { QUEUE_RING, QUEUE_BLOCKING, QUEUE_COUNT } chunk_queue;

/// A chunk's way: each step is one store, seen by waiting threads without a lock.
enum { CHUNK_PENDING, CHUNK_TAKEN, CHUNK_DONE };

typedef struct chunk_state {
    atomic_uchar step;
    uint8_t queue;        ///< chunk_queue
    bool is_resident;     ///< all in the page cache when it was looked at
    bool is_dropped;      ///< what is read of it by way of the page cache does not stay there
    uint64_t *kept_pages; ///< but for these of its pages, a bit each, which were there; NULL: none
    uint8_t way;          ///< fst_ring, of chunks that a ring reads
    uint16_t blocks_left; ///< used by the one worker that took it
    uint8_t slot;         ///< of the device's ring
} chunk_state;

typedef struct batch_state {
    fsti_batch_step step;
    uint32_t chunks_left;
    fsti_buffer *buffer; ///< NULL when all its items have destinations
} batch_state;

/// What is counted, each under the name that it has in fst_load_stats: the one list of it.
#define LOAD_COUNTERS(X)                                                                           \
    X(bytes_read)                                                                                  \
    X(bytes_direct)                                                                                \
    X(bytes_mapped)                                                                                \
    X(bytes_copied)                                                                                \
    X(bytes_converted)                                                                             \
    X(read_count)                                                                                  \
    X(read_ns)                                                                                     \
    X(copy_ns)                                                                                     \
    X(populate_ns)                                                                                 \
    X(bounce_bytes)                                                                                \
    X(device_bytes)                                                                                \
    X(device_copies)                                                                               \
    X(device_launches)                                                                             \
    X(device_wait_ns)                                                                              \
    X(gds_bytes)                                                                                   \
    X(cache_bytes)                                                                                 \
    X(verified_bytes)                                                                              \
    X(digest_ns)                                                                                   \
    X(stored_bytes)                                                                                \
    X(decoded_bytes)                                                                               \
    X(decode_ns)                                                                                   \
    X(network_requests)                                                                            \
    X(network_retries)                                                                             \
    X(network_hedges)                                                                              \
    X(network_connections)                                                                         \
    X(network_bytes)                                                                               \
    X(disk_cache_bytes)                                                                            \
    X(disk_cache_written)

/// Counters of one worker, added up when it ends.
typedef struct worker_counts {
#define COUNTER_FIELD(name) uint64_t name;
    LOAD_COUNTERS(COUNTER_FIELD)
#undef COUNTER_FIELD
    bool used[FST_ENGINE_COUNT];
} worker_counts;

/// The way to a device: private to device_lane.c.
typedef struct device_lane device_lane;

typedef struct fsti_sink fsti_sink;

struct fsti_pipeline {
    fsti_job job;
    const fsti_sink *sink;
    device_lane *device_lane; ///< NULL: memory that the processors write to
    /// Of a device, or NULL: memory of the caller's has come, and copies from now on wait for what
    /// its stream has queued by now.
    fst_status (*follow)(fsti_pipeline *pipeline, fst_error *error);
    atomic_uchar *places; ///< by item: fsti_place_step. NULL: all are streamed
    chunk_state *chunks;
    batch_state *batches;
    pthread_t *threads;
    uint32_t thread_count, threads_started;
    uint32_t lane_count;  ///< workers that keep many reads in flight; the others copy
    pid_t owner_pid;      ///< threads and locks are not there in a fork's child
    bool may_read_far;    ///< there is a library for reads straight to the device
    bool by_waiters;      ///< no thread could be started: who waits for chunks does the work
    char gds_reason[160]; ///< why files are read that way, or why not

    pthread_mutex_t lock; ///< for everything below, but for what is atomic
    pthread_cond_t work_changed, chunk_finished;
    uint32_t batches_admitted;
    bool is_admitting; ///< somebody makes memory or asks for chunks, without the lock
    bool is_demoted;   ///< a file was: rings no longer read all that is theirs
    char demotion_reason[160];
    char thread_reason[96];       ///< why those who wait do the work
    uint32_t chunk_limit;         ///< chunks of admitted batches
    uint32_t chunks_known;        ///< of these: those that have been looked at
    uint32_t cursor[QUEUE_COUNT]; ///< no pending chunk of that queue before it
    uint32_t populate_cursor;
    uint32_t chunks_done, chunks_taken, chunks_resident;
    uint32_t item_chunk; ///< of the first item that is not done: its chunks before this one are
    size_t items_done;   ///< in the order of delivery
    uint64_t bytes_in_flight, bytes_peak, bytes_allocated, bytes_done;
    uint64_t started_ns, first_ns, finished_ns;
    bool has_failed, is_placed; ///< failed; memory was given a NUMA policy
    fst_error error;
    worker_counts counts;
    pthread_mutex_t progress_lock;  ///< one progress call at a time
    bool was_told;                  ///< there was one; under that lock
    atomic_bool found_absent;       ///< of a view, where the kernel tells nothing of its pages
    atomic_bool was_huge, was_read; ///< how absent bytes of views came
    atomic_uint dear_count;         ///< chunks whose huge pages the host had to find
    atomic_bool stop;
};

/// Records the first failure and stops the work.
void fsti_pipeline_fail(fsti_pipeline *pipeline, const fst_error *error);

/// Gives memory to the batches that the budget allows now. No lock is held while memory is made:
/// an allocator of the caller's may take its time, and may ask the loader.
void fsti_pipeline_admit(fsti_pipeline *pipeline);

/// Whether a chunk is absent, and to be brought into the page cache before it is copied from there.
bool fsti_pipeline_brings_in(const fsti_pipeline *pipeline, uint32_t chunk);

/// A route of the file's has failed, `in_setup` before it read anything: the file takes the next
/// one from now on. False where that very route was asked for. `os_errno` 0: reads ended early.
bool fsti_pipeline_demote(fsti_pipeline *pipeline, uint32_t file, fsti_route failed, bool in_setup,
                          int os_errno);

/// A pending chunk for a worker: of the `preferred` queue first, the other if `may_steal` or when
/// rings have been given up. With `block` it waits for memory to be admitted. UINT32_MAX: none now,
/// or none any more. *populate is a chunk whose place a helper should make instead, or UINT32_MAX.
typedef struct chunk_wish {
    chunk_queue preferred;
    bool may_steal, block, may_populate;
} chunk_wish;
uint32_t fsti_pipeline_take(fsti_pipeline *pipeline, chunk_wish wish, uint32_t *populate);
/// Takes chunks that follow a taken one in its extent and are absent as well: at most `bytes_max`
/// with it, and no more than leaves every thread its share. Returns their end.
uint32_t fsti_pipeline_take_run(fsti_pipeline *pipeline, uint32_t chunk, uint64_t bytes_max);

/// All bytes of a taken chunk are in place. Adds the worker's counts to the pipeline's and clears
/// them, so that statistics are exact when the last chunk is.
void fsti_pipeline_finish(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts);
void fsti_pipeline_count(fsti_pipeline *pipeline, worker_counts *counts);

/// The page cache is to be left alone, and a chunk has to be read by way of it: drops it there,
/// before it is read (part of it may be there) and when it has been.
void fsti_pipeline_clear_cache(const fsti_pipeline *pipeline, uint32_t chunk);
/// Notes which pages of a chunk that is not all there the page cache has. False where it is not
/// noted: it is read past it, or there is no memory.
bool fsti_pipeline_note_kept(fsti_pipeline *pipeline, uint32_t chunk);

/// Calls the job's callback of progress, if that has not been called.
void fsti_pipeline_tell_first(fsti_pipeline *pipeline);

/// A worker's life. `index` below lane_count: a lane.
void fsti_worker_run(fsti_pipeline *pipeline, uint32_t index);
/// A worker's work until chunks [first, end) are done, nothing more can be taken now, or a chunk
/// more is done after `until_ns`. What it has taken is finished.
void fsti_worker_help(fsti_pipeline *pipeline, uint32_t first, uint32_t end, uint64_t until_ns);
/// Whether chunks [*first, end) are done; *first moves over those that are.
bool fsti_pipeline_chunks_done(const fsti_pipeline *pipeline, uint32_t *first, uint32_t end);

/// Makes the way to the job's device; undoes what it did when it fails.
fst_status fsti_device_lane_open(fsti_pipeline *pipeline, fst_error *error);
/// No worker runs any more. Waits for copies in flight.
void fsti_device_lane_close(fsti_pipeline *pipeline);
/// Wakes who waits for a slot: the pipeline stops.
void fsti_device_lane_wake(fsti_pipeline *pipeline);
/// A worker's life with the device: its context is the thread's between these.
fst_status fsti_device_lane_begin(fsti_pipeline *pipeline, fst_error *error);
void fsti_device_lane_end(fsti_pipeline *pipeline);
/// A free slot for a chunk, into pipeline->chunks[chunk].slot, and its memory; *data is NULL when
/// there is none (or, with `wait`, when the pipeline stops).
fst_status fsti_device_lane_take(fsti_pipeline *pipeline, uint32_t chunk, bool wait, char **data,
                                 worker_counts *counts, fst_error *error);
/// Probes whether files can be read straight to the device; fails only where that was demanded.
fst_status fsti_device_lane_probe(fsti_pipeline *pipeline, fst_error *error);
/// Asks whether there is anything to read that way with, which decides how memory is asked for.
void fsti_device_lane_look_far(fsti_pipeline *pipeline);
/// Whether a chunk is to be read straight to the device.
bool fsti_device_lane_reads_far(const fsti_pipeline *pipeline, uint32_t chunk);
/// Reads a chunk straight to the device, by the lane of the engine for that. *done is false when
/// that failed and the way through the ring is to be taken.
fst_status fsti_device_lane_read(fsti_pipeline *pipeline, uint32_t chunk, void *engine_lane,
                                 bool *done, worker_counts *counts, fst_error *error);
/// The memory of a chunk's slot.
char *fsti_device_lane_data(const fsti_pipeline *pipeline, uint32_t chunk);
/// All bytes of a chunk are in its slot: queues their way to the device.
fst_status fsti_device_lane_send(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                                 fst_error *error);
/// The same for what was put together already.
fst_status fsti_device_lane_send_parcel(fsti_pipeline *pipeline, uint32_t chunk,
                                        const fsti_ring_parcel *parcel, worker_counts *counts,
                                        fst_error *error);
/// Finishes chunks that have arrived; with `wait` at least one, or somebody else did meanwhile.
/// *any: whether there was one.
fst_status fsti_device_lane_reap(fsti_pipeline *pipeline, bool wait, bool *any,
                                 worker_counts *counts, fst_error *error);
/// ", through 64 MiB of locked memory, .." for the statistics.
void fsti_device_lane_explain(fsti_pipeline *pipeline, char *text, size_t size);

/// Where a chunk's bytes in its slot begin in the file.
static inline uint64_t fsti_chunk_origin(const fsti_plan_chunk *chunk) {
    return fsti_align_down(chunk->begin, FSTI_IO_PAGE_BYTES);
}

/// How the ring reads chunks of a device: FST_RING_PLACE or FST_RING_SLOTS, in turns until both
/// have been measured. From any thread.
fst_ring fsti_ring_choose(uint64_t device);
/// `bytes` bytes came that way in `ns`, with the ring full.
void fsti_ring_measured(uint64_t device, fst_ring way, uint64_t bytes, uint64_t ns);
/// ", to place measured best (..)" once that is known, else "".
void fsti_ring_explain(uint64_t device, char *text, size_t size);
/// For tests: forgets all measurements.
void fsti_ring_forget(void);

/// The engine that reads a chunk, as things are now.
const fsti_io_engine *fsti_pipeline_engine(const fsti_pipeline *pipeline, uint32_t chunk);

/// Puts the bytes [begin, end) of an extent, found at `source`, where they belong. Where the extent
/// converts, up to FSTI_PLAN_UNIT_BYTES_MAX - 1 bytes more must be at `source`.
typedef struct scatter_order {
    const fsti_plan *plan;
    const fsti_plan_extent *extent;
    char *buffer; ///< of the extent's batch; NULL when all its items have destinations
    const char *source;
    uint64_t begin, end;
    const atomic_uchar *places; ///< by item: what is settled is not to be touched; NULL: nothing is
    /// NULL, or who brings the parts of items to their places instead (a device)
    void (*emit)(void *context, const fsti_plan_item *item, char *target, const char *source,
                 uint64_t size);
    void *emit_context;
    uint64_t copied;    ///< out: bytes moved; none when they are in their place already
    uint64_t converted; ///< out: bytes of them converted
} scatter_order;
void fsti_scatter(scatter_order *order);

/// FST_E_FILE_CHANGED, naming tensor and offset, when the extent's file is not what it was.
fst_status fsti_pipeline_check_file(const fsti_pipeline *pipeline, const fsti_plan_extent *extent,
                                    uint64_t offset, fst_error *error);

/// Bytes of a file, and where they are.
typedef struct fsti_verify_range {
    uint64_t begin, end;
    const char *bytes;
    bool is_mapped; ///< a mapping: its pages may fail to come
} fsti_verify_range;

/// Holds bytes [begin, end) of a chunk, whole pieces of its file's digests, against them, where the
/// job has any: FST_E_DIGEST that names file, piece and tensor. Before anything is done with them.
fst_status fsti_pipeline_verify(const fsti_pipeline *pipeline, const fsti_plan_extent *extent,
                                const fsti_verify_range *range, worker_counts *counts,
                                fst_error *error);

/// What lies at `offset` of an extent's file.
fsti_error_place fsti_pipeline_place(const fsti_pipeline *pipeline, const fsti_plan_extent *extent,
                                     uint64_t offset);

/// An fst_error for `status` at `offset` of an extent's file, naming the tensor there.
void fsti_pipeline_describe(const fsti_pipeline *pipeline, const fsti_plan_extent *extent,
                            uint64_t offset, fst_status status, int os_errno, fst_error *error);

#endif
