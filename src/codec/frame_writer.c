// SPDX-License-Identifier: Apache-2.0
/// Makes one zstd frame from a stream of bytes.
#include <string.h>

#include "sparse_blocks.h"
#include "zstd_library.h"

// Parameters and directives of zstd.h.
enum {
    ZSTD_LEVEL = 100,
    ZSTD_CONTENT_SIZE = 200,
    ZSTD_RESET_SESSION = 1,
    ZSTD_CONTINUE = 0,
    ZSTD_END = 2,
};

/// Stored bytes that are given away at a time.
#define STORED_BYTES ((size_t)64 << 10)

struct fsti_frame_writer {
    const zstd_library *zstd;
    void *context;
    sparse_blocks *sparse; ///< NULL: other levels than 1
    bool is_sparse;        ///< the current frame
    size_t stored_size;    ///< bytes of a sparse frame that were not given away yet
    fsti_frame_sink sink;
    unsigned char stored[STORED_BYTES];
};

fst_status fsti_frame_writer_open(int level, fsti_frame_writer **out, fst_error *error) {
    const zstd_library *zstd;
    *out = NULL;
    FST_TRY(fsti_zstd_open(&zstd, error));
    fsti_frame_writer *writer = fsti_alloc(sizeof *writer);
    if (writer == NULL) return fsti_error_memory(error, sizeof *writer);
    writer->zstd = zstd;
    writer->sparse = NULL;
    writer->context = fsti_alloc_fails() ? NULL : zstd->ZSTD_createCCtx();
    if (writer->context == NULL) {
        fsti_free(writer);
        return fsti_error_memory(error, sizeof *writer);
    }
    (void)zstd->ZSTD_CCtx_setParameter(writer->context, ZSTD_LEVEL, level);
    (void)zstd->ZSTD_CCtx_setParameter(writer->context, ZSTD_CONTENT_SIZE, 1);
    fst_status status = level == 1 ? fsti_sparse_open(&writer->sparse, error) : FST_OK;
    if (status == FST_OK)
        *out = writer;
    else
        fsti_frame_writer_close(writer);
    return status;
}

void fsti_frame_writer_close(fsti_frame_writer *writer) {
    if (writer == NULL) return;
    writer->zstd->ZSTD_freeCCtx(writer->context);
    fsti_sparse_close(writer->sparse);
    fsti_free(writer);
}

fst_status fsti_frame_write_begin(fsti_frame_writer *writer, uint64_t content_bytes,
                                  const fsti_frame_sink *sink, fst_error *error) {
    writer->sink = *sink;
    writer->is_sparse = false;
    (void)writer->zstd->ZSTD_CCtx_reset(writer->context, ZSTD_RESET_SESSION);
    size_t code = writer->zstd->ZSTD_CCtx_setPledgedSrcSize(writer->context, content_bytes);
    if (writer->zstd->ZSTD_isError(code))
        return fsti_error_set(error, FST_E_IO, FSTI_NO_LOCATION,
                              "libzstd refuses a frame of %llu bytes",
                              (unsigned long long)content_bytes);
    return FST_OK;
}

fst_status fsti_frame_write_begin_sparse(fsti_frame_writer *writer, uint64_t content_bytes,
                                         const fsti_frame_sink *sink, fst_error *error) {
    if (writer->sparse == NULL) return fsti_frame_write_begin(writer, content_bytes, sink, error);
    writer->sink = *sink;
    writer->is_sparse = true;
    writer->stored_size = SPARSE_HEAD_BYTES;
    fsti_sparse_begin(writer->sparse, content_bytes, writer->stored);
    return FST_OK;
}

/// Collects stored bytes, because the blocks of a sparse frame are small.
static fst_status put_stored(fsti_frame_writer *writer, const void *bytes, size_t size,
                             fst_error *error) {
    if (size > STORED_BYTES - writer->stored_size) {
        size_t collected = writer->stored_size;
        writer->stored_size = 0;
        FST_TRY(writer->sink.put(writer->sink.context, writer->stored, collected, error));
    }
    if (size > STORED_BYTES) return writer->sink.put(writer->sink.context, bytes, size, error);
    memcpy(writer->stored + writer->stored_size, bytes, size);
    writer->stored_size += size;
    return FST_OK;
}

static fst_status encode_sparse(fsti_frame_writer *writer, const unsigned char *bytes, size_t size,
                                fst_error *error) {
    for (size_t at = 0; at < size; at += SPARSE_BLOCK_BYTES) {
        size_t piece = (size_t)fsti_min(SPARSE_BLOCK_BYTES, size - at);
        stored_block block = fsti_sparse_block(writer->sparse, bytes + at, piece);
        FST_TRY(put_stored(writer, block.bytes, block.size, error));
    }
    return FST_OK;
}

static fst_status encode_some(fsti_frame_writer *writer, zstd_input *input, int directive,
                              fst_error *error) {
    size_t left;
    do {
        zstd_output output = {writer->stored, STORED_BYTES, 0};
        left = writer->zstd->ZSTD_compressStream2(writer->context, &output, input, directive);
        if (writer->zstd->ZSTD_isError(left))
            return fsti_error_set(error, FST_E_NO_MEMORY, FSTI_NO_LOCATION,
                                  "libzstd failed to compress");
        if (output.position > 0)
            FST_TRY(writer->sink.put(writer->sink.context, writer->stored, output.position, error));
    } while (input->position < input->size || (directive == ZSTD_END && left > 0));
    return FST_OK;
}

fst_status fsti_frame_write(fsti_frame_writer *writer, const void *bytes, size_t size,
                            fst_error *error) {
    zstd_input input = {bytes, size, 0};
    if (writer->is_sparse) return encode_sparse(writer, bytes, size, error);
    return size == 0 ? FST_OK : encode_some(writer, &input, ZSTD_CONTINUE, error);
}

fst_status fsti_frame_write_end(fsti_frame_writer *writer, fst_error *error) {
    zstd_input input = {"", 0, 0};
    if (!writer->is_sparse) return encode_some(writer, &input, ZSTD_END, error);
    FST_TRY(put_stored(writer, fsti_sparse_tail, SPARSE_TAIL_BYTES, error));
    return writer->sink.put(writer->sink.context, writer->stored, writer->stored_size, error);
}
