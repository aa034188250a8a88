// SPDX-License-Identifier: Apache-2.0
/// Copies of the tensors, by callers and helping threads.
#include "async_state.h"

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

/// Copies what is left of one save's tensors. A save that has failed needs no copies.
static fst_status copy_one(fst_async_save *save, uint64_t deadline_ns, fst_error *error) {
    fst_status status;
    if (!begin_use(save, &status, error)) return status;
    status = fsti_snapshot_copy(save->writer->source.snapshot, deadline_ns, error);
    end_use(save);
    return status;
}

fst_status fsti_async_copy_earlier(fst_async_save *save, uint64_t deadline_ns) {
    for (;;) {
        fst_async_save *next = fsti_async_next_to_copy(save);
        fst_status status = next == save ? FST_OK : copy_one(next, deadline_ns, NULL);
        bool is_over = next == save || status == FST_E_TIMEOUT;
        if (!is_over) atomic_store(&next->is_copied, true);
        fsti_async_unref(next);
        if (is_over) return status;
    }
}

fst_status fsti_async_copy(fst_async_save *save, uint64_t deadline_ns, fst_error *error) {
    if (fsti_async_copy_earlier(save, deadline_ns) != FST_OK)
        return fsti_error_set(error, FST_E_TIMEOUT, FSTI_NO_LOCATION,
                              "the tensors are not staged yet: an earlier save is being copied");
    fst_status status = copy_one(save, deadline_ns, error);
    if (status != FST_E_TIMEOUT) atomic_store(&save->is_copied, true);
    return status;
}
