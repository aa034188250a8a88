// SPDX-License-Identifier: Apache-2.0
/// The state of one update of files by a delta. Private to apply_tensor.c and apply_files.c.
#ifndef FSTI_APPLY_JOB_H
#define FSTI_APPLY_JOB_H

#include "apply_journal.h"

typedef struct apply_job {
    const fst_delta *delta;
    delta_span span;
    const fst_model *base;
    bound_tensor *tensors;
    size_t tensor_count;
    uint64_t block_count; ///< of all tensors
    const sync_folder *sync;
    int *descriptors;               ///< one for each file of the model; -1: not opened
    fsti_delta_stamp *stamps;       ///< of the files that were copied
    struct file_check *file_checks; ///< one for each file, in apply_check.c
    apply_journal journal;          ///< journal.map is NULL for new files and for checks
    bool is_written;                ///< false: only verified
    bool rolls_back;                ///< of an update that another process has begun
    bool makes_files;               ///< the descriptors refer to copies of the files
    uint32_t thread_count;
    atomic_uint_least64_t bytes_read, bytes_written, bytes_hashed;
} apply_job;

static inline uint64_t apply_count_blocks(const bound_tensor *tensor) {
    return (tensor->size_bytes + DELTA_BLOCK_BYTES - 1) / DELTA_BLOCK_BYTES;
}

/// The bytes of a block; only the last one of a tensor is smaller.
static inline size_t apply_block_bytes(const bound_tensor *tensor, uint64_t block) {
    return (size_t)fsti_min(DELTA_BLOCK_BYTES, tensor->size_bytes - block * DELTA_BLOCK_BYTES);
}

/// Allocates the blocks of changed tensors in sparse files. FST_E_NO_SPACE if the disk is full.
fst_status fsti_apply_reserve(const apply_job *job, fst_error *error);
/// Makes all tensors new and verifies them; without a journal only verifies.
fst_status fsti_apply_forward(apply_job *job, fst_error *error);
/// Makes all changed blocks old again.
fst_status fsti_apply_backward(apply_job *job, fst_error *error);
/// Restores the old bytes of blocks that were being written, and moves the state of the slots into
/// the records. Call it after a kill or a failure, before either of the functions above.
fst_status fsti_apply_settle(apply_job *job, fst_error *error);
/// Reads a block of a tensor from the checkpoint.
fst_status fsti_apply_read(apply_job *job, const bound_tensor *tensor, uint64_t block,
                           unsigned char *target, fst_error *error);
/// Checks a journal that another process left, before anything is changed: all of its numbers
/// (FST_E_CORRUPT), and the bytes of the files that it has written to. FST_E_FILE_CHANGED if
/// another program has changed them.
fst_status fsti_apply_check(apply_job *job, fst_error *error);
/// FST_E_FILE_CHANGED if a path of the checkpoint does not name the file that was opened.
fst_status fsti_apply_check_names(const apply_job *job, fst_error *error);

#endif
