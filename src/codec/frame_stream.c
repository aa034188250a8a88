// SPDX-License-Identifier: Apache-2.0
/// One zstd frame as a stream of bytes: reading stops at what was asked for, so a frame that claims
/// more than its reader expects costs no memory.
#include <string.h>

#include "sparse_blocks.h"

// Parameters and directives of zstd.h.
enum {
    ZSTD_LEVEL = 100,
    ZSTD_CONTENT_SIZE = 200,
    ZSTD_WINDOW_LOG_MAX = 100,
    ZSTD_RESET_SESSION = 1,
    ZSTD_CONTINUE = 0,
    ZSTD_END = 2,
};

/// The result of ZSTD_getFrameContentSize() for bytes that are no frame. One more means that the
/// frame does not state its size.
#define ZSTD_SIZE_ERROR (0ULL - 2)

/// ZSTD_error_memory_allocation of zstd_errors.h, as functions return it.
#define ZSTD_MEMORY_ERROR ((size_t)0 - 64)

/// Stored bytes that are fetched, or given away, at a time.
#define STORED_BYTES ((size_t)64 << 10)
/// Content that is dropped at a time.
#define DROPPED_BYTES ((size_t)16 << 10)

struct fsti_frame_reader {
    const zstd_library *zstd;
    void *context;
    fsti_frame_source source;
    uint64_t fetched;
    zstd_input input;
    bool is_over; ///< the frame's last byte was decoded
    unsigned char stored[STORED_BYTES];
    unsigned char dropped[DROPPED_BYTES];
};

static fst_status refuse_frame(const char *what, fst_error *error) {
    return fsti_error_set(error, FST_E_CORRUPT, FSTI_NO_LOCATION, "CorruptData: %s", what);
}

fst_status fsti_frame_reader_open(fsti_frame_reader **out, fst_error *error) {
    const zstd_library *zstd;
    *out = NULL;
    FST_TRY(fsti_zstd_open(&zstd, error));
    fsti_frame_reader *reader = fsti_alloc(sizeof *reader);
    if (reader == NULL) return fsti_error_memory(error, sizeof *reader);
    reader->zstd = zstd;
    reader->context = fsti_alloc_fails() ? NULL : zstd->ZSTD_createDCtx();
    if (reader->context == NULL) {
        fsti_free(reader);
        return fsti_error_memory(error, sizeof *reader);
    }
    (void)zstd->ZSTD_DCtx_setParameter(reader->context, ZSTD_WINDOW_LOG_MAX,
                                       FSTI_FRAME_WINDOW_LOG_MAX);
    *out = reader;
    return FST_OK;
}

void fsti_frame_reader_close(fsti_frame_reader *reader) {
    if (reader == NULL) return;
    reader->zstd->ZSTD_freeDCtx(reader->context);
    fsti_free(reader);
}

void fsti_frame_begin(fsti_frame_reader *reader, const fsti_frame_source *source) {
    reader->source = *source;
    reader->fetched = 0;
    reader->input = (zstd_input){reader->stored, 0, 0};
    reader->is_over = false;
    (void)reader->zstd->ZSTD_DCtx_reset(reader->context, ZSTD_RESET_SESSION);
}

/// Fetches more stored bytes where all were used.
static fst_status fetch_stored(fsti_frame_reader *reader, fst_error *error) {
    if (reader->input.position < reader->input.size) return FST_OK;
    size_t size = (size_t)fsti_min(STORED_BYTES, reader->source.size_bytes - reader->fetched);
    reader->input = (zstd_input){reader->stored, size, 0};
    if (size == 0) return FST_OK;
    FST_TRY(
        reader->source.pull(reader->source.context, reader->stored, size, reader->fetched, error));
    reader->fetched += size;
    return FST_OK;
}

fst_status fsti_frame_stated(fsti_frame_reader *reader, uint64_t *content_bytes, fst_error *error) {
    FST_TRY(fetch_stored(reader, error));
    unsigned long long stated =
        reader->zstd->ZSTD_getFrameContentSize(reader->stored, reader->input.size);
    // fsti_frame_read() finds what is wrong with bytes that are no frame.
    *content_bytes = stated >= ZSTD_SIZE_ERROR ? FSTI_FRAME_UNSTATED : stated;
    return FST_OK;
}

/// Decodes into `output` until it is full or the frame is over.
static fst_status decode_some(fsti_frame_reader *reader, zstd_output *output, fst_error *error) {
    while (output->position < output->size && !reader->is_over) {
        FST_TRY(fetch_stored(reader, error));
        size_t had_input = reader->input.position, had_output = output->position;
        size_t code = reader->zstd->ZSTD_decompressStream(reader->context, output, &reader->input);
        if (code == ZSTD_MEMORY_ERROR) return fsti_error_memory(error, STORED_BYTES);
        if (reader->zstd->ZSTD_isError(code))
            return refuse_frame("not a zstd frame, damaged, or its window exceeds 8 MiB", error);
        if (code == 0)
            reader->is_over = true;
        else if (reader->input.position == had_input && output->position == had_output)
            return refuse_frame("the zstd frame is cut off", error);
    }
    return FST_OK;
}

fst_status fsti_frame_read(fsti_frame_reader *reader, void *target, uint64_t size,
                           fst_error *error) {
    unsigned char *at = target;
    while (size > 0) {
        size_t piece = (size_t)(target == NULL ? fsti_min(size, DROPPED_BYTES) : size);
        zstd_output output = {target == NULL ? reader->dropped : at, piece, 0};
        FST_TRY(decode_some(reader, &output, error));
        if (output.position < piece)
            return refuse_frame("the zstd frame holds fewer bytes than the tensor needs", error);
        size -= piece;
        if (target != NULL) at += piece;
    }
    return FST_OK;
}

fst_status fsti_frame_end(fsti_frame_reader *reader, fst_error *error) {
    zstd_output output = {reader->dropped, 1, 0};
    FST_TRY(decode_some(reader, &output, error));
    if (output.position > 0)
        return refuse_frame("the zstd frame holds more bytes than the tensor needs", error);
    if (reader->input.position < reader->input.size || reader->fetched < reader->source.size_bytes)
        return refuse_frame("there are bytes after the zstd frame", error);
    return FST_OK;
}

struct fsti_frame_writer {
    const zstd_library *zstd;
    void *context;
    sparse_blocks *sparse; ///< NULL: other levels than 1, or libzstd lacks what it needs
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
    fst_status status = level == 1 ? fsti_sparse_open(zstd, &writer->sparse, error) : FST_OK;
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
    fsti_sparse_head(content_bytes, writer->stored);
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
