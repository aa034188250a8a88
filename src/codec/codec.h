// SPDX-License-Identifier: Apache-2.0
/// Interface of the codec module: encoding and decoding chunks of compressed tensors. Independent
/// of files. The format: docs/FORMAT.md, "Compressed files".
///
/// Knows: chunks and frames: stored bytes and decoded bytes.
/// Does not know: files, tensors by name.
/// Main types: fsti_chunk, fsti_decoder, fsti_frame_reader.
#ifndef FSTI_CODEC_H
#define FSTI_CODEC_H

#include "base/primitives.h"
#include "dtype/dtype_info.h"

/// How the elements of a chunk are split into byte planes.
typedef enum fsti_codec_layout {
    FSTI_LAYOUT_BYTES = 0, ///< one plane, unchanged
    FSTI_LAYOUT_ROTATED =
        1, ///< floats: rotated left by one bit, so that the sign follows the mantissa
    FSTI_LAYOUT_NIBBLES =
        2, ///< rotated; the upper halves of two elements share a byte, and so do the lower ones
    FSTI_LAYOUT_INTEGERS = 3, ///< split without rotation
} fsti_codec_layout;
#define FSTI_LAYOUT_COUNT 4u

/// The coder of a plane.
typedef enum fsti_codec_coder {
    FSTI_CODER_ZSTD = 1, ///< one zstd frame per plane, of literals
} fsti_codec_coder;

/// The decoded size of a chunk is a power of two in this range; a tensor's last chunk may be
/// smaller.
#define FSTI_CHUNK_LOG_MIN 16u
#define FSTI_CHUNK_LOG_MAX 20u
#define FSTI_CHUNK_LOG_DEFAULT 18u
/// Alignment of planes within a chunk.
#define FSTI_PLANE_ALIGNMENT 16u
#define FSTI_PLANE_COUNT_MAX 8u

fsti_codec_layout fsti_codec_layout_of(fst_dtype dtype);
/// Whether a dtype is compressed by default: floats.
bool fsti_codec_is_float(fst_dtype dtype);

/// CRC32C (Castagnoli).
uint32_t fsti_crc32c(const void *bytes, size_t size_bytes);

/// The expected properties of a chunk, and its stored bytes.
typedef struct fsti_chunk {
    fst_dtype dtype;
    bool is_raw;
    uint32_t crc; ///< of the decoded bytes
    const unsigned char *stored;
    size_t stored_bytes;
    size_t true_bytes; ///< at least 1, at most 2^FSTI_CHUNK_LOG_MAX, whole elements
} fsti_chunk;

/// Memory of one thread for decoding or encoding.
typedef struct fsti_decoder fsti_decoder;
typedef struct fsti_encoder fsti_encoder;

fst_status fsti_decoder_open(fsti_decoder **out, fst_error *error);
/// Maximum memory of a decoder, including libzstd's.
size_t fsti_decoder_bytes(void);
void fsti_decoder_close(fsti_decoder *decoder);
/// Decodes a chunk to `target`. FST_E_CORRUPT describes any damage; memory outside `stored` and
/// `target` is never accessed. FST_E_UNSUPPORTED says what to install if a chunk of another writer
/// needs libzstd and it is missing; chunks of fsti_chunk_encode() almost never need it.
fst_status fsti_chunk_decode(fsti_decoder *decoder, const fsti_chunk *chunk, void *target,
                             fst_error *error);

/// FST_E_UNSUPPORTED says what to install if libzstd is missing.
fst_status fsti_encoder_open(fsti_encoder **out, fst_error *error);
void fsti_encoder_close(fsti_encoder *encoder);
/// Encodes chunk->true_bytes bytes at `source` into `target`, which has space for as many. Sets
/// is_raw, crc, stored (target) and stored_bytes (at most true_bytes).
fst_status fsti_chunk_encode(fsti_encoder *encoder, const void *source, unsigned char *target,
                             fsti_chunk *chunk, fst_error *error);

// ---- one zstd frame as a stream, for content of any size in bounded memory ----

/// Where a frame's stored bytes come from: exactly `size` bytes at `offset`, below size_bytes.
typedef struct fsti_frame_source {
    fst_status (*pull)(void *context, void *target, size_t size, uint64_t offset, fst_error *error);
    void *context;
    uint64_t size_bytes;
} fsti_frame_source;

/// Frames whose window is larger than 2^23 bytes (8 MiB) are refused: zstd's levels up to 19 make
/// none, and each thread holds a window in memory for every frame that it reads.
#define FSTI_FRAME_WINDOW_LOG_MAX 23

/// Reads one frame after another; of one thread at a time. FST_E_UNSUPPORTED without libzstd.
typedef struct fsti_frame_reader fsti_frame_reader;
fst_status fsti_frame_reader_open(fsti_frame_reader **out, fst_error *error);
void fsti_frame_reader_close(fsti_frame_reader *reader);
/// Begins a frame; `source` is copied.
void fsti_frame_begin(fsti_frame_reader *reader, const fsti_frame_source *source);
/// The next `size` bytes of content: all of them, or FST_E_CORRUPT. `target` NULL drops them.
fst_status fsti_frame_read(fsti_frame_reader *reader, void *target, uint64_t size,
                           fst_error *error);
/// The same, XORed into `target`. Frames of fsti_frame_write_begin_sparse() are decoded without
/// libzstd for this: their runs of zeros are passed over. A frame is read by this or by
/// fsti_frame_read().
fst_status fsti_frame_xor(fsti_frame_reader *reader, unsigned char *target, uint64_t size,
                          fst_error *error);
/// The content size that the frame states, or FSTI_FRAME_UNSTATED: most frames state theirs, but
/// need not. Called before the first fsti_frame_read() of the frame.
#define FSTI_FRAME_UNSTATED UINT64_MAX
fst_status fsti_frame_stated(fsti_frame_reader *reader, uint64_t *content_bytes, fst_error *error);
/// FST_E_CORRUPT unless the frame ends here and nothing follows it.
fst_status fsti_frame_end(fsti_frame_reader *reader, fst_error *error);

/// Makes frames; of one thread at a time. FST_E_UNSUPPORTED without libzstd.
typedef struct fsti_frame_writer fsti_frame_writer;
typedef struct fsti_frame_sink {
    fst_status (*put)(void *context, const void *bytes, size_t size, fst_error *error);
    void *context;
} fsti_frame_sink;
fst_status fsti_frame_writer_open(int level, fsti_frame_writer **out, fst_error *error);
void fsti_frame_writer_close(fsti_frame_writer *writer);
/// Begins a frame of exactly `content_bytes`, which the frame notes; `sink` is copied.
fst_status fsti_frame_write_begin(fsti_frame_writer *writer, uint64_t content_bytes,
                                  const fsti_frame_sink *sink, fst_error *error);
/// The same for content that is mostly zeros. At level 1 the frame is made without libzstd, several
/// times as fast, and usually smaller unless the content has a pattern.
fst_status fsti_frame_write_begin_sparse(fsti_frame_writer *writer, uint64_t content_bytes,
                                         const fsti_frame_sink *sink, fst_error *error);
fst_status fsti_frame_write(fsti_frame_writer *writer, const void *bytes, size_t size,
                            fst_error *error);
fst_status fsti_frame_write_end(fsti_frame_writer *writer, fst_error *error);

/// For tests: selects the kernels of one instruction set. NULL: the best one.
struct codec_kernels;
void fsti_codec_use(const struct codec_kernels *kernels);

#endif
