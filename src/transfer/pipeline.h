// SPDX-License-Identifier: Apache-2.0
/// The state of a pipeline. Private to the transfer module.
#ifndef FSTI_PIPELINE_H
#define FSTI_PIPELINE_H

#include <pthread.h>
#include <sys/types.h>

#include "transfer.h"

/// How a chunk is read: asynchronously by a lane (io_uring, HTTP), or with blocking calls by any
/// thread (copies from a mapping, plain reads).
typedef enum chunk_queue { QUEUE_ASYNC, QUEUE_BLOCKING, QUEUE_COUNT } chunk_queue;

/// The states of a chunk. Each change is one store, which waiting threads see without a lock.
enum {
    CHUNK_PENDING,
    CHUNK_TAKEN,
    CHUNK_DONE,
    CHUNK_DEFERRED, ///< another process reads it into shared memory
};

typedef struct chunk_state {
    atomic_uchar step;
    uint8_t queue;            ///< chunk_queue
    bool is_resident;         ///< completely resident when it was classified
    bool is_read;             ///< by a stream into the page cache, for any thread to copy
    bool is_unmapped;         ///< done; its pages are to be mapped when all chunks are read
    bool is_dropped;          ///< pages that are read through the page cache are dropped afterwards
    uint64_t *resident_pages; ///< bitmap of pages that were resident before and must not be
                              ///< dropped; NULL: no pages
    uint8_t method;           ///< fst_ring, for chunks read by io_uring
    uint16_t blocks_left;     ///< used only by the worker that took the chunk
    uint8_t slot;             ///< of the staging ring
    bool is_claimed; ///< by this process in the segment; used only by the worker that took it
    bool is_left;    ///< not done when its batch left the segment: read into private pages
} chunk_state;

/// Where the bytes of a batch are written.
typedef enum batch_place {
    BATCH_OWN,     ///< memory of this process: its own, or private pages of a segment's mapping
    BATCH_SHARED,  ///< the job's segment
    BATCH_LEAVING, ///< becomes BATCH_OWN when this process has finished the chunks it claimed
} batch_place;

typedef struct batch_state {
    fsti_batch_step step;
    uint32_t chunks_left;
    fsti_buffer *buffer; ///< NULL if all its items have destinations
    char *base; ///< where bytes for the buffer are written: its data, or a shared mapping of it
    batch_place place;
    bool is_started; ///< a chunk of it was taken
    uint32_t claims; ///< chunks that this process is claiming, or has claimed and not finished
} batch_state;

/// The list of counters except those of requests, with their names in fst_load_stats.
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
    X(shared_bytes)

/// Counters of one worker, added to the pipeline's at the end.
typedef struct worker_counts {
#define COUNTER_FIELD(name) uint64_t name;
    LOAD_COUNTERS(COUNTER_FIELD)
#undef COUNTER_FIELD
    fsti_http_counts net;
    bool used[FSTI_ENGINE_COUNT];
} worker_counts;

/// The path to a device. Private to device_lane.c.
typedef struct device_lane device_lane;

typedef struct fsti_sink fsti_sink;

struct fsti_pipeline {
    fsti_job job;
    const fsti_sink *sink;
    device_lane *device_lane; ///< NULL: CPU memory
    /// For a device, or NULL: called when caller memory was allocated. Later copies wait for the
    /// work queued on the caller's stream.
    fst_status (*follow)(fsti_pipeline *pipeline, fst_error *error);
    atomic_uchar *places; ///< fsti_place_step by item. NULL: all items are streamed
    chunk_state *chunks;
    batch_state *batches;
    pthread_t *threads;
    uint32_t thread_count, threads_started;
    atomic_uint threads_running; ///< started and not finished
    uint32_t lane_count;         ///< workers that keep many reads in flight; the others copy
    pid_t owner_pid;             ///< a forked child has neither the threads nor the lock states
    int fill_fd;                 ///< of fsti_fill_open(), when it was first needed; else -1
    bool may_use_gds;            ///< a GPUDirect library is available
    bool by_waiters;             ///< a thread could not be started: waiting threads do the work
    char gds_reason[192];        ///< why GPUDirect is used, or not

    pthread_mutex_t lock; ///< protects the fields below, except atomics
    pthread_cond_t work_changed, chunk_finished;
    uint32_t batches_admitted;
    bool lacks_memory; ///< memory for the next batch is missing; retried
    bool has_polled;   ///< a thread has waited for it with a timeout that is over
    bool is_admitting; ///< a thread is allocating or classifying, without the lock
    bool is_demoted;   ///< a route of some file failed: another one reads some of its chunks
    uint64_t
        memory_missed_ns; ///< since when memory is missing with no read in flight; 0: it is not
    char demotion_reason[160];
    char thread_reason[96];       ///< why waiting threads do the work
    uint32_t waiter_count;        ///< threads that wait for chunks
    uint32_t chunk_limit;         ///< chunks of admitted batches
    uint32_t chunks_known;        ///< of these, chunks that are classified
    uint32_t cursor[QUEUE_COUNT]; ///< no pending chunk of that queue is before it
    uint32_t populate_cursor;
    uint32_t unmapped_cursor;    ///< no unmapped chunk is before it
    atomic_uint chunks_unmapped; ///< unmapped, or being mapped
    uint32_t chunks_done, chunks_taken, chunks_resident;
    uint32_t stream_count;       ///< threads that read chunks for any thread to copy
    uint32_t chunks_deferred;    ///< neither pending nor taken
    uint64_t deferred_polled_ns; ///< when they were last looked at
    uint64_t deferred_tried_ns;  ///< when the first ones were last made pending
    uint32_t deferred_try_from;  ///< earlier chunks had their turn
    bool is_polling;             ///< an idle thread wakes up to look at them
    char share_reason[96];       ///< why some batches are not in shared memory
    uint32_t item_chunk;         ///< first chunk of the first incomplete item that is not done
    size_t items_done;           ///< in delivery order
    uint64_t bytes_in_flight, bytes_peak, bytes_allocated, bytes_done;
    uint64_t started_ns, first_ns, finished_ns;
    bool has_failed, is_placed; ///< is_placed: memory has a NUMA policy
    fst_error error;
    worker_counts counts;
    pthread_mutex_t faults_lock;   ///< one thread examines a file system
    pthread_mutex_t progress_lock; ///< one progress callback at a time
    bool was_reported;             ///< the callback was called; protected by progress_lock
    atomic_bool
        found_absent; ///< some chunk of a view was absent, where the kernel reports no residency
    atomic_bool was_read; ///< bytes were read into the page cache by streams of reads
    atomic_bool stop;
};

/// Records the first failure and stops the work.
void fsti_pipeline_fail(fsti_pipeline *pipeline, const fst_error *error);

/// Allocates memory for the batches that the budget allows. No lock is held meanwhile, because the
/// caller's allocator may be slow or call the loader.
void fsti_pipeline_admit(fsti_pipeline *pipeline);

/// The extent of a chunk.
static inline const fsti_plan_extent *fsti_chunk_extent(const fsti_pipeline *pipeline,
                                                        uint32_t chunk) {
    const fsti_plan *plan = pipeline->job.plan;
    return &plan->extents[plan->chunks[chunk].extent];
}

/// Whether a chunk is absent and must be read into the page cache before it is copied.
bool fsti_pipeline_pages_in(const fsti_pipeline *pipeline, uint32_t chunk);

/// Moves the file to its next route after a failure (`in_setup`: before it read anything). False if
/// that route was forced. `os_errno` 0: a read ended early.
bool fsti_pipeline_demote(fsti_pipeline *pipeline, uint32_t file, fsti_route failed, bool in_setup,
                          int os_errno);

/// Takes a pending chunk: of the `preferred` queue first, or the other one if `may_steal` or
/// io_uring was abandoned. With `may_wait` it waits for an admitted batch. UINT32_MAX: no chunk
/// now, or no more. *populate: a chunk whose memory the caller should prefault instead, or
/// UINT32_MAX.
typedef struct chunk_request {
    chunk_queue preferred;
    bool may_steal, may_wait, may_populate;
} chunk_request;
uint32_t fsti_pipeline_take(fsti_pipeline *pipeline, chunk_request request, uint32_t *populate);
/// Takes absent chunks that follow a taken one in its extent, to be read as one stream, but not
/// more than this thread's share. Returns the end of the run.
uint32_t fsti_pipeline_take_run(fsti_pipeline *pipeline, uint32_t chunk);
/// The same for a thread that reads them for any thread to copy. The first thread that does this
/// takes a long run, the others short ones, so that they are soon back to copy.
uint32_t fsti_pipeline_begin_stream(fsti_pipeline *pipeline, uint32_t chunk);
/// A chunk of the run has been read. It can be taken again, to be copied.
void fsti_pipeline_return_read(fsti_pipeline *pipeline, uint32_t chunk);
void fsti_pipeline_end_stream(fsti_pipeline *pipeline);

/// Defers a taken chunk that another process reads into shared memory. It becomes pending again
/// when it is done, or to try whether its reader has ended.
void fsti_pipeline_defer(fsti_pipeline *pipeline, uint32_t chunk);
/// The interval at which deferred chunks are checked.
#define FSTI_DEFERRED_PAUSE_MS 2
/// Makes deferred chunks pending that are done now. From time to time also the first others: the
/// thread that takes one finds out whether its reader has ended. The lock must be held.
void fsti_pipeline_poll_deferred(fsti_pipeline *pipeline);

/// The taken chunk of a view is going to be finished without its pages being mapped: a worker maps
/// them when no chunk is left to read, and fsti_pipeline_wait_mapped() waits for that.
void fsti_pipeline_map_later(fsti_pipeline *pipeline, uint32_t chunk);
/// The next such chunk, for a worker to map, or UINT32_MAX. The lock must be held.
uint32_t fsti_pipeline_take_unmapped(fsti_pipeline *pipeline);
/// The worker has mapped it.
void fsti_pipeline_note_mapped(fsti_pipeline *pipeline);

/// Completes a taken chunk. Adds the worker's counts to the pipeline's and clears them, so that
/// statistics are exact when the last chunk is done.
void fsti_pipeline_finish(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts);
void fsti_pipeline_count(fsti_pipeline *pipeline, worker_counts *counts);

/// Calls the caller's allocator, for one thread of the load at a time.
fst_status fsti_pipeline_call_allocator(fsti_pipeline *pipeline, const fsti_foreign *request,
                                        fsti_buffer **out, fst_error *error);

/// Drops a chunk from the page cache if the cache is to be bypassed and the chunk was read through
/// it. Called before the read, since part may be cached, and after it.
void fsti_pipeline_clear_cache(const fsti_pipeline *pipeline, uint32_t chunk);
/// Records which pages of a partly resident chunk are cached. False if this is not needed (direct
/// reads) or there is no memory.
bool fsti_pipeline_note_resident(fsti_pipeline *pipeline, uint32_t chunk);

/// Calls the job's progress callback, unless it was called before.
void fsti_pipeline_report_first(fsti_pipeline *pipeline);

/// Runs a worker thread. `index` below lane_count: with a lane.
void fsti_worker_run(fsti_pipeline *pipeline, uint32_t index);
/// Runs the worker on a waiting thread until chunks [first, end) are done, no chunk can be taken,
/// or the first chunk is done after `until_ns`. Chunks that it took are finished.
void fsti_worker_help(fsti_pipeline *pipeline, uint32_t first, uint32_t end, uint64_t until_ns);
/// Whether chunks [*first, end) are done. Advances *first past finished ones.
bool fsti_pipeline_chunks_done(const fsti_pipeline *pipeline, uint32_t *first, uint32_t end);

/// Opens the path to the job's device. Undoes everything on failure.
fst_status fsti_device_lane_open(fsti_pipeline *pipeline, fst_error *error);
/// Waits for copies in flight. Workers must have ended.
void fsti_device_lane_close(fsti_pipeline *pipeline);
/// Wakes threads that wait for a slot, because the pipeline stops.
void fsti_device_lane_wake(fsti_pipeline *pipeline);
/// Make the device's context current on a worker thread, and restore the previous one.
fst_status fsti_device_lane_begin(fsti_pipeline *pipeline, fst_error *error);
void fsti_device_lane_end(fsti_pipeline *pipeline);
/// Takes a free slot for a chunk, stores it in pipeline->chunks[chunk].slot, and returns its
/// memory. *data is NULL if there is no free slot or, with `wait`, if the pipeline stops.
fst_status fsti_device_lane_take(fsti_pipeline *pipeline, uint32_t chunk, bool wait, char **data,
                                 worker_counts *counts, fst_error *error);
/// Probes whether files support GPUDirect. Fails only if it was demanded.
fst_status fsti_device_lane_probe(fsti_pipeline *pipeline, fst_error *error);
/// Checks whether a GPUDirect library is available, which affects how memory is allocated.
void fsti_device_lane_check_gds(fsti_pipeline *pipeline);
/// Whether to read a chunk by GPUDirect.
bool fsti_device_lane_uses_gds(const fsti_pipeline *pipeline, uint32_t chunk);
/// Reads a chunk by GPUDirect. *done is false if that failed and the chunk must go through the
/// staging ring.
fst_status fsti_device_lane_read(fsti_pipeline *pipeline, uint32_t chunk, void *engine_lane,
                                 bool *done, worker_counts *counts, fst_error *error);
/// The memory of a chunk's slot.
char *fsti_device_lane_data(const fsti_pipeline *pipeline, uint32_t chunk);
/// Queues the copies of a chunk whose slot is filled.
fst_status fsti_device_lane_send(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                                 fst_error *error);
/// The same with a prepared list.
fst_status fsti_device_lane_send_list(fsti_pipeline *pipeline, uint32_t chunk,
                                      const fsti_copy_list *list, worker_counts *counts,
                                      fst_error *error);
/// Finishes chunks whose copies are complete. With `wait` it finishes at least one, or waits until
/// another thread did. *any: whether it finished one.
fst_status fsti_device_lane_reap(fsti_pipeline *pipeline, bool wait, bool *any,
                                 worker_counts *counts, fst_error *error);
/// Writes how chunks reached the device, for the statistics.
void fsti_device_lane_explain(fsti_pipeline *pipeline, char *text, size_t size);

/// The file offset of the first byte in a chunk's slot.
static inline uint64_t fsti_chunk_origin(const fsti_plan_chunk *chunk) {
    return fsti_align_down(chunk->begin, FSTI_IO_PAGE_BYTES);
}

/// How io_uring reads chunks of a device: FST_RING_PLACE or FST_RING_SLOTS, alternating until both
/// are measured. Thread-safe.
fst_ring fsti_uring_choose(uint64_t device);
/// Records that `bytes` bytes took `ns` by that method, with a full ring.
void fsti_uring_measured(uint64_t device, fst_ring method, uint64_t bytes, uint64_t ns);
/// Writes ", to place measured best (...)" once that is decided, else "".
void fsti_uring_explain(uint64_t device, char *text, size_t size);
/// For tests: clears all measurements.
void fsti_uring_clear_choices(void);

/// The engine that currently reads a chunk.
const fsti_io_engine *fsti_pipeline_engine(const fsti_pipeline *pipeline, uint32_t chunk);

/// Copies the bytes [begin, end) of an extent from `source` to their items. If the extent has
/// conversions, `source` must have up to FSTI_PLAN_UNIT_BYTES_MAX - 1 more bytes.
typedef struct scatter_order {
    const fsti_plan *plan;
    const fsti_plan_extent *extent;
    char *buffer;        ///< of the extent's batch; NULL if all its items have destinations
    fsti_buffer *memory; ///< that owns `buffer`; NULL if it is not in a fill (fsti_buffer_fill())
    const char *source;
    uint64_t begin, end;
    const atomic_uchar *places; ///< by item: claimed items are not written; NULL: no claims
    /// NULL, or receives the parts of items instead (device sinks)
    void (*emit)(void *context, const fsti_plan_item *item, char *target, const char *source,
                 uint64_t size);
    void *emit_context;
    uint64_t copied;    ///< out: bytes copied; 0 if they were read in place
    uint64_t converted; ///< out: bytes converted
} scatter_order;
void fsti_scatter(scatter_order *order);

/// FST_E_FILE_CHANGED with tensor and offset if the extent's file was changed.
fst_status fsti_pipeline_check_file(const fsti_pipeline *pipeline, const fsti_plan_extent *extent,
                                    uint64_t offset, fst_error *error);

/// Bytes of a file in memory.
typedef struct fsti_verify_range {
    uint64_t begin, end;
    const char *bytes;
    bool is_mapped; ///< in a mapping, so reading them may fail
} fsti_verify_range;

/// Verifies bytes [begin, end) of a chunk, whole digested pieces, if the job verifies. FST_E_DIGEST
/// names file, piece and tensor. Called before the bytes are used.
fst_status fsti_pipeline_verify(const fsti_pipeline *pipeline, const fsti_plan_extent *extent,
                                const fsti_verify_range *range, worker_counts *counts,
                                fst_error *error);

/// The tensor and offset of a position in an extent's file, for errors.
fsti_error_location fsti_pipeline_locate(const fsti_pipeline *pipeline,
                                         const fsti_plan_extent *extent, uint64_t offset);

/// Makes an error for `status` at `offset` of an extent's file, with the tensor there.
void fsti_pipeline_describe(const fsti_pipeline *pipeline, const fsti_plan_extent *extent,
                            uint64_t offset, fst_status status, int os_errno, fst_error *error);

#endif
