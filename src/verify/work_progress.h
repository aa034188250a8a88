// SPDX-License-Identifier: Apache-2.0
/// How far several threads have come with what they digest: private to the verify room.
#ifndef FSTI_WORK_PROGRESS_H
#define FSTI_WORK_PROGRESS_H

#include <pthread.h>

#include "verify.h"

typedef struct work_progress {
    const fsti_check_progress *listener;
    pthread_mutex_t lock; ///< for what follows
    uint64_t done_bytes, total_bytes;
    bool is_cancelled;
} work_progress;

void fsti_work_begin(work_progress *work, const fsti_check_progress *listener,
                     uint64_t total_bytes);
/// Some bytes more, from any thread. FST_E_CANCELLED once the listener wants no more.
fst_status fsti_work_add(work_progress *work, uint64_t size_bytes, fst_error *error);
void fsti_work_end(work_progress *work);

#endif
