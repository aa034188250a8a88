// SPDX-License-Identifier: Apache-2.0
/// What a save has done so far, and whether it was cancelled. Private to the save module.
#ifndef FSTI_SAVE_PROGRESS_H
#define FSTI_SAVE_PROGRESS_H

#include <pthread.h>

#include "output/output.h"
#include "stage.h"

typedef struct save_progress {
    // Constant once the writer is open.
    fst_progress_callback report; ///< the caller's; or NULL
    void *report_context;
    uint64_t bytes_total, start_ns;
    size_t tensor_count;

    atomic_bool cancel_requested; ///< by another thread
    atomic_bool cancel_reported;  ///< as FST_E_CANCELLED: the callback is not called again

    pthread_mutex_t report_lock; ///< serializes the callback; taken before `lock`
    pthread_mutex_t lock;        ///< protects the fields below
    stage_counts counts;
    uint64_t bytes_done, total_ns, sync_count, sync_ns, bytes_hashed, bytes_read;
    uint64_t bytes_shared, bytes_copied; ///< of an existing file
    uint64_t bytes_packed;               ///< saved by compression
    size_t tensors_done, leftover_count, step_count;
    char warning[256];
} save_progress;

void fsti_progress_init(save_progress *progress);
void fsti_progress_destroy(save_progress *progress);
/// Counts bytes and calls the callback; FST_E_CANCELLED if that or another thread has cancelled.
/// For stages, copies and stores: `progress` is a save_progress.
fst_status fsti_progress_report(void *progress, uint64_t size_bytes, fst_error *error);
/// Counts finished tensors.
void fsti_progress_add_tensors(save_progress *progress, size_t count);
/// Syncs an output and counts it.
fst_status fsti_progress_sync(save_progress *progress, fsti_output *output, fst_error *error);
/// The bytes that were written so far.
uint64_t fsti_progress_bytes(save_progress *progress);

#endif
