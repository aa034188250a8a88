// SPDX-License-Identifier: Apache-2.0
/// Progress reports: see work_progress.h.
#include "work_progress.h"

void fsti_work_begin(work_progress *work, const fsti_check_progress *listener,
                     uint64_t total_bytes) {
    *work = (work_progress){.listener = listener, .total_bytes = total_bytes};
    pthread_mutex_init(&work->lock, NULL);
}

fst_status fsti_work_add(work_progress *work, uint64_t size_bytes, fst_error *error) {
    const fsti_check_progress *listener = work->listener;
    if (listener->callback == NULL) return FST_OK;
    pthread_mutex_lock(&work->lock);
    work->done_bytes += size_bytes;
    // A file that grew is refused in the end; until then never report more than 100 %.
    uint64_t done = fsti_min(work->done_bytes, work->total_bytes);
    if (!work->is_cancelled)
        work->is_cancelled =
            listener->callback(listener->context, done, work->total_bytes, 0, 0) != 0;
    bool is_cancelled = work->is_cancelled;
    pthread_mutex_unlock(&work->lock);
    return is_cancelled ? fsti_error_set(error, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled")
                        : FST_OK;
}

void fsti_work_end(work_progress *work) { pthread_mutex_destroy(&work->lock); }
