// SPDX-License-Identifier: Apache-2.0
/// Makes blocks of content that is mostly zeros (RFC 8878, 3.1.1.2 and 3.1.1.3).
#include "sparse_blocks.h"

#include <string.h>

#include "codec_kernels.h"
#include "huffman_code.h"
#include "sequence_code.h"

#define RUNS_MAX (SPARSE_BLOCK_BYTES / SPARSE_RUN_MIN + 2)
#define EDGES_SPARE ((size_t)64)
/// In blocks with more changes, all zeros are literals: coding their runs would take longer, and so
/// would decoding them.
#define DENSE_CHANGES 105u ///< in 1,000 bytes
/// The bytes of a sample, and their distance.
#define SAMPLE_BYTES ((size_t)64)
#define SAMPLE_DISTANCE (8 * SAMPLE_BYTES)
#define BLOCK_HEAD_BYTES ((size_t)3)

/// The kinds of a block, and the flag of a frame's last one (RFC 8878, 3.1.1.2).
enum { BLOCK_RAW = 0, BLOCK_REPEATED = 1, BLOCK_COMPRESSED = 2, BLOCK_LAST = 1 };

const unsigned char fsti_sparse_tail[SPARSE_TAIL_BYTES] = {BLOCK_LAST, 0, 0};

struct sparse_blocks {
    literal_coder literals;
    sequence_coder sequences;
    literal_run runs[RUNS_MAX];
    uint32_t edges[2 * RUNS_MAX + EDGES_SPARE]; ///< see codec_kernels.h
    unsigned char literal[SPARSE_BLOCK_BYTES + 8];
    unsigned char stored[LITERALS_SECTION_BYTES + SEQUENCES_SECTION_BYTES(RUNS_MAX)];
};

/// How many of 1,000 bytes of a sample are not zero.
static size_t sample_changes(const unsigned char *bytes, size_t size) {
    size_t changed = 0, seen = 0;
    for (size_t at = 0; at + SAMPLE_BYTES <= size; at += SAMPLE_DISTANCE) {
        for (size_t i = 0; i < SAMPLE_BYTES; i++) changed += bytes[at + i] != 0;
        seen += SAMPLE_BYTES;
    }
    return seen == 0 ? 0 : changed * 1000 / seen;
}

static bool is_zero(const unsigned char *bytes, size_t size) {
    return bytes[0] == 0 && memcmp(bytes, bytes + 1, size - 1) == 0;
}

/// Copies a zone's literals: usually a few, so that more are copied than needed.
static unsigned char *copy_zone(unsigned char *target, const unsigned char *from, size_t size,
                                size_t room) {
    if (size <= 8 && room >= 8)
        memcpy(target, from, 8);
    else
        memcpy(target, from, size);
    return target + size;
}

/// A block as literals and runs.
typedef struct block_parts {
    size_t literal_bytes;
    uint32_t runs;
} block_parts;

/// Takes the literals out of the zones. The literals of a zone end one byte after its last change,
/// with the zero that the run repeats.
static block_parts split_zones(sparse_blocks *blocks, const unsigned char *bytes, size_t size,
                               size_t edge_count) {
    unsigned char *literal = blocks->literal;
    literal_run *run = blocks->runs;
    for (size_t i = 0; i < edge_count; i += 2) {
        uint32_t begin = blocks->edges[i], end = blocks->edges[i + 1] - SPARSE_RUN_MIN + 2;
        uint32_t next = i + 2 < edge_count ? blocks->edges[i + 2] : (uint32_t)size;
        if (end + MATCH_MIN > next) end = next; // only the last zone
        literal = copy_zone(literal, bytes + begin, end - begin, size - begin);
        *run = (literal_run){end - begin, next - end};
        if (next > end) run++; // literals at the end of the block have no run
    }
    return (block_parts){(size_t)(literal - blocks->literal), (uint32_t)(run - blocks->runs)};
}

static void put_block_head(unsigned char *at, size_t size, unsigned kind) {
    (void)fsti_number_store(at, size << 3 | kind << 1, BLOCK_HEAD_BYTES);
}

static stored_block repeat_zero(sparse_blocks *blocks, size_t size) {
    put_block_head(blocks->stored, size, BLOCK_REPEATED);
    blocks->stored[BLOCK_HEAD_BYTES] = 0;
    return (stored_block){blocks->stored, BLOCK_HEAD_BYTES + 1};
}

stored_block fsti_sparse_block(sparse_blocks *blocks, const unsigned char *bytes, size_t size) {
    const unsigned char *literals = bytes;
    block_parts parts = {size, 0};
    size_t changes = sample_changes(bytes, size);
    if (changes == 0 && is_zero(bytes, size)) return repeat_zero(blocks, size);
    if (changes < DENSE_CHANGES) {
        size_t edges = fsti_codec_kernels()->find_edges(bytes, size, blocks->edges);
        parts = split_zones(blocks, bytes, size, edges);
        literals = blocks->literal;
    }
    unsigned char *content = blocks->stored + BLOCK_HEAD_BYTES, *end = content;
    end = fsti_literals_encode(&blocks->literals, literals, parts.literal_bytes, end);
    if (parts.runs == 0)
        *end++ = 0;
    else
        end = fsti_sequences_encode(&blocks->sequences, blocks->runs, parts.runs, end);
    size_t content_bytes = (size_t)(end - content);
    if (content_bytes < size) {
        put_block_head(blocks->stored, content_bytes, BLOCK_COMPRESSED);
        return (stored_block){blocks->stored, BLOCK_HEAD_BYTES + content_bytes};
    }
    fsti_literals_begin(&blocks->literals); // no block may use a tree that is not stored
    put_block_head(blocks->stored, size, BLOCK_RAW);
    memcpy(blocks->stored + BLOCK_HEAD_BYTES, bytes, size);
    return (stored_block){blocks->stored, BLOCK_HEAD_BYTES + size};
}

void fsti_sparse_begin(sparse_blocks *blocks, uint64_t content_bytes,
                       unsigned char head[SPARSE_HEAD_BYTES]) {
    // The magic number; a content size of 8 bytes follows; the window is one block (2^17 bytes).
    static const unsigned char begin[] = {0x28, 0xb5, 0x2f, 0xfd, 0xc0, (17 - 10) << 3};
    memcpy(head, begin, sizeof begin);
    (void)fsti_number_store(head + sizeof begin, content_bytes, 8);
    fsti_literals_begin(&blocks->literals);
}

fst_status fsti_sparse_open(sparse_blocks **out, fst_error *error) {
    *out = fsti_alloc(sizeof **out);
    if (*out == NULL) return fsti_error_memory(error, sizeof **out);
    fsti_sequence_coder_open(&(*out)->sequences);
    return FST_OK;
}

void fsti_sparse_close(sparse_blocks *blocks) { fsti_free(blocks); }
