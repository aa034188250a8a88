// SPDX-License-Identifier: Apache-2.0
/// Arenas: anonymous memory in huge pages, kept for reuse within a limit. Reuse saves zeroing,
/// which is over half of the time of a load from the page cache.
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

/// Below this an arena of its own would waste most of a huge page.
#define SMALL_BUFFER_BYTES ((uint64_t)256 << 10)
#define KEPT_COUNT_MAX 1024

typedef struct kept_arena {
    char *data;
    uint64_t size_bytes;
    uint64_t promised_bytes; ///< of it, without pages as far as is known
} kept_arena;

static struct {
    pthread_mutex_t lock;
    kept_arena arenas[KEPT_COUNT_MAX];
    size_t count;
    uint64_t kept_bytes, keep_bytes_max;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

uint64_t fsti_buffer_arena_bytes(uint64_t size_bytes) {
    return fsti_align_up(size_bytes, size_bytes >= FSTI_HUGE_PAGE_BYTES ? FSTI_HUGE_PAGE_BYTES
                                                                        : FSTI_BUFFER_ALIGNMENT);
}

static pthread_once_t pool_once = PTHREAD_ONCE_INIT;
static void register_pool(void) { fsti_fork_lock(&pool.lock); }

/// The smallest kept arena that holds `size_bytes` without wasting as much again; data NULL: none.
static kept_arena take_kept(uint64_t size_bytes) {
    kept_arena taken = {0};
    pthread_mutex_lock(&pool.lock);
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < pool.count; i++) {
        uint64_t bytes = pool.arenas[i].size_bytes;
        if (bytes < size_bytes || bytes / 2 > size_bytes) continue;
        if (best == SIZE_MAX || bytes < pool.arenas[best].size_bytes) best = i;
    }
    if (best != SIZE_MAX) {
        taken = pool.arenas[best];
        pool.kept_bytes -= taken.size_bytes;
        pool.arenas[best] = pool.arenas[--pool.count];
    }
    pthread_mutex_unlock(&pool.lock);
    return taken;
}

static bool keep_arena(kept_arena arena) {
    pthread_mutex_lock(&pool.lock);
    bool kept =
        pool.count < KEPT_COUNT_MAX &&
        arena.size_bytes <= pool.keep_bytes_max - fsti_min(pool.kept_bytes, pool.keep_bytes_max);
    if (kept) {
        pool.arenas[pool.count++] = arena;
        pool.kept_bytes += arena.size_bytes;
    }
    pthread_mutex_unlock(&pool.lock);
    return kept;
}

uint64_t fsti_arena_trim(void) {
    uint64_t bytes = 0;
    pthread_mutex_lock(&pool.lock);
    while (pool.count > 0) {
        kept_arena arena = pool.arenas[--pool.count];
        pool.kept_bytes -= arena.size_bytes;
        bytes += arena.size_bytes - arena.promised_bytes;
        // Gigabytes take their time: others may load meanwhile.
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
    bool above = pool.kept_bytes > size_bytes;
    pthread_mutex_unlock(&pool.lock);
    if (above) fsti_arena_trim();
}

static void unpromise(fsti_buffer *buffer, uint64_t size_bytes);

static void release_arena(fsti_buffer *buffer) {
    kept_arena arena = {.data = buffer->data,
                        .size_bytes = fsti_buffer_arena_bytes(buffer->size_bytes),
                        .promised_bytes = atomic_load(&buffer->promised_bytes)};
    unpromise(buffer, UINT64_MAX);
    if (!keep_arena(arena)) munmap(arena.data, arena.size_bytes);
}

static void release_small(fsti_buffer *buffer) { free(buffer->data); }

/// Maps more and gives the ends back.
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
    madvise(start, bytes, MADV_HUGEPAGE); // refused where there are none: small pages do as well
    return start;
}

/// Bytes of arenas that were handed out and have no pages yet: the system does not count them, but
/// whoever got them will come for them.
static atomic_uint_fast64_t promised_bytes;

/// Takes up to `size_bytes` off what is promised for a buffer.
static void unpromise(fsti_buffer *buffer, uint64_t size_bytes) {
    uint64_t had = atomic_load(&buffer->promised_bytes), less;
    do less = fsti_min(had, size_bytes);
    while (!atomic_compare_exchange_weak(&buffer->promised_bytes, &had, had - less));
    atomic_fetch_sub(&promised_bytes, less);
}

void fsti_buffer_use(fsti_buffer *buffer, uint64_t size_bytes) {
    if (buffer != NULL) unpromise(buffer, size_bytes);
}

/// A cgroup kills the process that passes its limit, and the system one that takes all there is: an
/// error is better. Of the machine's memory the whole counts, not what is free now, which caches
/// give up that the system does not tell of.
static fst_status check_limit(uint64_t size_bytes, fst_error *error) {
    uint64_t left = fsti_memory_available(), whole = fsti_memory_machine();
    uint64_t available = fsti_min(left, whole), promised = atomic_load(&promised_bytes);
    if (size_bytes <= available - fsti_min(available, promised)) return FST_OK;
    return fsti_error_set(error, FST_E_NO_MEMORY, FSTI_NOWHERE,
                          "out of memory: %llu bytes needed and %llu promised to loads under way, "
                          "%s %llu",
                          (unsigned long long)size_bytes, (unsigned long long)promised,
                          left <= whole ? "the cgroup's limit leaves" : "the machine has",
                          (unsigned long long)available);
}

/// To ask what is left takes longer than to fill a small buffer: so often it is asked.
#define SMALL_CHECK_BYTES ((uint64_t)8 << 20)
static atomic_uint_fast64_t small_bytes;

static fst_status check_small(uint64_t size_bytes, fst_error *error) {
    if (atomic_fetch_add(&small_bytes, size_bytes) + size_bytes < SMALL_CHECK_BYTES) return FST_OK;
    atomic_store(&small_bytes, 0);
    return check_limit(SMALL_CHECK_BYTES, error);
}

static fst_status small_buffer(uint64_t size_bytes, fsti_buffer **out, fst_error *error) {
    void *data = NULL;
    FST_TRY(check_small(size_bytes, error));
    if (fsti_alloc_fails() ||
        posix_memalign(&data, FSTI_BUFFER_ALIGNMENT, size_bytes == 0 ? 1 : size_bytes) != 0)
        return fsti_error_memory(error, size_bytes);
    fst_status status = fsti_buffer_wrap(data, size_bytes, release_small, out, error);
    if (status != FST_OK) free(data);
    return status;
}

/// A kept arena, if what it still lacks may be had; else nothing, or new memory.
static fst_status find_arena(uint64_t bytes, kept_arena *out, fst_error *error) {
    *out = take_kept(bytes);
    if (out->data != NULL && out->promised_bytes > 0 &&
        check_limit(out->promised_bytes, NULL) != FST_OK) {
        munmap(out->data, out->size_bytes);
        out->data = NULL;
    }
    if (out->data != NULL) return FST_OK;
    FST_TRY(check_limit(bytes, error));
    *out = (kept_arena){fsti_pages_map(bytes), bytes, bytes};
    return out->data == NULL ? fsti_error_memory(error, bytes) : FST_OK;
}

fst_status fsti_buffer_arena(uint64_t size_bytes, fsti_buffer **out, fst_error *error) {
    pthread_once(&pool_once, register_pool);
    if (size_bytes < SMALL_BUFFER_BYTES) return small_buffer(size_bytes, out, error);
    if (size_bytes > UINT64_MAX / 2 || fsti_alloc_fails())
        return fsti_error_memory(error, size_bytes);
    kept_arena arena;
    FST_TRY(find_arena(fsti_buffer_arena_bytes(size_bytes), &arena, error));
    fst_status status = fsti_buffer_wrap(arena.data, arena.size_bytes, release_arena, out, error);
    if (status != FST_OK) {
        munmap(arena.data, arena.size_bytes);
        return status;
    }
    (*out)->is_fresh = arena.promised_bytes == arena.size_bytes;
    atomic_init(&(*out)->promised_bytes, arena.promised_bytes);
    atomic_fetch_add(&promised_bytes, arena.promised_bytes);
    return FST_OK;
}

/// Writes to every page, for kernels without MADV_POPULATE_WRITE.
static void touch_pages(char *data, uint64_t size_bytes) {
    uint64_t page = fsti_page_bytes();
    for (uint64_t at = 0; at < size_bytes; at += page)
        // An atomic addition of nothing: another thread may be writing the real bytes.
        __atomic_fetch_add(data + at, 0, __ATOMIC_RELAXED);
}

void fsti_pages_populate(char *data, uint64_t size_bytes) {
    if (madvise(data, size_bytes, MADV_POPULATE_WRITE) != 0 && errno == EINVAL)
        touch_pages(data, size_bytes);
}
