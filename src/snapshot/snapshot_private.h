// SPDX-License-Identifier: Apache-2.0
/// What the files of the snapshot module share.
#ifndef FSTI_SNAPSHOT_PRIVATE_H
#define FSTI_SNAPSHOT_PRIVATE_H

#include <sys/types.h>

#include "gpu/gpu.h"
#include "memory/memory.h"
#include "snapshot.h"

struct fst_staging_pool {
    fsti_refcount refs;
    pid_t owner;
    size_t count_max; ///< blocks; SIZE_MAX: no limit
    /// For everything below, and for the snapshots that use the pool: blocks change hands only some
    /// hundred times a gigabyte. `changed` is broadcast at each change.
    pthread_mutex_t lock;
    pthread_cond_t changed;
    fsti_buffer **segments;
    size_t segment_count, segment_capacity;
    char **free_blocks;
    size_t free_count, block_count, free_capacity;
};

/// A free block, or NULL. With the pool's lock held, as the next one.
char *fsti_staging_pool_take(fst_staging_pool *pool);
void fsti_staging_pool_give(fst_staging_pool *pool, char *block);

/// A thread that copies, and what it keeps between blocks.
typedef struct block_copier {
    bool is_guarded;
    fsti_device *device; ///< of `ring`; NULL: none yet
    fsti_staging_ring *ring;
    char *slots[2];
} block_copier;

/// Bytes of a file.
typedef struct byte_span {
    uint64_t begin, end;
} byte_span;

/// Fills [begin, end) of a file from its extents; `target` is where `begin` goes. `first` is an
/// extent at or before `begin`.
fst_status fsti_block_fill(block_copier *copier, const fsti_extent *first, uint64_t begin,
                           uint64_t end, char *target, fst_error *error);
/// A hash of pieces all over a block and of every tensor in it, read from its extents, or from its
/// copy where `copy` (the place of `begin`) is not NULL. Equal hashes: the copy is what the tensors
/// were, unless bytes between the pieces alone were changed.
fst_status fsti_block_sample(block_copier *copier, const fsti_extent *first, byte_span span,
                             const char *copy, uint64_t *out, fst_error *error);
void fsti_block_copier_close(block_copier *copier);

#endif
