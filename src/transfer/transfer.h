// SPDX-License-Identifier: Apache-2.0
/// The door of the transfer room: carries out a plan. The only room that sees both files and
/// memory. Threads take chunks, read them by the engine that suits each, and put the bytes in
/// their place; a reader of the pipeline waits for chunks.
#ifndef FSTI_TRANSFER_H
#define FSTI_TRANSFER_H

#include "digest/digest.h"
#include "gpu/gpu.h"
#include "fastsafetensors/experimental.h"
#include "io/io.h"
#include "plan/plan.h"
#include "route.h"

/// Files, plans and memory must mean the same page.
_Static_assert(FSTI_IO_PAGE_BYTES == FSTI_PLAN_PAGE_BYTES, "reads and plans agree");
_Static_assert(FSTI_IO_PAGE_BYTES == FSTI_BUFFER_ALIGNMENT, "reads and buffers agree");

typedef struct fsti_pipeline fsti_pipeline;

/// Everything here must live until the pipeline is closed.
typedef struct fsti_job {
    const fsti_plan *plan;
    const fsti_load_policy *policy;    ///< memory, and what becomes of the page cache
    const fsti_header *const *headers; ///< by file; for the names of tensors in errors
    fsti_file *const *files;
    /// By file: what its bytes are held against before a chunk is done (the plan has verify_bytes
    /// then); NULL: nothing is.
    const fsti_digest_list *const *digests;
    char *const *mappings;     ///< by file: views of it; nothing is read (FST_MODE_MAP). Or NULL
    fsti_file_route *routes;   ///< by file: what reads it; demoted on the way
    fsti_thread_facts threads; ///< but for what is found out on the way
    bool populate;             ///< make resident pages of the mappings present
    const fst_allocator *allocator;  ///< NULL: arenas, or the device's memory
    pthread_mutex_t *allocator_lock; ///< held while it is called
    fsti_device *device;             ///< NULL: the processors
    bool locks_memory;               ///< arenas are locked by the device's driver; no copies to it
    uintptr_t stream;    ///< copies to the device wait for what is queued on it; 0: none
    uint64_t ring_bytes; ///< locked memory that copies go through, at most
    fst_gds gds;
    fst_ring ring;
    fst_numa numa;
    uint64_t budget_bytes; ///< of buffers admitted and not released; 0: none
    uint64_t room_bytes;   ///< memory beside buffers that each thread takes, for statistics
    bool may_wait;         ///< who opens the pipeline, for a small job's bytes
    bool guard_allowed;
    fst_progress_callback progress;
    void *progress_context;
} fsti_job;

/// Starts the work in threads of its own; a small job is done before it returns, if it may wait.
fst_status fsti_pipeline_open(const fsti_job *job, fsti_pipeline **out, fst_error *error);

/// Waits until chunks [first, end) are in place; `timeout_ms` < 0: no limit.
fst_status fsti_pipeline_wait(fsti_pipeline *pipeline, uint32_t first, uint32_t end,
                              int64_t timeout_ms, fst_error *error);

/// Whether every chunk is in place; whether nothing more is read, for that or another reason. From
/// any thread, without waiting.
bool fsti_pipeline_is_done(const fsti_pipeline *pipeline);
bool fsti_pipeline_is_over(const fsti_pipeline *pipeline);

/// FST_E_UNSUPPORTED in the child of a fork: there are no threads, and locks may be held by them.
fst_status fsti_pipeline_check_owner(const fsti_pipeline *pipeline, fst_error *error);

/// Whether a batch waits for memory, has it, or has been handed out.
typedef enum fsti_batch_step { BATCH_WAITING, BATCH_ADMITTED, BATCH_RELEASED } fsti_batch_step;
/// *out: the buffer of a batch that has one (a new reference), else NULL.
fsti_batch_step fsti_pipeline_buffer(fsti_pipeline *pipeline, uint32_t batch, fsti_buffer **out);

/// How an item comes to its destination: with the stream, or, settled, by another who has begun
/// to bring it there while its batch waited, and says when it is.
typedef enum fsti_place_step { PLACE_STREAMED, PLACE_SETTLED, PLACE_FILLED } fsti_place_step;
fsti_place_step fsti_pipeline_place_step(const fsti_pipeline *pipeline, uint32_t item);
/// Settles an item whose batch waits: the stream writes nothing there any more. Of a batch that
/// does not wait, and of an item that is settled, nothing changes.
void fsti_pipeline_settle(fsti_pipeline *pipeline, uint32_t item);
/// The item is in its place, if it is one that was settled.
void fsti_pipeline_fill(fsti_pipeline *pipeline, uint32_t item);

/// True when the work was cancelled; *error says so.
bool fsti_pipeline_cancelled(fsti_pipeline *pipeline, fst_error *error);

/// Says that the batch's tensors have been handed out: its memory no longer counts.
void fsti_pipeline_release(fsti_pipeline *pipeline, uint32_t batch);

/// Stops the work; waits return FST_E_CANCELLED. From any thread.
void fsti_pipeline_cancel(fsti_pipeline *pipeline);

/// Stops, joins the threads and frees; in the child of a fork it only frees. Buffers live on by
/// their references. NULL is allowed.
void fsti_pipeline_close(fsti_pipeline *pipeline);

/// Fills what the pipeline knows of *stats. From any thread.
void fsti_pipeline_stats(fsti_pipeline *pipeline, fst_load_stats *stats);

/// Adds what it has counted to *sum. From any thread.
void fsti_pipeline_add_counts(fsti_pipeline *pipeline, fst_load_stats *sum);

/// Copies around the cache where that is faster (large blocks), else as memcpy does.
void fsti_copy(void *target, const void *source, size_t size);

#endif
