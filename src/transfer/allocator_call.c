// SPDX-License-Identifier: Apache-2.0
/// Calls of the caller's allocator.
#include "pipeline.h"

/// A call of an allocator that this thread is in.
typedef struct allocator_call {
    const pthread_mutex_t *lock; ///< identifies the load
    const struct allocator_call *outer;
} allocator_call;

static _Thread_local const allocator_call *current_call;

fst_status fsti_pipeline_check_caller(const fsti_pipeline *pipeline, fst_error *error) {
    const allocator_call *call = current_call;
    while (call != NULL && call->lock != pipeline->job.allocator_lock) call = call->outer;
    if (call == NULL) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                          "a load's allocator cannot wait for the load");
}

fst_status fsti_pipeline_call_allocator(fsti_pipeline *pipeline, const fsti_foreign *request,
                                        fsti_buffer **out, fst_error *error) {
    const allocator_call call = {pipeline->job.allocator_lock, current_call};
    pthread_mutex_lock(pipeline->job.allocator_lock);
    current_call = &call;
    fst_status status = fsti_buffer_foreign(request, out, error);
    current_call = call.outer;
    pthread_mutex_unlock(pipeline->job.allocator_lock);
    return status;
}
