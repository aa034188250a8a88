// SPDX-License-Identifier: Apache-2.0
/// One zstd frame as a stream of bytes: reading stops at what was asked for, so a frame that claims
/// more than its reader expects costs no memory.
#include <string.h>

#include "sparse_reader.h"
#include "zstd_library.h"

// A parameter and a directive of zstd.h.
enum { ZSTD_WINDOW_LOG_MAX = 100, ZSTD_RESET_SESSION = 1 };

/// The result of ZSTD_getFrameContentSize() for bytes that are no frame. One more means that the
/// frame does not state its size.
#define ZSTD_SIZE_ERROR (0ULL - 2)

/// ZSTD_error_memory_allocation of zstd_errors.h, as functions return it.
#define ZSTD_MEMORY_ERROR ((size_t)0 - 64)

/// Stored bytes that are fetched at a time.
#define STORED_BYTES ((size_t)64 << 10)
/// Content that is dropped at a time, or decoded before an XOR: it stays in the CPU's first-level
/// cache.
#define PIECE_BYTES ((size_t)32 << 10)

/// How the content of the current frame is decoded.
typedef enum frame_mode {
    MODE_UNDECIDED, ///< nothing was read yet
    MODE_SPARSE,    ///< by sparse_reader.c
    MODE_LIBZSTD,
} frame_mode;

struct fsti_frame_reader {
    const zstd_library *zstd;
    void *context;
    fsti_frame_source source;
    uint64_t fetched;
    zstd_input input;
    bool is_over;           ///< the frame's last byte was decoded
    uint64_t stated, given; ///< bytes of content: of the frame (FSTI_FRAME_UNSTATED), and read
    frame_mode mode;
    bool has_last;         ///< MODE_SPARSE: the current block is the frame's last one
    sparse_reader *sparse; ///< allocated for the first XOR
    unsigned char stored[STORED_BYTES];
    unsigned char piece[PIECE_BYTES];
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
    reader->sparse = NULL;
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
    fsti_free(reader->sparse);
    fsti_free(reader);
}

void fsti_frame_begin(fsti_frame_reader *reader, const fsti_frame_source *source) {
    reader->source = *source;
    reader->fetched = reader->given = 0;
    reader->stated = FSTI_FRAME_UNSTATED;
    reader->input = (zstd_input){reader->stored, 0, 0};
    reader->is_over = false;
    reader->mode = MODE_UNDECIDED;
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
    if (reader->fetched == 0) {
        unsigned long long stated =
            reader->zstd->ZSTD_getFrameContentSize(reader->stored, reader->input.size);
        // Reading finds what is wrong with bytes that are no frame.
        reader->stated = stated >= ZSTD_SIZE_ERROR ? FSTI_FRAME_UNSTATED : stated;
    }
    reader->fetched += size;
    return FST_OK;
}

fst_status fsti_frame_stated(fsti_frame_reader *reader, uint64_t *content_bytes, fst_error *error) {
    FST_TRY(fetch_stored(reader, error));
    *content_bytes = reader->stated;
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

/// Reads the next `size` bytes by libzstd; NULL drops them.
static fst_status read_content(fsti_frame_reader *reader, unsigned char *target, uint64_t size,
                               fst_error *error) {
    while (size > 0) {
        size_t piece = (size_t)(target == NULL ? fsti_min(size, PIECE_BYTES) : size);
        zstd_output output = {target == NULL ? reader->piece : target, piece, 0};
        FST_TRY(decode_some(reader, &output, error));
        if (output.position < piece)
            return refuse_frame("the zstd frame holds fewer bytes than the tensor needs", error);
        size -= piece;
        reader->given += piece;
        if (target != NULL) target += piece;
    }
    return FST_OK;
}

/// Leaves the frame to libzstd, from the next byte of content on. Also if it is damaged: libzstd
/// decides that.
static fst_status use_libzstd(fsti_frame_reader *reader, fst_error *error) {
    frame_mode mode = reader->mode;
    reader->mode = MODE_LIBZSTD;
    if (mode != MODE_SPARSE) return FST_OK;
    reader->fetched = 0;
    reader->input = (zstd_input){reader->stored, 0, 0};
    uint64_t given = reader->given;
    reader->given = 0;
    return read_content(reader, NULL, given, error);
}

fst_status fsti_frame_read(fsti_frame_reader *reader, void *target, uint64_t size,
                           fst_error *error) {
    if (reader->mode != MODE_LIBZSTD) FST_TRY(use_libzstd(reader, error));
    return read_content(reader, target, size, error);
}

/// Takes `size` stored bytes. *has_all: there were as many.
static fst_status take_stored(fsti_frame_reader *reader, unsigned char *target, size_t size,
                              bool *has_all, fst_error *error) {
    *has_all = false;
    while (size > 0) {
        FST_TRY(fetch_stored(reader, error));
        size_t piece = (size_t)fsti_min(size, reader->input.size - reader->input.position);
        if (piece == 0) return FST_OK;
        memcpy(target, reader->stored + reader->input.position, piece);
        reader->input.position += piece;
        target += piece;
        size -= piece;
    }
    *has_all = true;
    return FST_OK;
}

/// Reads the frame's header (RFC 8878, 3.1.1.1). *is_read: it has neither a dictionary nor a
/// checksum nor a window that is too large.
static fst_status read_head(fsti_frame_reader *reader, bool *is_read, fst_error *error) {
    static const unsigned char magic[] = {0x28, 0xb5, 0x2f, 0xfd};
    unsigned char head[sizeof magic + 1], rest[9];
    FST_TRY(take_stored(reader, head, sizeof head, is_read, error));
    uint32_t flags = head[sizeof magic];
    if (!*is_read || memcmp(head, magic, sizeof magic) != 0 || (flags & 0xf) != 0) {
        *is_read = false;
        return FST_OK;
    }
    bool is_single = (flags & 0x20) != 0;
    size_t window_bytes = is_single ? 0 : 1;
    size_t size_bytes = flags >> 6 == 0 ? (is_single ? 1 : 0) : (size_t)1 << (flags >> 6);
    FST_TRY(take_stored(reader, rest, window_bytes + size_bytes, is_read, error));
    if (!*is_read) return FST_OK;
    uint64_t content =
        fsti_number_load(rest + window_bytes, size_bytes) + (size_bytes == 2 ? 256 : 0);
    uint64_t window = content;
    if (!is_single) {
        window = (uint64_t)1 << (10 + (rest[0] >> 3));
        window += (window >> 3) * (rest[0] & 7);
    }
    *is_read = window <= (uint64_t)1 << FSTI_FRAME_WINDOW_LOG_MAX;
    fsti_sparse_reader_reset(reader->sparse, (size_t)fsti_min(window, SPARSE_BLOCK_BYTES_MAX));
    return FST_OK;
}

static fst_status begin_sparse(fsti_frame_reader *reader, fst_error *error) {
    bool is_read;
    if (reader->sparse == NULL) {
        reader->sparse = fsti_alloc(sizeof *reader->sparse);
        if (reader->sparse == NULL) return fsti_error_memory(error, sizeof *reader->sparse);
    }
    reader->mode = MODE_SPARSE;
    reader->has_last = false;
    FST_TRY(read_head(reader, &is_read, error));
    return is_read ? FST_OK : use_libzstd(reader, error);
}

/// Begins the next block. *is_begun: false after the last one, and if it needs libzstd.
static fst_status begin_block(fsti_frame_reader *reader, bool *is_begun, fst_error *error) {
    unsigned char head[3];
    *is_begun = false;
    if (reader->has_last) return FST_OK;
    FST_TRY(take_stored(reader, head, sizeof head, is_begun, error));
    if (!*is_begun) return FST_OK;
    uint32_t bits = (uint32_t)fsti_number_load(head, sizeof head), kind = bits >> 1 & 3;
    size_t size = bits >> 3, stored = kind == SPARSE_REPEATED ? 1 : size;
    *is_begun = kind <= SPARSE_COMPRESSED && size <= reader->sparse->content_max;
    if (!*is_begun) return FST_OK;
    FST_TRY(take_stored(reader, sparse_reader_block(reader->sparse), stored, is_begun, error));
    reader->has_last = (bits & 1) != 0;
    *is_begun = *is_begun && fsti_sparse_reader_begin(reader->sparse, kind, stored, size);
    return FST_OK;
}

/// XORs content until a block needs libzstd. *done: bytes of content.
static fst_status xor_sparse(fsti_frame_reader *reader, unsigned char *target, uint64_t size,
                             uint64_t *done, fst_error *error) {
    bool is_valid = true;
    *done = 0;
    while (is_valid && *done < size) {
        size_t got, most = (size_t)fsti_min(size - *done, PIECE_BYTES);
        is_valid = fsti_sparse_reader_xor(reader->sparse, target == NULL ? NULL : target + *done,
                                          most, &got);
        *done += got;
        reader->given += got;
        if (is_valid && got < most) FST_TRY(begin_block(reader, &is_valid, error));
    }
    return FST_OK;
}

fst_status fsti_frame_xor(fsti_frame_reader *reader, unsigned char *target, uint64_t size,
                          fst_error *error) {
    uint64_t done = 0;
    if (reader->mode == MODE_UNDECIDED) FST_TRY(begin_sparse(reader, error));
    if (reader->mode == MODE_SPARSE) {
        FST_TRY(xor_sparse(reader, target, size, &done, error));
        if (done == size) return FST_OK;
        FST_TRY(use_libzstd(reader, error));
    }
    if (target == NULL) return read_content(reader, NULL, size - done, error);
    while (done < size) {
        size_t piece = (size_t)fsti_min(PIECE_BYTES, size - done);
        FST_TRY(read_content(reader, reader->piece, piece, error));
        for (size_t i = 0; i < piece; i++) target[done + i] ^= reader->piece[i];
        done += piece;
    }
    return FST_OK;
}

/// Whether the frame ends after the content that was given.
static fst_status ends_here(fsti_frame_reader *reader, bool *ends, fst_error *error) {
    bool is_valid = true;
    while (is_valid) {
        size_t got;
        is_valid = fsti_sparse_reader_xor(reader->sparse, NULL, 1, &got) && got == 0;
        if (is_valid && reader->has_last) break;
        if (is_valid) FST_TRY(begin_block(reader, &is_valid, error));
    }
    *ends = is_valid && reader->input.position == reader->input.size &&
            reader->fetched == reader->source.size_bytes;
    return FST_OK;
}

/// libzstd compares the size with the header's in some of its calls only.
static fst_status check_size(const fsti_frame_reader *reader, fst_error *error) {
    if (reader->stated == FSTI_FRAME_UNSTATED || reader->stated == reader->given) return FST_OK;
    return refuse_frame("the zstd frame holds another number of bytes than it states", error);
}

fst_status fsti_frame_end(fsti_frame_reader *reader, fst_error *error) {
    zstd_output output = {reader->piece, 1, 0};
    if (reader->mode == MODE_SPARSE) {
        bool ends;
        FST_TRY(ends_here(reader, &ends, error));
        if (ends) return check_size(reader, error);
    }
    if (reader->mode != MODE_LIBZSTD) FST_TRY(use_libzstd(reader, error));
    FST_TRY(decode_some(reader, &output, error));
    if (output.position > 0)
        return refuse_frame("the zstd frame holds more bytes than the tensor needs", error);
    if (reader->input.position < reader->input.size || reader->fetched < reader->source.size_bytes)
        return refuse_frame("there are bytes after the zstd frame", error);
    return check_size(reader, error);
}
