// SPDX-License-Identifier: Apache-2.0
/// Progress of several digesting threads. Private to the verify module.
#ifndef FSTI_WORK_PROGRESS_H
#define FSTI_WORK_PROGRESS_H

#include <pthread.h>

#include "folder_check.h"

typedef struct work_progress {
    const fsti_check_progress *listener;
    pthread_mutex_t lock; ///< protects the fields below
    uint64_t done_bytes, total_bytes;
    bool is_cancelled;
} work_progress;

void fsti_work_begin(work_progress *work, const fsti_check_progress *listener,
                     uint64_t total_bytes);
/// Adds bytes, from any thread. FST_E_CANCELLED once the listener cancels.
fst_status fsti_work_add(work_progress *work, uint64_t size_bytes, fst_error *error);
void fsti_work_end(work_progress *work);

#endif
