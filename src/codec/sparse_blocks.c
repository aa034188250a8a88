// SPDX-License-Identifier: Apache-2.0
/// Finds runs of zeros, has libzstd code them as matches with the byte before, and joins the blocks
/// of its frames.
///
/// Each block is made as a frame, of which only the block is used. Blocks of different frames can
/// be joined because none refers to an earlier one: a frame's first block has its own tables, and
/// all matches have distance 1, which does not change the distances that a decoder remembers.
#include "sparse_blocks.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/// Parameters of zstd.h.
enum { ZSTD_LEVEL = 100, ZSTD_CONTENT_SIZE = 200, ZSTD_BLOCK_DELIMITERS = 1008 };

/// Shorter runs of zeros are left among the literals. In blocks with many changes, longer runs are
/// left, too: that costs a few per cent in size, and decoding takes a third less time.
#define RUN_MIN ((size_t)6)
#define RUN_MIN_DENSE ((size_t)16)
/// A block has many changes if at least one in so many bytes is not zero.
#define DENSE_SHARE 20u
#define SEQUENCES_MAX (SPARSE_BLOCK_BYTES / (RUN_MIN + 1) + 2)
#define STORED_BYTES (SPARSE_BLOCK_BYTES + ((size_t)16 << 10))
#define BLOCK_HEAD_BYTES ((size_t)3)
#define LINE_BYTES ((size_t)64)

/// The kinds of a block, and the flag of a frame's last one (RFC 8878, 3.1.1.2).
enum { BLOCK_RAW = 0, BLOCK_REPEATED = 1, BLOCK_RESERVED = 3, BLOCK_LAST = 1 };

const unsigned char fsti_sparse_tail[SPARSE_TAIL_BYTES] = {BLOCK_LAST, 0, 0};

struct sparse_blocks {
    const zstd_library *zstd;
    void *context;
    size_t run_min; ///< for the next block, from the changes of the one before
    zstd_sequence sequences[SEQUENCES_MAX];
    unsigned char stored[STORED_BYTES];
};

/// A bit for each of 64 bytes that is not zero.
static uint64_t find_changed(const unsigned char *line) {
    uint64_t mask = 0;
#ifdef __SSE2__
    const __m128i zero = _mm_setzero_si128();
    for (size_t i = 0; i < LINE_BYTES; i += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)(line + i));
        mask |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, zero)) << i;
    }
    return ~mask;
#else
    for (size_t i = 0; i < LINE_BYTES; i += 8) {
        uint64_t word;
        memcpy(&word, line + i, 8);
        for (size_t k = i; word != 0 && k < i + 8; k++) mask |= (uint64_t)(line[k] != 0) << k;
    }
    return mask;
#endif
}

/// The state of the search in one block.
typedef struct run_search {
    zstd_sequence *sequences;
    size_t run_min, count; ///< of sequences
    size_t literals;       ///< bytes since the last run
    size_t end;            ///< of the last byte that is not zero
    size_t changed;
} run_search;

/// Ends a run of zeros at `end`. The first zero is a literal, so that the match can repeat it.
static void end_run(run_search *search, size_t end) {
    size_t run = end - search->end;
    if (run < search->run_min) {
        search->literals += run;
        return;
    }
    search->sequences[search->count++] =
        (zstd_sequence){1, (unsigned)search->literals + 1, (unsigned)run - 1, 0};
    search->literals = 0;
}

static void search_line(run_search *search, const unsigned char *line, size_t at) {
    for (uint64_t mask = find_changed(line); mask != 0; mask &= mask - 1) {
        size_t changed = at + (size_t)__builtin_ctzll(mask);
        end_run(search, changed);
        search->literals++;
        search->end = changed + 1;
        search->changed++;
    }
}

static run_search find_runs(sparse_blocks *blocks, const unsigned char *bytes, size_t size) {
    run_search search = {.sequences = blocks->sequences, .run_min = blocks->run_min};
    unsigned char last[LINE_BYTES] = {0};
    size_t at = 0;
    for (; at + LINE_BYTES <= size; at += LINE_BYTES) search_line(&search, bytes + at, at);
    memcpy(last, bytes + at, size - at);
    search_line(&search, last, at);
    end_run(&search, size);
    // The literals after the last run end the block.
    search.sequences[search.count++] = (zstd_sequence){0, (unsigned)search.literals, 0, 0};
    return search;
}

static void put_block_head(unsigned char *at, size_t size, unsigned kind) {
    size_t head = size << 3 | kind << 1;
    for (size_t i = 0; i < BLOCK_HEAD_BYTES; i++) at[i] = (unsigned char)(head >> 8 * i);
}

/// The bytes before the first block of a frame that libzstd made (RFC 8878, 3.1.1.1).
static size_t frame_head_bytes(unsigned char descriptor) {
    static const size_t dictionary[] = {0, 1, 2, 4}, content[] = {0, 2, 4, 8};
    bool is_single = (descriptor & 0x20) != 0;
    size_t content_bytes = content[descriptor >> 6], window = is_single ? 0 : 1;
    if (is_single && content_bytes == 0) content_bytes = 1;
    return 5 + window + dictionary[descriptor & 3] + content_bytes;
}

/// The blocks of a frame, none of which is marked as the last one any more. Empty if the frame is
/// not what was expected.
static stored_block take_blocks(unsigned char *frame, size_t size) {
    size_t begin = size > 5 ? frame_head_bytes(frame[4]) : size, at = begin;
    while (at + BLOCK_HEAD_BYTES <= size) {
        uint32_t head = frame[at] | (uint32_t)frame[at + 1] << 8 | (uint32_t)frame[at + 2] << 16;
        uint32_t kind = head >> 1 & 3;
        size_t stored = kind == BLOCK_REPEATED ? 1 : head >> 3;
        unsigned char *first = &frame[at];
        at += BLOCK_HEAD_BYTES + stored;
        if (kind == BLOCK_RESERVED || at > size) break;
        if ((head & BLOCK_LAST) == 0) continue;
        *first &= (unsigned char)~BLOCK_LAST;
        return (stored_block){frame + begin, at == size ? size - begin : 0};
    }
    return (stored_block){frame, 0};
}

stored_block fsti_sparse_block(sparse_blocks *blocks, const unsigned char *bytes, size_t size) {
    run_search search = find_runs(blocks, bytes, size);
    blocks->run_min = search.changed * DENSE_SHARE >= size ? RUN_MIN_DENSE : RUN_MIN;
    if (search.changed == 0) {
        put_block_head(blocks->stored, size, BLOCK_REPEATED);
        blocks->stored[BLOCK_HEAD_BYTES] = 0;
        return (stored_block){blocks->stored, BLOCK_HEAD_BYTES + 1};
    }
    size_t got = blocks->zstd->ZSTD_compressSequences(blocks->context, blocks->stored, STORED_BYTES,
                                                      blocks->sequences, search.count, bytes, size);
    stored_block made = {blocks->stored, 0};
    if (!blocks->zstd->ZSTD_isError(got)) made = take_blocks(blocks->stored, got);
    if (made.size > 0 && made.size <= BLOCK_HEAD_BYTES + size) return made;
    put_block_head(blocks->stored, size, BLOCK_RAW);
    memcpy(blocks->stored + BLOCK_HEAD_BYTES, bytes, size);
    return (stored_block){blocks->stored, BLOCK_HEAD_BYTES + size};
}

void fsti_sparse_head(uint64_t content_bytes, unsigned char head[SPARSE_HEAD_BYTES]) {
    // The magic number; a content size of 8 bytes follows; the window is one block (2^17 bytes).
    static const unsigned char begin[] = {0x28, 0xb5, 0x2f, 0xfd, 0xc0, (17 - 10) << 3};
    memcpy(head, begin, sizeof begin);
    for (size_t i = 0; i < 8; i++) head[sizeof begin + i] = (unsigned char)(content_bytes >> 8 * i);
}

/// The function is not part of libzstd's stable interface. So a sample is encoded and decoded,
/// before the library is used for data.
static bool is_working(sparse_blocks *blocks) {
    enum { SAMPLE_BYTES = 4096 };
    unsigned char sample[SAMPLE_BYTES] = {0}, frame[SAMPLE_BYTES + 64], back[SAMPLE_BYTES];
    for (size_t i = 0; i < SAMPLE_BYTES; i += 5 + i % 97) sample[i] = (unsigned char)(1 + i % 7);
    stored_block made = fsti_sparse_block(blocks, sample, SAMPLE_BYTES);
    if (made.size > SAMPLE_BYTES / 2) return false;
    fsti_sparse_head(SAMPLE_BYTES, frame);
    memcpy(frame + SPARSE_HEAD_BYTES, made.bytes, made.size);
    memcpy(frame + SPARSE_HEAD_BYTES + made.size, fsti_sparse_tail, SPARSE_TAIL_BYTES);
    void *context = fsti_alloc_fails() ? NULL : blocks->zstd->ZSTD_createDCtx();
    if (context == NULL) return false;
    size_t got = blocks->zstd->ZSTD_decompressDCtx(
        context, back, SAMPLE_BYTES, frame, SPARSE_HEAD_BYTES + made.size + SPARSE_TAIL_BYTES);
    blocks->zstd->ZSTD_freeDCtx(context);
    return got == SAMPLE_BYTES && memcmp(back, sample, SAMPLE_BYTES) == 0;
}

fst_status fsti_sparse_open(const zstd_library *zstd, sparse_blocks **out, fst_error *error) {
    *out = NULL;
    if (zstd->ZSTD_compressSequences == NULL) return FST_OK;
    sparse_blocks *blocks = fsti_alloc(sizeof *blocks);
    if (blocks == NULL) return fsti_error_memory(error, sizeof *blocks);
    blocks->zstd = zstd;
    blocks->run_min = RUN_MIN;
    blocks->context = fsti_alloc_fails() ? NULL : zstd->ZSTD_createCCtx();
    if (blocks->context == NULL) {
        fsti_free(blocks);
        return fsti_error_memory(error, sizeof *blocks);
    }
    static const int parameters[][2] = {
        {ZSTD_LEVEL, 1}, {ZSTD_CONTENT_SIZE, 0}, {ZSTD_BLOCK_DELIMITERS, 1}};
    bool is_set = true;
    for (size_t i = 0; i < sizeof parameters / sizeof *parameters; i++)
        is_set = is_set && !zstd->ZSTD_isError(zstd->ZSTD_CCtx_setParameter(
                               blocks->context, parameters[i][0], parameters[i][1]));
    if (is_set && is_working(blocks))
        *out = blocks;
    else
        fsti_sparse_close(blocks);
    return FST_OK;
}

void fsti_sparse_close(sparse_blocks *blocks) {
    if (blocks == NULL) return;
    blocks->zstd->ZSTD_freeCCtx(blocks->context);
    fsti_free(blocks);
}
