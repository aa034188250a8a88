// SPDX-License-Identifier: Apache-2.0
/// Decodes chunks. Sizes are checked against each other before anything is written; results of the
/// coder and the CRC are checked afterwards.
#include <string.h>

#include "huffman.h"
#include "planes.h"
#include "zstd_library.h"

#define ZSTD_MAGIC 0xfd2fb528u
/// Magic, descriptor and the shortest content size of a frame.
#define ZSTD_HEAD_BYTES 6u

/// Memory for the planes of a whole chunk, and for stores past their end.
#define PLANES_BYTES (((size_t)1 << FSTI_CHUNK_LOG_MAX) + 64)
/// One-shot decoding takes 96 KiB in libzstd 1.4 and 160 KiB in 1.5.
#define ZSTD_BYTES ((size_t)256 << 10)

struct fsti_decoder {
    /// For frames of other writers; both NULL until the first one.
    const zstd_library *zstd;
    void *context;
    unsigned char *planes; ///< memory for the planes of a whole chunk
    huffman_table table;
};

fst_status fsti_decoder_open(fsti_decoder **out, fst_error *error) {
    fsti_decoder *decoder = fsti_alloc_zeroed(1, sizeof *decoder);
    if (decoder == NULL) return fsti_error_memory(error, sizeof *decoder);
    decoder->planes = fsti_alloc(PLANES_BYTES);
    if (decoder->planes == NULL) {
        fsti_decoder_close(decoder);
        return fsti_error_memory(error, PLANES_BYTES);
    }
    *out = decoder;
    return FST_OK;
}

size_t fsti_decoder_bytes(void) { return sizeof(fsti_decoder) + PLANES_BYTES + ZSTD_BYTES; }

void fsti_decoder_close(fsti_decoder *decoder) {
    if (decoder == NULL) return;
    if (decoder->context != NULL) decoder->zstd->ZSTD_freeDCtx(decoder->context);
    fsti_free(decoder->planes);
    fsti_free(decoder);
}

static fst_status refuse(fst_error *error, const char *why) {
    return fsti_error_set(error, FST_E_CORRUPT, FSTI_NO_LOCATION,
                          "a compressed chunk is damaged: %s", why);
}

/// The state of decoding a chunk.
typedef struct chunk_parse {
    const fsti_chunk *chunk;
    plane_cut cut;
    plane_head heads[FSTI_PLANE_COUNT_MAX];
    size_t places[FSTI_PLANE_COUNT_MAX]; ///< offsets of the planes in the chunk
} chunk_parse;

static uint32_t load_32(const unsigned char *bytes) {
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static bool is_zero(const unsigned char *bytes, size_t size) {
    unsigned char any = 0;
    for (size_t i = 0; i < size; i++) any |= bytes[i];
    return any == 0;
}

/// Assigns offsets after `*end` to the planes of one kind. False if they exceed the chunk, or
/// padding before them is not zero. Padding is checked so that a chunk has only one valid encoding.
static bool place_planes(chunk_parse *parse, bool coded, size_t *end) {
    for (uint32_t k = 0; k < parse->cut.plane_count; k++) {
        const plane_head *head = &parse->heads[k];
        if (head->kind == PLANE_CONSTANT || (head->kind == PLANE_CODED) != coded) continue;
        parse->places[k] = plane_align(*end);
        if (parse->places[k] > parse->chunk->stored_bytes ||
            head->stored_bytes > parse->chunk->stored_bytes - parse->places[k])
            return false;
        if (!is_zero(parse->chunk->stored + *end, parse->places[k] - *end)) return false;
        *end = parse->places[k] + head->stored_bytes;
    }
    return true;
}

/// Reads the planes' headers and computes their offsets. Returns NULL, or the error.
static const char *read_heads(chunk_parse *parse) {
    const fsti_chunk *chunk = parse->chunk;
    uint32_t count = parse->cut.plane_count;
    size_t end = 1 + count * PLANE_HEAD_BYTES;
    if (chunk->stored_bytes < end || chunk->stored[0] != count)
        return "its number of planes does not match its dtype";
    for (uint32_t k = 0; k < count; k++) {
        const unsigned char *bytes = chunk->stored + 1 + k * PLANE_HEAD_BYTES;
        plane_head *head = &parse->heads[k];
        *head = (plane_head){bytes[0], bytes[1], load_32(bytes + 2)};
        if (head->kind > PLANE_CODED) return "a plane has an unknown kind";
        if (head->kind != PLANE_CONSTANT && head->value != 0) return "a plane has a table";
        if (head->kind == PLANE_RAW && head->stored_bytes != parse->cut.plane_bytes)
            return "a plane has a wrong size";
        if (head->kind == PLANE_CONSTANT && head->stored_bytes != 0)
            return "a constant plane has bytes";
        if (head->kind == PLANE_CODED &&
            (head->stored_bytes == 0 || head->stored_bytes >= parse->cut.plane_bytes))
            return "a coded plane is not smaller than it was";
    }
    if (!place_planes(parse, true, &end) || !place_planes(parse, false, &end))
        return "its planes overlap, leave gaps or exceed the chunk";
    if (plane_align(end) != chunk->stored_bytes)
        return "the sizes of its planes do not add up to its size";
    if (!is_zero(chunk->stored + end, chunk->stored_bytes - end)) return "its padding is not zero";
    return NULL;
}

/// Whether a frame's header is one that the format allows: a single segment (the window is the
/// content), without dictionary and checksum.
static bool is_plain_frame(const unsigned char *frame, size_t size) {
    if (size < ZSTD_HEAD_BYTES || load_32(frame) != ZSTD_MAGIC) return false;
    return (frame[4] & 0x3f) == 0x20;
}

/// Decodes a frame that has more than literals with libzstd.
static fst_status decode_by_library(fsti_decoder *decoder, const unsigned char *frame, size_t size,
                                    unsigned char *target, size_t target_bytes, fst_error *error) {
    FST_TRY(fsti_zstd_open(&decoder->zstd, error));
    const zstd_library *zstd = decoder->zstd;
    if (decoder->context == NULL) decoder->context = zstd->ZSTD_createDCtx();
    if (decoder->context == NULL) return fsti_error_memory(error, target_bytes);
    if (zstd->ZSTD_findFrameCompressedSize(frame, size) != size)
        return refuse(error, "a plane contains something other than a zstd frame");
    size_t got = zstd->ZSTD_decompressDCtx(decoder->context, target, target_bytes, frame, size);
    if (zstd->ZSTD_isError(got) || got != target_bytes)
        return refuse(error, "a zstd frame can't be decoded");
    return FST_OK;
}

static fst_status decode_plane(fsti_decoder *decoder, const unsigned char *frame, size_t size,
                               unsigned char *target, size_t target_bytes, fst_error *error) {
    if (!is_plain_frame(frame, size))
        return refuse(error, "a plane is not a zstd frame of this format");
    switch (fsti_huffman_decode(&decoder->table, frame, size, target, target_bytes)) {
    case HUFFMAN_DONE: return FST_OK;
    case HUFFMAN_DAMAGED: return refuse(error, "a zstd frame can't be decoded");
    default: return decode_by_library(decoder, frame, size, target, target_bytes, error);
    }
}

/// Decodes the planes and joins them.
static fst_status decode_planes(fsti_decoder *decoder, const chunk_parse *parse,
                                unsigned char *target, fst_error *error) {
    const unsigned char *planes[FSTI_PLANE_COUNT_MAX];
    unsigned char *next_plane = decoder->planes;
    size_t size = parse->cut.plane_bytes;
    // Prefetch the target while decoding; joining would otherwise wait for each of its cache lines.
    decoder->table.ahead = (huffman_ahead){target, target + parse->chunk->true_bytes};
    for (uint32_t k = 0; k < parse->cut.plane_count; k++) {
        const plane_head *head = &parse->heads[k];
        const unsigned char *stored = parse->chunk->stored + parse->places[k];
        // A single plane is decoded directly into the target.
        unsigned char *plane = parse->cut.plane_count == 1 ? target : next_plane;
        planes[k] = plane;
        next_plane += size;
        if (head->kind == PLANE_CODED)
            FST_TRY(decode_plane(decoder, stored, head->stored_bytes, plane, size, error));
        else if (head->kind == PLANE_CONSTANT)
            memset(plane, head->value, size);
        else if (parse->cut.plane_count == 1)
            memcpy(plane, stored, size);
        else
            planes[k] = stored;
    }
    if (parse->cut.plane_count > 1) fsti_planes_join(&parse->cut, planes, target);
    return FST_OK;
}

fst_status fsti_chunk_decode(fsti_decoder *decoder, const fsti_chunk *chunk, void *target,
                             fst_error *error) {
    chunk_parse parse = {.chunk = chunk, .cut = fsti_planes_of(chunk->dtype, chunk->true_bytes)};
    if (chunk->true_bytes == 0 || chunk->true_bytes > (size_t)1 << FSTI_CHUNK_LOG_MAX ||
        chunk->true_bytes % parse.cut.element_bytes != 0)
        return refuse(error, "its size is not a multiple of the element size");
    if (chunk->is_raw && chunk->stored_bytes != chunk->true_bytes)
        return refuse(error, "it has a wrong size");
    if (chunk->is_raw) {
        memcpy(target, chunk->stored, chunk->true_bytes);
    } else {
        const char *fault = read_heads(&parse);
        if (fault != NULL) return refuse(error, fault);
        FST_TRY(decode_planes(decoder, &parse, target, error));
    }
    if (fsti_crc32c(target, chunk->true_bytes) != chunk->crc)
        return refuse(error, "its CRC32C does not match");
    return FST_OK;
}
