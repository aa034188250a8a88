// SPDX-License-Identifier: Apache-2.0
/// Large reads of mappings, for file systems that take long to answer each read.
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "io_private.h"

/// An answer that takes at least this long is slow. With faster ones the usual reads, of many
/// threads, are enough; and a server with one thread may answer small reads faster than large ones.
#define SLOW_ANSWER_NS 2000000u
/// A read is timed where so much is absent, at one of several places, because other processes may
/// have read parts of the range.
#define TIMED_BYTES ((uint64_t)64 << 10)
#define PLACE_COUNT 16u
#define TRIES_MAX 4u

/// With MADV_HUGEPAGE a page fault reads the bytes of an aligned huge page, in requests as large as
/// the file system accepts (do_sync_mmap_readahead() in mm/filemap.c, since Linux 5.18). Without
/// MADV_RANDOM it would read ahead as well, and then go on in small parts.
#define HUGE_PAGE_BYTES ((uint64_t)2 << 20)
#define USUAL_PAGE_BYTES 4096u

/// File systems that were timed. Their numbers are used again after a while.
#define DEVICE_COUNT_MAX 16u
#define VALID_NS ((uint64_t)60 * 1000000000)
typedef struct timed_device {
    uint64_t device, timed_at_ns;
    bool is_slow;
} timed_device;

static struct {
    pthread_mutex_t lock;
    timed_device devices[DEVICE_COUNT_MAX];
    unsigned next; ///< is replaced next
} known = {.lock = PTHREAD_MUTEX_INITIALIZER};

static pthread_once_t known_once = PTHREAD_ONCE_INIT;
static void register_known(void) { fsti_fork_lock(&known.lock); }

static bool find_device(uint64_t device, bool *is_slow) {
    bool is_found = false;
    pthread_mutex_lock(&known.lock);
    for (unsigned i = 0; i < DEVICE_COUNT_MAX && !is_found; i++) {
        const timed_device *timed = &known.devices[i];
        is_found = timed->timed_at_ns != 0 && timed->device == device &&
                   fsti_now_ns() - timed->timed_at_ns < VALID_NS;
        if (is_found) *is_slow = timed->is_slow;
    }
    pthread_mutex_unlock(&known.lock);
    return is_found;
}

static void note_device(uint64_t device, bool is_slow) {
    pthread_mutex_lock(&known.lock);
    known.devices[known.next++ % DEVICE_COUNT_MAX] = (timed_device){device, fsti_now_ns(), is_slow};
    pthread_mutex_unlock(&known.lock);
}

/// Whether reading one byte takes long.
static bool is_slow_read(const fsti_file *file, uint64_t at) {
    char byte;
    uint64_t start_ns = fsti_now_ns();
    return pread(file->fd, &byte, 1, (off_t)at) == 1 && fsti_now_ns() - start_ns >= SLOW_ANSWER_NS;
}

/// Times reads in the range. *is_known: a read was slow, or one of absent bytes was not. If the
/// kernel hides what is cached, some reads are tried.
static bool time_answers(fsti_file *file, uint64_t begin, uint64_t end, bool *is_known) {
    uint64_t step = (end - begin) / (PLACE_COUNT + 1);
    *is_known = false;
    // From the end, because other processes read from the beginning.
    for (unsigned i = PLACE_COUNT, tries = 0; i > 0 && tries < TRIES_MAX && !*is_known; i--) {
        uint64_t resident, at = begin + i * step, until = fsti_min(at + TIMED_BYTES, end);
        bool has_residency = fsti_file_resident(file, at, until, &resident);
        if (has_residency && resident > 0) continue;
        bool is_slow = is_slow_read(file, at);
        *is_known = is_slow || has_residency;
        tries++;
        if (is_slow) return true;
    }
    return false;
}

bool fsti_file_answers_slowly(fsti_file *file, uint64_t begin, uint64_t end) {
    bool is_slow = false, is_known;
    if (begin >= end || !fsti_file_is_distant(file)) return false;
    pthread_once(&known_once, register_known);
    if (find_device(file->device, &is_slow)) return is_slow;
    is_slow = time_answers(file, begin, end, &is_known);
    if (is_known) note_device(file->device, is_slow);
    return is_slow;
}

void fsti_file_advise_large_reads(const fsti_file *file, char *mapping, uint64_t begin,
                                  uint64_t end) {
    if (fsti_page_bytes() != USUAL_PAGE_BYTES) return; // huge pages are far larger then
    // Before the first boundary there is little but the header of the file.
    uint64_t from = begin < HUGE_PAGE_BYTES ? 0 : fsti_align_up(begin, HUGE_PAGE_BYTES);
    uint64_t until = end == file->size_bytes ? end : fsti_align_down(end, HUGE_PAGE_BYTES);
    if (from >= until || madvise(mapping + from, until - from, MADV_RANDOM) != 0 ||
        madvise(mapping + from, until - from, MADV_HUGEPAGE) != 0)
        return;
    // The rest is small.
    if (begin < from) fsti_io_start_reads(file->fd, begin, from);
    if (until < end) fsti_io_start_reads(file->fd, until, end);
}
