// SPDX-License-Identifier: Apache-2.0
/// The interface of the snapshot module. A snapshot holds the bytes that tensors had at a call, in
/// the layout of the files that will be written, so writing needs no further copy.
///
/// The data sections of the files are divided into blocks. Copying threads take the blocks in order
/// and copy each into a block of staging memory. Writing threads take the copies in the same order
/// and release their memory after the write. If there is less memory than blocks, it is reused like
/// a ring buffer.
///
/// Knows: blocks of memory, and when they may change again.
/// Does not know: files, saves.
/// Main types: fsti_snapshot, fsti_block_view.
#ifndef FSTI_SNAPSHOT_H
#define FSTI_SNAPSHOT_H

#include "base/primitives.h"
#include "fastsafetensors/experimental/async_save.h"
#include "fastsafetensors/device.h"

/// A block begins at a multiple of this in the file and in memory. Direct I/O writes this much at
/// once.
#define FSTI_BLOCK_BYTES ((uint64_t)2 << 20)
/// The smallest number of blocks, which is enough to keep a disk busy.
#define FSTI_BLOCK_COUNT_MIN ((size_t)16)

// ---- staging memory (staging_pool.c) ----

/// `limit_bytes` 0: the pool grows as needed.
fst_status fsti_staging_pool_open(uint64_t limit_bytes, uint64_t ready_bytes,
                                  fst_staging_pool **out, fst_error *error);
/// Drops a reference. Does nothing in a forked child.
void fsti_staging_pool_unref(fst_staging_pool *pool);
fst_staging_pool *fsti_staging_pool_ref(fst_staging_pool *pool);
uint64_t fsti_staging_pool_bytes(fst_staging_pool *pool);
/// FST_E_UNSUPPORTED in a child of the process that opened it.
fst_status fsti_staging_pool_check_owner(const fst_staging_pool *pool, fst_error *error);
/// Allocates until the pool has `count` blocks, or, if it has a limit, this many free ones or those
/// of the limit. Succeeds if it has at least FSTI_BLOCK_COUNT_MIN.
fst_status fsti_staging_pool_reserve(fst_staging_pool *pool, size_t count, fst_error *error);

// ---- snapshots ----

/// A range of a file's data section that is copied from one source. The extents of a file are in
/// file order, without gaps.
typedef struct fsti_extent {
    uint64_t begin, end; ///< in the file
    const char *data;    ///< NULL: zeros
    fst_device device;   ///< the device of the address `data`
} fsti_extent;

typedef struct fsti_snapshot_file {
    const fsti_extent *extents; ///< kept by the caller until the snapshot is closed
    size_t extent_count;
} fsti_snapshot_file;

typedef struct fsti_snapshot_options {
    fst_staging_pool *pool;
    uint64_t memory_bytes;              ///< most memory to use from the pool; 0: the pool's limit
    bool is_guarded;                    ///< the caller's memory may be unmapped while it is copied
    int (*is_unchanged)(void *context); ///< or NULL
    void *context;
} fsti_snapshot_options;

typedef struct fsti_snapshot_stats {
    uint64_t bytes_staged, memory_limit_bytes, memory_peak_bytes, memory_wait_count, memory_wait_ns;
    uint64_t
        staged_at_ns; ///< monotonic time after the last read of the caller's memory; 0: not yet
} fsti_snapshot_stats;

typedef struct fsti_snapshot fsti_snapshot;

/// A copied block.
typedef struct fsti_block_view {
    uint64_t offset, size_bytes; ///< in the file
    const char *data;            ///< congruent to `offset` modulo the page size
} fsti_block_view;

fst_status fsti_snapshot_open(const fsti_snapshot_file *files, size_t file_count,
                              const fsti_snapshot_options *options, fsti_snapshot **out,
                              fst_error *error);
/// Copies blocks until all are copied, the deadline (monotonic ns; UINT64_MAX: none) has passed, or
/// the snapshot has stopped. May be called by any number of threads at a time. Returns after all
/// threads have finished copying: FST_OK, FST_E_TIMEOUT, or the error that stopped the copies.
fst_status fsti_snapshot_copy(fsti_snapshot *snapshot, uint64_t deadline_ns, fst_error *error);
/// Copies like fsti_snapshot_copy(), but does not wait for other threads. Used by helper threads.
void fsti_snapshot_help(fsti_snapshot *snapshot);

/// Whether all blocks fit into memory at once. If not, copying continues only while blocks are
/// written.
bool fsti_snapshot_fits(fsti_snapshot *snapshot);
size_t fsti_snapshot_block_count(const fsti_snapshot *snapshot, size_t file);
/// Returns the copy of a block of a file. If it was not copied yet, waits for it (`wait`) or sets
/// out->data to NULL. Fails if the copies were stopped before it.
fst_status fsti_snapshot_take(fsti_snapshot *snapshot, size_t file, size_t block, bool wait,
                              fsti_block_view *out, fst_error *error);
/// Releases the blocks of a file that end at or before `offset`.
void fsti_snapshot_release(fsti_snapshot *snapshot, size_t file, uint64_t offset);

/// Ends the snapshot early: no further block is copied, and every wait returns `status` (not
/// FST_OK). Only the first call has an effect.
void fsti_snapshot_stop(fsti_snapshot *snapshot, fst_status status, const fst_error *why);
/// Waits until no thread reads the caller's memory any more. FST_OK if everything was copied and is
/// unchanged, otherwise the error.
fst_status fsti_snapshot_await_staged(fsti_snapshot *snapshot, fst_error *error);
/// The same for a snapshot that has stopped. False if the deadline has passed.
bool fsti_snapshot_await_copies(fsti_snapshot *snapshot, uint64_t deadline_ns);
/// Whether everything was copied and is unchanged, or the snapshot has stopped.
bool fsti_snapshot_is_over(fsti_snapshot *snapshot);
void fsti_snapshot_stats_get(fsti_snapshot *snapshot, fsti_snapshot_stats *out);
/// Releases all memory. No other call may be running. NULL is allowed.
void fsti_snapshot_close(fsti_snapshot *snapshot);

#endif
