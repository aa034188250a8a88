// SPDX-License-Identifier: Apache-2.0
/// Huffman-coded literals of zstd frames (RFC 8878), decoded several symbols a lookup: private to
/// the codec room. Frames of this format have nothing else in them, so libzstd is needed for
/// strangers' frames only, and most of its time goes.
#ifndef FSTI_HUFFMAN_H
#define FSTI_HUFFMAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/// The longest code of the format, and what the table is looked up with.
#define HUFFMAN_BITS 11u
#define HUFFMAN_CELLS ((size_t)1 << HUFFMAN_BITS)
/// Symbols that a lookup gives at most, and bytes that it writes.
#define HUFFMAN_SYMBOLS 6u
#define HUFFMAN_STORE_BYTES 8u
/// Lookups between two looks at the input: 7 bits of a byte that was begun and these are 62.
#define HUFFMAN_LOOKUPS 5u

/// cells[2^k + x] is what the k bits x begin with, for every k: the bits taken (byte 0), the
/// count of symbols (byte 1), and up to six symbols. Only those of all 11 bits,
/// the upper half, are looked up; the others are how it is made.
typedef struct huffman_table {
    uint64_t cells[2 * HUFFMAN_CELLS];
    uint8_t code_bits[256]; ///< of each symbol; 0: it has no code
    bool is_filled;
} huffman_table;

/// A stream of codes, which is read from its end to its begin.
typedef struct huffman_stream {
    const unsigned char *begin;
    uint64_t bits_left; ///< of the stream, from `begin`
    unsigned char *target, *target_end;
} huffman_stream;
#define HUFFMAN_STREAMS 4u

typedef enum huffman_verdict {
    HUFFMAN_DONE,
    HUFFMAN_OTHER,  ///< something that only libzstd decodes
    HUFFMAN_DAMAGED ///< no frame
} huffman_verdict;

/// Decodes a frame (a single segment without dictionary and checksum) of target_bytes bytes.
huffman_verdict fsti_huffman_decode(huffman_table *table, const unsigned char *frame, size_t size,
                                    unsigned char *target, size_t target_bytes);

/// Reads a tree's description and makes the table of it: the bytes that it took, 0 if it is none.
size_t fsti_huffman_table_read(huffman_table *table, const unsigned char *bytes, size_t size);

#endif
