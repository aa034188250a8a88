// SPDX-License-Identifier: Apache-2.0
/// Reserves the disk space of a change in place, so that a full disk is an error before anything is
/// changed. Only sparse files need new blocks.
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "apply_job.h"

#define STAT_BLOCK_BYTES 512

static bool is_sparse(int fd) {
    struct stat info;
    return fstat(fd, &info) == 0 && (off_t)info.st_blocks * STAT_BLOCK_BYTES < info.st_size;
}

fst_status fsti_apply_reserve(const apply_job *job, fst_error *error) {
    for (size_t i = 0; i < job->tensor_count; i++) {
        const bound_tensor *tensor = &job->tensors[i];
        int fd = job->descriptors[tensor->file], failure = 0;
        if (tensor->size_bytes == 0 || !is_sparse(fd)) continue;
        do {
            failure =
                fallocate(fd, 0, (off_t)tensor->offset, (off_t)tensor->size_bytes) == 0 ? 0 : errno;
        } while (failure == EINTR);
        // Without such a call in the file system, a full disk is found later and rolled back.
        if (failure != 0 && failure != EOPNOTSUPP && failure != ENOSYS)
            return fsti_error_errno(error, failure,
                                    fsti_file_path(job->base->files[tensor->file].file),
                                    "reserving the space of changed tensors");
    }
    return FST_OK;
}
