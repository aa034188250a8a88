// SPDX-License-Identifier: Apache-2.0
/// The calls on asynchronous saves: start, stage, wait, close, statistics.
#include <string.h>
#include <unistd.h>

#include "async_state.h"

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

fst_status fsti_async_save_stage(fst_async_save *save, int64_t timeout_ms, fst_error *error) {
    uint64_t start = fsti_now_ns();
    FST_TRY(fsti_async_check_owner(save, error));
    fst_status status = fsti_async_copy(save, deadline_of(timeout_ms), error);
    atomic_fetch_add(&save->blocked_ns, fsti_now_ns() - start);
    return status;
}

// ---- the start ----

/// Asks the program whether the tensors are unchanged.
static int ask_program(void *context) {
    const fst_async_save *save = context;
    const fst_async_save *before = fsti_async_set_callback_save(save);
    int is_unchanged = save->options.is_unchanged(save->options.context);
    fsti_async_set_callback_save(before);
    return is_unchanged;
}

/// Whether an earlier save may replace the link at the path.
static fst_status is_replaced(const fst_async_save *save, bool *out, fst_error *error) {
    save_place place;
    fst_status status = fsti_async_find_link(save->writer, &place, error);
    fst_async_save *earlier =
        status == FST_OK ? fsti_async_earlier_at(&place, UINT64_MAX, false) : NULL;
    *out = earlier != NULL;
    fsti_async_unref(earlier);
    fsti_async_clear_place(&place);
    return status;
}

/// Keeps what the path is a link to now: the program may change the link before the save is
/// written.
static fst_status follow_link(fst_async_save *save, fst_error *error) {
    const char *followed = save->place.link;
    bool is_gone = false;
    if (followed == NULL) return FST_OK;
    FST_TRY(is_replaced(save, &is_gone, error));
    if (is_gone) return FST_OK;
    save->writer->target.followed = fsti_string_copy(followed, strlen(followed));
    if (save->writer->target.followed == NULL) return fsti_error_memory(error, strlen(followed));
    fsti_async_forget_link(&save->place); // whatever becomes of it
    return FST_OK;
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
    FST_TRY(fsti_async_find_place(save->writer, &save->place, error));
    FST_TRY(follow_link(save, error));
    FST_TRY(fsti_save_manifest_check(save->writer, save->manifest, error));
    const fst_async_options *options = &save->options;
    uint64_t memory = options->stage == FST_STAGE_NONE ? FSTI_BLOCK_COUNT_MIN * FSTI_BLOCK_BYTES
                                                       : options->memory_bytes;
    if (save->has_own_memory) memory = 0;
    fsti_snapshot_options snapshot = {.pool = save->pool,
                                      .memory_bytes = memory,
                                      .is_guarded = options->stage != FST_STAGE_COPY,
                                      .is_unchanged =
                                          options->is_unchanged == NULL ? NULL : ask_program,
                                      .context = save};
    FST_TRY(fsti_snapshot_source_open(save->writer, &snapshot, error));
    return save->has_own_memory && !fsti_snapshot_fits(save->writer->source.snapshot)
               ? fsti_error_memory(error, (size_t)save->bytes_total)
               : FST_OK;
}

static fst_status open_pool(fst_async_save *save, fst_error *error) {
    fst_staging_pool *given = save->options.pool;
    // In a callback the pool's memory may be that of a save that waits for this thread, and nothing
    // may be written meanwhile, so that memory could be used again.
    save->has_own_memory = fsti_async_in_callback();
    if (given == NULL || save->has_own_memory)
        return fsti_staging_pool_open(0, 0, &save->pool, error);
    FST_TRY(fsti_staging_pool_check_owner(given, error));
    save->pool = fsti_staging_pool_ref(given);
    return FST_OK;
}

static fst_status check_request(const fsti_async_request *request, fst_error *error) {
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
    if (request->options.publish != NULL && request->options.save->manifest != NULL)
        return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                              "the process that publishes the files creates their manifest: "
                              "fst_publish_options.manifest");
    return FST_OK;
}

fst_status fsti_async_save_start(const fsti_async_request *request, fst_async_save **out,
                                 fst_error *error) {
    FST_TRY(check_request(request, error));
    fst_async_save *save = fsti_async_make(request);
    if (save == NULL) return fsti_error_memory(error, sizeof *save);
    fst_status status = open_pool(save, error);
    if (status == FST_OK) status = plan_save(save, request, error);
    if (status != FST_OK)
        fsti_writer_close(save->writer);
    else
        status = fsti_async_start_threads(save, error);
    if (status != FST_OK) {
        fsti_async_unref(save);
        return status;
    }
    bool copies = save->options.stage == FST_STAGE_COPY;
    uint32_t limit_ms = save->options.start_timeout_ms;
    atomic_fetch_add(&save->blocked_ns, fsti_now_ns() - save->start_ns);
    // Bytes that no thread copies are copied here.
    bool may_return = copies && limit_ms > 0 && save->helper_count > 0;
    if (save->options.overlap == FST_OVERLAP_SUPERSEDE) fsti_async_cancel_earlier(save);
    if (copies || save->helper_count == 0)
        (void)!fsti_async_save_stage(save, may_return ? (int64_t)limit_ms : -1, NULL);
    *out = save; // whatever went wrong meanwhile is reported by the handle
    return FST_OK;
}

// ---- calls on a running save ----

fst_status fsti_async_save_wait(fst_async_save *save, int64_t timeout_ms, fst_error *error) {
    FST_TRY(fsti_async_check_owner(save, error));
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

void fsti_async_save_close(fst_async_save *save) {
    // In a child of fork() its locks may be held by threads that are not there: it is left alone.
    if (save == NULL || save->owner != getpid()) return;
    fsti_async_end_reading(save);
    pthread_mutex_lock(&save->lock);
    save->is_closed = true;
    bool is_unheard = fsti_async_is_unheard(save);
    pthread_mutex_unlock(&save->lock);
    if (is_unheard) fsti_async_log_unheard(save);
    fsti_async_unref(save);
}

static fst_async_state state_of(const fst_async_save *save, const fsti_snapshot_stats *copied) {
    if (save->is_ended) return save->status == FST_OK ? FST_ASYNC_DONE : FST_ASYNC_FAILED;
    return copied->staged_at_ns == 0 ? FST_ASYNC_STAGING : FST_ASYNC_WRITING;
}

fst_status fsti_async_save_stats(fst_async_save *save, fst_async_stats *stats, fst_error *error) {
    FST_TRY(fsti_async_check_owner(save, error));
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
    FST_TRY(fsti_async_check_owner(save, error));
    pthread_mutex_lock(&save->lock);
    bool is_ended = save->is_ended;
    *stats = save->writer_stats;
    pthread_mutex_unlock(&save->lock);
    if (is_ended) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                          "the save has not ended: its writer is still counting");
}
