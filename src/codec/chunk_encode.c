// SPDX-License-Identifier: Apache-2.0
/// Encodes chunks: planes without redundancy are stored unchanged, constant planes as their
/// value, and others are coded.
#include <string.h>

#include "planes.h"
#include "zstd_library.h"

// Parameters of zstd.h that disable the search for matches, so that a frame is one Huffman table
// and four streams.
enum {
    ZSTD_STRATEGY = 107,
    ZSTD_STRATEGY_FAST = 1,
    ZSTD_HASH_LOG = 102,
    ZSTD_MIN_MATCH = 105,
    ZSTD_TARGET_LENGTH = 106,
    ZSTD_LITERAL_MODE = 1002, ///< experimental: without it frames are about 2 % larger
    ZSTD_LITERALS_HUFFMAN = 1,
};

/// A plane is coded if that saves 1/20 (5 %) of its bytes.
#define PLANE_SAVING 20u
/// Size of the sample of a plane that decides whether to code it, and its maximum entropy.
#define SAMPLE_BYTES 8192u
#define SAMPLE_RUN_BYTES 256u
#define SAMPLE_BITS_MAX 7.75f

struct fsti_encoder {
    const zstd_library *zstd;
    void *context;
    unsigned char *planes; ///< memory for the planes of a whole chunk
};

fst_status fsti_encoder_open(fsti_encoder **out, fst_error *error) {
    const zstd_library *zstd;
    size_t room = ((size_t)1 << FSTI_CHUNK_LOG_MAX) + 64;
    FST_TRY(fsti_zstd_open(&zstd, error));
    fsti_encoder *encoder = fsti_alloc_zeroed(1, sizeof *encoder);
    if (encoder == NULL) return fsti_error_memory(error, sizeof *encoder);
    encoder->zstd = zstd;
    encoder->planes = fsti_alloc(room);
    if (encoder->planes != NULL) encoder->context = zstd->ZSTD_createCCtx();
    if (encoder->context == NULL) {
        fsti_encoder_close(encoder);
        return fsti_error_memory(error, room);
    }
    static const int parameters[][2] = {{ZSTD_STRATEGY, ZSTD_STRATEGY_FAST},
                                        {ZSTD_MIN_MATCH, 7},
                                        {ZSTD_HASH_LOG, 6},
                                        {ZSTD_TARGET_LENGTH, 131072},
                                        {ZSTD_LITERAL_MODE, ZSTD_LITERALS_HUFFMAN}};
    // If the library lacks a parameter, frames are larger but correct.
    for (size_t i = 0; i < sizeof parameters / sizeof *parameters; i++)
        (void)zstd->ZSTD_CCtx_setParameter(encoder->context, parameters[i][0], parameters[i][1]);
    *out = encoder;
    return FST_OK;
}

void fsti_encoder_close(fsti_encoder *encoder) {
    if (encoder == NULL) return;
    if (encoder->context != NULL) encoder->zstd->ZSTD_freeCCtx(encoder->context);
    fsti_free(encoder->planes);
    fsti_free(encoder);
}

static bool is_constant(const unsigned char *plane, size_t size) {
    return memcmp(plane, plane + 1, size - 1) == 0;
}

/// An approximate log2 (to a hundredth), which avoids linking libm.
static float log2_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    int exponent = (int)(bits >> 23) - 127;
    bits = (bits & 0x007fffffu) | 0x3f800000u;
    memcpy(&value, &bits, 4);
    return (float)exponent + (2.0f - value / 3.0f) * value - 2.0f / 3.0f - 1.0f;
}

/// Whether a sample of the plane has low enough entropy for coding.
static bool is_worth_coding(const unsigned char *plane, size_t size) {
    uint32_t counts[256] = {0}, total = 0;
    size_t step =
        size <= SAMPLE_BYTES ? SAMPLE_RUN_BYTES : size / (SAMPLE_BYTES / SAMPLE_RUN_BYTES);
    for (size_t begin = 0; begin < size; begin += step) {
        size_t end = (size_t)fsti_min(begin + SAMPLE_RUN_BYTES, size);
        for (size_t i = begin; i < end; i++) counts[plane[i]]++;
        total += (uint32_t)(end - begin);
    }
    float bits = 0;
    for (int i = 0; i < 256; i++)
        if (counts[i] > 0)
            bits += (float)counts[i] * (log2_of((float)total) - log2_of((float)counts[i]));
    return bits <= SAMPLE_BITS_MAX * (float)total;
}

/// A chunk being encoded.
typedef struct chunk_build {
    unsigned char *target;
    size_t size, capacity;
} chunk_build;

/// Starts the next plane, after zero padding. False if there is no space.
static bool begin_plane(chunk_build *build) {
    size_t begin = plane_align(build->size);
    if (begin > build->capacity) return false;
    memset(build->target + build->size, 0, begin - build->size);
    build->size = begin;
    return true;
}

static void put_head(unsigned char *bytes, const plane_head *head) {
    bytes[0] = head->kind;
    bytes[1] = head->value;
    (void)fsti_number_store(bytes + 2, head->stored_bytes, 4);
}

/// Codes a plane at the current position. False if that does not pay off.
static bool code_plane(const fsti_encoder *encoder, const unsigned char *plane, size_t size,
                       chunk_build *build, size_t *coded_bytes) {
    size_t before = build->size;
    if (!is_worth_coding(plane, size) || !begin_plane(build)) return false;
    size_t most = size - size / PLANE_SAVING, room = build->capacity - build->size;
    // A large output buffer lets zstd take its fast path.
    size_t got = encoder->zstd->ZSTD_compress2(encoder->context, build->target + build->size, room,
                                               plane, size);
    if (encoder->zstd->ZSTD_isError(got) || got >= most) {
        build->size = before;
        return false;
    }
    build->size += got;
    *coded_bytes = got;
    return true;
}

static bool put_raw(const unsigned char *plane, size_t size, chunk_build *build) {
    if (!begin_plane(build) || size > build->capacity - build->size) return false;
    memcpy(build->target + build->size, plane, size);
    build->size += size;
    return true;
}

/// Assembles the chunk. False if it is not smaller than the original bytes.
static bool build_chunk(const fsti_encoder *encoder, const plane_cut *cut,
                        const unsigned char *const *planes, chunk_build *build) {
    plane_head heads[FSTI_PLANE_COUNT_MAX] = {{0}};
    size_t size = cut->plane_bytes, coded_bytes = 0;
    build->size = 1 + cut->plane_count * PLANE_HEAD_BYTES;
    if (build->size > build->capacity) return false;
    for (uint32_t k = 0; k < cut->plane_count; k++) {
        heads[k] = (plane_head){PLANE_RAW, 0, (uint32_t)size};
        if (is_constant(planes[k], size))
            heads[k] = (plane_head){PLANE_CONSTANT, planes[k][0], 0};
        else if (code_plane(encoder, planes[k], size, build, &coded_bytes))
            heads[k] = (plane_head){PLANE_CODED, 0, (uint32_t)coded_bytes};
    }
    for (uint32_t k = 0; k < cut->plane_count; k++)
        if (heads[k].kind == PLANE_RAW && !put_raw(planes[k], size, build)) return false;
    build->target[0] = (unsigned char)cut->plane_count;
    for (uint32_t k = 0; k < cut->plane_count; k++)
        put_head(build->target + 1 + k * PLANE_HEAD_BYTES, &heads[k]);
    return begin_plane(build) && build->size < build->capacity;
}

fst_status fsti_chunk_encode(fsti_encoder *encoder, const void *source, unsigned char *target,
                             fsti_chunk *chunk, fst_error *error) {
    plane_cut cut = fsti_planes_of(chunk->dtype, chunk->true_bytes);
    unsigned char *planes[FSTI_PLANE_COUNT_MAX];
    const unsigned char *views[FSTI_PLANE_COUNT_MAX];
    chunk_build build = {.target = target, .capacity = chunk->true_bytes};
    if (chunk->true_bytes == 0 || chunk->true_bytes > (size_t)1 << FSTI_CHUNK_LOG_MAX ||
        chunk->true_bytes % cut.element_bytes != 0)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "the chunk size is not a multiple of the element size");
    for (uint32_t k = 0; k < cut.plane_count; k++) {
        planes[k] = encoder->planes + k * cut.plane_bytes;
        views[k] = cut.plane_count == 1 ? source : planes[k];
    }
    if (cut.plane_count > 1) fsti_planes_split(&cut, source, planes);
    chunk->crc = fsti_crc32c(source, chunk->true_bytes);
    chunk->stored = target;
    chunk->is_raw = !build_chunk(encoder, &cut, views, &build);
    chunk->stored_bytes = chunk->is_raw ? chunk->true_bytes : build.size;
    if (chunk->is_raw) memcpy(target, source, chunk->true_bytes);
    return FST_OK;
}
