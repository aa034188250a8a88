// SPDX-License-Identifier: Apache-2.0
/// Copies of the tensors, by callers and helping threads, and waits for the saves that they are of.
#include "async_state.h"

/// Begins to use the snapshot; false when the save is ending, with what it came to.
static bool begin_use(fst_async_save *save, fst_status *status, fst_error *error) {
    pthread_mutex_lock(&save->lock);
    bool may_use = !save->is_ending;
    if (may_use) save->snapshot_users++;
    *status = save->status;
    if (!may_use && save->status != FST_OK && error != NULL) *error = save->error;
    pthread_mutex_unlock(&save->lock);
    return may_use;
}

static void end_use(fst_async_save *save) {
    pthread_mutex_lock(&save->lock);
    save->snapshot_users--;
    if (save->is_ending) pthread_cond_broadcast(&save->changed);
    pthread_mutex_unlock(&save->lock);
}

/// Waits for the end of the threads that read the tensors of a save that is ending.
static fst_status await_readers(fst_async_save *save, uint64_t deadline_ns, fst_error *error) {
    struct timespec deadline = {.tv_sec = (time_t)(deadline_ns / 1000000000u),
                                .tv_nsec = (long)(deadline_ns % 1000000000u)};
    int failure = 0;
    pthread_mutex_lock(&save->lock);
    while (save->writer != NULL && failure == 0) {
        if (deadline_ns == UINT64_MAX)
            pthread_cond_wait(&save->changed, &save->lock);
        else
            failure = pthread_cond_timedwait(&save->changed, &save->lock, &deadline);
    }
    bool is_late = save->writer != NULL;
    pthread_mutex_unlock(&save->lock);
    if (!is_late) return FST_OK;
    return fsti_error_set(error, FST_E_TIMEOUT, FSTI_NO_LOCATION,
                          "the tensors of a save that is ending are still being read");
}

/// Waits until no thread reads the tensors of a save that is cancelled or ending, or asks for them.
/// The thread that writes may go on.
static fst_status await_copies(fst_async_save *save, uint64_t deadline_ns) {
    pthread_mutex_lock(&save->lock);
    fsti_snapshot *snapshot = save->writer == NULL ? NULL : save->writer->source.snapshot;
    if (snapshot != NULL) save->snapshot_users++;
    pthread_mutex_unlock(&save->lock);
    if (snapshot == NULL) return FST_OK;
    bool in_time = fsti_snapshot_await_copies(snapshot, deadline_ns);
    end_use(save);
    return in_time ? FST_OK : FST_E_TIMEOUT;
}

/// Copies what is left of one save's tensors. A save that has failed needs no copies.
static fst_status copy_one(fst_async_save *save, uint64_t deadline_ns, fst_error *error) {
    fst_status status;
    if (begin_use(save, &status, error)) {
        status = fsti_snapshot_copy(save->writer->source.snapshot, deadline_ns, error);
        end_use(save);
    } else if (fsti_async_in_callback()) { // the save may wait for this callback
        if (await_copies(save, deadline_ns) != FST_OK)
            return fsti_error_set(error, FST_E_TIMEOUT, FSTI_NO_LOCATION,
                                  "the tensors of a save that is ending are still being read");
    } else {
        FST_TRY(await_readers(save, deadline_ns, error));
    }
    return status;
}

/// Whether some of a save's tensors are left to copy.
static bool needs_copies(fst_async_save *save) {
    pthread_mutex_lock(&save->lock);
    bool is_needed = !save->is_ending && !fsti_snapshot_is_over(save->writer->source.snapshot);
    pthread_mutex_unlock(&save->lock);
    return is_needed;
}

fst_status fsti_async_copy_earlier(fst_async_save *save, uint64_t deadline_ns) {
    while (!save->has_own_memory && !atomic_load(&save->is_cancelled)) {
        fst_async_save *next = fsti_async_next_to_copy(save);
        bool is_last = next == save;
        fst_status status =
            is_last ? FST_OK : copy_one(next, fsti_min(deadline_ns, fsti_async_next_check()), NULL);
        if (!is_last && status != FST_E_TIMEOUT) atomic_store(&next->is_copied, true);
        fsti_async_unref(next);
        if (is_last) break;
        if (status == FST_E_TIMEOUT && fsti_now_ns() >= deadline_ns) return status;
    }
    return FST_OK;
}

fst_status fsti_async_copy(fst_async_save *save, uint64_t deadline_ns, fst_error *error) {
    if (needs_copies(save) &&
        (fsti_async_is_blocked(save) || fsti_async_copy_earlier(save, deadline_ns) != FST_OK))
        return fsti_error_set(error, FST_E_TIMEOUT, FSTI_NO_LOCATION,
                              "the tensors are not staged yet: an earlier save is being copied");
    fst_status status = copy_one(save, deadline_ns, error);
    if (status != FST_E_TIMEOUT) atomic_store(&save->is_copied, true);
    return status;
}

void fsti_async_end_reading(fst_async_save *save) {
    if (fsti_async_copy(save, UINT64_MAX, NULL) != FST_E_TIMEOUT) return;
    fsti_async_save_cancel(save); // it can't go on before this callback returns
    (void)!await_copies(save, UINT64_MAX);
}

/// What decides for which saves one waits: see fsti_async_earlier_at().
typedef struct save_wait_scope {
    uint64_t order_ns;
    bool publishes;
} save_wait_scope;

/// Waits for the saves of a place that were started before a time. Copies what is left of their
/// tensors, because perhaps no other thread does: a signal handler may have interrupted the caller.
static fst_status await_place(const save_place *place, const save_wait_scope *scope,
                              save_progress *progress, fst_error *error) {
    fst_status status = FST_OK;
    while (status == FST_OK) {
        fst_async_save *earlier = fsti_async_earlier_at(place, scope->order_ns, scope->publishes);
        if (earlier == NULL) break;
        if (fsti_async_in_cancelled_callback()) { // its close() may wait for this callback
            fsti_async_unref(earlier);
            return fsti_error_set(error, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled");
        }
        (void)!fsti_async_copy(earlier, fsti_async_next_check(), NULL);
        fsti_async_await_a_little(earlier);
        fsti_async_unref(earlier);
        status = fsti_progress_report(progress, 0, error);
    }
    return status;
}

fst_status fsti_async_await_link(fst_writer *writer, fst_error *error) {
    save_place place;
    save_wait_scope scope = {.order_ns = fsti_async_order_ns()};
    if (scope.order_ns == 0) return FST_OK;
    fst_status status = fsti_async_find_link(writer, &place, error);
    if (status == FST_OK) status = await_place(&place, &scope, &writer->progress, error);
    fsti_async_clear_place(&place);
    return status;
}

fst_status fsti_async_await_earlier(fst_writer *writer, fst_error *error) {
    save_place place;
    save_wait_scope scope = {.order_ns = fsti_async_order_ns(),
                             .publishes = writer->publication.role == ROLE_ADOPTED};
    if (scope.order_ns == 0) return FST_OK;
    // What is edited was read at the beginning, so a save that is started later comes later.
    if (writer->source.origin != NULL)
        scope.order_ns = fsti_min(scope.order_ns, writer->progress.start_ns);
    fst_status status = fsti_async_find_place(writer, &place, error);
    if (status == FST_OK) status = await_place(&place, &scope, &writer->progress, error);
    fsti_async_clear_place(&place);
    return status;
}

fst_status fsti_async_await_file(const char *path, fst_progress_callback report,
                                 void *report_context, fst_error *error) {
    save_place place;
    save_progress progress = {.report = report, .report_context = report_context};
    save_wait_scope scope = {.order_ns = fsti_async_order_ns()};
    if (scope.order_ns == 0) return FST_OK;
    fsti_progress_init(&progress);
    fst_status status = fsti_async_find_file(path, &place, error);
    if (status == FST_OK) status = await_place(&place, &scope, &progress, error);
    fsti_progress_destroy(&progress);
    fsti_async_clear_place(&place);
    return status;
}
