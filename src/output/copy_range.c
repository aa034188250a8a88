// SPDX-License-Identifier: Apache-2.0
/// Copies the rest of another file in the cheapest way: shared blocks, a copy in the kernel (or on
/// a file server), or through memory.
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "io/io.h"
#include "output_private.h"

/// How much the kernel copies per call, so that progress can be reported and the copy cancelled.
#define KERNEL_BYTES ((uint64_t)64 << 20)
#define MEMORY_BYTES ((size_t)1 << 20)

static fst_status report_early_end(const fsti_copy *copy, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = fsti_file_path(copy->source);
    return fsti_error_set(error, FST_E_FILE_CHANGED, location,
                          "the file became shorter while it was copied");
}

/// Copies `size` bytes through memory.
static fst_status copy_through_memory(fsti_output *output, fsti_copy *copy, uint64_t at,
                                      uint64_t size, fst_error *error) {
    char *block = fsti_alloc(MEMORY_BYTES);
    if (block == NULL) return fsti_error_memory(error, MEMORY_BYTES);
    fst_status status = FST_OK;
    while (size > 0 && status == FST_OK) {
        size_t got, wanted = (size_t)fsti_min(size, MEMORY_BYTES);
        status = fsti_file_read(copy->source, block, wanted, copy->source_begin + at, &got, error);
        if (status == FST_OK && got < wanted) status = report_early_end(copy, error);
        if (status == FST_OK)
            status = fsti_output_write(output, block, got, copy->begin + at, error);
        if (status == FST_OK) status = copy->report(copy->context, got, error);
        if (status != FST_OK) break;
        copy->bytes_copied += got;
        copy->call_count++;
        at += got;
        size -= got;
    }
    fsti_free(block);
    return status;
}

/// Shares whole blocks from `at` on. False with the reason if the file system cannot.
static bool share_blocks(const fsti_output *output, fsti_copy *copy, uint64_t at) {
    struct file_clone_range range = {.src_fd = fsti_file_descriptor(copy->source),
                                     .src_offset = copy->source_begin + at,
                                     .src_length = 0, // up to the end
                                     .dest_offset = copy->begin + at};
    if (ioctl(output->fd, FICLONERANGE, &range) == 0) return true;
    bool is_missing = errno == EOPNOTSUPP || errno == ENOTTY || errno == EXDEV;
    snprintf(copy->reason, sizeof copy->reason, "no shared blocks: %s",
             is_missing ? "not supported by the file system" : strerror(errno));
    return false;
}

/// Whether another method may work after copy_file_range() failed with this errno.
static bool is_refusal(int failure) {
    return failure == EXDEV || failure == EINVAL || failure == EOPNOTSUPP || failure == ENOSYS ||
           failure == EPERM || failure == EBADF || failure == ETXTBSY;
}

/// *left: bytes not copied because the kernel does not support it here.
static fst_status copy_in_kernel(fsti_output *output, fsti_copy *copy, uint64_t at, uint64_t *left,
                                 fst_error *error) {
    while (*left > 0) {
        off_t from = (off_t)(copy->source_begin + at), to = (off_t)(copy->begin + at);
        ssize_t got = copy_file_range(fsti_file_descriptor(copy->source), &from, output->fd, &to,
                                      (size_t)fsti_min(*left, KERNEL_BYTES), 0);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && is_refusal(errno)) return FST_OK;
        if (got < 0) return fsti_error_errno(error, errno, output->target.path, "copying");
        // Some file systems return 0 for what they cannot copy.
        if (got == 0) return FST_OK;
        if (output->is_durable)
            (void)sync_file_range(output->fd, (off_t)(copy->begin + at), got,
                                  SYNC_FILE_RANGE_WRITE);
        copy->bytes_copied += (uint64_t)got;
        copy->call_count++;
        at += (uint64_t)got;
        *left -= (uint64_t)got;
        FST_TRY(copy->report(copy->context, (uint64_t)got, error));
    }
    return FST_OK;
}

fst_status fsti_output_copy(fsti_output *output, fsti_copy *copy, fst_error *error) {
    uint64_t total = fsti_file_size(copy->source) - copy->source_begin;
    uint64_t head =
        (FSTI_OUTPUT_BLOCK_BYTES - copy->begin % FSTI_OUTPUT_BLOCK_BYTES) % FSTI_OUTPUT_BLOCK_BYTES;
    if (head > total) head = total;
    FST_TRY(fsti_file_check_limit(output->target.path, copy->begin + total, error));
    copy->engine = "shared";
    bool agrees = (copy->source_begin + head) % FSTI_OUTPUT_BLOCK_BYTES == 0;
    FST_TRY(fsti_output_reserve(output, copy->begin + head, error));
    if (head < total && agrees && share_blocks(output, copy, head)) {
        copy->bytes_shared = total - head;
        FST_TRY(copy->report(copy->context, copy->bytes_shared, error));
        return copy_through_memory(output, copy, 0, head, error);
    }
    copy->engine = "kernel";
    uint64_t left = total;
    FST_TRY(fsti_output_reserve(output, copy->begin + total, error));
    FST_TRY(copy_in_kernel(output, copy, 0, &left, error));
    if (left == 0) return FST_OK;
    copy->engine = "buffered";
    return copy_through_memory(output, copy, total - left, left, error);
}
