// SPDX-License-Identifier: Apache-2.0
/// Frames of content that is mostly zeros: any content comes back, frames are smaller than
/// libzstd's own, and nothing but a frame is written.
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "codec/codec.h"
#include "codec/sequence_code.h"
#include "codec/sparse_blocks.h"
#include "fixture.h"

#define BLOCK ((size_t)128 << 10)

/// Stored bytes of a frame.
typedef struct stored {
    unsigned char *bytes;
    size_t size, capacity;
} stored;

static fst_status put(void *context, const void *bytes, size_t size, fst_error *error) {
    stored *out = context;
    (void)error;
    if (out->size + size > out->capacity) {
        out->capacity = 2 * (out->size + size);
        out->bytes = realloc(out->bytes, out->capacity);
    }
    memcpy(out->bytes + out->size, bytes, size);
    out->size += size;
    return FST_OK;
}

/// How often the beginning of a frame was read: twice if libzstd took over.
static int begin_count;

static fst_status pull(void *context, void *target, size_t size, uint64_t offset,
                       fst_error *error) {
    const stored *in = context;
    (void)error;
    begin_count += offset == 0;
    memcpy(target, in->bytes + offset, size);
    return FST_OK;
}

static fst_status write_frame(fsti_frame_writer *writer, const unsigned char *content, size_t size,
                              size_t piece, fst_error *error) {
    for (size_t at = 0; at < size; at += piece)
        FST_TRY(fsti_frame_write(writer, content + at, (size_t)fsti_min(piece, size - at), error));
    return fsti_frame_write_end(writer, error);
}

/// Writes a frame in pieces of up to `piece` bytes; no bytes after an error.
static stored make_frame(const unsigned char *content, size_t size, size_t piece, bool is_sparse) {
    fsti_frame_writer *writer;
    fst_error error;
    stored out = {NULL, 0, 0};
    fsti_frame_sink sink = {put, &out};
    fst_status status = fsti_frame_writer_open(1, &writer, &error);
    // The second frame is kept: a writer is used for many.
    for (int i = 0; i < 2 && status == FST_OK; i++) {
        out.size = 0;
        status = is_sparse ? fsti_frame_write_begin_sparse(writer, size, &sink, &error)
                           : fsti_frame_write_begin(writer, size, &sink, &error);
        if (status == FST_OK) status = write_frame(writer, content, size, piece, &error);
    }
    fsti_frame_writer_close(writer);
    if (status != FST_OK) out.size = 0;
    return out;
}

static bool comes_back(const unsigned char *content, size_t size, stored *frame) {
    fsti_frame_reader *reader;
    fst_error error = {0};
    uint64_t stated = 0;
    unsigned char *back = malloc(size + 1);
    fsti_frame_source source = {pull, frame, frame->size};
    fst_status status = fsti_frame_reader_open(&reader, &error);
    if (status == FST_OK) fsti_frame_begin(reader, &source);
    if (status == FST_OK) status = fsti_frame_stated(reader, &stated, &error);
    if (status == FST_OK) status = fsti_frame_read(reader, back, size, &error);
    if (status == FST_OK) status = fsti_frame_end(reader, &error);
    if (status != FST_OK) fprintf(stderr, "# %s\n", error.message);
    bool same = status == FST_OK && stated == size && memcmp(back, content, size) == 0;
    fsti_frame_reader_close(reader);
    free(back);
    return same;
}

/// One byte in `distance` is not zero; 0: none is.
static unsigned char *make_content(size_t size, unsigned distance, uint64_t *seed) {
    unsigned char *content = calloc(size + 1, 1);
    for (size_t i = 0; i < size && distance > 0; i++)
        if (fixture_random(seed) % distance == 0)
            content[i] = (unsigned char)(1 + fixture_random(seed) % 7);
    return content;
}

/// The result of reading `size` bytes by pieces, into `back`, which XORs must leave as the content.
typedef enum reading { BY_XOR, BY_READ } reading;
static fst_status read_frame(const stored *frame, unsigned char *back, size_t size, size_t piece,
                             reading how, fst_error *error) {
    fsti_frame_reader *reader;
    fsti_frame_source source = {pull, (void *)(uintptr_t)frame, frame->size};
    memset(back, 0, size);
    FST_TRY(fsti_frame_reader_open(&reader, error));
    fsti_frame_begin(reader, &source);
    fst_status status = FST_OK;
    for (size_t at = 0; at < size && status == FST_OK; at += piece) {
        size_t part = (size_t)fsti_min(piece, size - at);
        status = how == BY_XOR ? fsti_frame_xor(reader, back + at, part, error)
                               : fsti_frame_read(reader, back + at, part, error);
    }
    if (status == FST_OK) status = fsti_frame_end(reader, error);
    fsti_frame_reader_close(reader);
    return status;
}

/// Whether an XOR gives what decoding gives, or an error. (libzstd accepts an empty compressed
/// block in some of its calls.)
static bool is_right_or_refused(const stored *frame, size_t size, size_t piece) {
    unsigned char *by_xor = malloc(size + 1), *by_read = malloc(size + 1);
    fst_error error = {0};
    fst_status xored = read_frame(frame, by_xor, size, piece, BY_XOR, &error);
    fst_status got = read_frame(frame, by_read, size, piece, BY_READ, &error);
    bool is_right = xored == FST_OK ? got == FST_OK && memcmp(by_xor, by_read, size) == 0
                                    : xored == FST_E_CORRUPT;
    free(by_xor);
    free(by_read);
    return is_right;
}

TEST(xor_in_pieces_of_any_size)
{
    static const size_t sizes[] = {1, 63, 1000, BLOCK, BLOCK + 1, 3 * BLOCK + 77};
    static const size_t pieces[] = {1, 13, 4096, BLOCK, 2 * BLOCK + 3};
    static const unsigned distances[] = {0, 1, 2, 5, 21, 200, 100000};
    uint64_t seed = 6;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t k = 0; k < sizeof distances / sizeof *distances; k++) {
            unsigned char *content = make_content(sizes[i], distances[k], &seed);
            stored frame = make_frame(content, sizes[i], 2 * BLOCK, true);
            for (size_t n = 0; n < sizeof pieces / sizeof *pieces; n++) {
                unsigned char *back = malloc(sizes[i]);
                fst_error error;
                begin_count = 0;
                CHECK_INT(read_frame(&frame, back, sizes[i], pieces[n], BY_XOR, &error), FST_OK);
                CHECK(memcmp(back, content, sizes[i]) == 0);
                CHECK_INT(begin_count, 1); // without libzstd
                free(back);
            }
            free(frame.bytes);
            free(content);
        }
}

TEST(libzstd_takes_over)
{
    uint64_t seed = 7;
    size_t size = 4 * BLOCK + 9;
    unsigned char *content = make_content(size, 40, &seed);
    // The third block repeats what is far before it.
    for (size_t i = 0; i < BLOCK; i++) content[i] = (unsigned char)fixture_random(&seed);
    memcpy(content + 2 * BLOCK + 100, content, BLOCK / 2);
    stored frame = make_frame(content, size, size, false);
    unsigned char *back = malloc(size);
    fst_error error;
    for (size_t piece = 1000; piece < 3 * BLOCK; piece *= 3) {
        begin_count = 0;
        CHECK_INT(read_frame(&frame, back, size, piece, BY_XOR, &error), FST_OK);
        CHECK(memcmp(back, content, size) == 0);
        CHECK_INT(begin_count, 2);
    }
    free(back);
    free(frame.bytes);
    free(content);
}

/// A damaged frame that libzstd refuses is refused.
TEST(damage_is_found)
{
    static const unsigned distances[] = {3, 11, 60, 700};
    uint64_t seed = 8;
    for (size_t k = 0; k < sizeof distances / sizeof *distances; k++) {
        size_t size = 3000;
        unsigned char *content = make_content(size, distances[k], &seed);
        stored frame = make_frame(content, size, size, true);
        for (size_t bit = 0; bit < frame.size * 8; bit++) {
            frame.bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
            CHECK(is_right_or_refused(&frame, size, 700));
            frame.bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
        }
        size_t whole = frame.size;
        for (frame.size = 0; frame.size < whole; frame.size++)
            CHECK(is_right_or_refused(&frame, size, 700));
        frame.size = whole;
        CHECK(is_right_or_refused(&frame, size - 1, 700) &&
              is_right_or_refused(&frame, size + 1, 700));
        free(frame.bytes);
        free(content);
    }
}

/// A frame of `content` bytes that is one block: literals, stored unchanged, and any runs.
static stored make_block(const unsigned char *literals, size_t literal_bytes,
                         const literal_run *runs, uint32_t run_count, size_t content) {
    static sequence_coder coder;
    stored frame = {
        malloc(SPARSE_HEAD_BYTES + 3 + 3 + literal_bytes + 16 + SEQUENCES_SECTION_BYTES(run_count)),
        0, 0};
    unsigned char *block = frame.bytes + SPARSE_HEAD_BYTES, *end = block + 3;
    fsti_sequence_coder_open(&coder);
    for (size_t i = 0; i < 3; i++) *end++ = (unsigned char)((12 | literal_bytes << 4) >> 8 * i);
    memcpy(end, literals, literal_bytes);
    end = fsti_sequences_encode(&coder, runs, run_count, end + literal_bytes);
    uint64_t head = (uint64_t)(end - block - 3) << 3 | 2 << 1 | 1;
    for (size_t i = 0; i < 3; i++) block[i] = (unsigned char)(head >> 8 * i);
    sparse_blocks *blocks;
    if (fsti_sparse_open(&blocks, NULL) != FST_OK) abort();
    fsti_sparse_begin(blocks, content, frame.bytes);
    fsti_sparse_close(blocks);
    frame.size = (size_t)(end - frame.bytes);
    return frame;
}

/// Runs may ask for more literals than there are, and for more content than a block may have.
TEST(runs_of_a_hostile_writer)
{
    static const uint32_t lengths[] = {1, 2, 8, 9, 40, 5000, 65535, 131071};
    unsigned char *literals = calloc(BLOCK, 1);
    uint64_t seed = 11;
    size_t right = 0;
    for (int round = 0; round < 3000; round++) {
        literal_run runs[12];
        uint32_t count = 1 + (uint32_t)(fixture_random(&seed) % 12);
        size_t asked = 0, content = 0;
        for (uint32_t i = 0; i < count; i++) {
            runs[i].literals = lengths[fixture_random(&seed) % (round % 2 == 0 ? 5 : 8)];
            runs[i].repeats = 3 + lengths[fixture_random(&seed) % (round % 3 == 0 ? 8 : 5)];
            asked += runs[i].literals;
            content += runs[i].literals + runs[i].repeats;
        }
        size_t given = round % 5 == 0 ? 1 + fixture_random(&seed) % asked : asked;
        if (given > BLOCK - 3 * 1024) given = 50;
        for (size_t i = 0; i < given; i++) literals[i] = i % 3 == 0 ? 7 : 0;
        stored frame = make_block(literals, given, runs, count, content);
        CHECK(is_right_or_refused(&frame, content, 700));
        // A piece ends where a run does: the next one was not looked at.
        for (size_t i = 0, piece = 0; i + 1 < count; i++) {
            piece += runs[i].literals + runs[i].repeats;
            CHECK(is_right_or_refused(&frame, content, piece));
        }
        right += given == asked && content <= BLOCK;
        free(frame.bytes);
    }
    CHECK(right > 100);
    free(literals);
}

/// libzstd does not always compare them, above all in a context that has decoded larger frames.
TEST(a_frame_of_another_size_than_it_states)
{
    uint64_t seed = 9;
    size_t size = 3 * BLOCK;
    unsigned char *content = make_content(size, 50, &seed), *back = malloc(size + 1);
    fsti_frame_reader *reader;
    fst_error error;
    CHECK_INT(fsti_frame_reader_open(&reader, &error), FST_OK);
    for (int i = 0; i < 8; i++) {
        stored frame = make_frame(content, size, size, i % 2 == 0);
        fsti_frame_source source = {pull, &frame, frame.size};
        bool is_changed = i >= 4;
        // The header's content size: 8 bytes after the window in a sparse frame, else 4 bytes.
        if (is_changed) frame.bytes[i % 2 == 0 ? 6 : 5 + ((frame.bytes[4] & 0x20) == 0)] ^= 4;
        fsti_frame_begin(reader, &source);
        fst_status status = fsti_frame_read(reader, back, i % 2 == 0 ? 1 : size, &error);
        if (status == FST_OK && i % 2 == 0) status = fsti_frame_xor(reader, back, size - 1, &error);
        if (status == FST_OK) status = fsti_frame_end(reader, &error);
        CHECK_INT(status, is_changed ? FST_E_CORRUPT : FST_OK);
        free(frame.bytes);
    }
    fsti_frame_reader_close(reader);
    free(content);
    free(back);
}

TEST(every_content_comes_back)
{
    static const size_t sizes[] = {
        0, 1, 2, 7, 63, 64, 65, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 77};
    static const unsigned distances[] = {0, 1, 2, 5, 9, 19, 21, 200, 5000, 100000};
    uint64_t seed = 3;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t k = 0; k < sizeof distances / sizeof *distances; k++) {
            unsigned char *content = make_content(sizes[i], distances[k], &seed);
            stored frame = make_frame(content, sizes[i], k % 2 == 0 ? 2 * BLOCK : 1000, true);
            CHECK(comes_back(content, sizes[i], &frame));
            free(frame.bytes);
            free(content);
        }
}

TEST(random_bytes_are_stored_as_they_are)
{
    uint64_t seed = 4;
    size_t size = 2 * BLOCK + 5;
    unsigned char *content = calloc(size, 1);
    for (size_t i = 0; i < size; i++) content[i] = (unsigned char)fixture_random(&seed);
    stored frame = make_frame(content, size, size, true);
    CHECK(comes_back(content, size, &frame) && frame.size < size + 64);
    free(frame.bytes);
    free(content);
}

/// Coding saves a few bytes, or none: a tree of a block that was stored unchanged is lost.
TEST(bytes_that_hardly_shrink_come_back)
{
    enum { PIECE = 2000, PIECES = 20 };
    uint64_t seed = 12;
    unsigned char *content = malloc(PIECES * PIECE);
    for (unsigned values = 120; values <= 256; values++) {
        for (size_t i = 0; i < PIECES * PIECE; i++)
            content[i] = (unsigned char)((fixture_random(&seed) >> 8) % values);
        stored frame = make_frame(content, PIECES * PIECE, PIECE, true);
        CHECK(comes_back(content, PIECES * PIECE, &frame));
        CHECK(frame.size < PIECES * (PIECE + 3) + 64);
        free(frame.bytes);
    }
    free(content);
}

/// The XOR of 16-bit numbers, of which `share` of 1,000 grew by one or two.
static unsigned char *make_numbers(size_t size, unsigned share, uint64_t *seed) {
    unsigned char *content = calloc(size, 1);
    for (size_t i = 0; i + 2 <= size; i += 2) {
        uint64_t number = fixture_random(seed) >> 8;
        if (number % 1000 >= share) continue;
        uint16_t old = (uint16_t)(number >> 10);
        uint16_t both = (uint16_t)(old ^ (old + 1 + (number >> 30 & 1)));
        memcpy(content + i, &both, sizeof both);
    }
    return content;
}

TEST(frames_of_changed_numbers_are_smaller_than_those_of_libzstd)
{
    static const unsigned shares[] = {1, 10, 50, 100, 150, 200, 230, 300, 500};
    uint64_t seed = 5;
    size_t size = 16 * BLOCK;
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++) {
        unsigned char *content = make_numbers(size, shares[i], &seed);
        stored sparse = make_frame(content, size, 2 * BLOCK, true);
        stored plain = make_frame(content, size, 2 * BLOCK, false);
        CHECK(comes_back(content, size, &sparse) && comes_back(content, size, &plain));
        printf("# %u of 1,000: %zu and %zu bytes\n", shares[i], sparse.size, plain.size);
        CHECK(sparse.size < plain.size);
        free(sparse.bytes);
        free(plain.bytes);
        free(content);
    }
    unsigned char *zeros = calloc(size, 1);
    stored frame = make_frame(zeros, size, size, true);
    CHECK_INT(frame.size, 14 + 16 * 4 + 3);
    free(frame.bytes);
    free(zeros);
}

/// Zones of literals, and runs of zeros, of any length.
TEST(runs_of_any_length_come_back)
{
    static const size_t lengths[] = {1,   2,    3,    4,    5,    6,    7,    8,   9,   10,
                                     14,  15,   16,   17,   31,   32,   33,   62,  63,  64,
                                     65,  66,   127,  128,  129,  130,  131,  132, 255, 256,
                                     511, 1023, 1026, 1027, 1028, 4000, 8190, 8192};
    size_t count = sizeof lengths / sizeof *lengths, size = 2 * BLOCK;
    unsigned char *content = malloc(size), *back = malloc(size);
    fst_error error;
    for (size_t literals = 0; literals < count; literals++)
        for (size_t zeros = 0; zeros < count; zeros++) {
            memset(content, 0, size);
            size_t at = lengths[(literals + zeros) % count] - 1;
            while (at + lengths[literals] <= size && at < 20 * lengths[literals] + 60000) {
                memset(content + at, 1 + (int)(at % 5), lengths[literals]);
                at += lengths[literals] + lengths[zeros] * (literals > 20 ? 16 : 1);
            }
            stored frame = make_frame(content, size, size, true);
            CHECK(comes_back(content, size, &frame));
            begin_count = 0;
            CHECK_INT(read_frame(&frame, back, size, 5000, BY_XOR, &error), FST_OK);
            CHECK(memcmp(back, content, size) == 0);
            CHECK_INT(begin_count, 1);
            free(frame.bytes);
        }
    // One change far behind the other, and at the end.
    for (size_t at = BLOCK - 1; at > 1; at /= 2) {
        memset(content, 0, size);
        content[0] = content[at] = content[size - 1] = 3;
        stored frame = make_frame(content, size, size, true);
        CHECK(comes_back(content, size, &frame));
        free(frame.bytes);
    }
    free(content);
    free(back);
}

TEST(a_writer_without_memory_is_an_error)
{
    fst_error error;
    fst_status status = FST_E_NO_MEMORY;
    for (long number = 0; number < 20 && status == FST_E_NO_MEMORY; number++) {
        fsti_frame_writer *writer = NULL;
        fsti_alloc_fail_after(number);
        status = fsti_frame_writer_open(1, &writer, &error);
        fsti_alloc_fail_after(-1);
        CHECK((status == FST_OK) == (writer != NULL));
        fsti_frame_writer_close(writer);
    }
    CHECK_INT(status, FST_OK);
}
