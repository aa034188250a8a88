// SPDX-License-Identifier: Apache-2.0
/// Fills the page cache with ranges of files, for mappings.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "io_private.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 // Linux 5.14
#endif

// ---- reading and discarding ----

/// A block stays in the CPU cache.
#define BLOCK_BYTES ((uint64_t)256 << 10)

/// The kernel recognises a stream after two or three blocks and reads ahead. This is checked then,
/// and again after a small readahead was doubled.
#define SAMPLED_BLOCK_COUNT 4u
#define LAST_SAMPLED_BLOCK_COUNT 6u
/// Readahead below this counts as small.
#define AHEAD_BYTES ((uint64_t)512 << 10)

/// The kernel's readahead is switched off this close to the end: a window of 8 MiB plus the next
/// one.
#define EXACT_BYTES ((uint64_t)16 << 20)
/// How far ahead of the reads to advise, so that the device stays busy.
#define ADVISED_BYTES ((uint64_t)8 << 20)

struct fsti_file_stream {
    fsti_file *file;
    int fd;
    int null_fd;          ///< /dev/null, so that bytes need no copy; -1: they are copied to `block`
    bool is_own;          ///< the descriptor is not shared with other streams
    uint32_t block_count; ///< blocks read, and examined for readahead
    bool is_advised;      ///< the kernel does not read ahead; advised up to `advised_end`
    uint64_t advised_end, end; ///< reads and advice stop at `end`
    char block[BLOCK_BYTES];
};

/// Opens /dev/null, or -1 if it is missing or another device.
static int open_null_device(void) {
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
    stream->is_advised = false;
    stream->advised_end = 0;
    stream->end = fsti_min(end, fsti_file_size(file));
    stream->block_count = 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file->fd);
    bool may_open = !fsti_io_test_disables(FSTI_TEST_NO_PROC) && !fsti_file_has_own_readahead(file);
    stream->fd = may_open ? open(link, O_RDONLY | O_CLOEXEC) : -1;
    stream->is_own = stream->fd >= 0;
    // Alternating reads of streams that share an open file look less sequential.
    if (!stream->is_own) stream->fd = file->fd;
    stream->null_fd = open_null_device();
    if (fsti_io_test_disables(FSTI_TEST_NO_AHEAD))
        posix_fadvise(stream->fd, 0, 0, POSIX_FADV_RANDOM);
    return FST_OK;
}

void fsti_stream_close(fsti_file_stream *stream) {
    if (stream == NULL) return;
    if (stream->is_own) close(stream->fd);
    if (stream->null_fd >= 0) close(stream->null_fd);
    fsti_free(stream);
}

// One call for all of it comes first, which takes a third less CPU time if the device allows it.
void fsti_io_start_reads(int fd, uint64_t begin, uint64_t end) {
    enum { ADVICE_BYTES = 128 << 10 };
    if (end > begin) posix_fadvise(fd, (off_t)begin, (off_t)(end - begin), POSIX_FADV_WILLNEED);
    for (uint64_t at = begin; at < end; at += ADVICE_BYTES)
        posix_fadvise(fd, (off_t)at, (off_t)fsti_min(end - at, ADVICE_BYTES), POSIX_FADV_WILLNEED);
}

/// Advises that [begin, end) and more will be read.
static void advise(fsti_file_stream *stream, uint64_t begin, uint64_t end) {
    uint64_t until = fsti_max(fsti_min(end + ADVISED_BYTES, stream->end), end);
    fsti_io_start_reads(stream->fd, fsti_max(begin, fsti_min(stream->advised_end, until)), until);
    stream->advised_end = until;
}

/// Whether the next bytes of a stream are all resident or being read, or none of them. Both are
/// true if residency is unknown.
static bool is_ahead(fsti_file_stream *stream, uint64_t at, uint64_t bytes, bool *is_absent) {
    uint64_t resident, limit = fsti_min(at + bytes, stream->end);
    bool has_residency = at < limit && fsti_file_resident(stream->file, at, limit, &resident);
    *is_absent = has_residency && resident == 0;
    return !has_residency || resident == limit - at;
}

/// Checks the kernel's readahead for a running stream. A small one is doubled by advising
/// sequential access, because its pages are at most that large, and small pages are slow to map. If
/// there is no readahead (switched off on the device), pages would be read one by one, so from here
/// on the stream advises. True: advice starts now.
static bool check_readahead(fsti_file_stream *stream, uint64_t at) {
    bool is_absent, is_last = ++stream->block_count == LAST_SAMPLED_BLOCK_COUNT;
    if (stream->is_advised || (stream->block_count != SAMPLED_BLOCK_COUNT && !is_last))
        return false;
    if (is_last) {
        (void)is_ahead(stream, at, BLOCK_BYTES / 4, &is_absent);
        stream->is_advised = is_absent;
    } else if (!is_ahead(stream, at, AHEAD_BYTES, &is_absent) && stream->is_own &&
               !fsti_io_test_disables(FSTI_TEST_NO_AHEAD)) {
        posix_fadvise(stream->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    }
    return stream->is_advised;
}

/// Near the end of a stream, readahead up to the device's limit would be wasted: switch it off and
/// advise the remaining bytes.
static void stop_readahead(fsti_file_stream *stream, uint64_t at) {
    uint64_t limit = stream->end;
    if (stream->is_advised || !stream->is_own || limit == fsti_file_size(stream->file)) return;
    if (limit > at && limit - at > EXACT_BYTES) return;
    stream->is_advised = posix_fadvise(stream->fd, 0, 0, POSIX_FADV_RANDOM) == 0;
}

/// Makes the kernel read a block as for read(2), without copying if sendfile() to /dev/null works.
/// Returns bytes, or -errno.
static int64_t read_and_discard(fsti_file_stream *stream, uint64_t at, size_t size) {
    off_t from = (off_t)at;
    if (stream->null_fd >= 0) {
        ssize_t sent = sendfile(stream->null_fd, stream->fd, &from, size);
        if (sent >= 0 || errno == EINTR || errno == EIO) return sent >= 0 ? sent : -errno;
        close(stream->null_fd);
        stream->null_fd = -1;
    }
    // The block stays in the CPU cache, so the copy costs little memory bandwidth.
    ssize_t got = pread(stream->fd, stream->block, size, (off_t)at);
    return got >= 0 ? got : -errno;
}

fst_status fsti_stream_read(fsti_file_stream *stream, uint64_t begin, uint64_t end,
                            uint64_t *read_count, fst_error *error) {
    stop_readahead(stream, begin);
    if (stream->is_advised) advise(stream, begin, end);
    for (uint64_t at = begin; at < end;) {
        fsti_io_op read = {.file = stream->file,
                           .offset = at,
                           .size = (size_t)fsti_min(BLOCK_BYTES, end - at),
                           .buffer = stream->block};
        read.result = read_and_discard(stream, at, read.size);
        fsti_io_finish(&read);
        ++*read_count;
        if (read.result == -EINTR) continue;
        if (read.result < 0) {
            fsti_error_location location = {
                .file = stream->file->path, .byte_offset = at, .os_errno = (int)-read.result};
            return fsti_error_set(error, FST_E_IO, location, "read failed");
        }
        if (read.result == 0) break; // the caller checks the file's size and sees that it shrank
        at += (uint64_t)read.result;
        if (check_readahead(stream, at)) advise(stream, at, end);
    }
    return FST_OK;
}

// ---- mappings ----

/// Whether to read the range instead: MADV_POPULATE_READ is unavailable (older kernel, system call
/// filter) or interfered with another change of the mappings. A read detects the same I/O errors.
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

/// After this many consecutive EAGAIN results, read instead.
#define RETRY_COUNT_MAX 64u

fst_status fsti_file_populate(fsti_file *file, char *mapping, uint64_t begin, uint64_t end,
                              fst_error *error) {
    uint64_t from = fsti_align_down(begin, fsti_page_bytes());
    uint32_t retry_count = 0;
    while (madvise(mapping + from, end - from, MADV_POPULATE_READ) != 0) {
        int failure = errno;
        if (failure == EINTR) continue;
        if (failure == EAGAIN && retry_count++ < RETRY_COUNT_MAX) continue;
        FST_TRY(fsti_file_check(file, error));
        if (can_read_instead(failure)) return read_instead(file, begin, end, error);
        return fsti_error_errno(error, failure == EFAULT ? EIO : failure, file->path, "mapping");
    }
    return FST_OK;
}

void fsti_file_read_parts(fsti_file *file) {
    if (fsti_file_is_distant(file)) return; // a request for each part would take too long
    atomic_store(&file->in_parts, true);
    fsti_file_advise_random(file);
}

void fsti_file_start_reads(const fsti_file *file, uint64_t begin, uint64_t end) {
    if (fsti_io_file_is_plain(file))
        posix_fadvise(file->fd, (off_t)begin, (off_t)(end - begin), POSIX_FADV_WILLNEED);
}

void fsti_file_start_part(const fsti_file *file, uint64_t begin, uint64_t end) {
    if (atomic_load(&file->in_parts) && fsti_io_file_is_plain(file))
        fsti_io_start_reads(file->fd, begin, end);
}

void fsti_file_drop_cached(const fsti_file *file, uint64_t begin, uint64_t end) {
    uint64_t from = fsti_align_down(begin, fsti_page_bytes());
    if (file->derivation.drop_cached != NULL)
        file->derivation.drop_cached(file->derivation.context, begin, end);
    if (!fsti_io_file_is_plain(file)) return;
    posix_fadvise(file->fd, (off_t)from, (off_t)(fsti_align_up(end, fsti_page_bytes()) - from),
                  POSIX_FADV_DONTNEED);
}

void fsti_file_advise_random(const fsti_file *file) {
    if (file->derivation.origin != NULL) file = file->derivation.origin;
    if (fsti_io_file_is_plain(file) && !file->is_shared)
        posix_fadvise(file->fd, 0, 0, POSIX_FADV_RANDOM);
}

void fsti_file_advise_sequential(const fsti_file *file) {
    if (fsti_io_file_is_plain(file) && !file->is_shared)
        posix_fadvise(file->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
}
