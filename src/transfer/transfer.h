// SPDX-License-Identifier: Apache-2.0
/// Interface of the transfer module, which executes plans. Threads take chunks, read them by the
/// most suitable engine, and place the bytes; callers wait for chunks.
///
/// Knows: chunks, files, destinations, threads.
/// Does not know: names and dtypes of tensors, and the caller's request.
/// Main types: fsti_job, fsti_pipeline, fsti_place_step.
#ifndef FSTI_TRANSFER_H
#define FSTI_TRANSFER_H

#include "digest/digest.h"
#include "gpu/gpu.h"
#include "fastsafetensors/experimental.h"
#include "io/io.h"
#include "plan/plan.h"
#include "route.h"
#include "share/share.h"

/// Files, plans and buffers must agree on the page size.
_Static_assert(FSTI_IO_PAGE_BYTES == FSTI_PLAN_PAGE_BYTES, "reads and plans agree");
_Static_assert(FSTI_IO_PAGE_BYTES == FSTI_BUFFER_ALIGNMENT, "reads and buffers agree");

typedef struct fsti_pipeline fsti_pipeline;

/// A file that a job reads.
typedef struct fsti_job_file {
    fsti_file *file;
    const fsti_header *header;       ///< for tensor names in errors
    const fsti_digest_list *digests; ///< to verify chunks against
    fsti_buffer *view;               ///< FST_MODE_MAP: its mapping, if the plan touches it
} fsti_job_file;

/// Serializes calls of a load's allocator. The caller may be a coroutine, whose stack is elsewhere
/// while other coroutines of its thread run.
typedef struct fsti_allocator_lock {
    pthread_mutex_t mutex;
    atomic_uintptr_t caller; ///< identifies the thread that is in a call; 0: none
} fsti_allocator_lock;

/// All of this must live until the pipeline is closed.
typedef struct fsti_job {
    const fsti_plan *plan;
    const fsti_load_policy *policy; ///< memory kind and cache policy
    const fsti_job_file *files;
    bool verifies;  ///< chunks are verified, where a file has digests; the plan has verify_bytes
    bool is_mapped; ///< tensors are views, so nothing is read
    fsti_file_route *routes;             ///< by file; demoted after failures
    fsti_thread_facts threads;           ///< except for facts found out later
    bool populate;                       ///< prefault resident pages of the mappings
    const fst_allocator *allocator;      ///< NULL: arenas, or device memory
    fsti_allocator_lock *allocator_lock; ///< held during its calls
    fsti_device *device;                 ///< NULL: the CPU
    bool pins_memory;       ///< arenas are pinned by the device's driver, without copies to it
    uintptr_t stream;       ///< copies to the device wait for work queued on it; 0: no stream
    uint64_t staging_bytes; ///< maximum pinned memory for staging
    fst_gds gds;
    fst_ring ring;
    fst_numa numa;
    uint64_t budget_bytes;    ///< limit for admitted and unreleased buffers; 0: unlimited
    uint64_t workspace_bytes; ///< extra memory per thread, for statistics
    fsti_share *share; ///< NULL, or the segment that gives memory for the batches, on the CPU only
    bool share_is_writable; ///< tensors in it may be written, which stays private
    bool others_read;       ///< other processes read the same files now
    bool may_wait;          ///< the opening thread may wait for a small job's bytes
    bool guard_allowed;
    fst_progress_callback progress;
    void *progress_context;
} fsti_job;

/// Starts the threads. A small job is done before this returns, if waiting is allowed.
fst_status fsti_pipeline_open(const fsti_job *job, fsti_pipeline **out, fst_error *error);

/// Waits until chunks [first, end) are complete. `timeout_ms` < 0: no timeout.
fst_status fsti_pipeline_wait(fsti_pipeline *pipeline, uint32_t first, uint32_t end,
                              int64_t timeout_ms, fst_error *error);

/// When all chunks are complete, waits until pages of views that are mapped last are mapped.
fst_status fsti_pipeline_wait_mapped(fsti_pipeline *pipeline, int64_t timeout_ms, fst_error *error);

/// Whether chunks [first, end) are complete. Thread-safe, takes no lock.
bool fsti_pipeline_has(const fsti_pipeline *pipeline, uint32_t first, uint32_t end);
/// Whether all chunks are complete. Thread-safe, does not wait.
bool fsti_pipeline_is_done(const fsti_pipeline *pipeline);
/// Whether no thread works on it any more, so that closing does not wait.
bool fsti_pipeline_is_idle(const fsti_pipeline *pipeline);

/// FST_E_UNSUPPORTED in a forked child, where threads are missing and locks may be held.
fst_status fsti_pipeline_check_owner(const fsti_pipeline *pipeline, fst_error *error);
/// FST_E_ARGUMENT if this thread is in a call of the load's allocator, which must not wait for it.
fst_status fsti_pipeline_check_caller(const fsti_pipeline *pipeline, fst_error *error);

/// Whether a batch waits for memory, has memory, or was returned completely.
typedef enum fsti_batch_step { BATCH_WAITING, BATCH_ADMITTED, BATCH_RELEASED } fsti_batch_step;
/// *out: a new reference to the batch's buffer, or NULL.
fsti_batch_step fsti_pipeline_buffer(fsti_pipeline *pipeline, uint32_t batch, fsti_buffer **out);

/// Who fills an item's destination: the stream, or (claimed) a separate read that started while its
/// batch waited and marks it as filled.
typedef enum fsti_place_step { PLACE_STREAMED, PLACE_CLAIMED, PLACE_FILLED } fsti_place_step;
fsti_place_step fsti_pipeline_place_step(const fsti_pipeline *pipeline, uint32_t item);
/// Claims an item whose batch waits, so that the stream does not write it. No effect if the batch
/// has memory or the item is claimed.
void fsti_pipeline_claim(fsti_pipeline *pipeline, uint32_t item);
/// Marks a claimed item as filled.
void fsti_pipeline_mark_filled(fsti_pipeline *pipeline, uint32_t item);

/// True if the work was cancelled; sets *error.
bool fsti_pipeline_cancelled(fsti_pipeline *pipeline, fst_error *error);

/// The error that ended the work, or FST_OK. Does not wait.
fst_status fsti_pipeline_failure(fsti_pipeline *pipeline, fst_error *error);

/// Releases a batch whose tensors were all returned, so that it no longer counts towards the
/// budget.
void fsti_pipeline_release(fsti_pipeline *pipeline, uint32_t batch);

/// Stops the work. Waits return FST_E_CANCELLED. Thread-safe.
void fsti_pipeline_cancel(fsti_pipeline *pipeline);

/// Stops, joins the threads and frees the pipeline; in a forked child only frees it. Buffers stay
/// alive by their references. NULL is allowed.
void fsti_pipeline_close(fsti_pipeline *pipeline);

/// Adds the costs of requests to a load's statistics.
void fsti_stats_add_requests(fst_load_stats *sum, const fsti_http_counts *net);
/// Fills in the pipeline's statistics. Thread-safe.
void fsti_pipeline_stats(fsti_pipeline *pipeline, fst_load_stats *stats);

/// Adds its counts to *sum. Thread-safe.
void fsti_pipeline_add_counts(fsti_pipeline *pipeline, fst_load_stats *sum);

#endif
