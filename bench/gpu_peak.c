// SPDX-License-Identifier: Apache-2.0
/// The limits that loads to a GPU are measured against, as one JSON object: copies from locked
/// memory by the driver alone (the limit), and what threads can read from the page cache to slots
/// of their own in locked memory, alone and while the bus works (an explanation).
///
///   gpu_peak [cuda|hip] [DEVICE] [MIB] [FILE]
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define THREAD_COUNT_MAX 16
#define COPY_BYTES ((size_t)2 << 20)
#define SLOTS_PER_THREAD 2
#define RING_BYTES (THREAD_COUNT_MAX * SLOTS_PER_THREAD * COPY_BYTES)
#define ROUNDS 5
_Static_assert(RING_BYTES == (size_t)64 << 20, "every thread has slots of its own");

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

typedef struct bus {
    const driver *gpu;
    void *context;
    const char *ring;
    uint64_t target;
    void *streams[2];
} bus;

static bus open_bus(const driver *gpu, void *context, const char *ring) {
    bus found = {.gpu = gpu, .context = context, .ring = ring};
    must(gpu->allocate(&found.target, RING_BYTES), "allocating");
    for (int i = 0; i < 2; i++) must(gpu->stream(&found.streams[i], 1), "making a stream");
    return found;
}

/// GB/s of copies of `size` bytes on two streams in turns, from a ring of locked memory.
static double measure_bus(const bus *self, size_t bytes, size_t size) {
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        double start = now();
        for (size_t done = 0, i = 0; done < bytes; done += size, i++)
            must(self->gpu->copy(self->target + done % RING_BYTES, self->ring + done % RING_BYTES,
                                 size, self->streams[i % 2]),
                 "copying");
        for (int i = 0; i < 2; i++) must(self->gpu->sync(self->streams[i]), "waiting");
        double speed = (double)bytes / (now() - start) / 1e9;
        if (speed > best) best = speed;
    }
    return best;
}

typedef struct copier {
    pthread_t thread;
    int fd;
    char *slots; ///< of this thread alone
    size_t begin, end;
} copier;

static void *run_copier(void *argument) {
    const copier *self = argument;
    for (size_t at = self->begin, i = 0; at < self->end; at += COPY_BYTES, i++)
        if (pread(self->fd, self->slots + i % SLOTS_PER_THREAD * COPY_BYTES, COPY_BYTES,
                  (off_t)at) <= 0)
            exit(1);
    return NULL;
}

/// GB/s of `count` threads that read the file, which is in the page cache, to the ring.
static double measure_copies(char *ring, int fd, size_t bytes, int count) {
    copier copiers[THREAD_COUNT_MAX];
    size_t share = bytes / (size_t)count / COPY_BYTES * COPY_BYTES;
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        double start = now();
        for (int i = 0; i < count; i++) {
            copiers[i] = (copier){.fd = fd,
                                  .slots = ring + (size_t)i * SLOTS_PER_THREAD * COPY_BYTES,
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

typedef struct busy_bus {
    const bus *bus;
    size_t bytes;
    double gbps;
} busy_bus;

static void *run_bus(void *argument) {
    busy_bus *self = argument;
    must(self->bus->gpu->push(self->bus->context), "using the device");
    self->gbps = measure_bus(self->bus, self->bytes, COPY_BYTES);
    return NULL;
}

static char *map_memory(size_t size) {
    char *data =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (data == MAP_FAILED) exit(1);
    memset(data, 1, size);
    return data;
}

/// A file of that many bytes in the page cache; without a name when none was given.
static int open_source(const char *path, size_t bytes) {
    char name[] = "/tmp/gpu_peak.XXXXXX";
    int fd = path != NULL ? open(path, O_RDONLY) : mkstemp(name);
    if (fd < 0) exit(1);
    if (path == NULL) unlink(name);
    char *block = map_memory(COPY_BYTES);
    for (size_t at = 0; at < bytes; at += COPY_BYTES)
        if ((path == NULL ? pwrite(fd, block, COPY_BYTES, (off_t)at)
                          : pread(fd, block, COPY_BYTES, (off_t)at)) <= 0)
            exit(1);
    munmap(block, COPY_BYTES);
    return fd;
}

static void print_limits(const bus *found, char *ring, int fd, size_t bytes, int threads) {
    for (size_t mib = 1; mib <= 8; mib *= 2)
        printf("\"bus_%zuMiB_gbps\": %.3f, ", mib, measure_bus(found, bytes, mib << 20));
    busy_bus busy = {found, 2 * bytes, 0};
    printf("\"bus_gbps\": %.3f, \"copy_1_gbps\": %.3f, \"copy_gbps\": %.3f, ",
           measure_bus(found, bytes, COPY_BYTES), measure_copies(ring, fd, bytes, 1),
           measure_copies(ring, fd, bytes, threads));
    pthread_t thread;
    pthread_create(&thread, NULL, run_bus, &busy);
    double copy = measure_copies(ring, fd, bytes, threads);
    pthread_join(thread, NULL);
    printf("\"copy_beside_bus_gbps\": %.3f, \"bus_beside_copy_gbps\": %.3f, ", copy, busy.gbps);
}

int main(int argc, char **argv) {
    int is_hip = argc > 1 && strcmp(argv[1], "hip") == 0;
    int device = argc > 2 ? atoi(argv[2]) : 0;
    size_t bytes = (size_t)(argc > 3 ? atoi(argv[3]) : 2048) << 20;
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    int threads = cpus > THREAD_COUNT_MAX ? THREAD_COUNT_MAX : (int)cpus;
    driver gpu = open_driver(is_hip);
    void *context;
    double start = now();
    must(gpu.init(0), "starting the driver");
    must(gpu.retain(&context, device), "opening the device");
    double context_seconds = now() - start;
    must(gpu.push(context), "using the device");
    char *ring = map_memory(RING_BYTES);
    start = now();
    must(gpu.lock(ring, RING_BYTES, 0), "pinning memory");
    double lock_seconds = now() - start;
    int fd = open_source(argc > 4 ? argv[4] : NULL, bytes);
    bus found = open_bus(&gpu, context, ring);
    printf("{");
    print_limits(&found, ring, fd, bytes, threads);
    printf("\"threads\": %d, \"context_s\": %.4f, \"lock_64MiB_s\": %.4f}\n", threads,
           context_seconds, lock_seconds);
    return 0;
}
