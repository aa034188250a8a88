// SPDX-License-Identifier: Apache-2.0
/// Huffman-coded literals of zstd frames (RFC 8878), decoded several symbols a lookup: private to
/// the codec room. Frames of this format have nothing else in them, so libzstd is needed for
/// strangers' frames only, and most of its time goes.
#ifndef FSTI_HUFFMAN_H
#define FSTI_HUFFMAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "codec_kernels.h"

/// The longest code of the format, and what the table is looked up with.
#define HUFFMAN_BITS 11u
#define HUFFMAN_CELLS ((size_t)1 << HUFFMAN_BITS)
/// Symbols that a lookup gives at most, and bytes that it writes at most.
#define HUFFMAN_SYMBOLS 6u
#define HUFFMAN_STORE_BYTES 8u
/// Lookups between two looks at the input: 7 bits of a byte that was begun and these are 62.
#define HUFFMAN_LOOKUPS 5u

/// What the next 11 bits are, as it is looked up. The bits that a lookup takes are apart, as all
/// that the next one waits for. Cells are narrow, up to three symbols and their count, where no
/// code is so short that there could be more; else wide, six symbols, a zero and their count.
typedef struct huffman_codes {
    uint8_t taken[HUFFMAN_CELLS];
    union {
        uint32_t narrow[HUFFMAN_CELLS];
        uint64_t wide[HUFFMAN_CELLS];
    } cells;
} huffman_codes;
/// The shortest code of a tree with narrow cells: four of them have more than 11 bits.
#define HUFFMAN_NARROW_BITS 3u

/// How the codes' cells are made: cells[2^k + x] is what the k bits x begin with, for k = 11 and
/// those that this needs: up to six symbols from the lowest byte on, the bits taken (byte 6), the
/// count of symbols (byte 7).
typedef struct huffman_table {
    huffman_codes codes;
    uint64_t cells[2 * HUFFMAN_CELLS];
    uint8_t code_bits[256]; ///< of each symbol; 0: it has no code
    bool is_narrow, is_filled;
    huffman_ahead ahead; ///< set by who decodes; it may be empty
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
