// SPDX-License-Identifier: Apache-2.0
/// An application to files in progress: private to apply_tensor.c and apply_files.c.
#ifndef FSTI_APPLY_JOB_H
#define FSTI_APPLY_JOB_H

#include "apply_journal.h"

typedef struct apply_job {
    const fst_delta *delta;
    delta_span span;
    const fst_model *base;
    bound_tensor *tensors;
    size_t tensor_count;
    int *descriptors;      ///< of the model's files; -1: not opened
    apply_journal journal; ///< journal.map is NULL for new files, and where nothing is written
    bool is_written;       ///< false: only verified
    bool makes_files;      ///< the descriptors are of copies
    uint32_t thread_count;
    atomic_uint_least64_t bytes_read, bytes_written, bytes_hashed;
} apply_job;

/// Makes all tensors new and verifies them; without a journal only verifies.
fst_status fsti_apply_forward(apply_job *job, fst_error *error);
/// Makes all changed blocks old again.
fst_status fsti_apply_backward(apply_job *job, fst_error *error);
/// Brings blocks that were being written back to their old bytes, and turns the slots into records.
/// After a kill or a failure, before either of the others.
fst_status fsti_apply_settle(apply_job *job, fst_error *error);

#endif
