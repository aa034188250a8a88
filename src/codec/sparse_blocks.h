// SPDX-License-Identifier: Apache-2.0
/// Blocks of a zstd frame whose content is mostly zeros, such as the XOR of two similar tensors.
/// Runs of zeros are located by comparing bytes, and coded as matches with the byte before: that
/// takes a fraction of libzstd's search for matches at level 1, and blocks are smaller. Private to
/// the codec module.
#ifndef FSTI_SPARSE_BLOCKS_H
#define FSTI_SPARSE_BLOCKS_H

#include "codec.h"

/// The content of a block has at most this size, which is the format's limit.
#define SPARSE_BLOCK_BYTES ((size_t)128 << 10)
/// Shorter runs of zeros are left among the literals.
#define SPARSE_RUN_MIN 6u
/// The bytes of the frame's header, and of the block that ends it.
#define SPARSE_HEAD_BYTES ((size_t)14)
#define SPARSE_TAIL_BYTES ((size_t)3)

/// An encoded block, or several.
typedef struct stored_block {
    const unsigned char *bytes;
    size_t size;
} stored_block;

/// Memory of one thread for making blocks.
typedef struct sparse_blocks sparse_blocks;
fst_status fsti_sparse_open(sparse_blocks **out, fst_error *error);
void fsti_sparse_close(sparse_blocks *blocks);
/// Begins a frame of `content_bytes`, and writes its header to `head`.
void fsti_sparse_begin(sparse_blocks *blocks, uint64_t content_bytes,
                       unsigned char head[SPARSE_HEAD_BYTES]);
/// Encodes the next `size` bytes, 1 to SPARSE_BLOCK_BYTES, of the frame. The stored block is valid
/// until the next call.
stored_block fsti_sparse_block(sparse_blocks *blocks, const unsigned char *bytes, size_t size);
/// The empty block that ends a frame.
extern const unsigned char fsti_sparse_tail[SPARSE_TAIL_BYTES];

#endif
