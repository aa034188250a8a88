// SPDX-License-Identifier: Apache-2.0
/// Ranges of files brought into the page cache, on behalf of mappings.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/sysmacros.h>
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

// ---- reading to nowhere ----

/// A block stays in the processor's cache.
#define BLOCK_BYTES ((uint64_t)256 << 10)

/// From the second or third block on the kernel takes reads for a stream, and reads ahead of it:
/// that is looked at, and once more when a small window was doubled.
#define LOOK_BLOCK_COUNT 4u
#define LAST_LOOK_BLOCK_COUNT 6u
/// A window in which less than this lies ahead of a stream is small.
#define AHEAD_BYTES ((uint64_t)512 << 10)

/// So much before its end a stream is no longer read ahead of: a window of 8 MiB, and the next one
/// on its way.
#define EXACT_BYTES ((uint64_t)16 << 20)
/// So much is told ahead of what is read, that the device has something to do.
#define TOLD_BYTES ((uint64_t)8 << 20)

struct fsti_file_stream {
    fsti_file *file;
    int fd;
    int null_fd; ///< bytes can be sent nowhere by way of this; -1: they are copied to `block`
    bool is_own; ///< the descriptor is an opening of the stream's own
    uint32_t block_count; ///< read, and looked ahead of
    bool is_told;         ///< the kernel does not read ahead by itself: it was told up to `told`
    uint64_t told, end;   ///< nothing at `end` and behind it is wanted
    char block[BLOCK_BYTES];
};

/// The device that takes everything, -1 where it is not there, or something else in its place.
static int open_nowhere(void) {
    enum { MEMORY_MAJOR = 1, NULL_MINOR = 3 }; // admin-guide/devices.txt
    struct stat info;
    int fd = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    if (fstat(fd, &info) == 0 && S_ISCHR(info.st_mode) &&
        info.st_rdev == makedev(MEMORY_MAJOR, NULL_MINOR))
        return fd;
    close(fd);
    return -1;
}

fst_status fsti_stream_open(fsti_file *file, uint64_t end, fsti_file_stream **out,
                            fst_error *error) {
    char link[32];
    fsti_file_stream *stream = *out = fsti_alloc(sizeof *stream);
    if (stream == NULL) return fsti_error_memory(error, sizeof *stream);
    stream->file = file;
    stream->is_told = false;
    stream->told = 0;
    stream->end = fsti_min(end, fsti_file_size(file));
    stream->block_count = 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file->fd);
    bool may_open = !fsti_io_hidden(FSTI_IO_HIDE_PROC) && !fsti_file_is_cached(file);
    stream->fd = may_open ? open(link, O_RDONLY | O_CLOEXEC) : -1;
    stream->is_own = stream->fd >= 0;
    // Reads by turns of those who share an opening look less like streams.
    if (!stream->is_own) stream->fd = file->fd;
    stream->null_fd = open_nowhere();
    if (fsti_io_hidden(FSTI_IO_HIDE_AHEAD)) posix_fadvise(stream->fd, 0, 0, POSIX_FADV_RANDOM);
    return FST_OK;
}

void fsti_stream_close(fsti_file_stream *stream) {
    if (stream == NULL) return;
    if (stream->is_own) close(stream->fd);
    if (stream->null_fd >= 0) close(stream->null_fd);
    fsti_free(stream);
}

/// Tells the kernel that [begin, end) is wanted soon, and more of what follows, in calls that no
/// device's window makes smaller.
static void tell(fsti_file_stream *stream, uint64_t begin, uint64_t end) {
    enum { ADVICE_BYTES = 128 << 10 };
    uint64_t until = fsti_max(fsti_min(end + TOLD_BYTES, stream->end), end);
    uint64_t at = fsti_max(begin, fsti_min(stream->told, until));
    for (; at < until; at += ADVICE_BYTES)
        posix_fadvise(stream->fd, (off_t)at, (off_t)fsti_min(until - at, ADVICE_BYTES),
                      POSIX_FADV_WILLNEED);
    stream->told = until;
}

/// Whether all of the next bytes of a stream are there or on their way, or else, none of them; both
/// where nobody tells.
static bool is_ahead(fsti_file_stream *stream, uint64_t at, uint64_t bytes, bool *is_none) {
    uint64_t resident, limit = fsti_min(at + bytes, stream->end);
    bool is_known = at < limit && fsti_file_resident(stream->file, at, limit, &resident);
    *is_none = is_known && resident == 0;
    return !is_known || resident == limit - at;
}

/// Looks at what the kernel does for a stream that is under way. A small window is doubled, as for
/// whoever says that he reads from front to back: what lies in it is in pages of its size at most,
/// and those are slow to map. Where there is none, the device's readahead is switched off, and
/// pages would come one by one: from here on the kernel is told. True: it was not told before.
static bool look_ahead(fsti_file_stream *stream, uint64_t at) {
    bool is_none, is_last = ++stream->block_count == LAST_LOOK_BLOCK_COUNT;
    if (stream->is_told || (stream->block_count != LOOK_BLOCK_COUNT && !is_last)) return false;
    if (is_last) {
        (void)is_ahead(stream, at, BLOCK_BYTES / 4, &is_none);
        stream->is_told = is_none;
    } else if (!is_ahead(stream, at, AHEAD_BYTES, &is_none) && stream->is_own &&
               !fsti_io_hidden(FSTI_IO_HIDE_AHEAD)) {
        posix_fadvise(stream->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    }
    return stream->is_told;
}

/// What the kernel reads ahead of a stream, up to the device's window, is brought for nothing where
/// the stream ends: its last bytes are told instead.
static void end_ahead(fsti_file_stream *stream, uint64_t at) {
    uint64_t limit = stream->end;
    if (stream->is_told || !stream->is_own || limit == fsti_file_size(stream->file)) return;
    if (limit > at && limit - at > EXACT_BYTES) return;
    stream->is_told = posix_fadvise(stream->fd, 0, 0, POSIX_FADV_RANDOM) == 0;
}

/// Has the kernel read a block, as it does for read(2), but without a copy of it where the system
/// sends files to /dev/null: bytes, or -errno.
static int64_t read_nowhere(fsti_file_stream *stream, uint64_t at, size_t size) {
    off_t from = (off_t)at;
    if (stream->null_fd >= 0) {
        ssize_t sent = sendfile(stream->null_fd, stream->fd, &from, size);
        if (sent >= 0 || errno == EINTR || errno == EIO) return sent >= 0 ? sent : -errno;
        close(stream->null_fd);
        stream->null_fd = -1;
    }
    ssize_t got = pread(stream->fd, stream->block, size, (off_t)at);
    return got >= 0 ? got : -errno;
}

fst_status fsti_stream_read(fsti_file_stream *stream, uint64_t begin, uint64_t end,
                            uint64_t *read_count, fst_error *error) {
    end_ahead(stream, begin);
    if (stream->is_told) tell(stream, begin, end);
    for (uint64_t at = begin; at < end;) {
        fsti_io_op read = {.file = stream->file,
                           .offset = at,
                           .size = (size_t)fsti_min(BLOCK_BYTES, end - at),
                           .buffer = stream->block};
        read.result = read_nowhere(stream, at, read.size);
        fsti_io_finish(&read);
        ++*read_count;
        if (read.result == -EINTR) continue;
        if (read.result < 0)
            return fsti_error_errno(error, (int)-read.result, stream->file->path, "read");
        if (read.result == 0) break; // whoever looks at the file's size finds that it has shrunk
        at += (uint64_t)read.result;
        if (look_ahead(stream, at)) tell(stream, at, end);
    }
    return FST_OK;
}

// ---- mappings ----

/// The call is not to be had: an older kernel, a filter of system calls, memory that another call
/// is at. What it would have found out, reading finds out as well.
static bool can_read_instead(int failure) {
    return failure == EINVAL || failure == EAGAIN || failure == ENOSYS || failure == EPERM ||
           failure == EBUSY || failure == ENOMEM;
}

static fst_status read_instead(fsti_file *file, uint64_t begin, uint64_t end, fst_error *error) {
    fsti_file_stream *stream;
    uint64_t read_count = 0;
    FST_TRY(fsti_stream_open(file, end, &stream, error));
    fst_status status = fsti_stream_read(stream, begin, end, &read_count, error);
    fsti_stream_close(stream);
    return status;
}

/// Told so often in a row to come again, reading is asked instead.
#define AGAIN_COUNT_MAX 64u

fst_status fsti_file_populate(fsti_file *file, char *mapping, uint64_t begin, uint64_t end,
                              fst_error *error) {
    uint64_t from = fsti_align_down(begin, fsti_page_bytes());
    uint32_t retry_count = 0;
    while (madvise(mapping + from, end - from, MADV_POPULATE_READ) != 0) {
        int failure = errno;
        if (failure == EINTR) continue;
        if (failure == EAGAIN && retry_count++ < AGAIN_COUNT_MAX) continue;
        FST_TRY(fsti_file_check(file, error));
        if (can_read_instead(failure)) return read_instead(file, begin, end, error);
        return fsti_error_errno(error, failure == EFAULT ? EIO : failure, file->path, "mapping");
    }
    return FST_OK;
}

void fsti_file_let_go(const fsti_file *file, uint64_t begin, uint64_t end) {
    uint64_t from = fsti_align_down(begin, fsti_page_bytes());
    if (file->maker.let_go != NULL) file->maker.let_go(file->maker.context, begin, end);
    if (!fsti_io_file_is_plain(file)) return;
    posix_fadvise(file->fd, (off_t)from, (off_t)(fsti_align_up(end, fsti_page_bytes()) - from),
                  POSIX_FADV_DONTNEED);
}

void fsti_file_expect_jumps(const fsti_file *file) {
    if (file->maker.origin != NULL) file = file->maker.origin;
    if (fsti_io_file_is_plain(file) && !file->is_shared)
        posix_fadvise(file->fd, 0, 0, POSIX_FADV_RANDOM);
}

void fsti_file_expect_stream(const fsti_file *file) {
    if (fsti_io_file_is_plain(file) && !file->is_shared)
        posix_fadvise(file->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
}
