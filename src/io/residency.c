// SPDX-License-Identifier: Apache-2.0
/// Residency of a range in the page cache: cachestat(2), else mincore(2). For a file that the
/// caller neither owns nor may write, kernels refuse the first (EPERM) and the second always
/// reports "resident"; residency is then unknown.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "io_private.h"

#ifndef SYS_cachestat
#define SYS_cachestat 451 // Linux 6.5, the same number everywhere
#endif

struct cache_range {
    uint64_t offset, size;
};
struct cache_counts {
    uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

static bool count_by_cachestat(int fd, uint64_t begin, uint64_t end, uint64_t *pages) {
    struct cache_range range = {begin, end - begin};
    struct cache_counts counts = {0};
    if (fsti_io_test_disables(FSTI_TEST_NO_CACHESTAT)) return false;
    if (syscall(SYS_cachestat, fd, &range, &counts, 0) != 0) return false;
    *pages = counts.cached;
    return true;
}

/// Whether mincore() reports real residency to this process: it must own the file or have write
/// permission (mm/mincore.c).
static bool ask_mincore_rights(const fsti_file *file) {
    struct stat info;
    char link[64];
    if (fstat(file->fd, &info) != 0) return false;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file->fd);
    return info.st_uid == geteuid() || faccessat(AT_FDCWD, link, W_OK, AT_EACCESS) == 0;
}

/// Asks once for each file, because a network file system may answer slowly.
static bool may_ask_mincore(fsti_file *file) {
    pthread_mutex_lock(&file->lock);
    if (file->mincore_answer == FSTI_MINCORE_UNKNOWN)
        file->mincore_answer =
            ask_mincore_rights(file) ? FSTI_MINCORE_ALLOWED : FSTI_MINCORE_DENIED;
    bool is_allowed = file->mincore_answer == FSTI_MINCORE_ALLOWED;
    pthread_mutex_unlock(&file->lock);
    return is_allowed;
}

static bool count_by_mincore(fsti_file *file, uint64_t begin, uint64_t end, uint64_t *out) {
    const char *mapping = may_ask_mincore(file) ? fsti_io_file_mapping(file) : NULL;
    uint64_t page = fsti_page_bytes(), count = 0;
    if (mapping == NULL) return false;
    unsigned char pages[2048];
    for (uint64_t at = fsti_align_down(begin, page); at < end;) {
        uint64_t size = fsti_min(end - at, sizeof pages * page);
        uint64_t page_count = (size + page - 1) / page;
        // mincore() does not write to the mapping, although its parameter is not const.
        if (mincore((void *)(uintptr_t)(mapping + at), size, pages) != 0) return false;
        for (uint64_t i = 0; i < page_count; i++) count += pages[i] & 1u;
        at += size;
    }
    *out = count;
    return true;
}

bool fsti_file_is_read(fsti_file *file, uint64_t begin, uint64_t end) {
    uint64_t pages, page = fsti_page_bytes();
    return fsti_io_file_is_plain(file) && count_by_mincore(file, begin, end, &pages) &&
           pages == (fsti_align_up(end, page) - fsti_align_down(begin, page)) / page;
}

bool fsti_file_is_resident_at(fsti_file *file, uint64_t at) {
    char byte;
    struct iovec vector = {&byte, 1};
    if (!fsti_io_file_is_plain(file)) return file->memory != NULL;
    return preadv2(file->fd, &vector, 1, (off_t)at, RWF_NOWAIT) == 1;
}

/// Resident bytes of [begin, end) given the number of resident pages; a lower bound if some are
/// missing.
static uint64_t bytes_of_pages(uint64_t begin, uint64_t end, uint64_t pages) {
    uint64_t page = fsti_page_bytes(), size = end - begin;
    uint64_t all = (fsti_align_up(end, page) - fsti_align_down(begin, page)) / page;
    if (pages == 0 || pages >= all) return pages == 0 ? 0 : size;
    // The partial pages at the ends may be the resident ones, with at least one byte each.
    return fsti_max(size - fsti_min((all - pages) * page, size), 1);
}

bool fsti_file_resident(fsti_file *file, uint64_t begin, uint64_t end, uint64_t *bytes) {
    uint64_t pages;
    *bytes = 0;
    if (end <= begin) return true;
    if (file->memory != NULL) *bytes = end - begin;
    if (!fsti_io_file_is_plain(file)) return file->memory != NULL;
    if (fsti_io_file_is_memory(file)) { // counting its pages takes as long as mapping them
        *bytes = end - begin;
        return true;
    }
    // Relaxed: a thread that misses the flag asks the kernel once more.
    if (atomic_load_explicit(&file->residency_denied, memory_order_relaxed)) return false;
    if (!count_by_cachestat(file->fd, begin, end, &pages) &&
        !count_by_mincore(file, begin, end, &pages)) {
        bool is_refused = !fsti_io_test_disables(FSTI_TEST_NO_CACHESTAT);
        atomic_store_explicit(&file->residency_denied, is_refused, memory_order_relaxed);
        return false;
    }
    *bytes = bytes_of_pages(begin, end, pages);
    return true;
}
