// SPDX-License-Identifier: Apache-2.0
/// The limits that loads to a GPU are measured against, as one JSON object: copies from locked
/// memory by the driver alone, and what threads can copy from cached pages to locked memory.
///
///   gpu_peak [cuda|hip] [DEVICE] [MIB]
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define COPY_BYTES ((size_t)4 << 20)
#define RING_BYTES ((size_t)64 << 20)
#define ROUNDS 5
#define THREAD_COUNT_MAX 64

typedef struct driver {
    int (*init)(unsigned flags);
    int (*retain)(void **context, int device);
    int (*push)(void *context);
    int (*allocate)(uint64_t *address, size_t size);
    int (*lock)(void *address, size_t size, unsigned flags);
    int (*stream)(void **stream, unsigned flags);
    int (*copy)(uint64_t target, const void *source, size_t size, void *stream);
    int (*sync)(void *stream);
} driver;

static void find(void *library, const char *name, void *function) {
    void *address = dlsym(library, name);
    if (address == NULL) {
        fprintf(stderr, "no %s\n", name);
        exit(77);
    }
    memcpy(function, &address, sizeof address);
}

static driver open_driver(int is_hip) {
    void *library = dlopen(is_hip ? "libamdhip64.so" : "libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "no driver\n");
        exit(77);
    }
    driver found;
    find(library, is_hip ? "hipInit" : "cuInit", &found.init);
    find(library, is_hip ? "hipDevicePrimaryCtxRetain" : "cuDevicePrimaryCtxRetain", &found.retain);
    find(library, is_hip ? "hipCtxPushCurrent" : "cuCtxPushCurrent_v2", &found.push);
    find(library, is_hip ? "hipMalloc" : "cuMemAlloc_v2", &found.allocate);
    find(library, is_hip ? "hipHostRegister" : "cuMemHostRegister_v2", &found.lock);
    find(library, is_hip ? "hipStreamCreateWithFlags" : "cuStreamCreate", &found.stream);
    find(library, is_hip ? "hipMemcpyHtoDAsync" : "cuMemcpyHtoDAsync_v2", &found.copy);
    find(library, is_hip ? "hipStreamSynchronize" : "cuStreamSynchronize", &found.sync);
    return found;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void must(int code, const char *what) {
    if (code == 0) return;
    fprintf(stderr, "%s: error %d\n", what, code);
    exit(1);
}

/// GB/s of copies of 4 MiB on two streams in turns, from a ring of locked memory.
static double measure_bus(const driver *gpu, const char *ring, size_t bytes) {
    uint64_t target;
    void *streams[2];
    must(gpu->allocate(&target, RING_BYTES), "allocating");
    for (int i = 0; i < 2; i++) must(gpu->stream(&streams[i], 1), "making a stream");
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        double start = now();
        for (size_t done = 0, i = 0; done < bytes; done += COPY_BYTES, i++)
            must(gpu->copy(target + done % RING_BYTES, ring + done % RING_BYTES, COPY_BYTES,
                           streams[i % 2]),
                 "copying");
        for (int i = 0; i < 2; i++) must(gpu->sync(streams[i]), "waiting");
        double speed = (double)bytes / (now() - start) / 1e9;
        if (speed > best) best = speed;
    }
    return best;
}

typedef struct copier {
    pthread_t thread;
    const char *source;
    char *ring;
    size_t begin, end;
} copier;

static void *run_copier(void *argument) {
    const copier *self = argument;
    for (size_t at = self->begin; at < self->end; at += COPY_BYTES)
        memcpy(self->ring + at % RING_BYTES, self->source + at, COPY_BYTES);
    return NULL;
}

/// GB/s of `count` threads that copy from memory to the ring.
static double measure_copies(char *ring, const char *source, size_t bytes, int count) {
    copier copiers[THREAD_COUNT_MAX];
    size_t share = bytes / (size_t)count / COPY_BYTES * COPY_BYTES;
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        double start = now();
        for (int i = 0; i < count; i++) {
            copiers[i] = (copier){.source = source,
                                  .ring = ring,
                                  .begin = share * (size_t)i,
                                  .end = share * (size_t)(i + 1)};
            pthread_create(&copiers[i].thread, NULL, run_copier, &copiers[i]);
        }
        for (int i = 0; i < count; i++) pthread_join(copiers[i].thread, NULL);
        double speed = (double)(share * (size_t)count) / (now() - start) / 1e9;
        if (speed > best) best = speed;
    }
    return best;
}

static char *map_memory(size_t size) {
    char *data =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (data == MAP_FAILED) exit(1);
    memset(data, 1, size);
    return data;
}

int main(int argc, char **argv) {
    int is_hip = argc > 1 && strcmp(argv[1], "hip") == 0;
    int device = argc > 2 ? atoi(argv[2]) : 0;
    size_t bytes = (size_t)(argc > 3 ? atoi(argv[3]) : 2048) << 20;
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    int threads = cpus > 16 ? 16 : (int)cpus;
    driver gpu = open_driver(is_hip);
    void *context;
    double start = now();
    must(gpu.init(0), "starting the driver");
    must(gpu.retain(&context, device), "opening the device");
    double context_seconds = now() - start;
    must(gpu.push(context), "using the device");
    char *ring = map_memory(RING_BYTES), *source = map_memory(bytes);
    start = now();
    must(gpu.lock(ring, RING_BYTES, 0), "locking memory");
    double lock_seconds = now() - start;
    double bus = measure_bus(&gpu, ring, bytes);
    printf("{\"bus_gbps\": %.3f, \"copy_gbps\": %.3f, \"copy_1_gbps\": %.3f, \"threads\": %d, "
           "\"context_s\": %.4f, \"lock_64MiB_s\": %.4f}\n",
           bus, measure_copies(ring, source, bytes, threads),
           measure_copies(ring, source, bytes, 1), threads, context_seconds, lock_seconds);
    return 0;
}
