// SPDX-License-Identifier: Apache-2.0
/// Decodes zstd blocks whose only matches repeat the byte before them, as sparse_blocks.c makes
/// them, straight into an XOR: a run of zeros costs one addition, while libzstd writes it byte by
/// byte for someone else to read. Other blocks are left to libzstd. Private to the codec module.
#ifndef FSTI_SPARSE_READER_H
#define FSTI_SPARSE_READER_H

#include "fse_table.h"
#include "huffman.h"

#define SPARSE_BLOCK_BYTES_MAX ((size_t)128 << 10)
/// Bytes that are read before and past a block, or past its literals; their values mean nothing.
#define SPARSE_SPARE_BYTES ((size_t)16)

/// The sequences of a block: how many literals, then how many repetitions of the last byte. Their
/// bits are read backwards (RFC 8878, 3.1.1.3.2).
typedef struct sparse_sequences {
    fse_table literals, offsets, matches;
    /// By state: how many bits a sequence takes for its length and the next state.
    uint8_t literal_taken[1u << FSE_LOG_MAX], match_taken[1u << FSE_LOG_MAX];
    uint32_t literal_state, offset_state, match_state;
    const unsigned char *bits;
    int64_t bits_left; ///< negative: more were read than there are
    uint32_t left;     ///< sequences
} sparse_sequences;

/// A block that is being read.
typedef struct sparse_reader {
    huffman_table huffman;
    sparse_sequences sequences;
    size_t literal_at, literal_end; ///< the literals that were not used yet
    size_t copies, repeats;         ///< what is left of the current sequence
    size_t content_max;             ///< of a block
    size_t content_left;            ///< bytes that the block may still have
    unsigned char last;             ///< the byte that a match repeats
    unsigned char stored[SPARSE_BLOCK_BYTES_MAX + 2 * SPARSE_SPARE_BYTES];
    unsigned char literal[SPARSE_BLOCK_BYTES_MAX + SPARSE_SPARE_BYTES];
} sparse_reader;

/// The kinds of a block (RFC 8878, 3.1.1.2.2).
typedef enum sparse_kind { SPARSE_RAW, SPARSE_REPEATED, SPARSE_COMPRESSED } sparse_kind;

/// Begins a frame, whose blocks have at most `content_max` bytes of content.
void fsti_sparse_reader_reset(sparse_reader *reader, size_t content_max);
/// Where the caller stores the next block.
static inline unsigned char *sparse_reader_block(sparse_reader *reader) {
    return reader->stored + SPARSE_SPARE_BYTES;
}
/// Begins the block of `size` stored bytes; `repeated`: the content's size of a block of that kind.
/// False: it needs libzstd, or is damaged.
bool fsti_sparse_reader_begin(sparse_reader *reader, sparse_kind kind, size_t size,
                              size_t repeated);
/// XORs up to `size` bytes of content into `target` (NULL: drops them); *done: how many, fewer only
/// at the block's end. False: the rest needs libzstd, or is damaged.
bool fsti_sparse_reader_xor(sparse_reader *reader, unsigned char *target, size_t size,
                            size_t *done);

#endif
