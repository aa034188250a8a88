// SPDX-License-Identifier: Apache-2.0
/// Decodes frames whose blocks have only literals (RFC 8878, 3.1.1), as this format's writer almost
/// always makes them. Other frames are left to libzstd. Never reads outside the frame or writes
/// outside the target.
#include <string.h>

#include "base/primitives.h"
#include "codec_kernels.h"
#include "huffman.h"

#define BLOCK_BYTES_MAX ((size_t)128 << 10)
enum { BLOCK_RAW, BLOCK_REPEATED, BLOCK_COMPRESSED };
enum { LITERALS_RAW, LITERALS_REPEATED, LITERALS_CODED, LITERALS_CODED_AS_BEFORE };

/// The remaining input and output.
typedef struct frame_parse {
    const codec_kernels *kernels;
    huffman_table *table;
    const unsigned char *at, *end;
    unsigned char *target, *target_end;
} frame_parse;

static size_t bytes_left(const frame_parse *parse) { return (size_t)(parse->end - parse->at); }
static size_t room_left(const frame_parse *parse) {
    return (size_t)(parse->target_end - parse->target);
}

static bool put_raw(frame_parse *parse, size_t size) {
    if (size > bytes_left(parse) || size > room_left(parse)) return false;
    memcpy(parse->target, parse->at, size);
    parse->at += size;
    parse->target += size;
    return true;
}

static bool put_repeated(frame_parse *parse, size_t size) {
    if (bytes_left(parse) == 0 || size > room_left(parse)) return false;
    memset(parse->target, *parse->at, size);
    parse->at++;
    parse->target += size;
    return true;
}

/// A stream ends with a set bit, followed by zeros up to the byte boundary.
static bool begin_stream(huffman_stream *stream, const unsigned char *bytes, size_t size) {
    if (size == 0 || bytes[size - 1] == 0) return false;
    uint32_t unused = (uint32_t)__builtin_clz(bytes[size - 1]) - 24 + 1;
    stream->begin = bytes;
    stream->bits_left = (uint64_t)size * 8 - unused;
    return true;
}

/// Decodes the last symbols one by one. A stream must have exactly the bits of its symbols.
static bool finish_stream(const huffman_table *table, huffman_stream *stream) {
    uint64_t left = stream->bits_left;
    while (stream->target < stream->target_end) {
        uint64_t from = left > HUFFMAN_BITS ? left - HUFFMAN_BITS : 0, end = (left + 7) / 8;
        uint64_t bits =
            fsti_number_load(stream->begin + from / 8, (size_t)(end - from / 8)) >> from % 8;
        bits = bits << (HUFFMAN_BITS - (left - from)) & (HUFFMAN_CELLS - 1);
        unsigned char symbol = (unsigned char)table->cells[HUFFMAN_CELLS + bits];
        if (table->code_bits[symbol] > left) return false;
        left -= table->code_bits[symbol];
        *stream->target++ = symbol;
    }
    return left == 0;
}

/// Decodes `size` bytes from the streams in `coded`.
static bool put_streams(frame_parse *parse, const unsigned char *coded, size_t coded_bytes,
                        size_t size, size_t count) {
    huffman_stream streams[HUFFMAN_STREAMS];
    const unsigned char *end = coded + coded_bytes, *sizes = coded;
    size_t each = (size + count - 1) / count;
    if (count > 1) {
        if (coded_bytes < 6 || each * (count - 1) > size) return false;
        coded += 6;
    }
    for (size_t i = 0; i < count; i++) {
        size_t bytes = (size_t)(end - coded);
        if (i + 1 < count) {
            size_t stated = (size_t)fsti_number_load(sizes + 2 * i, 2);
            if (stated > bytes) return false;
            bytes = stated;
        }
        if (!begin_stream(&streams[i], coded, bytes)) return false;
        streams[i].target = parse->target + i * each;
        streams[i].target_end = i + 1 < count ? streams[i].target + each : parse->target + size;
        coded += bytes;
    }
    parse->kernels->decode_streams(parse->table, streams, count, parse->table->ahead);
    for (size_t i = 0; i < count; i++)
        if (!finish_stream(parse->table, &streams[i])) return false;
    parse->target += size;
    return true;
}

/// Decodes literals with a new tree, or the previous one.
static bool put_coded(frame_parse *parse, bool has_tree) {
    uint32_t format = parse->at[0] >> 2 & 3, width = format < 2 ? 10 : format == 2 ? 14 : 18;
    size_t head = format < 2 ? 3 : format + 2;
    if (bytes_left(parse) < head) return false;
    uint64_t sizes = fsti_number_load(parse->at, head) >> 4;
    size_t size = (size_t)(sizes & ((1u << width) - 1)), coded_bytes = (size_t)(sizes >> width);
    parse->at += head;
    if (coded_bytes > bytes_left(parse) || size > room_left(parse) || size > BLOCK_BYTES_MAX)
        return false;
    const unsigned char *coded = parse->at;
    parse->at += coded_bytes;
    size_t tree = 0;
    if (has_tree) {
        tree = fsti_huffman_table_read(parse->table, coded, coded_bytes);
        if (tree == 0) return false;
    }
    if (!parse->table->is_filled) return false;
    return put_streams(parse, coded + tree, coded_bytes - tree, size,
                       format == 0 ? 1 : HUFFMAN_STREAMS);
}

/// Decodes the literals of a compressed block.
static bool put_literals(frame_parse *parse) {
    if (bytes_left(parse) == 0) return false;
    uint32_t kind = parse->at[0] & 3, format = parse->at[0] >> 2 & 3;
    if (kind >= LITERALS_CODED) return put_coded(parse, kind == LITERALS_CODED);
    size_t head = format % 2 == 0 ? 1 : format == 1 ? 2 : 3;
    if (bytes_left(parse) < head) return false;
    size_t size = (size_t)(fsti_number_load(parse->at, head) >> (head == 1 ? 3 : 4));
    parse->at += head;
    return kind == LITERALS_RAW ? put_raw(parse, size) : put_repeated(parse, size);
}

size_t fsti_literals_decode(huffman_table *table, const unsigned char *bytes, size_t size,
                            unsigned char *target, size_t *target_bytes) {
    frame_parse parse = {.kernels = fsti_codec_kernels(),
                         .table = table,
                         .at = bytes,
                         .end = bytes + size,
                         .target = target,
                         .target_end = target + *target_bytes};
    if (!put_literals(&parse)) return 0;
    *target_bytes = (size_t)(parse.target - target);
    return (size_t)(parse.at - bytes);
}

/// Decodes a block of literals without sequences.
static huffman_verdict put_compressed(frame_parse *parse) {
    if (!put_literals(parse) || bytes_left(parse) == 0) return HUFFMAN_DAMAGED;
    if (*parse->at++ != 0) return HUFFMAN_OTHER;
    return bytes_left(parse) == 0 ? HUFFMAN_DONE : HUFFMAN_DAMAGED;
}

/// Decodes one block. *is_last: it is marked as the last one.
static huffman_verdict put_block(frame_parse *parse, bool *is_last) {
    if (bytes_left(parse) < 3) return HUFFMAN_DAMAGED;
    uint32_t head = (uint32_t)fsti_number_load(parse->at, 3);
    size_t size = head >> 3;
    parse->at += 3;
    *is_last = (head & 1) != 0;
    if (size > BLOCK_BYTES_MAX) return HUFFMAN_DAMAGED;
    switch (head >> 1 & 3) {
    case BLOCK_RAW: return put_raw(parse, size) ? HUFFMAN_DONE : HUFFMAN_DAMAGED;
    case BLOCK_REPEATED: return put_repeated(parse, size) ? HUFFMAN_DONE : HUFFMAN_DAMAGED;
    case BLOCK_COMPRESSED: break;
    default: return HUFFMAN_DAMAGED;
    }
    if (size > bytes_left(parse)) return HUFFMAN_DAMAGED;
    frame_parse block = *parse;
    block.end = parse->at + size;
    huffman_verdict verdict = put_compressed(&block);
    parse->at += size;
    parse->target = block.target;
    return verdict;
}

huffman_verdict fsti_huffman_decode(huffman_table *table, const unsigned char *frame, size_t size,
                                    unsigned char *target, size_t target_bytes) {
    frame_parse parse = {.kernels = fsti_codec_kernels(),
                         .table = table,
                         .at = frame + 5,
                         .end = frame + size,
                         .target = target,
                         .target_end = target + target_bytes};
    bool is_last = false;
    table->is_filled = false;
    if (size < 5) return HUFFMAN_DAMAGED;
    uint32_t width = 1u << (frame[4] >> 6);
    if (bytes_left(&parse) < width) return HUFFMAN_DAMAGED;
    uint64_t content = fsti_number_load(parse.at, width) + (width == 2 ? 256 : 0);
    parse.at += width;
    if (content != target_bytes) return HUFFMAN_DAMAGED;
    while (!is_last) {
        huffman_verdict verdict = put_block(&parse, &is_last);
        if (verdict != HUFFMAN_DONE) return verdict;
    }
    return parse.at == parse.end && parse.target == parse.target_end ? HUFFMAN_DONE
                                                                     : HUFFMAN_DAMAGED;
}
