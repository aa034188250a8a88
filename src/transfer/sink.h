// SPDX-License-Identifier: Apache-2.0
/// Sinks: the destinations of chunks (CPU memory, views, a device). Workers call the first six
/// functions, from any thread. The pipeline calls the others; NULL: not needed.
#ifndef FSTI_SINK_H
#define FSTI_SINK_H

#include "pipeline.h"

typedef enum sink_answer {
    SINK_READY, ///< its blocks can be read
    SINK_BUSY,  ///< no memory now: retry after finishing another chunk, or with `wait`
    SINK_DONE,  ///< no read needed: the sink finished or returned the chunk, or the work stops
} sink_answer;

/// Where to read a chunk: `base` corresponds to `origin` in the file. NULL: the worker reads into
/// its own slots, and place() copies from there.
typedef struct sink_target {
    bool wait; ///< in: wait for memory
    sink_answer answer;
    char *base;
    uint64_t origin;
} sink_target;

/// Bytes [begin, end) of a chunk at `source`. Up to `needed_end` may be accessed.
typedef struct sink_block {
    uint32_t chunk;
    uint64_t begin, end, needed_end;
    const char *source;
    bool is_mapped; ///< in a mapping, so reading them may fail
} sink_block;

/// Measuring the page size would take as long as loads of at most this size.
#define FSTI_UNMEASURED_LOAD_BYTES ((uint64_t)64 << 20)

struct fsti_sink {
    bool is_view;   ///< needs no memory; resident chunks are complete
    bool has_slots; ///< its targets accept every read, so workers need no slots
    /// Chunks are classified while others are read, instead of all at once.
    bool classifies_ahead;
    fst_status (*prepare)(fsti_pipeline *pipeline, uint32_t chunk, sink_target *target,
                          worker_counts *counts, fst_error *error);
    fst_status (*place)(fsti_pipeline *pipeline, const sink_block *block, worker_counts *counts,
                        fst_error *error);
    /// All blocks are placed. The chunk is finished now, or later by reap().
    fst_status (*complete)(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                           fst_error *error);
    /// Waits for a chunk in flight. *any is false if no chunk is in flight.
    fst_status (*reap)(fsti_pipeline *pipeline, bool *any, worker_counts *counts, fst_error *error);
    /// The work stops: wakes threads that wait for memory.
    void (*wake)(fsti_pipeline *pipeline);
    /// Provides memory that fsti_pipeline_take() named, while no chunk can be read.
    void (*populate)(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts);
    /// Before the first chunk of a batch is read. The lock is held.
    void (*begin_batch)(fsti_pipeline *pipeline, uint32_t batch);
    /// Allocates the sink's resources.
    fst_status (*open)(fsti_pipeline *pipeline, fst_error *error);
    /// Probes methods that need the first batch's memory, before threads run.
    fst_status (*probe)(fsti_pipeline *pipeline, fst_error *error);
    /// Called after all workers ended, and if open() failed.
    void (*close)(fsti_pipeline *pipeline);
    /// How bytes were transferred, for the statistics, or "".
    void (*explain)(fsti_pipeline *pipeline, char *text, size_t size);
};

extern const fsti_sink fsti_sink_host, fsti_sink_share, fsti_sink_view, fsti_sink_device;

/// The sink for a job.
const fsti_sink *fsti_sink_choose(const fsti_job *job);

/// Runs `copy(context)`, which reads the block. FST_E_IO or FST_E_FILE_CHANGED if mapped pages
/// could not be read.
fst_status fsti_sink_copy(fsti_pipeline *pipeline, const sink_block *block,
                          void (*copy)(void *context), void *context, fst_error *error);

/// Whether absent bytes of a chunk are read into the page cache by sequential reads, for which the
/// kernel allocates growing pages; else by page faults of a mapping, with the kernel's readahead.
bool fsti_page_in_streams(const fsti_pipeline *pipeline, uint32_t chunk);
/// Reads a chunk into the page cache. *is_returned: together with the following ones, and each can
/// be taken again by any thread, to be copied. So the storage is not idle while chunks are copied.
fst_status fsti_page_in_chunk(fsti_pipeline *pipeline, uint32_t chunk, bool *is_returned,
                              worker_counts *counts, fst_error *error);
/// Whether page faults read large parts of a chunk's file, because its file system answers slowly.
/// The first call for a file reads a byte, to find out; other threads wait for that.
bool fsti_page_in_is_large(fsti_pipeline *pipeline, uint32_t chunk);
/// Before buffered reads of a chunk from a file system that answers slowly: reads it into the page
/// cache by large page faults, because buffered reads would wait for 128 KiB at a time.
void fsti_page_in_before_read(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts);
/// Leaves bytes of a chunk that were copied from the mapping: unmaps them, or keeps them for the
/// next small loads.
void fsti_page_in_leave(fsti_pipeline *pipeline, uint32_t chunk, uint64_t begin, uint64_t end);
/// How bytes were read into the page cache so far; "" if none were, or by page faults.
const char *fsti_page_in_text(fsti_pipeline *pipeline);

/// Finds the position of a chunk in CPU memory, for fsti_sink.prepare().
fst_status fsti_host_prepare(fsti_pipeline *pipeline, uint32_t chunk, sink_target *target,
                             worker_counts *counts, fst_error *error);
/// Copies a block to its items in CPU memory, for fsti_sink.place().
fst_status fsti_host_place(fsti_pipeline *pipeline, const sink_block *block, worker_counts *counts,
                           fst_error *error);
/// Appends how the bytes got into the page cache, for fsti_sink.explain().
void fsti_host_explain(fsti_pipeline *pipeline, char *text, size_t size);

/// Maps a batch of the job's segment. *out is NULL if the segment has no memory for it; the batch
/// is then this process's own. `base`: where its bytes are written. (shared_batch.c)
void fsti_shared_batch(fsti_pipeline *pipeline, uint32_t batch, fsti_buffer **out, char **base);

/// What to do with a chunk of a job with a segment.
typedef enum fsti_shared_turn {
    FSTI_TURN_CLAIM, ///< claim it in the segment, then call fsti_shared_end_claim()
    FSTI_TURN_READ,  ///< read it into this process's memory
    FSTI_TURN_DONE,  ///< its bytes are in the segment
    FSTI_TURN_LATER, ///< this process still writes other chunks of the batch to the segment
} fsti_shared_turn;
fsti_shared_turn fsti_shared_begin(fsti_pipeline *pipeline, uint32_t chunk);
/// A claim was refused, or its chunk is finished.
void fsti_shared_end_claim(fsti_pipeline *pipeline, uint32_t chunk);
/// Makes the unfinished chunks of a chunk's batch private, because the owner of one is stalled.
fst_status fsti_shared_leave(fsti_pipeline *pipeline, uint32_t chunk, fst_error *error);

/// For sinks that never wait.
fst_status fsti_sink_finish(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                            fst_error *error);
fst_status fsti_sink_reap_none(fsti_pipeline *pipeline, bool *any, worker_counts *counts,
                               fst_error *error);
void fsti_sink_wake_none(fsti_pipeline *pipeline);
/// Prefaults a chunk's part of the load's buffer.
void fsti_sink_populate(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts);

// ---- mapped pages of views ----

/// A page fault maps all cached pages of an aligned block of this size (fault_around_bytes of the
/// kernel, 64 KiB unless configured).
#define FSTI_VIEW_BLOCK_BYTES ((uint64_t)64 << 10)
/// Accesses the first and last byte of a range, and a byte of each step between them. False if the
/// SIGBUS guard is not active, or a page has an error.
bool fsti_view_touch(const char *bytes, uint64_t size, uint64_t step);
/// The cached pages of views that a separate thread is to map.
typedef struct fsti_map_ahead fsti_map_ahead;
/// Before the pipeline's threads start. NULL: nothing is to be mapped.
fsti_map_ahead *fsti_map_ahead_find(const fsti_pipeline *pipeline);
/// Starts a thread that ends by itself and does not use the pipeline. Takes `ahead`, which may be
/// NULL.
void fsti_map_ahead_start(fsti_map_ahead *ahead);
void fsti_map_ahead_drop(fsti_map_ahead *ahead);

#endif
