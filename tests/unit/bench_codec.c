// SPDX-License-Identifier: Apache-2.0
/// bench_codec DTYPE FILE: encodes and decodes a file of elements chunk by chunk on one core.
/// Prints "SIZE ENCODE DECODE" per instruction set: stored size in percent, decoded GB per second
/// of CPU time (medians). Uses huge pages if available, as loads do.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "codec/codec.h"
#include "codec/codec_kernels.h"

#define CHUNK_BYTES ((size_t)1 << FSTI_CHUNK_LOG_DEFAULT)
#define REPEATS 7

typedef struct bench {
    fst_dtype dtype;
    unsigned char *source, *stored, *target;
    size_t size, count;
    fsti_chunk *chunks;
    fsti_encoder *encoder;
    fsti_decoder *decoder;
} bench;

static double processor_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void encode(bench *self) {
    for (size_t i = 0; i < self->count; i++) {
        size_t at = i * CHUNK_BYTES;
        self->chunks[i] = (fsti_chunk){.dtype = self->dtype,
                                       .true_bytes = fsti_min(CHUNK_BYTES, self->size - at)};
        if (fsti_chunk_encode(self->encoder, self->source + at, self->stored + at, &self->chunks[i],
                              NULL) != FST_OK)
            abort();
    }
}

static void decode(bench *self) {
    for (size_t i = 0; i < self->count; i++)
        if (fsti_chunk_decode(self->decoder, &self->chunks[i], self->target + i * CHUNK_BYTES,
                              NULL) != FST_OK)
            abort();
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median_rate(bench *self, void (*work)(bench *)) {
    double seconds[REPEATS];
    for (int i = 0; i < REPEATS; i++) {
        double start = processor_seconds();
        work(self);
        seconds[i] = processor_seconds() - start;
    }
    qsort(seconds, REPEATS, sizeof *seconds, compare);
    return (double)self->size / seconds[REPEATS / 2] / 1e9;
}

static void *room_of(size_t size) {
    size_t huge = (size_t)2 << 20;
    void *room = aligned_alloc(huge, (size + huge - 1) / huge * huge);
    if (room != NULL) (void)madvise(room, size, MADV_HUGEPAGE);
    return room;
}

static bool read_file(bench *self, const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) return false;
    self->size = (size_t)ftell(file) / 8 * 8;
    self->source = room_of(self->size);
    self->stored = room_of(self->size);
    self->target = room_of(self->size);
    self->count = (self->size + CHUNK_BYTES - 1) / CHUNK_BYTES;
    self->chunks = calloc(self->count, sizeof *self->chunks);
    rewind(file);
    bool good = fread(self->source, 1, self->size, file) == self->size;
    fclose(file);
    memset(self->stored, 0, self->size);
    memset(self->target, 0, self->size);
    return good;
}

int main(int argc, char **argv) {
    static const codec_kernels *const sets[] = {
#if defined(__x86_64__)
        &fsti_codec_avx512, &fsti_codec_avx2,
#elif defined(__aarch64__)
        &fsti_codec_neon,
#endif
        &fsti_codec_scalar};
    bench self = {0};
    if (argc != 3 || !read_file(&self, argv[2])) return 2;
    self.dtype = fsti_dtype_find(argv[1], strlen(argv[1]));
    if (self.dtype == FSTI_DTYPE_NONE) return 2;
    if (fsti_encoder_open(&self.encoder, NULL) != FST_OK ||
        fsti_decoder_open(&self.decoder, NULL) != FST_OK)
        return 77;
    for (size_t k = 0; k < sizeof sets / sizeof *sets; k++) {
        if (!fsti_codec_usable(sets[k])) continue;
        fsti_codec_use(sets[k]);
        double encoding = median_rate(&self, encode), decoding = median_rate(&self, decode);
        uint64_t stored = 0;
        for (size_t i = 0; i < self.count; i++) stored += self.chunks[i].stored_bytes + 8;
        if (memcmp(self.source, self.target, self.size) != 0) return 1;
        printf("%s %.2f %.2f %.2f\n", sets[k]->name, 100.0 * (double)stored / (double)self.size,
               encoding, decoding);
    }
    return 0;
}
