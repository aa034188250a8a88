// SPDX-License-Identifier: Apache-2.0
/// Arenas: anonymous memory in huge pages, cached for reuse up to a limit. Reuse avoids zeroing,
/// which takes more than half of a load from the page cache.
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 // Linux 5.14
#endif

/// Smaller buffers come from malloc(), which keeps freed memory for the next ones.
#define SMALL_BUFFER_BYTES FSTI_HUGE_PAGE_BYTES
/// From this size on, small buffers get their pages by one call. One page fault each takes half as
/// long again, and most of the time of a copy from the page cache.
#define POPULATE_BYTES_MIN ((uint64_t)128 << 10)
#define CACHED_COUNT_MAX 1024

typedef struct cached_arena {
    char *data;
    uint64_t size_bytes;
    uint64_t reserved_bytes; ///< bytes without pages, as far as known
} cached_arena;

static struct {
    pthread_mutex_t lock;
    cached_arena arenas[CACHED_COUNT_MAX];
    size_t count;
    uint64_t cached_bytes, keep_bytes_max;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

uint64_t fsti_buffer_arena_bytes(uint64_t size_bytes) {
    return fsti_align_up(size_bytes, size_bytes >= FSTI_HUGE_PAGE_BYTES ? FSTI_HUGE_PAGE_BYTES
                                                                        : FSTI_BUFFER_ALIGNMENT);
}

static pthread_once_t pool_once = PTHREAD_ONCE_INIT;
static void register_pool(void) { fsti_fork_lock(&pool.lock); }

/// Takes the smallest cached arena that fits and is at most about twice as large. Without one, data
/// is NULL.
static cached_arena take_cached(uint64_t size_bytes) {
    cached_arena taken = {0};
    pthread_mutex_lock(&pool.lock);
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < pool.count; i++) {
        uint64_t bytes = pool.arenas[i].size_bytes;
        if (bytes < size_bytes || bytes / 2 > size_bytes) continue;
        if (best == SIZE_MAX || bytes < pool.arenas[best].size_bytes) best = i;
    }
    if (best != SIZE_MAX) {
        taken = pool.arenas[best];
        pool.cached_bytes -= taken.size_bytes;
        pool.arenas[best] = pool.arenas[--pool.count];
    }
    pthread_mutex_unlock(&pool.lock);
    return taken;
}

static bool keep_arena(cached_arena arena) {
    pthread_mutex_lock(&pool.lock);
    bool kept =
        pool.count < CACHED_COUNT_MAX &&
        arena.size_bytes <= pool.keep_bytes_max - fsti_min(pool.cached_bytes, pool.keep_bytes_max);
    if (kept) {
        pool.arenas[pool.count++] = arena;
        pool.cached_bytes += arena.size_bytes;
    }
    pthread_mutex_unlock(&pool.lock);
    return kept;
}

uint64_t fsti_arena_trim(void) {
    uint64_t bytes = 0;
    pthread_mutex_lock(&pool.lock);
    while (pool.count > 0) {
        cached_arena arena = pool.arenas[--pool.count];
        pool.cached_bytes -= arena.size_bytes;
        bytes += arena.size_bytes - arena.reserved_bytes;
        // Unlock first: unmapping gigabytes takes time that other loads should not wait for.
        pthread_mutex_unlock(&pool.lock);
        munmap(arena.data, arena.size_bytes);
        pthread_mutex_lock(&pool.lock);
    }
    pthread_mutex_unlock(&pool.lock);
    return bytes;
}

void fsti_arena_keep_max(uint64_t size_bytes) {
    pthread_mutex_lock(&pool.lock);
    pool.keep_bytes_max = size_bytes;
    bool exceeds = pool.cached_bytes > size_bytes;
    pthread_mutex_unlock(&pool.lock);
    if (exceeds) fsti_arena_trim();
}

static void unreserve(fsti_buffer *buffer, uint64_t size_bytes);

static void release_arena(fsti_buffer *buffer) {
    cached_arena arena = {.data = buffer->data,
                          .size_bytes = fsti_buffer_arena_bytes(buffer->size_bytes),
                          .reserved_bytes = atomic_load(&buffer->reserved_bytes)};
    unreserve(buffer, UINT64_MAX);
    if (!keep_arena(arena)) munmap(arena.data, arena.size_bytes);
}

static void release_small(fsti_buffer *buffer) { free(buffer->allocation); }

/// Maps more than needed and unmaps the unaligned ends.
char *fsti_pages_map(uint64_t bytes) {
    if (bytes == 0) return NULL;
    uint64_t slack = bytes >= FSTI_HUGE_PAGE_BYTES ? FSTI_HUGE_PAGE_BYTES : 0;
    char *start =
        mmap(NULL, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return NULL;
    if (slack == 0) return start;
    uint64_t before = fsti_align_up((uintptr_t)start, FSTI_HUGE_PAGE_BYTES) - (uintptr_t)start;
    if (before > 0) munmap(start, before);
    if (slack - before > 0) munmap(start + before + bytes, slack - before);
    start += before;
    madvise(start, bytes, MADV_HUGEPAGE); // small pages work as well if this is refused
    return start;
}

/// Bytes of arenas that are in use but have no pages yet. The system does not count them, although
/// their owners will need them.
static atomic_uint_fast64_t reserved_bytes;

/// Takes up to `size_bytes` off a buffer's reservation. Threads fill parts of a buffer concurrently
/// and may report more bytes than are reserved, so the rest stops at zero.
static void unreserve(fsti_buffer *buffer, uint64_t size_bytes) {
    uint64_t before = atomic_load(&buffer->reserved_bytes), taken;
    do taken = fsti_min(before, size_bytes);
    while (!atomic_compare_exchange_weak(&buffer->reserved_bytes, &before, before - taken));
    atomic_fetch_sub(&reserved_bytes, taken);
}

void fsti_buffer_use(fsti_buffer *buffer, uint64_t size_bytes) {
    if (buffer != NULL) unreserve(buffer, size_bytes);
}

/// Exceeding a cgroup limit or the machine's memory kills processes, so fail first. The limit for
/// the machine is its total memory, because caches that can be reclaimed are not reported reliably.
fst_status fsti_memory_check(uint64_t size_bytes, fst_error *error) {
    uint64_t left = fsti_memory_available(), total = fsti_memory_total();
    uint64_t available = fsti_min(left, total), reserved = atomic_load(&reserved_bytes);
    if (size_bytes <= available - fsti_min(available, reserved)) return FST_OK;
    return fsti_error_set(error, FST_E_NO_MEMORY, FSTI_NO_LOCATION,
                          "out of memory: %llu bytes needed and %llu reserved by running loads, "
                          "%s %llu",
                          (unsigned long long)size_bytes, (unsigned long long)reserved,
                          left <= total ? "the cgroup's limit leaves" : "the machine has",
                          (unsigned long long)available);
}

/// Querying free memory takes longer than filling a small buffer, so small buffers are checked
/// together, each time they sum up to this.
#define SMALL_CHECK_BYTES ((uint64_t)8 << 20)
static atomic_uint_fast64_t small_bytes;

/// Concurrent callers may reset the sum of each other. That only moves the next check. A check that
/// fails makes the next call check again.
static fst_status check_small(uint64_t size_bytes, fst_error *error) {
    if (atomic_fetch_add(&small_bytes, size_bytes) + size_bytes < SMALL_CHECK_BYTES) return FST_OK;
    // Twice as much, for what other threads were given and have not used yet.
    fst_status status = fsti_memory_check(2 * SMALL_CHECK_BYTES, error);
    atomic_store(&small_bytes, status == FST_OK ? 0 : SMALL_CHECK_BYTES);
    return status;
}

/// Writes to every page, on kernels without MADV_POPULATE_WRITE.
static void touch_pages(char *data, uint64_t size_bytes) {
    uint64_t page = fsti_page_bytes();
    for (uint64_t at = 0; at < size_bytes; at += page)
        // Adds 0 atomically, because another thread may be writing real data.
        __atomic_fetch_add(data + at, 0, __ATOMIC_RELAXED);
}

void fsti_pages_populate(char *data, uint64_t size_bytes) {
    if (madvise(data, size_bytes, MADV_POPULATE_WRITE) != 0 && errno == EINVAL)
        touch_pages(data, size_bytes);
}

/// Prefaults the whole pages in a range.
static void populate_within(char *data, uint64_t size_bytes) {
    uint64_t page = fsti_page_bytes(), before = -(uintptr_t)data % page;
    if (size_bytes <= before) return;
    fsti_pages_populate(data + before, (size_bytes - before) / page * page);
}

/// Not by posix_memalign(): above glibc's limit for mappings (mallopt(3), M_MMAP_THRESHOLD), which
/// follows the sizes that are freed, it would take new memory each time.
static fst_status small_buffer(uint64_t size_bytes, fsti_buffer **out, fst_error *error) {
    FST_TRY(check_small(size_bytes, error));
    char *memory = fsti_alloc_fails() ? NULL : malloc(size_bytes + FSTI_BUFFER_ALIGNMENT);
    if (memory == NULL) return fsti_error_memory(error, size_bytes);
    char *data = memory + -(uintptr_t)memory % FSTI_BUFFER_ALIGNMENT;
    fst_status status = fsti_buffer_wrap(data, size_bytes, release_small, out, error);
    if (status != FST_OK) {
        free(memory);
        return status;
    }
    (*out)->allocation = memory;
    if (size_bytes >= POPULATE_BYTES_MIN) populate_within(data, size_bytes);
    return FST_OK;
}

/// Takes a cached arena, if the pages that it lacks fit in memory. Otherwise maps new memory, if
/// all of it fits.
static fst_status find_arena(uint64_t bytes, cached_arena *out, fst_error *error) {
    *out = take_cached(bytes);
    if (out->data != NULL && out->reserved_bytes > 0 &&
        fsti_memory_check(out->reserved_bytes, NULL) != FST_OK) {
        munmap(out->data, out->size_bytes);
        out->data = NULL;
    }
    if (out->data != NULL) return FST_OK;
    FST_TRY(fsti_memory_check(bytes, error));
    *out = (cached_arena){fsti_pages_map(bytes), bytes, bytes};
    return out->data == NULL ? fsti_error_memory(error, bytes) : FST_OK;
}

fst_status fsti_buffer_arena(uint64_t size_bytes, fsti_buffer **out, fst_error *error) {
    pthread_once(&pool_once, register_pool);
    if (size_bytes < SMALL_BUFFER_BYTES) return small_buffer(size_bytes, out, error);
    if (size_bytes > UINT64_MAX / 2 || fsti_alloc_fails())
        return fsti_error_memory(error, size_bytes);
    cached_arena arena;
    FST_TRY(find_arena(fsti_buffer_arena_bytes(size_bytes), &arena, error));
    fst_status status = fsti_buffer_wrap(arena.data, arena.size_bytes, release_arena, out, error);
    if (status != FST_OK) {
        munmap(arena.data, arena.size_bytes);
        return status;
    }
    (*out)->is_fresh = arena.reserved_bytes == arena.size_bytes;
    atomic_init(&(*out)->reserved_bytes, arena.reserved_bytes);
    // Counted after the check, so two loads that start at the same moment may both pass it.
    atomic_fetch_add(&reserved_bytes, arena.reserved_bytes);
    return FST_OK;
}
