// SPDX-License-Identifier: Apache-2.0
/// Asynchronous saves: a planned writer, a snapshot that feeds it, and the threads of both.
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "save_state.h"

#define COPY_THREADS_DEFAULT 4u
#define THREAD_COUNT_MAX 16u
/// How often a save that waits for an earlier one looks whether it was cancelled itself.
#define TURN_CHECK_MS 20

struct fst_async_save {
    fsti_refcount refs; ///< the handle, the writing thread, and the save that comes after
    pid_t owner;
    fst_async_options options; ///< `save` is NULL
    fst_staging_pool *pool;
    char *path, *manifest; ///< `manifest`: of the writer's options
    char *target;          ///< `path` without links; NULL: it is too long for that
    bool is_set;           ///< several files
    fst_writer *writer;    ///< of the writing thread, which closes it
    fst_async_save *next_running;
    uint64_t start_ns;
    pthread_t helpers[THREAD_COUNT_MAX];
    uint32_t helper_count;
    atomic_bool is_cancelled;
    atomic_bool is_copied; ///< nothing of the tensors is left to copy
    atomic_uint_fast64_t blocked_ns;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    /// The save that this one comes after, if that has not ended; after a cancelled one the one
    /// before that.
    fst_async_save *previous;
    uint32_t user_count; ///< callers that use the snapshot: the writing thread waits for them
    bool is_created;     ///< the writer has its files
    bool is_ending;      ///< `status` is known; no caller may begin to use the snapshot
    bool is_ended, is_told, is_closed;
    fst_status status;
    fst_error error;
    uint64_t done_ns, bytes_total, bytes_written;
    fsti_snapshot_stats snapshot_stats; ///< final
    fst_save_stats writer_stats;        ///< final
};

/// Saves that run, the latest first.
static struct {
    pthread_mutex_t lock;
    fst_async_save *first;
    pid_t owner;
} running = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t running_once = PTHREAD_ONCE_INIT;
static void register_running(void) { fsti_fork_lock(&running.lock); }

// ---- handles ----

/// A loop, because a chain of saves may be longer than a stack is deep.
static void unref_save(fst_async_save *save) {
    while (save != NULL && fsti_refcount_unref(&save->refs)) {
        fst_async_save *previous = save->previous;
        fsti_staging_pool_unref(save->pool);
        pthread_mutex_destroy(&save->lock);
        pthread_cond_destroy(&save->changed);
        fsti_free(save->path);
        fsti_free(save->target);
        fsti_free(save->manifest);
        fsti_free(save);
        save = previous;
    }
}

static fst_status check_owner(const fst_async_save *save, fst_error *error) {
    if (save->owner == getpid()) return FST_OK;
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                          "the save was started before fork(): it belongs to the parent");
}

/// Whether two saves may replace the same files. Sets in one folder share an index.
static bool have_same_target(const fst_async_save *one, const fst_async_save *other) {
    if (one->target == NULL || other->target == NULL) return strcmp(one->path, other->path) == 0;
    if (!one->is_set && !other->is_set) return strcmp(one->target, other->target) == 0;
    size_t size = (size_t)(fsti_path_name(one->target) - one->target);
    return size == (size_t)(fsti_path_name(other->target) - other->target) &&
           memcmp(one->target, other->target, size) == 0;
}

static bool must_precede(const fst_async_save *earlier, const fst_async_save *save) {
    return earlier->pool == save->pool || have_same_target(earlier, save);
}

/// Adds a save to those that run, and finds the one that it comes after.
static void enter_running(fst_async_save *save) {
    pthread_once(&running_once, register_running);
    pthread_mutex_lock(&running.lock);
    if (running.owner != getpid()) { // of a fork's parent: they do not run here
        running.owner = getpid();
        running.first = NULL;
    }
    for (fst_async_save *other = running.first; other != NULL; other = other->next_running) {
        if (!must_precede(other, save)) continue;
        fsti_refcount_ref(&other->refs);
        save->previous = other;
        break;
    }
    save->next_running = running.first;
    running.first = save;
    pthread_mutex_unlock(&running.lock);
}

/// A save that runs, was started earlier, and must end first; referenced, or NULL. Several may
/// match that are not in one chain: the same files, and different pools.
static fst_async_save *earlier_of(fst_async_save *save) {
    pthread_mutex_lock(&running.lock);
    fst_async_save *other = save->next_running;
    while (other != NULL && !must_precede(other, save)) other = other->next_running;
    if (other != NULL) fsti_refcount_ref(&other->refs);
    pthread_mutex_unlock(&running.lock);
    return other;
}

static void leave_running(fst_async_save *save) {
    pthread_mutex_lock(&running.lock);
    fst_async_save **at = &running.first;
    while (*at != NULL && *at != save) at = &(*at)->next_running;
    if (*at != NULL) *at = save->next_running;
    save->next_running = NULL; // no longer kept up to date
    pthread_mutex_unlock(&running.lock);
}

static void report_untold(const fst_async_save *save) {
    fsti_log(FST_LOG_WARNING, "an asynchronous save failed, and its result was never requested: %s",
             save->error.message);
}

// ---- the barrier ----

/// A deadline in monotonic nanoseconds.
static uint64_t deadline_of(int64_t timeout_ms) {
    uint64_t timeout_ns;
    if (timeout_ms < 0 || !fsti_mul((uint64_t)timeout_ms, 1000000u, &timeout_ns) ||
        timeout_ns > INT64_MAX)
        return UINT64_MAX;
    return fsti_now_ns() + timeout_ns;
}

static int64_t ms_until(uint64_t deadline_ns) {
    uint64_t now = fsti_now_ns();
    if (deadline_ns == UINT64_MAX) return -1;
    return deadline_ns <= now ? 0 : (int64_t)((deadline_ns - now + 999999) / 1000000);
}

/// Begins to use the snapshot; false when the save is ending, with what it came to.
static bool begin_use(fst_async_save *save, fst_status *status, fst_error *error) {
    pthread_mutex_lock(&save->lock);
    bool may_use = !save->is_ending;
    if (may_use) save->user_count++;
    *status = save->status;
    if (!may_use && save->status != FST_OK && error != NULL) *error = save->error;
    pthread_mutex_unlock(&save->lock);
    return may_use;
}

static void end_use(fst_async_save *save) {
    pthread_mutex_lock(&save->lock);
    save->user_count--;
    pthread_cond_broadcast(&save->changed);
    pthread_mutex_unlock(&save->lock);
}

/// The save before this one, referenced, or NULL.
static fst_async_save *previous_of(fst_async_save *save) {
    pthread_mutex_lock(&save->lock);
    fst_async_save *previous = save->previous;
    if (previous != NULL) fsti_refcount_ref(&previous->refs);
    pthread_mutex_unlock(&save->lock);
    return previous;
}

/// Returns a new reference to a save whose tensors must be copied next: `save` itself, unless an
/// earlier one must precede it. The list has the latest save first, so one pass also finds saves
/// that must precede a predecessor.
static fst_async_save *next_to_copy(fst_async_save *save) {
    pthread_mutex_lock(&running.lock);
    fst_async_save *next = save;
    for (fst_async_save *other = save->next_running; other != NULL; other = other->next_running)
        if (!atomic_load(&other->is_copied) && must_precede(other, next)) next = other;
    fsti_refcount_ref(&next->refs);
    pthread_mutex_unlock(&running.lock);
    return next;
}

/// Copies what is left of one save's tensors. A save that has failed needs no copies.
static fst_status copy_one(fst_async_save *save, uint64_t deadline_ns, fst_error *error) {
    fst_status status;
    if (!begin_use(save, &status, error)) return status;
    status = fsti_snapshot_copy(save->writer->source.snapshot, deadline_ns, error);
    end_use(save);
    return status;
}

/// Copies what is left of the saves before this one: they must not wait for staging memory that a
/// later one holds, because the later one is written after them. Their failures are not errors
/// here. FST_E_TIMEOUT if bytes are left.
static fst_status copy_earlier(fst_async_save *save, uint64_t deadline_ns) {
    for (;;) {
        fst_async_save *next = next_to_copy(save);
        fst_status status = next == save ? FST_OK : copy_one(next, deadline_ns, NULL);
        bool is_over = next == save || status == FST_E_TIMEOUT;
        if (!is_over) atomic_store(&next->is_copied, true);
        unref_save(next);
        if (is_over) return status;
    }
}

static fst_status copy_in_turn(fst_async_save *save, uint64_t deadline_ns, fst_error *error) {
    if (copy_earlier(save, deadline_ns) != FST_OK)
        return fsti_error_set(error, FST_E_TIMEOUT, FSTI_NO_LOCATION,
                              "the tensors are not staged yet: an earlier save is being copied");
    fst_status status = copy_one(save, deadline_ns, error);
    if (status != FST_E_TIMEOUT) atomic_store(&save->is_copied, true);
    return status;
}

fst_status fsti_async_save_stage(fst_async_save *save, int64_t timeout_ms, fst_error *error) {
    uint64_t start = fsti_now_ns();
    FST_TRY(check_owner(save, error));
    fst_status status = copy_in_turn(save, deadline_of(timeout_ms), error);
    atomic_fetch_add(&save->blocked_ns, fsti_now_ns() - start);
    return status;
}

// ---- threads ----

/// Until a save that has ended needs no help any more, its thread looks so often.
static uint64_t next_check(void) { return fsti_now_ns() + (uint64_t)TURN_CHECK_MS * 1000000; }

static void *help_copying(void *context) {
    fst_async_save *save = context;
    while (!atomic_load(&save->is_cancelled) && copy_earlier(save, next_check()) == FST_E_TIMEOUT)
        continue;
    fsti_snapshot_help(save->writer->source.snapshot);
    return NULL;
}

/// Waits a little for the end of a save.
static void await_earlier(fst_async_save *earlier) {
    struct timespec deadline = fsti_deadline_after(TURN_CHECK_MS);
    pthread_mutex_lock(&earlier->lock);
    if (!earlier->is_ended) pthread_cond_timedwait(&earlier->changed, &earlier->lock, &deadline);
    pthread_mutex_unlock(&earlier->lock);
}

/// Waits a little for the end of `previous`. When it has ended, the save before it, which it may
/// have left running, takes its place.
static void await_previous(fst_async_save *save, fst_async_save *previous) {
    struct timespec deadline = fsti_deadline_after(TURN_CHECK_MS);
    pthread_mutex_lock(&previous->lock);
    if (!previous->is_ended) pthread_cond_timedwait(&previous->changed, &previous->lock, &deadline);
    bool is_ended = previous->is_ended;
    fst_async_save *before = previous->previous;
    if (is_ended && before != NULL) fsti_refcount_ref(&before->refs);
    pthread_mutex_unlock(&previous->lock);
    if (!is_ended) return;
    pthread_mutex_lock(&save->lock);
    save->previous = before;
    pthread_mutex_unlock(&save->lock);
    unref_save(previous);
}

/// Waits for the end of all saves before this one, or ends them.
static fst_status await_turn(fst_async_save *save, fst_error *error) {
    bool supersedes = save->options.overlap == FST_OVERLAP_SUPERSEDE;
    for (;;) {
        fst_async_save *previous = previous_of(save);
        fst_async_save *earlier = previous == NULL ? earlier_of(save) : previous;
        bool is_over = earlier == NULL || atomic_load(&save->is_cancelled);
        if (!is_over && supersedes) fsti_async_save_cancel(earlier);
        if (!is_over && previous != NULL) await_previous(save, previous);
        if (!is_over && previous == NULL) await_earlier(earlier);
        unref_save(earlier);
        if (is_over) break;
    }
    if (!atomic_load(&save->is_cancelled)) return FST_OK;
    return fsti_error_set(error, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled");
}

static fst_status run_save(fst_async_save *save, fst_error *error) {
    fst_writer *writer = save->writer;
    // While the caller is blocked, every processor and the memory's bandwidth are for the copy.
    if (save->options.stage == FST_STAGE_COPY && fsti_snapshot_fits(writer->source.snapshot))
        FST_TRY(fsti_snapshot_await_staged(writer->source.snapshot, error));
    FST_TRY(await_turn(save, error));
    FST_TRY(fsti_writer_create(writer, NULL, error));
    pthread_mutex_lock(&save->lock);
    save->is_created = true; // from here on cancelling reaches what waits for a store
    pthread_mutex_unlock(&save->lock);
    FST_TRY(fsti_writer_finish(writer, error));
    // Whether the tensors were changed meanwhile must be known before anything is put in place.
    FST_TRY(fsti_snapshot_await_staged(writer->source.snapshot, error));
    return fsti_writer_commit(writer, error);
}

/// Waits until no caller uses the snapshot, and closes the writer: a failed one leaves
/// nothing behind.
static void close_writer(fst_async_save *save, fst_status status, const fst_error *error) {
    fst_writer *writer = save->writer;
    if (status != FST_OK) fsti_snapshot_stop(writer->source.snapshot, status, error);
    pthread_mutex_lock(&save->lock);
    save->is_ending = true;
    save->status = status;
    if (status != FST_OK) save->error = *error;
    while (save->user_count > 0) pthread_cond_wait(&save->changed, &save->lock);
    pthread_mutex_unlock(&save->lock);
    for (uint32_t i = 0; i < save->helper_count; i++) pthread_join(save->helpers[i], NULL);
    fst_save_stats stats = {.struct_size = sizeof stats};
    (void)!fsti_writer_stats(writer, &stats, NULL);
    fsti_snapshot_stats copied;
    fsti_snapshot_stats_get(writer->source.snapshot, &copied);
    pthread_mutex_lock(&save->lock);
    save->writer_stats = stats;
    save->snapshot_stats = copied;
    save->bytes_written = fsti_progress_bytes(&writer->progress);
    save->writer = NULL;
    pthread_mutex_unlock(&save->lock);
    fsti_writer_close(writer);
}

static void *write_files(void *context) {
    fst_async_save *save = context;
    fst_error error;
    pid_t thread = (pid_t)syscall(SYS_gettid);
    // On Linux each thread has its own priority. A refusal is ignored.
    if (save->options.nice > 0)
        (void)setpriority(PRIO_PROCESS, (id_t)thread, (int)save->options.nice);
    fst_status status = run_save(save, &error);
    close_writer(save, status, &error);
    leave_running(save);
    pthread_mutex_lock(&save->lock);
    save->is_ended = true;
    save->done_ns = fsti_now_ns() - save->start_ns;
    bool is_unheard =
        status != FST_OK && save->is_closed && !save->is_told && status != FST_E_CANCELLED;
    pthread_cond_broadcast(&save->changed);
    pthread_mutex_unlock(&save->lock);
    if (is_unheard) report_untold(save);
    unref_save(save);
    return NULL;
}

static uint32_t helper_count_of(const fst_async_options *options) {
    bool copies = options->stage == FST_STAGE_COPY;
    uint32_t count = options->thread_count;
    if (count == 0) count = copies ? (uint32_t)fsti_min(fsti_cpu_count(), COPY_THREADS_DEFAULT) : 1;
    if (count > THREAD_COUNT_MAX) count = THREAD_COUNT_MAX;
    return copies ? count - 1 : count; // the caller is one of them
}

/// Threads that can't be started are not missed where the caller copies.
static void start_helpers(fst_async_save *save) {
    uint32_t wanted = helper_count_of(&save->options);
    while (save->helper_count < wanted &&
           fsti_thread_start(&save->helpers[save->helper_count], help_copying, save) == 0)
        save->helper_count++;
}

// ---- the calls ----

/// Finds which files the save replaces, for its order.
static fst_status find_target(fst_async_save *save, fst_error *error) {
    const char *path = save->writer->target.published[0];
    char resolved[PATH_MAX];
    save->path = fsti_string_copy(path, strlen(path));
    if (save->path == NULL) return fsti_error_memory(error, strlen(path));
    save->is_set = save->writer->contents.file_count > 1;
    bool follows = save->writer->target.folder == NULL && save->writer->options.replace_link == 0;
    if (!save->writer->target.kind->resolve(path, follows, resolved)) return FST_OK;
    save->target = fsti_string_copy(resolved, strlen(resolved));
    return save->target == NULL ? fsti_error_memory(error, sizeof resolved) : FST_OK;
}

/// Plans the writer and its snapshot. The save has its pool and its options.
static fst_status plan_save(fst_async_save *save, const fsti_async_request *request,
                            fst_error *error) {
    fst_save_options own = *request->options.save;
    if (own.manifest != NULL) {
        save->manifest = fsti_string_copy(own.manifest, strlen(own.manifest));
        if (save->manifest == NULL) return fsti_error_memory(error, 64);
        own.manifest = save->manifest;
    }
    save_request planned = {.path = request->path,
                            .tensors = request->tensors,
                            .tensor_count = request->tensor_count,
                            .options = &own,
                            .source = {.kind = &fsti_source_snapshot}};
    FST_TRY(fsti_writer_plan(&planned, &save->writer, error));
    save->bytes_total = save->writer->progress.bytes_total;
    FST_TRY(find_target(save, error));
    FST_TRY(fsti_save_manifest_check(save->writer, save->manifest, error));
    const fst_async_options *options = &save->options;
    uint64_t memory = options->stage == FST_STAGE_NONE ? FSTI_BLOCK_COUNT_MIN * FSTI_BLOCK_BYTES
                                                       : options->memory_bytes;
    fsti_snapshot_options snapshot = {.pool = save->pool,
                                      .memory_bytes = memory,
                                      .is_guarded = options->stage != FST_STAGE_COPY,
                                      .is_unchanged = options->is_unchanged,
                                      .context = options->context};
    return fsti_snapshot_source_open(save->writer, &snapshot, error);
}

static fst_status open_pool(fst_async_save *save, fst_error *error) {
    fst_staging_pool *given = save->options.pool;
    if (given == NULL) return fsti_staging_pool_open(0, 0, &save->pool, error);
    FST_TRY(fsti_staging_pool_check_owner(given, error));
    save->pool = fsti_staging_pool_ref(given);
    return FST_OK;
}

static fst_status check_data(const fsti_async_request *request, fst_error *error) {
    for (size_t i = 0; i < request->tensor_count; i++)
        if (request->tensors[i].data == NULL)
            return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                                  "tensor %zu has no data: an asynchronous save needs the data of "
                                  "every tensor",
                                  i);
    if (request->options.save->others_write != 0)
        return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                              "a file that other processes write parts of can't be saved "
                              "asynchronously: start a thread for it");
    return FST_OK;
}

static fst_async_save *make_save(const fsti_async_request *request) {
    fst_async_save *save = fsti_alloc_zeroed(1, sizeof *save);
    pthread_condattr_t attributes;
    if (save == NULL) return NULL;
    fsti_refcount_init(&save->refs);
    save->owner = getpid();
    save->start_ns = fsti_now_ns();
    save->options = request->options;
    save->options.save = NULL;
    pthread_mutex_init(&save->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&save->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    return save;
}

/// Starts the threads: the writing one last, as it ends the save.
static fst_status start_threads(fst_async_save *save, fst_error *error) {
    pthread_t writing;
    enter_running(save);
    start_helpers(save);
    fsti_refcount_ref(&save->refs);
    int failure = fsti_thread_start(&writing, write_files, save);
    if (failure == 0) {
        (void)pthread_detach(writing);
        return FST_OK;
    }
    fst_error own;
    fst_status status = fsti_error_thread(&own, failure, save->path);
    close_writer(save, status, &own);
    leave_running(save);
    pthread_mutex_lock(&save->lock);
    save->is_ended = true; // a save that was started meanwhile may wait for this one
    pthread_cond_broadcast(&save->changed);
    pthread_mutex_unlock(&save->lock);
    if (error != NULL) *error = own;
    unref_save(save); // the reference that the thread would have had
    return status;
}

fst_status fsti_async_save_start(const fsti_async_request *request, fst_async_save **out,
                                 fst_error *error) {
    FST_TRY(check_data(request, error));
    fst_async_save *save = make_save(request);
    if (save == NULL) return fsti_error_memory(error, sizeof *save);
    fst_status status = open_pool(save, error);
    if (status == FST_OK) status = plan_save(save, request, error);
    if (status != FST_OK)
        fsti_writer_close(save->writer);
    else
        status = start_threads(save, error);
    if (status != FST_OK) {
        unref_save(save);
        return status;
    }
    // Bytes that no thread copies are copied here.
    bool copies = save->options.stage == FST_STAGE_COPY;
    uint32_t limit_ms = save->options.start_timeout_ms;
    atomic_fetch_add(&save->blocked_ns, fsti_now_ns() - save->start_ns);
    if (copies || save->helper_count == 0)
        (void)!fsti_async_save_stage(save, copies && limit_ms > 0 ? (int64_t)limit_ms : -1, NULL);
    *out = save; // whatever went wrong meanwhile is reported by the handle
    return FST_OK;
}

fst_status fsti_async_save_wait(fst_async_save *save, int64_t timeout_ms, fst_error *error) {
    FST_TRY(check_owner(save, error));
    uint64_t deadline_ns = deadline_of(timeout_ms);
    pthread_mutex_lock(&save->lock);
    while (!save->is_ended) {
        int64_t left = ms_until(deadline_ns);
        if (left == 0) break;
        struct timespec deadline = fsti_deadline_after(left);
        if (left < 0)
            pthread_cond_wait(&save->changed, &save->lock);
        else
            pthread_cond_timedwait(&save->changed, &save->lock, &deadline);
    }
    bool is_ended = save->is_ended;
    fst_status status = save->status;
    if (is_ended) save->is_told = true;
    if (is_ended && status != FST_OK && error != NULL) *error = save->error;
    pthread_mutex_unlock(&save->lock);
    if (is_ended) return status;
    return fsti_error_set(error, FST_E_TIMEOUT, FSTI_NO_LOCATION, "the save is not done yet");
}

void fsti_async_save_cancel(fst_async_save *save) {
    fst_error why;
    if (save->owner != getpid()) return;
    fsti_error_set(&why, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled");
    atomic_store(&save->is_cancelled, true);
    pthread_mutex_lock(&save->lock);
    if (!save->is_ending) {
        fsti_snapshot_stop(save->writer->source.snapshot, FST_E_CANCELLED, &why);
        if (save->is_created)
            fsti_writer_cancel(save->writer);
        else
            atomic_store(&save->writer->progress.is_cancelled, true);
    }
    pthread_mutex_unlock(&save->lock);
}

void fsti_async_save_close(fst_async_save *save) {
    // In a child of fork() its locks may be held by threads that are not there: it is left alone.
    if (save == NULL || save->owner != getpid()) return;
    (void)!copy_in_turn(save, UINT64_MAX, NULL);
    pthread_mutex_lock(&save->lock);
    save->is_closed = true;
    bool is_unheard = save->is_ended && save->status != FST_OK && !save->is_told &&
                      save->status != FST_E_CANCELLED;
    pthread_mutex_unlock(&save->lock);
    if (is_unheard) report_untold(save);
    unref_save(save);
}

static fst_async_state state_of(const fst_async_save *save, const fsti_snapshot_stats *copied) {
    if (save->is_ended) return save->status == FST_OK ? FST_ASYNC_DONE : FST_ASYNC_FAILED;
    return copied->staged_at_ns == 0 ? FST_ASYNC_STAGING : FST_ASYNC_WRITING;
}

fst_status fsti_async_save_stats(fst_async_save *save, fst_async_stats *stats, fst_error *error) {
    FST_TRY(check_owner(save, error));
    pthread_mutex_lock(&save->lock);
    fsti_snapshot_stats copied = save->snapshot_stats;
    stats->bytes_written = save->bytes_written;
    if (save->writer != NULL) {
        fsti_snapshot_stats_get(save->writer->source.snapshot, &copied);
        stats->bytes_written = fsti_progress_bytes(&save->writer->progress);
    }
    stats->state = state_of(save, &copied);
    stats->stage = save->options.stage;
    stats->blocked_ns = atomic_load(&save->blocked_ns);
    stats->staged_ns = copied.staged_at_ns == 0 ? 0 : copied.staged_at_ns - save->start_ns;
    stats->done_ns = save->done_ns;
    stats->bytes_total = save->bytes_total;
    stats->bytes_staged = copied.bytes_staged;
    stats->memory_limit_bytes = copied.memory_limit_bytes;
    stats->memory_peak_bytes = copied.memory_peak_bytes;
    stats->memory_wait_count = copied.memory_wait_count;
    stats->memory_wait_ns = copied.memory_wait_ns;
    stats->thread_count = save->helper_count;
    pthread_mutex_unlock(&save->lock);
    return FST_OK;
}

fst_status fsti_async_save_writer_stats(fst_async_save *save, fst_save_stats *stats,
                                        fst_error *error) {
    FST_TRY(check_owner(save, error));
    pthread_mutex_lock(&save->lock);
    bool is_ended = save->is_ended;
    *stats = save->writer_stats;
    pthread_mutex_unlock(&save->lock);
    if (is_ended) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                          "the save has not ended: its writer is still counting");
}
