// SPDX-License-Identifier: Apache-2.0
/// Calls of the caller's allocator.
#include "pipeline.h"

/// Its address identifies the thread.
static _Thread_local char thread_mark;

fst_status fsti_pipeline_check_caller(const fsti_pipeline *pipeline, fst_error *error) {
    if (atomic_load(&pipeline->job.allocator_lock->caller) != (uintptr_t)&thread_mark)
        return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                          "a load's allocator cannot wait for the load");
}

fst_status fsti_pipeline_call_allocator(fsti_pipeline *pipeline, const fsti_foreign *request,
                                        fsti_buffer **out, fst_error *error) {
    fsti_allocator_lock *lock = pipeline->job.allocator_lock;
    pthread_mutex_lock(&lock->mutex);
    atomic_store(&lock->caller, (uintptr_t)&thread_mark);
    fst_status status = fsti_buffer_foreign(request, out, error);
    atomic_store(&lock->caller, 0);
    pthread_mutex_unlock(&lock->mutex);
    return status;
}
