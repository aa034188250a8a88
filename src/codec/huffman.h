// SPDX-License-Identifier: Apache-2.0
/// Decodes Huffman-coded literals of zstd frames (RFC 8878), several symbols per lookup. Private to
/// the codec module. Frames of this format contain nothing else, so libzstd is needed only for
/// frames of other writers. Decoding spends most of its time here.
#ifndef FSTI_HUFFMAN_H
#define FSTI_HUFFMAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "codec_kernels.h"

/// The longest code of the format, and the index size of the table.
#define HUFFMAN_BITS 11u
#define HUFFMAN_CELLS ((size_t)1 << HUFFMAN_BITS)
/// Maximum symbols per lookup, and maximum bytes written by it.
#define HUFFMAN_SYMBOLS 6u
#define HUFFMAN_STORE_BYTES 8u
/// Lookups between refills: up to 7 bits of a partial byte and these are 62 bits.
#define HUFFMAN_LOOKUPS 5u

/// The lookup table for the next 11 bits. The number of consumed bits is stored separately, because
/// it is all that the next lookup waits for. Cells are narrow (up to three symbols and their count)
/// if no code is short enough for more symbols; otherwise wide (six symbols, a zero, and their
/// count).
typedef struct huffman_codes {
    uint8_t taken[HUFFMAN_CELLS];
    union {
        uint32_t narrow[HUFFMAN_CELLS];
        uint64_t wide[HUFFMAN_CELLS];
    } cells;
} huffman_codes;
/// Shortest code of a tree with narrow cells: four such codes exceed 11 bits.
#define HUFFMAN_NARROW_BITS 3u

/// Intermediate cells: cells[2^k + x] describes the codes at the start of the k bits x, for k = 11
/// and smaller k that it needs: up to six symbols from the lowest byte on, the consumed bits (byte
/// 6), and the number of symbols (byte 7).
typedef struct huffman_table {
    huffman_codes codes;
    uint64_t cells[2 * HUFFMAN_CELLS];
    uint8_t code_bits[256]; ///< by symbol; 0: no code
    bool is_narrow, is_filled;
    huffman_ahead ahead; ///< set by the caller; may be empty
} huffman_table;

/// A stream of codes, read backwards from its end.
typedef struct huffman_stream {
    const unsigned char *begin;
    uint64_t bits_left; ///< of the stream, from `begin`
    unsigned char *target, *target_end;
} huffman_stream;
#define HUFFMAN_STREAMS 4u

typedef enum huffman_verdict {
    HUFFMAN_DONE,
    HUFFMAN_OTHER,  ///< needs libzstd
    HUFFMAN_DAMAGED ///< not a valid frame
} huffman_verdict;

/// Decodes a frame (a single segment without dictionary and checksum) of target_bytes bytes.
huffman_verdict fsti_huffman_decode(huffman_table *table, const unsigned char *frame, size_t size,
                                    unsigned char *target, size_t target_bytes);

/// Decodes the literals at the start of a compressed block (RFC 8878, 3.1.1.3.1) to `target`, which
/// has room for *target_bytes; sets these to their number. Returns the bytes read; 0: invalid. The
/// table keeps a block's tree for the next block; is_filled = false begins a frame.
size_t fsti_literals_decode(huffman_table *table, const unsigned char *bytes, size_t size,
                            unsigned char *target, size_t *target_bytes);

/// Reads a tree's description and builds its table. Returns the bytes read; 0: invalid.
size_t fsti_huffman_table_read(huffman_table *table, const unsigned char *bytes, size_t size);

#endif
