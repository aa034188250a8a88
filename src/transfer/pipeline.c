// SPDX-License-Identifier: Apache-2.0
/// The pipeline: starting and stopping threads, waiting, cancelling, statistics.
///
/// Invariants: a chunk is complete when its `step` is CHUNK_DONE, which is stored (release) after
/// its last byte was written and the file was checked; readers load it (acquire) without the lock.
/// The lock protects queues, batches, errors and counters, and is never held during I/O, allocation
/// or callbacks. Threads take only chunks of admitted batches.
#include "sink.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/// How long a waiter that also works sleeps when other threads have the remaining chunks.
#define WAITER_SLEEP_MS 10
/// Longer timeouts count as infinite (a century).
#define TIMEOUT_MS_MAX ((int64_t)100 * 366 * 86400 * 1000)

/// Whether cached bytes of all files are copied from mappings, only those of the tensors.
static bool copies_mappings(const fsti_job *job) {
    if (job->verifies) return false;
    for (size_t i = 0; i < job->plan->extent_count; i++) {
        const fsti_io_engine *engine = job->routes[job->plan->extents[i].file].resident;
        if (engine == NULL || !engine->is_mapped) return false;
    }
    return true;
}

/// Whether the calling thread does the job: a very small one, or a small one that is cached.
static bool may_run_inline(const fsti_pipeline *pipeline) {
    const fsti_job *job = &pipeline->job;
    // Another process may read chunks of a segment that is not complete.
    if (job->share != NULL) return fsti_share_is_complete(job->share);
    bool is_view_only = pipeline->sink->is_view && !job->verifies;
    uint64_t planned = job->plan->bytes_planned;
    fsti_executor_facts facts = {.bytes = planned,
                                 .touched_bytes =
                                     copies_mappings(job) ? job->plan->bytes_requested : planned,
                                 .has_budget = job->budget_bytes != 0,
                                 .may_wait = job->may_wait,
                                 .is_view_only = is_view_only};
    fsti_executor executor = fsti_policy_executor(&facts);
    if (executor != FSTI_EXECUTOR_CALLER_IF_CACHED) return executor == FSTI_EXECUTOR_CALLER;
    for (size_t i = 0; i < job->plan->chunk_count; i++) {
        const fsti_plan_chunk *chunk = &job->plan->chunks[i];
        fsti_file *file = job->files[job->plan->extents[chunk->extent].file].file;
        uint64_t bytes;
        if (pipeline->chunks[i].is_resident) continue; // is classified already
        if (!fsti_file_resident(file, chunk->begin, chunk->end, &bytes) ||
            bytes != chunk->end - chunk->begin)
            return false;
    }
    return true;
}

/// Chooses the number of threads from the job's facts and facts learned since.
static void size_threads(fsti_pipeline *pipeline, bool by_caller) {
    const fsti_job *job = &pipeline->job;
    fsti_thread_facts facts = job->threads;
    if (by_caller) facts = (fsti_thread_facts){.wanted = 1, .any_async = facts.any_async};
    facts.reads_by_gds = job->plan->extent_count > 0 &&
                         atomic_load(&job->routes[job->plan->extents[0].file].uses_gds);
    fsti_thread_policy policy = fsti_policy_threads(&facts);
    pipeline->thread_count = policy.thread_count;
    pipeline->lane_count = policy.lane_count;
}

typedef struct thread_start {
    fsti_pipeline *pipeline;
    uint32_t index;
} thread_start;

static void *run_thread(void *argument) {
    thread_start start = *(thread_start *)argument;
    fsti_free(argument);
    fsti_worker_run(start.pipeline, start.index);
    // The last access of this thread to the pipeline: at 0 another thread may close it.
    atomic_fetch_sub(&start.pipeline->threads_running, 1);
    return NULL;
}

static fst_status start_threads(fsti_pipeline *pipeline, fst_error *error) {
    int failure = 0;
    for (uint32_t i = 0; i < pipeline->thread_count && failure == 0; i++) {
        thread_start *start = fsti_alloc(sizeof *start);
        if (start == NULL) {
            failure = ENOMEM;
            break;
        }
        *start = (thread_start){pipeline, i};
        atomic_fetch_add(&pipeline->threads_running, 1);
        failure = fsti_thread_start(&pipeline->threads[i], run_thread, start);
        if (failure == 0) {
            pipeline->threads_started++;
        } else {
            atomic_fetch_sub(&pipeline->threads_running, 1);
            fsti_free(start);
        }
    }
    // One thread can do all the work, so fewer threads than requested is not an error.
    if (pipeline->threads_started > 0) return FST_OK;
    if (failure == ENOMEM) return fsti_error_memory(error, sizeof(thread_start));
    pipeline->by_waiters = true;
    pipeline->thread_count = 1;
    snprintf(pipeline->thread_reason, sizeof pipeline->thread_reason,
             ", by the calling thread, because no thread can be started: %s",
             failure != 0 ? strerror(failure) : "the address space is limited");
    return FST_OK;
}

static fst_status prepare(fsti_pipeline *pipeline, fst_error *error) {
    const fsti_plan *plan = pipeline->job.plan;
    pipeline->chunks = fsti_alloc_zeroed(plan->chunk_count, sizeof *pipeline->chunks);
    pipeline->batches = fsti_alloc_zeroed(plan->batch_count, sizeof *pipeline->batches);
    pipeline->threads = fsti_alloc_zeroed(FSTI_POLICY_THREADS_MAX, sizeof *pipeline->threads);
    if (pipeline->job.budget_bytes != 0)
        pipeline->places = fsti_alloc_zeroed(plan->item_count, sizeof *pipeline->places);
    if (pipeline->chunks == NULL || pipeline->batches == NULL || pipeline->threads == NULL ||
        (pipeline->job.budget_bytes != 0 && pipeline->places == NULL))
        return fsti_error_memory(error, plan->chunk_count * sizeof *pipeline->chunks);
    return pipeline->sink->open != NULL ? pipeline->sink->open(pipeline, error) : FST_OK;
}

/// Before threads run, admits what fits, so that the load owns its memory when it is open. For a
/// device only the first batch, because its bus waits for that.
static fst_status admit_first(fsti_pipeline *pipeline, fst_error *error) {
    fsti_pipeline_admit(pipeline);
    if (pipeline->has_failed) {
        if (error != NULL) *error = pipeline->error;
        return pipeline->error.status;
    }
    if (pipeline->sink->probe == NULL) return FST_OK;
    return pipeline->sink->probe(pipeline, error);
}

static fst_status start_reads(fsti_pipeline *pipeline, fst_error *error) {
    if (pipeline->chunks_done == pipeline->job.plan->chunk_count) { // everything is resident
        pipeline->first_ns = pipeline->finished_ns = fsti_now_ns();
        return FST_OK;
    }
    bool by_caller = may_run_inline(pipeline);
    size_threads(pipeline, by_caller);
    if (!by_caller) return start_threads(pipeline, error);
    fsti_worker_run(pipeline, 0); // a failure is stored for the first wait
    return FST_OK;
}

static fst_status begin_work(fsti_pipeline *pipeline, fst_error *error) {
    fsti_map_ahead *ahead = fsti_map_ahead_find(pipeline);
    fst_status status = start_reads(pipeline, error);
    status == FST_OK ? fsti_map_ahead_start(ahead) : fsti_map_ahead_drop(ahead);
    return status;
}

/// Waits use the monotonic clock, so that setting the time does not end or extend them.
static void init_locks(fsti_pipeline *pipeline) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&pipeline->lock, NULL);
    pthread_mutex_init(&pipeline->progress_lock, NULL);
    pthread_mutex_init(&pipeline->faults_lock, NULL);
    pthread_cond_init(&pipeline->work_changed, &attributes);
    pthread_cond_init(&pipeline->chunk_finished, &attributes);
    pthread_condattr_destroy(&attributes);
}

/// Finishes all chunks of views that need no reads. No other thread knows the pipeline yet, so the
/// stores need no order.
static void finish_views(fsti_pipeline *pipeline) {
    const fsti_plan *plan = pipeline->job.plan;
    for (size_t i = 0; i < plan->chunk_count; i++)
        atomic_store_explicit(&pipeline->chunks[i].step, CHUNK_DONE, memory_order_relaxed);
    pipeline->chunks_done = pipeline->chunks_taken = (uint32_t)plan->chunk_count;
    pipeline->bytes_done = plan->bytes_planned;
    pipeline->items_done = plan->item_count;
    pipeline->first_ns = pipeline->finished_ns = fsti_now_ns();
}

fst_status fsti_pipeline_open(const fsti_job *job, fsti_pipeline **out, fst_error *error) {
    fsti_pipeline *pipeline = fsti_alloc_zeroed(1, sizeof *pipeline);
    if (pipeline == NULL) return fsti_error_memory(error, sizeof *pipeline);
    pipeline->job = *job;
    pipeline->started_ns = fsti_now_ns();
    pipeline->owner_pid = getpid();
    pipeline->fill_fd = -1;
    pipeline->sink = fsti_sink_choose(job);
    init_locks(pipeline);
    fst_status status = prepare(pipeline, error);
    bool has_work =
        !pipeline->sink->is_view || job->populate || job->policy->keeps_cache || job->verifies;
    if (status == FST_OK && has_work) status = admit_first(pipeline, error);
    if (status == FST_OK && has_work) status = begin_work(pipeline, error);
    if (status == FST_OK && !has_work) finish_views(pipeline);
    if (status == FST_OK) fsti_pipeline_report_first(pipeline);
    if (status != FST_OK) {
        fsti_pipeline_close(pipeline);
        return status;
    }
    *out = pipeline;
    return FST_OK;
}

fst_status fsti_pipeline_check_owner(const fsti_pipeline *pipeline, fst_error *error) {
    if (pipeline->owner_pid == getpid()) return FST_OK;
    return fsti_error_set(
        error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
        "the loader was opened before fork() and its threads are in the parent process. "
        "Open one in this process");
}

bool fsti_pipeline_cancelled(fsti_pipeline *pipeline, fst_error *error) {
    pthread_mutex_lock(&pipeline->lock);
    bool cancelled = pipeline->has_failed && pipeline->error.status == FST_E_CANCELLED;
    if (cancelled && error != NULL) *error = pipeline->error;
    pthread_mutex_unlock(&pipeline->lock);
    return cancelled;
}

fst_status fsti_pipeline_failure(fsti_pipeline *pipeline, fst_error *error) {
    fst_status status = FST_OK;
    pthread_mutex_lock(&pipeline->lock);
    if (pipeline->has_failed) {
        status = pipeline->error.status;
        if (error != NULL) *error = pipeline->error;
    }
    pthread_mutex_unlock(&pipeline->lock);
    return status;
}

/// Stops the threads and closes what they share.
static void stop_work(fsti_pipeline *pipeline) {
    fsti_pipeline_cancel(pipeline);
    for (uint32_t i = 0; i < pipeline->threads_started; i++)
        pthread_join(pipeline->threads[i], NULL);
    if (pipeline->sink->close != NULL)
        pipeline->sink->close(pipeline); // before the memory is freed
    for (size_t i = 0; pipeline->batches != NULL && i < pipeline->job.plan->batch_count; i++)
        fsti_buffer_end_fill(pipeline->batches[i].buffer);
    fsti_fill_close(pipeline->fill_fd);
    pthread_cond_destroy(&pipeline->work_changed);
    pthread_cond_destroy(&pipeline->chunk_finished);
    pthread_mutex_destroy(&pipeline->lock);
    pthread_mutex_destroy(&pipeline->progress_lock);
    pthread_mutex_destroy(&pipeline->faults_lock);
}

void fsti_pipeline_close(fsti_pipeline *pipeline) {
    if (pipeline == NULL) return;
    // A forked child has no threads and cannot know which locks they held.
    if (fsti_pipeline_check_owner(pipeline, NULL) == FST_OK) stop_work(pipeline);
    if (pipeline->batches != NULL)
        for (size_t i = 0; i < pipeline->job.plan->batch_count; i++)
            fsti_buffer_unref(pipeline->batches[i].buffer);
    fsti_free(pipeline->places);
    for (size_t i = 0; pipeline->chunks != NULL && i < pipeline->job.plan->chunk_count; i++)
        fsti_free(pipeline->chunks[i].resident_pages);
    fsti_free(pipeline->chunks);
    fsti_free(pipeline->batches);
    fsti_free(pipeline->threads);
    fsti_free(pipeline);
}

static fst_status timed_out(int64_t timeout_ms, fst_error *error) {
    return fsti_error_set(error, FST_E_TIMEOUT, FSTI_NO_LOCATION, "timed out after %lld ms",
                          (long long)timeout_ms);
}

/// Sleeps until a chunk is finished or mapped, or the deadline. Returns 0 or an errno. The lock
/// must be held.
static int sleep_once(fsti_pipeline *pipeline, int64_t timeout_ms,
                      const struct timespec *deadline) {
    return timeout_ms < 0
               ? pthread_cond_wait(&pipeline->chunk_finished, &pipeline->lock)
               : pthread_cond_timedwait(&pipeline->chunk_finished, &pipeline->lock, deadline);
}

/// Sleeps until the chunks are done, the work failed, or the timeout expired.
static fst_status sleep_for(fsti_pipeline *pipeline, uint32_t first, uint32_t end,
                            int64_t timeout_ms, fst_error *error) {
    struct timespec deadline = fsti_deadline_after(timeout_ms < 0 ? 0 : timeout_ms);
    int woken = 0;
    fst_status status = FST_OK;
    pthread_mutex_lock(&pipeline->lock);
    pipeline->waiter_count++;
    while (!fsti_pipeline_chunks_done(pipeline, &first, end)) {
        if (pipeline->has_failed) {
            if (error != NULL) *error = pipeline->error;
            status = pipeline->error.status;
            break;
        }
        if (woken == ETIMEDOUT) {
            status = timed_out(timeout_ms, error);
            break;
        }
        woken = sleep_once(pipeline, timeout_ms, &deadline);
    }
    pipeline->waiter_count--;
    pipeline->has_polled |= status == FST_E_TIMEOUT && pipeline->lacks_memory;
    pthread_mutex_unlock(&pipeline->lock);
    return status;
}

fst_status fsti_pipeline_wait_mapped(fsti_pipeline *pipeline, int64_t timeout_ms,
                                     fst_error *error) {
    struct timespec deadline = fsti_deadline_after(timeout_ms < 0 ? 0 : timeout_ms);
    int woken = 0;
    fst_status status = FST_OK;
    if (atomic_load(&pipeline->chunks_unmapped) == 0) return FST_OK;
    pthread_mutex_lock(&pipeline->lock);
    while (atomic_load(&pipeline->chunks_unmapped) > 0 && !pipeline->has_failed &&
           woken != ETIMEDOUT)
        woken = sleep_once(pipeline, timeout_ms, &deadline);
    if (atomic_load(&pipeline->chunks_unmapped) > 0) {
        status = pipeline->has_failed ? pipeline->error.status : timed_out(timeout_ms, error);
        if (pipeline->has_failed && error != NULL) *error = pipeline->error;
    }
    pthread_mutex_unlock(&pipeline->lock);
    return status;
}

/// Works until the chunks are done. Wakes up regularly, because other waiting threads may have
/// taken chunks, or hold memory that the rest waits for.
static fst_status work_on_chunks(fsti_pipeline *pipeline, uint32_t first, uint32_t end,
                                 int64_t timeout_ms, fst_error *error) {
    bool is_limited = timeout_ms >= 0 && timeout_ms < TIMEOUT_MS_MAX, is_last;
    uint64_t limit_ns = is_limited ? (uint64_t)timeout_ms * 1000000 : 0, start_ns = fsti_now_ns();
    fst_status status;
    do {
        fsti_worker_help(pipeline, first, end, is_limited ? start_ns + limit_ns : UINT64_MAX);
        is_last = is_limited && fsti_now_ns() - start_ns >= limit_ns;
        status = sleep_for(pipeline, first, end, is_last ? 0 : WAITER_SLEEP_MS, error);
    } while (status == FST_E_TIMEOUT && !is_last);
    return status == FST_E_TIMEOUT ? timed_out(timeout_ms, error) : status;
}

bool fsti_pipeline_has(const fsti_pipeline *pipeline, uint32_t first, uint32_t end) {
    return fsti_pipeline_chunks_done(pipeline, &first, end);
}

bool fsti_pipeline_is_done(const fsti_pipeline *pipeline) {
    return fsti_pipeline_has(pipeline, 0, (uint32_t)pipeline->job.plan->chunk_count);
}

bool fsti_pipeline_is_idle(const fsti_pipeline *pipeline) {
    return atomic_load(&pipeline->threads_running) == 0 &&
           (atomic_load(&pipeline->stop) || fsti_pipeline_is_done(pipeline));
}

fst_status fsti_pipeline_wait(fsti_pipeline *pipeline, uint32_t first, uint32_t end,
                              int64_t timeout_ms, fst_error *error) {
    if (pipeline->by_waiters) return work_on_chunks(pipeline, first, end, timeout_ms, error);
    return sleep_for(pipeline, first, end, timeout_ms, error);
}

/// Engine names such as "uring+mmap", in the order of the enumeration.
static void name_engines(const worker_counts *counts, char *text, size_t size) {
    text[0] = '\0';
    for (unsigned i = 0; i < FSTI_ENGINE_COUNT; i++) {
        if (!counts->used[i]) continue;
        size_t used = strlen(text);
        snprintf(text + used, size - used, "%s%s", used > 0 ? "+" : "",
                 fsti_io_engine_get((fst_engine)i)->name);
    }
    if (text[0] == '\0') snprintf(text, size, "none");
}

/// Why a file was read differently from the first one; NULL if all were read the same way.
static const char *find_other_reason(const fsti_job *job, const char *first) {
    for (size_t i = 1; i < job->plan->extent_count; i++) {
        const char *reason = job->routes[job->plan->extents[i].file].reason;
        if (strcmp(reason, first) != 0) return reason;
    }
    return NULL;
}

/// Why the chosen engines were used.
static void explain_reads(const fsti_pipeline *pipeline, fst_load_stats *stats) {
    const fsti_job *job = &pipeline->job;
    uint32_t file = job->plan->extents[0].file;
    const char *first = job->routes[file].reason, *other = find_other_reason(job, first);
    char ring[96] = "";
    fsti_append(stats->reason, sizeof stats->reason, first);
    if (other != NULL) fsti_append(stats->reason, sizeof stats->reason, "; of other files ");
    if (other != NULL) fsti_append(stats->reason, sizeof stats->reason, other);
    fsti_append(stats->reason, sizeof stats->reason, pipeline->demotion_reason);
    if (pipeline->counts.used[FST_ENGINE_URING] && job->ring == FST_RING_AUTO)
        fsti_uring_explain(fsti_file_device(job->files[file].file), ring, sizeof ring);
    fsti_append(stats->reason, sizeof stats->reason, ring);
}

static const char *describe_nodes(const fsti_pipeline *pipeline) {
    if (!pipeline->is_placed) return "";
    return pipeline->job.numa == FST_NUMA_INTERLEAVE ? ", memory interleaved over nodes"
                                                     : ", memory of the local node";
}

void fsti_stats_add_requests(fst_load_stats *sum, const fsti_http_counts *net) {
    sum->network_requests += net->requests;
    sum->network_retries += net->retries;
    sum->network_hedges += net->hedges;
    sum->network_connections += net->connections;
    sum->network_bytes += net->bytes;
    sum->disk_cache_bytes += net->kept_bytes;
    sum->disk_cache_written += net->written_bytes;
    sum->network_retry_wait_ns += net->retry_wait_ns;
    sum->network_first_byte_ns += net->first_byte_ns;
}

/// The lock must be held.
static void add_counts(const fsti_pipeline *pipeline, fst_load_stats *sum) {
#define COPY_COUNTER(name) sum->name += pipeline->counts.name;
    LOAD_COUNTERS(COPY_COUNTER)
#undef COPY_COUNTER
    fsti_stats_add_requests(sum, &pipeline->counts.net);
    sum->buffer_bytes += pipeline->bytes_allocated;
}

void fsti_pipeline_add_counts(fsti_pipeline *pipeline, fst_load_stats *sum) {
    pthread_mutex_lock(&pipeline->lock);
    add_counts(pipeline, sum);
    pthread_mutex_unlock(&pipeline->lock);
}

void fsti_pipeline_stats(fsti_pipeline *pipeline, fst_load_stats *stats) {
    const fsti_plan *plan = pipeline->job.plan;
    pthread_mutex_lock(&pipeline->lock);
    const worker_counts *counts = &pipeline->counts;
    name_engines(counts, stats->engine, sizeof stats->engine);
    char words[288] = "";
    bool is_view = pipeline->sink->is_view, has_reads = plan->extent_count > 0 && !is_view;
    if (pipeline->sink->explain != NULL) pipeline->sink->explain(pipeline, words, sizeof words);
    stats->reason[0] = '\0';
    if (has_reads) explain_reads(pipeline, stats);
    if (has_reads || is_view) fsti_append(stats->reason, sizeof stats->reason, words);
    if (has_reads) fsti_append(stats->reason, sizeof stats->reason, describe_nodes(pipeline));
    fsti_append(stats->reason, sizeof stats->reason, pipeline->thread_reason);
    stats->thread_count = pipeline->threads_started > 0 ? pipeline->threads_started : 1;
    stats->chunk_count = plan->chunk_count;
    stats->chunks_resident = pipeline->chunks_resident;
    add_counts(pipeline, stats);
    stats->buffer_bytes_peak =
        pipeline->bytes_peak + pipeline->job.workspace_bytes * stats->thread_count;
    if (pipeline->first_ns > 0) stats->first_tensor_ns = pipeline->first_ns - pipeline->started_ns;
    if (pipeline->finished_ns > 0) stats->total_ns = pipeline->finished_ns - pipeline->started_ns;
    pthread_mutex_unlock(&pipeline->lock);
}
