// SPDX-License-Identifier: Apache-2.0
/// The bytes of a tensor that a change writes, in little memory: only the changed ones, and a mask
/// of 64 bits for each line of 64 bytes that has any.
#ifndef FSTI_CHANGED_LINES_H
#define FSTI_CHANGED_LINES_H

#include "base/primitives.h"

/// A tensor is processed in pieces of this size, which threads can write independently.
#define CHANGED_PIECE_BYTES ((size_t)1 << 20)

/// The changes of one piece. `bytes` is from fsti_alloc, and is followed by bytes that mean
/// nothing; NULL: nothing changes.
///
/// For each group of 64 lines: a mask of the changed lines, 8 bytes. Then for each of these lines,
/// in order: a mask of the changed bytes, 8 bytes, and these bytes. Masks are in the CPU's byte
/// order, and bit 0 is the first line or byte. A line of which many bytes change is stored whole.
/// The last line of a tensor may be shorter, and the last group of a piece may have fewer lines.
typedef struct changed_piece {
    unsigned char *bytes;
    size_t size_bytes;
} changed_piece;

/// Collects the changes of one piece. Used by one thread, for one piece after the other.
typedef struct changed_lines changed_lines;
fst_status fsti_changed_lines_open(changed_lines **out, fst_error *error);
/// NULL is allowed.
void fsti_changed_lines_close(changed_lines *lines);
/// Compares the next `size` bytes of a piece. All calls for a piece together have at most
/// CHANGED_PIECE_BYTES; `size` is a multiple of 4096 except in the last call for a tensor.
void fsti_changed_lines_add(changed_lines *lines, const unsigned char *old,
                            const unsigned char *made, size_t size);
/// Ends a piece: copies its changes to *out, and begins the next piece.
fst_status fsti_changed_lines_take(changed_lines *lines, changed_piece *out, fst_error *error);

/// Writes the changes of a piece of `size` bytes, which are at `target`.
void fsti_changed_piece_write(const changed_piece *piece, unsigned char *target, size_t size);

/// For tests: true: without instructions that only some CPUs have.
void fsti_changed_lines_be_plain(bool plain);

#endif
