// SPDX-License-Identifier: Apache-2.0
/// References to asynchronous saves, their ownership and cancellation.
#include <unistd.h>

#include "async_state.h"

void fsti_async_unref(fst_async_save *save) {
    if (save == NULL || !fsti_refcount_unref(&save->refs)) return;
    fsti_staging_pool_unref(save->pool);
    pthread_mutex_destroy(&save->lock);
    pthread_cond_destroy(&save->changed);
    fsti_async_clear_place(&save->place);
    fsti_free(save->manifest);
    fsti_free(save);
}

fst_status fsti_async_check_owner(const fst_async_save *save, fst_error *error) {
    if (save->owner == getpid()) return FST_OK;
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                          "the save was started before fork(): it belongs to the parent");
}

bool fsti_async_is_unheard(const fst_async_save *save) {
    return save->is_ended && save->is_closed && !save->is_told && save->status != FST_OK &&
           save->status != FST_E_CANCELLED;
}

void fsti_async_log_unheard(const fst_async_save *save) {
    fsti_log(FST_LOG_WARNING, "an asynchronous save failed, and its result was never requested: %s",
             save->error.message);
}

fst_async_save *fsti_async_make(const fsti_async_request *request) {
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
            atomic_store(&save->writer->progress.cancel_requested, true);
    }
    pthread_mutex_unlock(&save->lock);
}
