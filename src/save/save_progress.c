// SPDX-License-Identifier: Apache-2.0
#include "save_progress.h"

void fsti_progress_init(save_progress *progress) {
    pthread_mutex_init(&progress->lock, NULL);
    pthread_mutex_init(&progress->report_lock, NULL);
    progress->start_ns = fsti_now_ns();
}

void fsti_progress_destroy(save_progress *progress) {
    pthread_mutex_destroy(&progress->lock);
    pthread_mutex_destroy(&progress->report_lock);
}

/// Lock order: report_lock, then lock. The first is held during the callback, so that reports of
/// several threads do not overtake each other; the second is not, because the callback may be slow.
fst_status fsti_progress_report(void *context, uint64_t size_bytes, fst_error *error) {
    save_progress *progress = context;
    int stop = 0;
    if (progress->report != NULL) pthread_mutex_lock(&progress->report_lock);
    pthread_mutex_lock(&progress->lock);
    progress->bytes_done += size_bytes;
    uint64_t done = progress->bytes_done;
    size_t tensors_done = progress->tensors_done;
    pthread_mutex_unlock(&progress->lock);
    if (progress->report != NULL) {
        stop = progress->report(progress->report_context, done, progress->bytes_total, tensors_done,
                                progress->tensor_count);
        pthread_mutex_unlock(&progress->report_lock);
    }
    if (stop == 0 && !atomic_load(&progress->cancel_requested)) return FST_OK;
    atomic_store(&progress->cancel_reported, true);
    return fsti_error_set(error, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled");
}

void fsti_progress_add_tensors(save_progress *progress, size_t count) {
    pthread_mutex_lock(&progress->lock);
    progress->tensors_done += count;
    pthread_mutex_unlock(&progress->lock);
}

fst_status fsti_progress_sync(save_progress *progress, fsti_output *output, fst_error *error) {
    uint64_t start = fsti_now_ns();
    fst_status status = fsti_output_sync(output, error);
    pthread_mutex_lock(&progress->lock);
    progress->sync_count++;
    progress->sync_ns += fsti_now_ns() - start;
    pthread_mutex_unlock(&progress->lock);
    return status;
}

uint64_t fsti_progress_bytes(save_progress *progress) {
    pthread_mutex_lock(&progress->lock);
    uint64_t done = progress->bytes_done;
    pthread_mutex_unlock(&progress->lock);
    return done;
}
