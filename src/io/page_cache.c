// SPDX-License-Identifier: Apache-2.0
/// Ranges of files brought into the page cache, on behalf of mappings.
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "io_private.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 // Linux 5.14
#endif

void fsti_file_expect(char *mapping, uint64_t begin, uint64_t end) {
    uint64_t from = fsti_align_down(begin, fsti_page_bytes());
    madvise(mapping + from, end - from, MADV_HUGEPAGE); // advice: refused, all is as it was
}

uint64_t fsti_file_look_ns(const fsti_file *file, uint64_t begin, uint64_t end) {
    enum { LOOK_COUNT = 64 };
    struct timespec start, stop;
    char byte;
    if (fsti_io_hidden(FSTI_IO_HIDE_COLD)) return 0;
    if (fsti_io_hidden(FSTI_IO_HIDE_WARM)) return UINT64_MAX;
    uint64_t step = fsti_align_down((end - begin) / LOOK_COUNT, fsti_page_bytes());
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
    for (uint64_t i = 0; i < LOOK_COUNT; i++)
        if (pread(file->fd, &byte, 1, (off_t)(begin + i * step)) != 1) return 0;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &stop);
    int64_t spent_ns = (stop.tv_sec - start.tv_sec) * 1000000000 + (stop.tv_nsec - start.tv_nsec);
    return (uint64_t)spent_ns / LOOK_COUNT;
}

/// Brings a range into the page cache by reading it to nowhere.
static fst_status read_through(const fsti_file *file, uint64_t begin, uint64_t end,
                               fst_error *error) {
    enum { BLOCK_BYTES = 256 << 10 }; // stays in the processor's cache
    char *block = fsti_alloc(BLOCK_BYTES);
    if (block == NULL) return fsti_error_memory(error, BLOCK_BYTES);
    ssize_t result = 1;
    for (uint64_t at = begin; at < end && result > 0;
         at += (uint64_t)fsti_max((uint64_t)result, 1)) {
        result = pread(file->fd, block, (size_t)fsti_min(BLOCK_BYTES, end - at), (off_t)at);
        if (result < 0 && errno == EINTR) result = 1; // a byte is skipped: the page comes with it
    }
    int failure = errno;
    fsti_free(block);
    return result < 0 ? fsti_error_errno(error, failure, file->path, "read") : FST_OK;
}

/// The call is not to be had: an older kernel, a filter of system calls, memory that another call
/// is at. What it would have found out, reading finds out as well.
static bool can_read_instead(int failure) {
    return failure == EINVAL || failure == EAGAIN || failure == ENOSYS || failure == EPERM ||
           failure == EBUSY || failure == ENOMEM;
}

/// Told so often in a row to come again, reading is asked instead.
#define AGAIN_COUNT_MAX 64u

fst_status fsti_file_populate(const fsti_file *file, char *mapping, uint64_t begin, uint64_t end,
                              fst_error *error) {
    uint64_t from = fsti_align_down(begin, fsti_page_bytes());
    uint32_t retry_count = 0;
    while (madvise(mapping + from, end - from, MADV_POPULATE_READ) != 0) {
        int failure = errno;
        if (failure == EINTR) continue;
        if (failure == EAGAIN && retry_count++ < AGAIN_COUNT_MAX) continue;
        FST_TRY(fsti_file_check(file, error));
        if (can_read_instead(failure)) return read_through(file, begin, end, error);
        return fsti_error_errno(error, failure == EFAULT ? EIO : failure, file->path, "mapping");
    }
    return FST_OK;
}

void fsti_file_let_go(const fsti_file *file, uint64_t begin, uint64_t end) {
    uint64_t from = fsti_align_down(begin, fsti_page_bytes());
    if (!fsti_io_file_is_plain(file)) return;
    posix_fadvise(file->fd, (off_t)from, (off_t)(fsti_align_up(end, fsti_page_bytes()) - from),
                  POSIX_FADV_DONTNEED);
}

void fsti_file_expect_jumps(const fsti_file *file) {
    if (fsti_io_file_is_plain(file)) posix_fadvise(file->fd, 0, 0, POSIX_FADV_RANDOM);
}

/// One call reads no more than the larger of the device's readahead window and its largest request:
/// this much it always may, and what follows on is merged.
#define ADVICE_BYTES ((uint64_t)128 << 10)

uint32_t fsti_file_advise(const fsti_file *file, uint64_t begin, uint64_t end) {
    uint32_t count = 0;
    if (!fsti_io_file_is_plain(file)) return 0;
    for (uint64_t at = begin; at < end; at += ADVICE_BYTES, count++)
        posix_fadvise(file->fd, (off_t)at, (off_t)fsti_min(end - at, ADVICE_BYTES),
                      POSIX_FADV_WILLNEED);
    return count;
}
