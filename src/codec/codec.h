// SPDX-License-Identifier: Apache-2.0
/// The door of the codec room: chunks of compressed tensors, between bytes as they are stored and
/// bytes as they are. Knows nothing of files. The format: docs/FORMAT.md, "Compressed files".
#ifndef FSTI_CODEC_H
#define FSTI_CODEC_H

#include "base/base.h"
#include "dtype/dtype.h"

/// How the elements of a chunk are cut into planes of bytes.
typedef enum fsti_codec_layout {
    FSTI_LAYOUT_BYTES = 0,    ///< as they are: one plane
    FSTI_LAYOUT_ROTATED = 1,  ///< floats: rotated left by one bit, the sign behind the mantissa
    FSTI_LAYOUT_NIBBLES = 2,  ///< rotated; two elements' upper halves make a byte, and their lower
    FSTI_LAYOUT_INTEGERS = 3, ///< cut as they are
} fsti_codec_layout;
#define FSTI_LAYOUT_COUNT 4u

/// How a plane is coded.
typedef enum fsti_codec_coder {
    FSTI_CODER_ZSTD = 1, ///< a zstd frame a plane, of literals
} fsti_codec_coder;

/// A chunk's true bytes are a power of two between these; the last chunk of a tensor has fewer.
#define FSTI_CHUNK_LOG_MIN 16u
#define FSTI_CHUNK_LOG_MAX 20u
#define FSTI_CHUNK_LOG_DEFAULT 18u
/// Planes begin at multiples of this from the chunk's begin.
#define FSTI_PLANE_ALIGNMENT 16u
#define FSTI_PLANE_COUNT_MAX 8u

fsti_codec_layout fsti_codec_layout_of(fst_dtype dtype);
/// Whether the dtype is one that compression is for unless all is asked for: floats.
bool fsti_codec_is_float(fst_dtype dtype);

/// CRC32C (Castagnoli) of bytes.
uint32_t fsti_crc32c(const void *bytes, size_t size_bytes);

/// What is claimed of a chunk, and where its stored bytes are.
typedef struct fsti_chunk {
    fst_dtype dtype;
    bool is_raw;
    uint32_t crc; ///< of its true bytes
    const unsigned char *stored;
    size_t stored_bytes;
    size_t true_bytes; ///< at least 1, at most 2^FSTI_CHUNK_LOG_MAX, whole elements
} fsti_chunk;

/// One thread's room for decoding, or encoding.
typedef struct fsti_decoder fsti_decoder;
typedef struct fsti_encoder fsti_encoder;

fst_status fsti_decoder_open(fsti_decoder **out, fst_error *error);
/// Bytes of memory that a decoder comes to at most, libzstd's among them.
size_t fsti_decoder_bytes(void);
void fsti_decoder_close(fsti_decoder *decoder);
/// Writes the chunk's true bytes to `target`: them, or FST_E_CORRUPT that says what is wrong with
/// the chunk, whatever its bytes are. Nothing outside of `stored` and `target` is touched.
/// FST_E_UNSUPPORTED that says what to install where a chunk of another writer's needs the coder's
/// library and it is not there; what fsti_chunk_encode() makes hardly ever does.
fst_status fsti_chunk_decode(fsti_decoder *decoder, const fsti_chunk *chunk, void *target,
                             fst_error *error);

/// FST_E_UNSUPPORTED that says what to install where the coder's library is not there.
fst_status fsti_encoder_open(fsti_encoder **out, fst_error *error);
void fsti_encoder_close(fsti_encoder *encoder);
/// Encodes chunk->true_bytes bytes at `source` to `target`, which has room for as many; fills the
/// chunk's is_raw, crc, stored (target) and stored_bytes (never more than true_bytes).
fst_status fsti_chunk_encode(fsti_encoder *encoder, const void *source, unsigned char *target,
                             fsti_chunk *chunk, fst_error *error);

/// The same by kernels of one instruction set, for tests: NULL is the best one.
struct codec_kernels;
void fsti_codec_use(const struct codec_kernels *kernels);

#endif
