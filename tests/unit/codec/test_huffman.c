// SPDX-License-Identifier: Apache-2.0
/// Literals of zstd frames: output of libzstd is decoded without it, to the same bytes. Damaged
/// input is rejected or gives the right number of bytes, within bounds.
#include <sys/mman.h>
#include <unistd.h>

#include "all_kernels.h"
#include "check.h"
#include "codec/huffman.h"
#include "codec/zstd_library.h"

#define SIZE_MAX_BYTES ((size_t)300000)

static const zstd_library *zstd;
static void *context;
static unsigned char *plain, *frame, *target;
static huffman_table *table;
static uint64_t seed = 7;

static uint32_t next_random(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33);
}

static bool have_library(void) {
    if (context != NULL) return true;
    if (fsti_zstd_open(&zstd, NULL) != FST_OK) {
        check_skip_reason = "no libzstd";
        return false;
    }
    plain = malloc(SIZE_MAX_BYTES);
    frame = malloc(2 * SIZE_MAX_BYTES);
    target = malloc(SIZE_MAX_BYTES + 64);
    table = calloc(1, sizeof *table);
    context = zstd->ZSTD_createCCtx();
    return context != NULL;
}

/// Makes a frame of literals only, without a search for matches, as the writer does.
static size_t make_frame(size_t size) {
    static const int parameters[][2] = {{107, 1}, {105, 7}, {102, 6}, {106, 131072}, {1002, 1}};
    for (size_t i = 0; i < 5; i++)
        (void)zstd->ZSTD_CCtx_setParameter(context, parameters[i][0], parameters[i][1]);
    return zstd->ZSTD_compress2(context, frame, 2 * SIZE_MAX_BYTES, plain, size);
}

/// Random bytes with a given number of values and frequency of the most frequent one.
static void fill(size_t size, uint32_t values, uint32_t skew) {
    for (size_t i = 0; i < size; i++) {
        uint32_t value = next_random() % values;
        for (uint32_t k = 0; k < skew; k++) {
            uint32_t other = next_random() % values;
            value = other < value ? other : value;
        }
        plain[i] = (unsigned char)(value + 7);
    }
}

/// Memory that ends exactly where inaccessible pages begin, because sanitizers do not check loops
/// in assembly.
typedef struct guarded_room {
    unsigned char *pages;
    size_t bytes;
} guarded_room;

static unsigned char *guard(guarded_room *room, size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    room->bytes = (size + page - 1) / page * page + 2 * page;
    room->pages =
        mmap(NULL, room->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room->pages == MAP_FAILED) abort();
    unsigned char *end = room->pages + room->bytes - page;
    if (mprotect(end, page, PROT_NONE) != 0 || mprotect(room->pages, page, PROT_NONE) != 0) abort();
    return end - size;
}

static huffman_verdict decode(const codec_kernels *kernels, size_t frame_bytes, size_t size) {
    guarded_room frame_room, target_room;
    unsigned char *exact = guard(&frame_room, frame_bytes);
    unsigned char *place = guard(&target_room, size);
    memcpy(exact, frame, frame_bytes);
    fsti_codec_use(kernels);
    huffman_verdict verdict = fsti_huffman_decode(table, exact, frame_bytes, place, size);
    memcpy(target, place, size);
    munmap(frame_room.pages, frame_room.bytes);
    munmap(target_room.pages, target_room.bytes);
    return verdict;
}

TEST(frames_of_literals_need_no_library)
{
    static const size_t sizes[] = {1,    2,    63,    64,     255,    256,    300,   1000,
                                   1024, 4097, 65536, 131072, 131073, 262144, 299999};
    if (!have_library()) return;
    size_t done = 0, others = 0;
    for (uint32_t values = 1; values <= 249; values += values < 20 ? 1 : 57)
        for (uint32_t skew = 0; skew < 8; skew += values < 20 ? 1 : 3)
            for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
                fill(sizes[i], values, skew);
                size_t bytes = make_frame(sizes[i]);
                for (size_t k = 0; k < KERNEL_COUNT; k++) {
                    if (!fsti_codec_usable(all_kernels[k])) continue;
                    huffman_verdict verdict = decode(all_kernels[k], bytes, sizes[i]);
                    CHECK(verdict != HUFFMAN_DAMAGED);
                    if (verdict == HUFFMAN_OTHER) others++;
                    if (verdict != HUFFMAN_DONE) continue;
                    done++;
                    CHECK(memcmp(target, plain, sizes[i]) == 0);
                }
            }
    printf("# %zu of literals, %zu with matches\n", done, others);
    CHECK(done > 8 * others);
}

TEST(frames_with_matches_use_libzstd)
{
    if (!have_library()) return;
    fill(5000, 200, 0);
    memcpy(plain + 5000, plain, 5000);
    (void)zstd->ZSTD_CCtx_setParameter(context, 107, 3);
    (void)zstd->ZSTD_CCtx_setParameter(context, 106, 0);
    (void)zstd->ZSTD_CCtx_setParameter(context, 102, 17);
    size_t bytes = zstd->ZSTD_compress2(context, frame, 2 * SIZE_MAX_BYTES, plain, 10000);
    CHECK(bytes < 6000);
    CHECK(decode(fsti_codec_kernels(), bytes, 10000) == HUFFMAN_OTHER);
}

TEST(damage_stays_within_bounds)
{
    if (!have_library()) return;
    void *reader = zstd->ZSTD_createDCtx();
    size_t refused = 0, agreed = 0;
    for (uint32_t round = 0; round < 40; round++) {
        size_t size = 200 + next_random() % 5000;
        fill(size, 2 + round * 5, round % 6);
        size_t bytes = make_frame(size);
        for (uint32_t flip = 0; flip < 250; flip++) {
            size_t at = 5 + next_random() % (bytes - 5);
            unsigned char bit = (unsigned char)(1u << next_random() % 8);
            frame[at] ^= bit;
            huffman_verdict verdict = decode(fsti_codec_kernels(), bytes, size);
            if (verdict == HUFFMAN_DAMAGED) refused++;
            if (verdict == HUFFMAN_DONE) {
                // What both take is the same bytes. (The library refuses a little more: chunks
                // have a CRC.)
                unsigned char *other = malloc(size);
                size_t got = zstd->ZSTD_decompressDCtx(reader, other, size, frame, bytes);
                bool is_taken = !zstd->ZSTD_isError(got);
                CHECK(!is_taken || (got == size && memcmp(other, target, size) == 0));
                free(other);
                if (is_taken) agreed++;
            }
            frame[at] ^= bit;
        }
        for (size_t cut = 0; cut < bytes; cut += 1 + bytes / 50)
            CHECK(decode(fsti_codec_kernels(), cut, size) != HUFFMAN_DONE);
    }
    printf("# %zu flips refused, %zu decoded as by libzstd\n", refused, agreed);
    CHECK(refused > 1000 && agreed > 10);
    zstd->ZSTD_freeDCtx(reader);
}
