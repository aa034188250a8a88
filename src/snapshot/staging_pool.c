// SPDX-License-Identifier: Apache-2.0
/// Staging memory: blocks of equal size in a few large segments, kept until the pool is freed.
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "snapshot_private.h"

#define SEGMENT_COUNT_MAX 4096u

static void init_changed(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

static bool reserve_lists(fst_staging_pool *pool, size_t more) {
    void *segments = pool->segments;
    bool good = fsti_array_reserve(&segments, &pool->segment_capacity, pool->segment_count,
                                   sizeof *pool->segments, SEGMENT_COUNT_MAX);
    pool->segments = segments;
    if (!good) return false;
    // Space for every block in the list of free ones, so that releasing a block can't fail.
    size_t wanted = pool->block_count + more;
    if (wanted <= pool->free_capacity) return true;
    char **blocks = fsti_realloc(pool->free_blocks, wanted * sizeof *blocks);
    if (blocks == NULL) return false;
    pool->free_blocks = blocks;
    pool->free_capacity = wanted;
    return true;
}

/// Allocates a segment of `count` blocks. With `is_ready` its pages are faulted in as well.
static fst_status add_segment(fst_staging_pool *pool, size_t count, bool is_ready,
                              fst_error *error) {
    fsti_buffer *segment;
    uint64_t bytes;
    if (!fsti_mul((uint64_t)count, FSTI_BLOCK_BYTES, &bytes))
        return fsti_error_memory(error, UINT64_MAX);
    FST_TRY(fsti_buffer_arena(bytes, &segment, error));
    // A forked child does not use these copies. Excluding them makes fork() faster and avoids
    // copy-on-write faults in the parent.
    madvise(segment->data, bytes, MADV_DONTFORK);
    if (is_ready && segment->is_fresh) {
        fsti_buffer_choose_pages(segment, true);
        fsti_buffer_populate(segment, 0, bytes);
        // The pass with huge pages stops if they are slow to allocate; the rest gets small pages.
        fsti_pages_populate(segment->data, bytes);
        fsti_buffer_use(segment, bytes);
    }
    pthread_mutex_lock(&pool->lock);
    bool good = reserve_lists(pool, count);
    if (good) {
        pool->segments[pool->segment_count++] = segment;
        pool->block_count += count;
        // The list is used from its end, so reverse order here gives blocks in the order of
        // addresses.
        for (size_t i = count; i-- > 0;)
            pool->free_blocks[pool->free_count++] = segment->data + i * FSTI_BLOCK_BYTES;
        pthread_cond_broadcast(&pool->changed);
    }
    pthread_mutex_unlock(&pool->lock);
    if (good) return FST_OK;
    madvise(segment->data, bytes, MADV_DOFORK);
    fsti_buffer_unref(segment);
    return fsti_error_memory(error, count * sizeof(char *));
}

fst_status fsti_staging_pool_open(uint64_t limit_bytes, uint64_t ready_bytes,
                                  fst_staging_pool **out, fst_error *error) {
    fst_staging_pool *pool = fsti_alloc_zeroed(1, sizeof *pool);
    if (pool == NULL) return fsti_error_memory(error, sizeof *pool);
    fsti_refcount_init(&pool->refs);
    pool->owner = getpid();
    pool->count_max = limit_bytes == 0 ? SIZE_MAX : (size_t)(limit_bytes / FSTI_BLOCK_BYTES);
    if (pool->count_max < FSTI_BLOCK_COUNT_MIN) pool->count_max = FSTI_BLOCK_COUNT_MIN;
    pthread_mutex_init(&pool->lock, NULL);
    init_changed(&pool->changed);
    uint64_t blocks = fsti_min(
        ready_bytes / FSTI_BLOCK_BYTES + (ready_bytes % FSTI_BLOCK_BYTES > 0), pool->count_max);
    fst_status status = blocks == 0 ? FST_OK : add_segment(pool, (size_t)blocks, true, error);
    if (status != FST_OK) {
        fsti_staging_pool_unref(pool);
        return status;
    }
    *out = pool;
    return FST_OK;
}

fst_staging_pool *fsti_staging_pool_ref(fst_staging_pool *pool) {
    fsti_refcount_ref(&pool->refs);
    return pool;
}

void fsti_staging_pool_unref(fst_staging_pool *pool) {
    // A forked child does not have the memory, and a thread of the parent may have held the lock.
    if (pool == NULL || pool->owner != getpid() || !fsti_refcount_unref(&pool->refs)) return;
    for (size_t i = 0; i < pool->segment_count; i++) {
        fsti_buffer *segment = pool->segments[i];
        madvise(segment->data, segment->size_bytes,
                MADV_DOFORK); // the memory may be reused for other purposes
        fsti_buffer_unref(segment);
    }
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->changed);
    fsti_free(pool->segments);
    fsti_free(pool->free_blocks);
    fsti_free(pool);
}

fst_status fsti_staging_pool_check_owner(const fst_staging_pool *pool, fst_error *error) {
    if (pool->owner == getpid()) return FST_OK;
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                          "the staging memory was allocated before fork(): it belongs to the "
                          "parent. Open a pool in this process.");
}

uint64_t fsti_staging_pool_bytes(fst_staging_pool *pool) {
    if (pool->owner != getpid()) return 0;
    pthread_mutex_lock(&pool->lock);
    uint64_t bytes = (uint64_t)pool->block_count * FSTI_BLOCK_BYTES;
    pthread_mutex_unlock(&pool->lock);
    return bytes;
}

/// Adds blocks to the `have` ones.
static fst_status grow(fst_staging_pool *pool, size_t have, size_t count, fst_error *error) {
    bool is_enough = have >= FSTI_BLOCK_COUNT_MIN;
    fst_status status = add_segment(pool, count - have, false, is_enough ? NULL : error);
    if (status == FST_OK || is_enough) return FST_OK;
    // The minimum is enough then, because a written block is reused at once.
    return add_segment(pool, (size_t)fsti_min(count, FSTI_BLOCK_COUNT_MIN) - have, false, error);
}

fst_status fsti_staging_pool_reserve(fst_staging_pool *pool, size_t count, fst_error *error) {
    pthread_mutex_lock(&pool->lock);
    while (pool->is_growing) pthread_cond_wait(&pool->changed, &pool->lock);
    size_t have = pool->block_count, used = have - pool->free_count;
    // Up to a limit that was given, saves do not wait for each other's memory.
    if (pool->count_max != SIZE_MAX) count = (size_t)fsti_min(count + used, pool->count_max);
    pool->is_growing = have < count;
    pthread_mutex_unlock(&pool->lock);
    if (have >= count) return FST_OK;
    fst_status status = grow(pool, have, count, error);
    pthread_mutex_lock(&pool->lock);
    pool->is_growing = false;
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->lock);
    return status;
}

char *fsti_staging_pool_take(fst_staging_pool *pool) {
    return pool->free_count == 0 ? NULL : pool->free_blocks[--pool->free_count];
}

void fsti_staging_pool_give(fst_staging_pool *pool, char *block) {
    pool->free_blocks[pool->free_count++] = block;
    pthread_cond_broadcast(&pool->changed);
}
