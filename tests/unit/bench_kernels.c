// SPDX-License-Identifier: Apache-2.0
/// The limits of the CPU, and how close the kernels get: non-temporal copies and conversions, in
/// mapped memory. GB/s count bytes read and written.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/primitives.h"
#include "dtype/dtype_info.h"
#include "transfer/transfer.h"

#define SOURCE_BYTES ((size_t)256 << 20)
#define PIECE_BYTES ((size_t)1 << 20) ///< as the pipeline converts: block by block
#define REPEATS 9
#define THREAD_COUNT_MAX 64

typedef struct dtype_pair {
    fst_dtype from, to;
} dtype_pair;

/// One thread's share of the work.
typedef struct thread_share {
    const char *source;
    char *target;
    size_t size;
    const dtype_pair *pair; ///< NULL: copy
} thread_share;

static void *map_present(size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) abort();
    madvise(memory, size, MADV_HUGEPAGE);
    memset(memory, 63, size);
    return memory;
}

static void *work(void *context) {
    const thread_share *share = context;
    if (share->pair == NULL) {
        for (size_t at = 0; at < share->size; at += PIECE_BYTES)
            fsti_copy_bytes(share->target + at, share->source + at, PIECE_BYTES);
        return NULL;
    }
    fsti_conversion conversion = fsti_dtype_conversion(share->pair->from, share->pair->to);
    size_t units = PIECE_BYTES / conversion.from_bytes;
    for (size_t at = 0; at < share->size; at += PIECE_BYTES)
        fsti_dtype_convert(conversion,
                           share->target + at / conversion.from_bytes * conversion.to_bytes,
                           share->source + at, units);
    return NULL;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/// Seconds of the median run, and the fastest and slowest.
static void measure(thread_share whole, unsigned thread_count, double *seconds) {
    for (unsigned r = 0; r < REPEATS; r++) {
        pthread_t threads[THREAD_COUNT_MAX];
        thread_share shares[THREAD_COUNT_MAX];
        uint64_t start = fsti_now_ns();
        size_t part = whole.size / thread_count / PIECE_BYTES * PIECE_BYTES;
        for (unsigned i = 0; i < thread_count; i++) {
            fsti_conversion c = {.from_bytes = 1, .to_bytes = 1};
            if (whole.pair != NULL) c = fsti_dtype_conversion(whole.pair->from, whole.pair->to);
            shares[i] = (thread_share){whole.source + i * part,
                                       whole.target + i * part / c.from_bytes * c.to_bytes, part,
                                       whole.pair};
            if (pthread_create(&threads[i], NULL, work, &shares[i]) != 0) abort();
        }
        for (unsigned i = 0; i < thread_count; i++) pthread_join(threads[i], NULL);
        seconds[r] = (double)(fsti_now_ns() - start) / 1e9;
    }
    qsort(seconds, REPEATS, sizeof *seconds, compare);
}

static void show(const char *name, double bytes, const double *seconds) {
    printf("  %-24s %6.2f GB/s [%.2f-%.2f]\n", name, bytes / seconds[REPEATS / 2] / 1e9,
           bytes / seconds[REPEATS - 1] / 1e9, bytes / seconds[0] / 1e9);
}

int main(void) {
    static const dtype_pair pairs[] = {
        {FST_DTYPE_BF16, FST_DTYPE_F32},     {FST_DTYPE_F16, FST_DTYPE_F32},
        {FST_DTYPE_F32, FST_DTYPE_BF16},     {FST_DTYPE_F32, FST_DTYPE_F16},
        {FST_DTYPE_F8_E4M3, FST_DTYPE_BF16}, {FST_DTYPE_BF16, FST_DTYPE_F8_E4M3},
        {FST_DTYPE_BF16, FST_DTYPE_F16},     {FST_DTYPE_I8, FST_DTYPE_I32},
    };
    char *source = map_present(SOURCE_BYTES), *target = map_present(2 * SOURCE_BYTES + PIECE_BYTES);
    char *large = map_present(4 * SOURCE_BYTES);
    unsigned cores = fsti_cpu_count() < THREAD_COUNT_MAX ? fsti_cpu_count() : THREAD_COUNT_MAX;
    double seconds[REPEATS];
    for (unsigned threads = 1; threads <= cores; threads += cores - 1 > 0 ? cores - 1 : 1) {
        printf("%u thread%s, %zu MiB of source, median [slowest-fastest] of %d\n", threads,
               threads == 1 ? "" : "s", SOURCE_BYTES >> 20, REPEATS);
        measure((thread_share){source, target, SOURCE_BYTES, NULL}, threads, seconds);
        show("copy around the cache", 2.0 * (double)SOURCE_BYTES, seconds);
        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
            char name[40];
            snprintf(name, sizeof name, "%s to %s", fst_dtype_name(pairs[i].from),
                     fst_dtype_name(pairs[i].to));
            fsti_conversion c = fsti_dtype_conversion(pairs[i].from, pairs[i].to);
            measure((thread_share){source, large, SOURCE_BYTES, &pairs[i]}, threads, seconds);
            show(name, (double)SOURCE_BYTES * (1.0 + (double)c.to_bytes / c.from_bytes), seconds);
        }
    }
    return 0;
}
