// SPDX-License-Identifier: Apache-2.0
/// Declarations shared by the files of the snapshot module.
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
    /// Protects the fields below and the snapshots that use the pool. One lock is enough, because
    /// it is taken only some hundred times per gigabyte. `changed` is broadcast after each change.
    pthread_mutex_t lock;
    pthread_cond_t changed;
    fsti_buffer **segments;
    size_t segment_count, segment_capacity;
    char **free_blocks;
    size_t free_count, block_count, free_capacity;
    bool is_growing; ///< a thread allocates memory for it
};

/// Takes a free block, or returns NULL. The pool's lock must be held, also for the next function.
char *fsti_staging_pool_take(fst_staging_pool *pool);
void fsti_staging_pool_give(fst_staging_pool *pool, char *block);

/// The state that a copying thread keeps between blocks.
typedef struct block_copier {
    bool is_guarded;
    fsti_device *device; ///< the device of `ring`; NULL: not opened yet
    fsti_staging_ring *ring;
    char *slots[2];
} block_copier;

/// A range of a file, in bytes.
typedef struct byte_span {
    uint64_t begin, end;
} byte_span;

/// Copies the bytes [begin, end) of a file from its extents to `target`. `first` is an extent at or
/// before `begin`.
fst_status fsti_block_fill(block_copier *copier, const fsti_extent *first, uint64_t begin,
                           uint64_t end, char *target, fst_error *error);
/// Hashes samples of a block, distributed over the block and including every tensor in it. They are
/// read from the extents, or from the block's copy if `copy` (the address of the byte `span.begin`)
/// is not NULL. Equal hashes mean that the copy has the tensors' values, unless only bytes between
/// the samples were changed.
fst_status fsti_block_sample(block_copier *copier, const fsti_extent *first, byte_span span,
                             const char *copy, uint64_t *out, fst_error *error);
void fsti_block_copier_close(block_copier *copier);

#endif
