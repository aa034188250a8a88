// SPDX-License-Identifier: Apache-2.0
/// How much of a range is in the page cache: cachestat(2), else mincore(2).
#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
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

static bool count_by_cachestat(int fd, uint64_t begin, uint64_t end, uint64_t *bytes) {
    struct cache_range range = {begin, end - begin};
    struct cache_counts counts = {0};
    if (fsti_io_hidden(FSTI_IO_HIDE_CACHESTAT)) return false;
    if (syscall(SYS_cachestat, fd, &range, &counts, 0) != 0) return false;
    *bytes = counts.cached * (uint64_t)sysconf(_SC_PAGESIZE);
    return true;
}

static uint64_t count_by_mincore(fsti_file *file, uint64_t begin, uint64_t end) {
    const char *mapping = fsti_io_file_mapping(file);
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), count = 0;
    if (mapping == NULL) return 0;
    unsigned char pages[2048];
    for (uint64_t at = fsti_align_down(begin, page); at < end;) {
        uint64_t size = fsti_min(end - at, sizeof pages * page);
        uint64_t page_count = (size + page - 1) / page;
        // mincore does not write to the mapping; its parameter merely is not const.
        if (mincore((void *)(uintptr_t)(mapping + at), size, pages) != 0) return 0;
        for (uint64_t i = 0; i < page_count; i++) count += pages[i] & 1u;
        at += size;
    }
    return count * page;
}

uint64_t fsti_file_resident(fsti_file *file, uint64_t begin, uint64_t end) {
    if (end <= begin) return 0;
    uint64_t bytes;
    if (!count_by_cachestat(file->fd, begin, end, &bytes))
        bytes = count_by_mincore(file, begin, end);
    return fsti_min(bytes, end - begin);
}
