// SPDX-License-Identifier: Apache-2.0
/// The list of changed lines and bytes of a tensor.
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "delta/changed_lines.h"
#include "fixture.h"

#define BUFFER_BYTES (2 * CHANGED_PIECE_BYTES)

static unsigned char old[BUFFER_BYTES], made[BUFFER_BYTES], target[BUFFER_BYTES + 64];
static uint64_t seed = 1;

static uint64_t next_random(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    return seed ^= seed << 17;
}

/// Fills both buffers, which differ in one of `one_in` bytes; 0: they are equal.
static void make_states(size_t size, unsigned one_in) {
    for (size_t i = 0; i < size; i++) {
        old[i] = (unsigned char)next_random();
        bool differs = one_in != 0 && next_random() % one_in == 0;
        made[i] = (unsigned char)(old[i] ^ (differs ? 1 + next_random() % 255 : 0));
    }
}

/// Sends `size` bytes through lists, piece by piece, to memory that begins `shift` bytes behind an
/// aligned address. Returns the bytes of the lists, or SIZE_MAX if the result is wrong.
static size_t send(changed_lines *lines, size_t size, size_t block, size_t shift) {
    size_t listed = 0;
    unsigned char *to = target + shift;
    memcpy(to, old, size);
    to[size] = 0xa5; // must stay
    for (size_t begin = 0; begin < size; begin += CHANGED_PIECE_BYTES) {
        size_t length = (size_t)fsti_min(CHANGED_PIECE_BYTES, size - begin);
        changed_piece piece;
        for (size_t at = begin; at < begin + length; at += block)
            fsti_changed_lines_add(lines, old + at, made + at,
                                   (size_t)fsti_min(block, begin + length - at));
        if (fsti_changed_lines_take(lines, &piece, NULL) != FST_OK) return SIZE_MAX;
        fsti_changed_piece_write(&piece, to + begin, length);
        listed += piece.size_bytes;
        fsti_free(piece.bytes);
    }
    return memcmp(to, made, size) == 0 && to[size] == 0xa5 ? listed : SIZE_MAX;
}

TEST(every_change_arrives_and_nothing_else)
{
    static const size_t sizes[] = {1,
                                   7,
                                   63,
                                   64,
                                   65,
                                   4095,
                                   4096,
                                   4097,
                                   8191,
                                   65537,
                                   CHANGED_PIECE_BYTES,
                                   CHANGED_PIECE_BYTES + 1,
                                   BUFFER_BYTES - 64};
    static const unsigned shares[] = {0, 1, 2, 3, 8, 100, 5000};
    changed_lines *lines;
    CHECK_INT(fsti_changed_lines_open(&lines, NULL), FST_OK);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t k = 0; k < sizeof shares / sizeof *shares; k++)
            for (size_t shift = 0; shift < 32; shift += 1 + shift * 15) {
                make_states(sizes[i], shares[k]);
                CHECK(send(lines, sizes[i], 4096, shift) != SIZE_MAX);
                fsti_changed_lines_be_plain(true);
                CHECK(send(lines, sizes[i], (size_t)256 << 10, shift) != SIZE_MAX);
                fsti_changed_lines_be_plain(false);
            }
    fsti_changed_lines_close(lines);
}

TEST(few_changes_take_little_memory)
{
    changed_lines *lines;
    CHECK_INT(fsti_changed_lines_open(&lines, NULL), FST_OK);
    size_t size = CHANGED_PIECE_BYTES;
    make_states(size, 0);
    CHECK_INT(send(lines, size, 4096, 0), 0);
    made[12345] ^= 1; // masks of the groups, the mask of a line, one byte
    CHECK_INT(send(lines, size, 4096, 0), size / 4096 * 8 + 8 + 1);
    make_states(size, 200); // as when one of a hundred 2-byte elements changes
    CHECK(send(lines, size, 4096, 0) < size / 20);
    make_states(size, 1); // never much more than the tensor
    CHECK(send(lines, size, 4096, 0) <= size / 4096 * 8 + size / 64 * 72);
    fsti_changed_lines_close(lines);
}

TEST(a_list_without_memory_is_an_error)
{
    changed_lines *lines;
    changed_piece piece;
    make_states(4096, 2);
    CHECK_INT(fsti_changed_lines_open(&lines, NULL), FST_OK);
    fsti_changed_lines_add(lines, old, made, 4096);
    fsti_alloc_fail_after(0);
    CHECK_INT(fsti_changed_lines_take(lines, &piece, NULL), FST_E_NO_MEMORY);
    fsti_alloc_fail_after(-1);
    CHECK(piece.bytes == NULL);
    fsti_changed_lines_close(lines);
    fsti_alloc_fail_after(0);
    CHECK_INT(fsti_changed_lines_open(&lines, NULL), FST_E_NO_MEMORY);
    fsti_alloc_fail_after(-1);
    fsti_changed_lines_close(NULL);
}
