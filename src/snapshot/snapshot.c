// SPDX-License-Identifier: Apache-2.0
/// Distributes the blocks of a snapshot over copying and writing threads. See snapshot.h.
#include <string.h>

#include "snapshot_private.h"

typedef enum block_state {
    BLOCK_LIVE = 0, ///< not copied yet
    BLOCK_COPYING,
    BLOCK_STAGED,
    BLOCK_RELEASED, ///< written, memory released
} block_state;

typedef struct snapshot_block {
    uint64_t begin, end;      ///< in the file
    const fsti_extent *first; ///< an extent at or before `begin`
    uint64_t sample; ///< hash of its samples at the call; only used if the snapshot is guarded
    char *memory;    ///< a block of the pool
    block_state state;
} snapshot_block;

struct fsti_snapshot {
    fsti_snapshot_options options;
    fst_staging_pool *pool;
    size_t *file_begin; ///< index in `blocks` of each file's first block, and the end
    size_t *released;   ///< for each file, its first block that is not released
    size_t file_count;
    snapshot_block *blocks;
    size_t block_count;
    size_t memory_max; ///< most blocks of memory in use at a time

    // Protected by the pool's lock.
    size_t next;          ///< the first block that no thread has taken to copy
    size_t copying_count; ///< threads that are copying a block
    size_t memory_count;  ///< blocks of memory in use
    bool is_checking, is_staged;
    bool is_asking;    ///< the program is asked whether the tensors are unchanged
    fst_status status; ///< the error that stopped it
    fst_error error;
    fsti_snapshot_stats stats;
};

// ---- opening and closing ----

static uint64_t data_begin(const fsti_snapshot_file *file) {
    return file->extent_count == 0 ? 0 : file->extents[0].begin;
}
static uint64_t data_end(const fsti_snapshot_file *file) {
    return file->extent_count == 0 ? 0 : file->extents[file->extent_count - 1].end;
}

static size_t count_blocks(const fsti_snapshot_file *file) {
    uint64_t begin = data_begin(file), end = data_end(file);
    if (begin == end) return 0;
    return (size_t)((end - 1) / FSTI_BLOCK_BYTES - begin / FSTI_BLOCK_BYTES + 1);
}

static void cut_file(snapshot_block *blocks, size_t count, const fsti_snapshot_file *file) {
    const fsti_extent *extent = file->extents;
    uint64_t at = data_begin(file), end = data_end(file);
    for (size_t i = 0; i < count; i++) {
        while (extent->end <= at) extent++;
        blocks[i].begin = at;
        at = fsti_min(fsti_align_down(at, FSTI_BLOCK_BYTES) + FSTI_BLOCK_BYTES, end);
        blocks[i].end = at;
        blocks[i].first = extent;
    }
}

static fst_status make_blocks(fsti_snapshot *snapshot, const fsti_snapshot_file *files,
                              fst_error *error) {
    size_t count = snapshot->file_count;
    snapshot->file_begin = fsti_alloc_zeroed(count + 1, sizeof *snapshot->file_begin);
    snapshot->released = fsti_alloc_zeroed(count + 1, sizeof *snapshot->released);
    if (snapshot->file_begin == NULL || snapshot->released == NULL)
        return fsti_error_memory(error, count * sizeof *snapshot->file_begin);
    for (size_t f = 0; f < count; f++)
        snapshot->file_begin[f + 1] = snapshot->file_begin[f] + count_blocks(&files[f]);
    snapshot->block_count = snapshot->file_begin[count];
    snapshot->blocks = fsti_alloc_zeroed(snapshot->block_count + 1, sizeof *snapshot->blocks);
    if (snapshot->blocks == NULL)
        return fsti_error_memory(error, snapshot->block_count * sizeof *snapshot->blocks);
    for (size_t f = 0; f < count; f++) {
        size_t begin = snapshot->file_begin[f];
        snapshot->released[f] = begin;
        cut_file(snapshot->blocks + begin, snapshot->file_begin[f + 1] - begin, &files[f]);
    }
    return FST_OK;
}

/// Samples the tensors now, because they are copied after the call returns.
static fst_status sample_blocks(fsti_snapshot *snapshot, fst_error *error) {
    block_copier copier = {0}; // not guarded: the memory stays valid while the caller waits
    fst_status status = FST_OK;
    for (size_t i = 0; i < snapshot->block_count && status == FST_OK; i++) {
        snapshot_block *block = &snapshot->blocks[i];
        status = fsti_block_sample(&copier, block->first, (byte_span){block->begin, block->end},
                                   NULL, &block->sample, error);
    }
    fsti_block_copier_close(&copier);
    return status;
}

static void set_limit(fsti_snapshot *snapshot) {
    uint64_t bytes = snapshot->options.memory_bytes;
    size_t count = bytes == 0 ? SIZE_MAX : (size_t)(bytes / FSTI_BLOCK_BYTES);
    if (count < FSTI_BLOCK_COUNT_MIN) count = FSTI_BLOCK_COUNT_MIN;
    snapshot->memory_max =
        (size_t)fsti_min(fsti_min(count, snapshot->pool->count_max), snapshot->block_count + 1);
    uint64_t limit = (uint64_t)snapshot->memory_max * FSTI_BLOCK_BYTES;
    snapshot->stats.memory_limit_bytes = limit;
}

fst_status fsti_snapshot_open(const fsti_snapshot_file *files, size_t file_count,
                              const fsti_snapshot_options *options, fsti_snapshot **out,
                              fst_error *error) {
    fsti_snapshot *snapshot = fsti_alloc_zeroed(1, sizeof *snapshot);
    if (snapshot == NULL) return fsti_error_memory(error, sizeof *snapshot);
    snapshot->options = *options;
    snapshot->pool = fsti_staging_pool_ref(options->pool);
    snapshot->file_count = file_count;
    fst_status status = make_blocks(snapshot, files, error);
    if (status == FST_OK) {
        set_limit(snapshot);
        size_t wanted = (size_t)fsti_min(snapshot->memory_max, snapshot->block_count);
        status = fsti_staging_pool_reserve(snapshot->pool, wanted, error);
    }
    if (status == FST_OK && options->is_guarded) status = sample_blocks(snapshot, error);
    if (status != FST_OK) {
        fsti_snapshot_close(snapshot);
        return status;
    }
    *out = snapshot;
    return FST_OK;
}

static void give_memory(fsti_snapshot *snapshot, snapshot_block *block) {
    if (block->memory == NULL) return;
    fsti_staging_pool_give(snapshot->pool, block->memory);
    block->memory = NULL;
    snapshot->memory_count--;
}

void fsti_snapshot_close(fsti_snapshot *snapshot) {
    if (snapshot == NULL) return;
    pthread_mutex_lock(&snapshot->pool->lock);
    for (size_t i = 0; snapshot->blocks != NULL && i < snapshot->block_count; i++)
        give_memory(snapshot, &snapshot->blocks[i]);
    pthread_mutex_unlock(&snapshot->pool->lock);
    fsti_staging_pool_unref(snapshot->pool);
    fsti_free(snapshot->file_begin);
    fsti_free(snapshot->released);
    fsti_free(snapshot->blocks);
    fsti_free(snapshot);
}

// ---- copying ----

/// Waits for a change; false when the deadline has passed. The deadline is on the monotonic clock,
/// as the pool's condition variable is. The lock must be held.
static bool await_change(fst_staging_pool *pool, uint64_t deadline_ns) {
    if (deadline_ns == UINT64_MAX) {
        pthread_cond_wait(&pool->changed, &pool->lock);
        return true;
    }
    struct timespec time = {.tv_sec = (time_t)(deadline_ns / 1000000000u),
                            .tv_nsec = (long)(deadline_ns % 1000000000u)};
    return pthread_cond_timedwait(&pool->changed, &pool->lock, &time) == 0;
}

/// Sets the error that stopped the snapshot, unless one is set. The lock must be held.
static void stop_locked(fsti_snapshot *snapshot, fst_status status, const fst_error *why) {
    if (snapshot->status == FST_OK) {
        snapshot->status = status;
        snapshot->error = *why;
    }
    pthread_cond_broadcast(&snapshot->pool->changed);
}

static fst_status refuse_changed(fst_error *error) {
    return fsti_error_set(error, FST_E_FILE_CHANGED, FSTI_NO_LOCATION,
                          "a tensor was changed while it was being saved; nothing was saved. Wait "
                          "until the tensors are staged before they change.");
}

/// Asks the program. The lock must be held; it is released meanwhile.
static bool ask_unchanged(fsti_snapshot *snapshot) {
    const fsti_snapshot_options *options = &snapshot->options;
    snapshot->is_asking = true;
    pthread_mutex_unlock(&snapshot->pool->lock);
    bool is_unchanged = options->is_unchanged(options->context) != 0;
    pthread_mutex_lock(&snapshot->pool->lock);
    snapshot->is_asking = false;
    pthread_cond_broadcast(&snapshot->pool->changed);
    return is_unchanged;
}

/// The thread that copied last checks that the tensors are unchanged. The lock must be held; it is
/// released meanwhile.
static void check_unchanged(fsti_snapshot *snapshot) {
    if (snapshot->next < snapshot->block_count || snapshot->copying_count > 0 ||
        snapshot->is_checking || snapshot->status != FST_OK)
        return;
    snapshot->is_checking = true;
    bool is_good = snapshot->options.is_unchanged == NULL || ask_unchanged(snapshot);
    fst_error error;
    if (!is_good) (void)!refuse_changed(&error);
    if (!is_good) stop_locked(snapshot, FST_E_FILE_CHANGED, &error);
    snapshot->is_staged = is_good && snapshot->status == FST_OK;
    snapshot->stats.staged_at_ns = fsti_now_ns();
    pthread_cond_broadcast(&snapshot->pool->changed);
}

/// Waits for memory for the next block and takes it. NULL if all blocks were copied or the deadline
/// has passed. The lock must be held.
static char *await_memory(fsti_snapshot *snapshot, uint64_t deadline_ns) {
    uint64_t waited_since = 0;
    char *memory = NULL;
    bool in_time = true;
    while (in_time && snapshot->next < snapshot->block_count && snapshot->status == FST_OK) {
        if (snapshot->memory_count < snapshot->memory_max)
            memory = fsti_staging_pool_take(snapshot->pool);
        if (memory != NULL) break;
        if (waited_since == 0) waited_since = fsti_now_ns();
        in_time = await_change(snapshot->pool, deadline_ns);
    }
    if (waited_since != 0) {
        snapshot->stats.memory_wait_count++;
        snapshot->stats.memory_wait_ns += fsti_now_ns() - waited_since;
    }
    return memory;
}

/// Copies a block and compares it with the samples taken at the call.
static fst_status copy_block(block_copier *copier, const snapshot_block *block, fst_error *error) {
    char *target = block->memory + block->begin % FSTI_BLOCK_BYTES;
    uint64_t sample;
    FST_TRY(fsti_block_fill(copier, block->first, block->begin, block->end, target, error));
    if (!copier->is_guarded) return FST_OK;
    FST_TRY(fsti_block_sample(copier, block->first, (byte_span){block->begin, block->end}, target,
                              &sample, error));
    return sample == block->sample ? FST_OK : refuse_changed(error);
}

/// Lets the program find out which tensor was changed, after a sample differed. The lock must be
/// held; it is released meanwhile.
static void report_change(fsti_snapshot *snapshot) {
    if (snapshot->options.is_unchanged == NULL || snapshot->is_checking) return;
    snapshot->is_checking = true;
    (void)ask_unchanged(snapshot);
}

/// Copies the next block. False if all blocks were copied or no memory was free in time. The lock
/// must be held; it is released during the copy.
static bool copy_next(fsti_snapshot *snapshot, block_copier *copier, uint64_t deadline_ns) {
    char *memory = await_memory(snapshot, deadline_ns);
    if (memory == NULL) return false;
    snapshot_block *block = &snapshot->blocks[snapshot->next++];
    block->memory = memory;
    block->state = BLOCK_COPYING;
    snapshot->copying_count++;
    snapshot->memory_count++;
    uint64_t bytes = (uint64_t)snapshot->memory_count * FSTI_BLOCK_BYTES;
    snapshot->stats.memory_peak_bytes = fsti_max(snapshot->stats.memory_peak_bytes, bytes);
    pthread_mutex_unlock(&snapshot->pool->lock);
    fst_error error;
    fst_status status = copy_block(copier, block, &error);
    pthread_mutex_lock(&snapshot->pool->lock);
    bool is_first = snapshot->status == FST_OK;
    snapshot->copying_count--;
    snapshot->stats.bytes_staged += status == FST_OK ? block->end - block->begin : 0;
    block->state = BLOCK_STAGED;
    if (status != FST_OK) stop_locked(snapshot, status, &error);
    pthread_cond_broadcast(&snapshot->pool->changed);
    if (status == FST_E_FILE_CHANGED && is_first) report_change(snapshot);
    return true;
}

/// Whether a thread still reads the caller's memory or asks the program, or will. The lock must be
/// held.
static bool is_busy(const fsti_snapshot *snapshot) {
    if (snapshot->copying_count > 0 || snapshot->is_asking) return true;
    return snapshot->status == FST_OK && !snapshot->is_staged;
}

static fst_status copy_blocks(fsti_snapshot *snapshot, uint64_t deadline_ns, bool waits,
                              fst_error *error) {
    block_copier copier = {.is_guarded = snapshot->options.is_guarded};
    pthread_mutex_lock(&snapshot->pool->lock);
    bool in_time = true;
    while (in_time && copy_next(snapshot, &copier, deadline_ns))
        in_time = deadline_ns == UINT64_MAX || fsti_now_ns() < deadline_ns;
    check_unchanged(snapshot);
    while (waits && in_time && is_busy(snapshot))
        in_time = await_change(snapshot->pool, deadline_ns);
    fst_status status = snapshot->status;
    bool is_late = is_busy(snapshot); // perhaps of a save that has failed
    if (status != FST_OK && error != NULL) *error = snapshot->error;
    pthread_mutex_unlock(&snapshot->pool->lock);
    fsti_block_copier_close(&copier);
    if (!is_late || !waits) return status;
    return fsti_error_set(error, FST_E_TIMEOUT, FSTI_NO_LOCATION,
                          "the tensors are not staged yet: their bytes are still being copied");
}

fst_status fsti_snapshot_copy(fsti_snapshot *snapshot, uint64_t deadline_ns, fst_error *error) {
    return copy_blocks(snapshot, deadline_ns, true, error);
}

void fsti_snapshot_help(fsti_snapshot *snapshot) {
    (void)!copy_blocks(snapshot, UINT64_MAX, false, NULL);
}

// ---- writing ----

bool fsti_snapshot_fits(fsti_snapshot *snapshot) {
    fst_staging_pool *pool = snapshot->pool;
    pthread_mutex_lock(&pool->lock);
    // Blocks that earlier saves hold are released when these have been written.
    bool fits =
        snapshot->memory_max >= snapshot->block_count && pool->block_count >= snapshot->block_count;
    pthread_mutex_unlock(&pool->lock);
    return fits;
}

size_t fsti_snapshot_block_count(const fsti_snapshot *snapshot, size_t file) {
    return snapshot->file_begin[file + 1] - snapshot->file_begin[file];
}

fst_status fsti_snapshot_take(fsti_snapshot *snapshot, size_t file, size_t block_index, bool wait,
                              fsti_block_view *out, fst_error *error) {
    const snapshot_block *block = &snapshot->blocks[snapshot->file_begin[file] + block_index];
    *out = (fsti_block_view){.offset = block->begin, .size_bytes = block->end - block->begin};
    pthread_mutex_lock(&snapshot->pool->lock);
    while (wait && block->state != BLOCK_STAGED && snapshot->status == FST_OK)
        await_change(snapshot->pool, UINT64_MAX);
    fst_status status = snapshot->status;
    if (status != FST_OK && error != NULL) *error = snapshot->error;
    if (status == FST_OK && block->state == BLOCK_STAGED)
        out->data = block->memory + block->begin % FSTI_BLOCK_BYTES;
    pthread_mutex_unlock(&snapshot->pool->lock);
    return status;
}

void fsti_snapshot_release(fsti_snapshot *snapshot, size_t file, uint64_t offset) {
    pthread_mutex_lock(&snapshot->pool->lock);
    size_t *at = &snapshot->released[file];
    for (; *at < snapshot->file_begin[file + 1]; ++*at) {
        snapshot_block *block = &snapshot->blocks[*at];
        if (block->end > offset || block->state != BLOCK_STAGED) break;
        block->state = BLOCK_RELEASED;
        give_memory(snapshot, block);
    }
    pthread_mutex_unlock(&snapshot->pool->lock);
}

// ---- the end ----

void fsti_snapshot_stop(fsti_snapshot *snapshot, fst_status status, const fst_error *why) {
    pthread_mutex_lock(&snapshot->pool->lock);
    stop_locked(snapshot, status, why);
    pthread_mutex_unlock(&snapshot->pool->lock);
}

fst_status fsti_snapshot_await_staged(fsti_snapshot *snapshot, fst_error *error) {
    pthread_mutex_lock(&snapshot->pool->lock);
    while (is_busy(snapshot)) await_change(snapshot->pool, UINT64_MAX);
    fst_status status = snapshot->status;
    if (status != FST_OK && error != NULL) *error = snapshot->error;
    pthread_mutex_unlock(&snapshot->pool->lock);
    return status;
}

bool fsti_snapshot_await_copies(fsti_snapshot *snapshot, uint64_t deadline_ns) {
    bool in_time = true;
    pthread_mutex_lock(&snapshot->pool->lock);
    while (in_time && (snapshot->copying_count > 0 || snapshot->is_asking))
        in_time = await_change(snapshot->pool, deadline_ns);
    pthread_mutex_unlock(&snapshot->pool->lock);
    return in_time;
}

bool fsti_snapshot_is_over(fsti_snapshot *snapshot) {
    pthread_mutex_lock(&snapshot->pool->lock);
    bool is_over = snapshot->is_staged || snapshot->status != FST_OK;
    pthread_mutex_unlock(&snapshot->pool->lock);
    return is_over;
}

void fsti_snapshot_stats_get(fsti_snapshot *snapshot, fsti_snapshot_stats *out) {
    pthread_mutex_lock(&snapshot->pool->lock);
    *out = snapshot->stats;
    pthread_mutex_unlock(&snapshot->pool->lock);
}
