// SPDX-License-Identifier: Apache-2.0
/// Encodes the literals of zstd blocks with Huffman codes (RFC 8878, 4.2), the counterpart of
/// huffman.h. Private to the codec module. A tree is used for the following blocks of its frame as
/// long as it suits them, which saves counting symbols, making trees, and describing them.
#ifndef FSTI_HUFFMAN_CODE_H
#define FSTI_HUFFMAN_CODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/// The longest code of the format.
#define HUFFMAN_CODE_BITS 11u
#define HUFFMAN_SYMBOL_COUNT ((size_t)256)
#define HUFFMAN_TREE_BYTES ((size_t)128)
/// Maximum literals of a block, and maximum size of their section, in bytes.
#define LITERALS_MAX ((size_t)128 << 10)
#define LITERALS_SECTION_BYTES (LITERALS_MAX / 8 * HUFFMAN_CODE_BITS + 256)

/// Codes by symbol, and joined codes: the bits, from bit 8 on, and their number. The first symbol
/// is the lower byte of the index; its bits are above the other's, because streams are read
/// backwards. HUFFMAN_NO_CODE: a symbol has no code, or the joined codes are too long for `even`.
typedef struct huffman_code {
    uint32_t singles[HUFFMAN_SYMBOL_COUNT];
    uint32_t pairs[HUFFMAN_SYMBOL_COUNT * HUFFMAN_SYMBOL_COUNT];
    /// Of four symbols, the first and the third of which are the index; the others are zero. The
    /// XOR of two 16-bit tensors has hardly any others.
    uint32_t even[HUFFMAN_SYMBOL_COUNT * HUFFMAN_SYMBOL_COUNT];
    uint8_t bits[HUFFMAN_SYMBOL_COUNT];          ///< of each symbol; 0: no code
    unsigned char tree[HUFFMAN_TREE_BYTES + 16]; ///< its description
    size_t tree_bytes;
    bool is_joined; ///< `pairs` and `even` are filled
} huffman_code;
#define HUFFMAN_NO_CODE ((uint32_t)1 << 31)
#define HUFFMAN_JOINED_BITS 23u

/// Makes the best codes for symbols that occur so often. False: there are fewer than two symbols,
/// or the tree has no description.
bool fsti_huffman_code_make(huffman_code *code, const uint32_t counts[HUFFMAN_SYMBOL_COUNT]);

/// Encodes the literals of a frame's blocks.
typedef struct literal_coder {
    huffman_code code;
    uint32_t
        counts[HUFFMAN_SYMBOL_COUNT]; ///< of the blocks with an own tree; later ones count more
    bool has_tree;                    ///< the frame has the tree of `code`
    uint32_t tree_uses;               ///< by other blocks than its own
    size_t cost;                      ///< bytes per 1,024 literals in the tree's own block
} literal_coder;

/// Begins a frame.
void fsti_literals_begin(literal_coder *coder);
/// Writes the literals section of a block, at most LITERALS_SECTION_BYTES. Returns its end.
unsigned char *fsti_literals_encode(literal_coder *coder, const unsigned char *literals,
                                    size_t size, unsigned char *target);

#endif
