// SPDX-License-Identifier: Apache-2.0
/// The loops that make and read sparse blocks, compiled once per instruction set.
#include "length_codes.h"
#include "sequence_code.h"
#include "sparse_blocks.h"
#include "sparse_reader.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define MASK_BYTES ((size_t)64)

/// A bit for each of 64 bytes that is not zero.
ALWAYS_INLINE uint64_t find_changed(const unsigned char *line) {
#if defined(__AVX512BW__)
    __m512i bytes = _mm512_loadu_si512(line);
    return _mm512_test_epi8_mask(bytes, bytes);
#elif defined(__SSE2__)
    uint64_t zeros = 0;
    const __m128i zero = _mm_setzero_si128();
    for (size_t i = 0; i < MASK_BYTES; i += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)(line + i));
        zeros |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, zero)) << i;
    }
    return ~zeros;
#else
    uint64_t changed = 0;
    for (size_t i = 0; i < MASK_BYTES; i += 8) {
        uint64_t word;
        memcpy(&word, line + i, 8);
        for (size_t k = i; word != 0 && k < i + 8; k++) changed |= (uint64_t)(line[k] != 0) << k;
    }
    return changed;
#endif
}

/// State of the search for changed bytes. Each bit of a mask is one byte of a line; bits shifted
/// beyond the end of a line continue in the next one.
typedef struct edge_search {
    uint64_t one, two, zone; ///< masks of the line before
} edge_search;

/// `mask` moved up by `count` bytes, with the end of the line before.
ALWAYS_INLINE uint64_t move_up(uint64_t mask, uint64_t before, uint32_t count) {
    return mask << count | before >> (64 - count);
}

/// The edges of a line, where zones of literals begin and end. A zone goes five bytes beyond its
/// last change, so that changes that are closer than SPARSE_RUN_MIN zeros share one.
ALWAYS_INLINE uint64_t find_line_edges(edge_search *search, uint64_t changed) {
    uint64_t two = changed | move_up(changed, search->one, 1);
    uint64_t four = two | move_up(two, search->two, 2);
    uint64_t zone = four | move_up(two, search->two, 4);
    uint64_t edges = zone ^ move_up(zone, search->zone, 1);
    *search = (edge_search){changed, two, zone};
    return edges;
}

/// Adds the positions of a line's edges, four at a time, because branches cost more than positions
/// that are overwritten.
ALWAYS_INLINE uint32_t *add_edges(uint32_t *edges, uint64_t mask, uint32_t at) {
    uint32_t *end = edges + __builtin_popcountll(mask);
    do {
        for (uint32_t i = 0; i < 4; i++) {
            *edges++ = at + (uint32_t)__builtin_ctzll(mask | (uint64_t)1 << 63);
            mask &= mask - 1;
        }
    } while (mask != 0);
    return end;
}

/// Finds the edges of up to 64 lines. Most have none, so that lines with edges are remembered.
ALWAYS_INLINE uint32_t *find_group_edges(edge_search *search, const unsigned char *bytes,
                                         uint32_t lines, uint32_t *edges, uint32_t at) {
    uint64_t masks[64], with_edges = 0;
    for (uint32_t i = 0; i < lines; i++) {
        uint64_t begin = at + i == 0;
        masks[i] = find_line_edges(search, find_changed(bytes + i * MASK_BYTES) | begin);
        with_edges |= (uint64_t)(masks[i] != 0) << i;
    }
    for (; with_edges != 0; with_edges &= with_edges - 1) {
        uint32_t i = (uint32_t)__builtin_ctzll(with_edges);
        edges = add_edges(edges, masks[i], at + i * (uint32_t)MASK_BYTES);
    }
    return edges;
}

static size_t find_edges(const unsigned char *bytes, size_t size, uint32_t *edges) {
    edge_search search = {0};
    unsigned char last[2 * MASK_BYTES] = {0}; // a zone may end in the line behind the block
    uint32_t *end = edges, at = 0, lines = (uint32_t)(size / MASK_BYTES);
    for (; lines > 0; lines -= lines < 64 ? lines : 64, at += 64 * (uint32_t)MASK_BYTES)
        end = find_group_edges(&search, bytes + at, lines < 64 ? lines : 64, end, at);
    at = (uint32_t)(size / MASK_BYTES * MASK_BYTES);
    memcpy(last, bytes + at, size - at);
    return (size_t)(find_group_edges(&search, last, 2, end, at) - edges);
}

/// For each sequence from the last one on: how to get to the states of the next one, and the bits
/// that complete its lengths. A decoder begins with the states of the first one.
static unsigned char *put_runs(const sequence_coder *coder, const literal_run *runs, uint32_t count,
                               unsigned char *target) {
    bit_writer writer = {.at = target};
    uint32_t literals = 0, matches = 0;
    for (uint32_t i = count; i-- > 0; bits_store(&writer)) {
        literal_run run = runs[i];
        uint32_t of_literals = literal_code(coder, run.literals),
                 of_match = match_code(coder, run.repeats);
        if (i + 1 == count) {
            literals = coder->literals.first[of_literals];
            matches = coder->matches.first[of_match];
        } else {
            matches = fse_put(&coder->matches, &writer, matches, of_match);
            literals = fse_put(&coder->literals, &writer, literals, of_literals);
        }
        length_code literal_length = fsti_literal_lengths[of_literals];
        length_code match_length = fsti_match_lengths[of_match];
        bits_put(&writer, run.literals - literal_length.base, literal_length.bits);
        bits_put(&writer, run.repeats - match_length.base, match_length.bits);
    }
    fse_put_state(&coder->matches, &writer, matches);
    fse_put_state(&coder->literals, &writer, literals);
    return bits_end_stream(&writer);
}

/// The bits before `left`, the last one at the top of the result: 57 or more.
ALWAYS_INLINE uint64_t bits_before(const unsigned char *bits, int64_t left) {
    int64_t end = (left + 7) / 8;
    uint64_t word;
    memcpy(&word, bits + end - 8, sizeof word);
    return word << (end * 8 - left);
}

/// `count` bits of `bits`, behind the first `skipped` from the top.
ALWAYS_INLINE uint32_t bits_behind(uint64_t bits, uint32_t skipped, uint32_t count) {
    return (uint32_t)(bits << skipped >> 1 >> (63 - count));
}

/// XORs 1 to 8 bytes. `room` has at least 8.
ALWAYS_INLINE void xor_few(unsigned char *room, const unsigned char *bytes, size_t count) {
    uint64_t word, old;
    memcpy(&word, bytes, sizeof word);
    memcpy(&old, room, sizeof old);
    old ^= word & (UINT64_MAX >> (64 - 8 * count));
    memcpy(room, &old, sizeof old);
}

/// Where the reading of sequences is, in local variables of the loop.
typedef struct run_reading {
    uint32_t literal_state, match_state;
    int64_t bits_left;
} run_reading;

/// Decodes a sequence that is not a block's last one: the bits of the lengths, the match's first,
/// then those of the next states. The largest tables need 50 bits. False: the bits do not suffice.
/// The next sequence waits for the states, so that these are computed by the shortest way.
ALWAYS_INLINE bool read_run(const sparse_sequences *all, run_reading *reading, literal_run *run) {
    fse_cell literal = all->literals.cells[reading->literal_state];
    fse_cell match = all->matches.cells[reading->match_state];
    length_code literal_length = fsti_literal_lengths[literal.symbol];
    length_code match_length = fsti_match_lengths[match.symbol];
    uint32_t count = (uint32_t)all->literal_taken[reading->literal_state] +
                     all->match_taken[reading->match_state];
    if (reading->bits_left < (int64_t)count) return false;
    uint64_t bits = bits_before(all->bits, reading->bits_left), states = bits >> 1 >> (63 - count);
    reading->match_state = match.base + ((uint32_t)states & ((1u << match.bits) - 1));
    reading->literal_state =
        literal.base + ((uint32_t)(states >> match.bits) & ((1u << literal.bits) - 1));
    reading->bits_left -= count;
    run->repeats = match_length.base + bits_behind(bits, 0, match_length.bits);
    run->literals = literal_length.base + bits_behind(bits, match_length.bits, literal_length.bits);
    return true;
}

ALWAYS_INLINE void xor_literals(unsigned char *room, const unsigned char *literals, size_t count) {
    for (; count > 8; count -= 8, room += 8, literals += 8) xor_few(room, literals, 8);
    xor_few(room, literals, count);
}

static size_t xor_runs(sparse_reader *reader, unsigned char *target, size_t size) {
    sparse_sequences *all = &reader->sequences;
    if (all->offsets.log != 0 || all->offsets.cells[0].symbol != 0) return 0;
    const unsigned char *literals = reader->literal + reader->literal_at;
    size_t literals_left = reader->literal_end - reader->literal_at;
    size_t left = size < reader->content_left ? size : reader->content_left, whole = left;
    run_reading reading = {all->literal_state, all->match_state, all->bits_left};
    uint32_t runs = all->left;
    literal_run run;
    for (run_reading next = reading; runs > 1 && read_run(all, &next, &run); runs--) {
        size_t count = run.literals, both = count + run.repeats;
        if (count == 0 || count > literals_left || both > left || left < count + 8 ||
            literals[count - 1] != 0)
            break;
        xor_literals(target, literals, count);
        target += both;
        left -= both;
        literals += count;
        literals_left -= count;
        reading = next;
    }
    all->literal_state = reading.literal_state;
    all->match_state = reading.match_state;
    all->bits_left = reading.bits_left;
    all->left = runs;
    reader->literal_at = reader->literal_end - literals_left;
    reader->content_left -= whole - left;
    return whole - left;
}
