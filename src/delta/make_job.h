// SPDX-License-Identifier: Apache-2.0
/// The state of one delta that is being made. Private to delta_make.c and make_tensor.c.
#ifndef FSTI_MAKE_JOB_H
#define FSTI_MAKE_JOB_H

#include "delta_private.h"
#include "shard_write.h"

#define MAKE_THREADS_MAX 16u

/// A tensor to be compared.
typedef struct make_task {
    fsti_name name;
    size_t old;  ///< index in the old model
    size_t made; ///< index in the new model, the delta, or the tensors in memory
    uint64_t size_bytes;
    const delta_tensor *tensor; ///< if the new state is a delta: its tensor
} make_task;

typedef struct make_job {
    const fst_delta_make_options *options;
    const fsti_digest_kind *kind;
    fst_model *old, *made; ///< the new model; NULL if the new state is not a checkpoint
    make_task *tasks;
    size_t task_count;
    shard_writer shards[MAKE_THREADS_MAX];
    uint32_t thread_count;
    atomic_uint_least64_t bytes_read, bytes_hashed, tensor_bytes;
} make_job;

/// The work of one thread: takes tensors, compares them, and writes those that changed to the
/// thread's shard. `pool->context` is the job.
fst_status fsti_make_tensors(delta_pool *pool, uint32_t thread, fst_error *error);

#endif
