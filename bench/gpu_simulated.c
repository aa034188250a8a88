// SPDX-License-Identifier: Apache-2.0
/// How much of a bus loads to a GPU reach, where there is none: the stand-in for the driver moves
/// nothing and lets the time pass that a bus of a set rate takes, with the driver's fixed costs.
/// The rate is what this machine's processors can copy divided by 1.45, which is what an H100's
/// host of 16 processors has (80 GB/s for a bus of 55). Prints a table in Markdown.
///
///   LD_LIBRARY_PATH=build/release/tests/fakes gpu_simulated [FOLDER] [MIB] [RUNS]
#include <dlfcn.h>
#include <fastsafetensors.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define BLOCK_BYTES ((size_t)2 << 20)
#define PROCESSORS_PER_BUS 1.45
#define THREAD_COUNT_MAX 16
#define PATH_BYTES 600
#define LOCK_US 100
#define LOCK_MIB_US 100

static void (*set)(const char *name, long value);
static long (*get)(const char *name);

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void must(int good, const char *what) {
    if (good) return;
    fprintf(stderr, "gpu_simulated: %s\n", what);
    exit(1);
}

// ---- files ----

/// A file of `count` BF16 tensors of `bytes` each, whose data begin at `remainder` modulo 16.
static void write_model(const char *path, size_t count, size_t bytes, size_t remainder) {
    char *json = malloc(count * 100 + 64), *at = json;
    must(json != NULL, "no memory");
    *at++ = '{';
    for (size_t i = 0; i < count; i++)
        at += sprintf(at,
                      "%s\"t%zu\":{\"dtype\":\"BF16\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]}",
                      i > 0 ? "," : "", i, bytes / 2, i * bytes, (i + 1) * bytes);
    *at++ = '}';
    while ((size_t)(at - json + 8) % 16 != remainder) *at++ = ' ';
    uint64_t length = (uint64_t)(at - json);
    FILE *file = fopen(path, "wb");
    must(file != NULL && fwrite(&length, 8, 1, file) == 1 && fwrite(json, length, 1, file) == 1,
         "writing a model");
    free(json);
    static char block[1 << 20];
    for (size_t i = 0; i < sizeof block; i++) block[i] = (char)(i * 2654435761u >> 13);
    for (size_t left = count * bytes; left > 0;) {
        size_t size = left < sizeof block ? left : sizeof block;
        must(fwrite(block, size, 1, file) == 1, "writing a model");
        left -= size;
    }
    must(fflush(file) == 0 && fsync(fileno(file)) == 0 && fclose(file) == 0, "writing a model");
}

static void prepare(const char *path, int is_cold) {
    static char block[1 << 20];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (is_cold) posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    while (!is_cold && read(fd, block, sizeof block) > 0) continue;
    close(fd);
}

// ---- limits ----

typedef struct copier {
    pthread_t thread;
    const char *path;
    size_t begin, end;
    int flags;
} copier;

static void *run_copier(void *argument) {
    const copier *self = argument;
    char *slots = NULL;
    int fd = open(self->path, O_RDONLY | O_CLOEXEC | self->flags);
    must(fd >= 0 && posix_memalign((void **)&slots, 4096, 2 * BLOCK_BYTES) == 0, "copying");
    for (size_t at = self->begin, i = 0; at < self->end; at += BLOCK_BYTES, i++)
        must(pread(fd, slots + i % 2 * BLOCK_BYTES, BLOCK_BYTES, (off_t)at) > 0, "reading");
    free(slots);
    close(fd);
    return NULL;
}

/// GB/s at which `count` threads read the file, each to slots of its own; the best of some rounds.
static double measure_reads(const char *path, size_t bytes, int count, int flags, int rounds) {
    copier copiers[THREAD_COUNT_MAX];
    size_t share = bytes / (size_t)count / BLOCK_BYTES * BLOCK_BYTES;
    double best = 0;
    for (int round = 0; round < rounds; round++) {
        prepare(path, flags != 0);
        double start = now();
        for (int i = 0; i < count; i++) {
            copiers[i] = (copier){.path = path,
                                  .begin = share * (size_t)i,
                                  .end = share * (size_t)(i + 1),
                                  .flags = flags};
            pthread_create(&copiers[i].thread, NULL, run_copier, &copiers[i]);
        }
        for (int i = 0; i < count; i++) pthread_join(copiers[i].thread, NULL);
        double speed = (double)(share * (size_t)count) / (now() - start) / 1e9;
        if (speed > best) best = speed;
    }
    return best;
}

// ---- loads ----

typedef struct scenario {
    const char *title, *path;
    int is_cold, loads, converts;
} scenario;

/// What all rows are held against: a cached file, and the disk.
typedef struct limits {
    const char *path;
    size_t bytes;
    int threads;
    double disk_gbps;
} limits;

/// Sets the bus's rate by what the processors copy now, as others may have them a moment later; in
/// GB/s.
static double set_bus(const limits *by) {
    double gbps = measure_reads(by->path, by->bytes, by->threads, 0, 1) / PROCESSORS_PER_BUS;
    set("bus_mbps", (long)(gbps * 1000));
    return gbps;
}

/// Seconds of loads of a model side by side, and the bytes that went over the bus.
static double time_loads(const scenario *what, uint64_t *bytes) {
    fst_model *model = NULL;
    fst_loader *loaders[4];
    fst_error error = {0};
    fst_load_options options = {.struct_size = sizeof options,
                                .device = {FST_DEVICE_CUDA, 0},
                                .convert = what->converts,
                                .dtype = FST_DTYPE_F16};
    must(fst_model_open(what->path, NULL, &model, &error) == FST_OK, error.message);
    double start = now();
    for (int i = 0; i < what->loads; i++)
        must(fst_loader_open(model, &options, &loaders[i], &error) == FST_OK, error.message);
    for (int i = 0; i < what->loads; i++)
        must(fst_loader_wait(loaders[i], -1, &error) == FST_OK, error.message);
    double seconds = now() - start;
    *bytes = 0;
    for (int i = 0; i < what->loads; i++) {
        fst_load_stats stats = {.struct_size = sizeof stats};
        must(fst_loader_stats_get(loaders[i], &stats, &error) == FST_OK, error.message);
        *bytes += stats.bytes_requested;
        fst_loader_close(loaders[i]);
    }
    fst_model_close(model);
    return seconds;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/// A row: the median of a few, with lowest and highest, each beside its own limit.
static void measure(const scenario *what, const limits *by, int runs) {
    double parts[64], rates[64], bounds[64];
    uint64_t bytes = 0;
    long queries = get("queries"), waits = get("blocking_waits"), idle = get("bus_idle_us");
    for (int i = 0; i < runs; i++) {
        bounds[i] = set_bus(by);
        if (what->is_cold && by->disk_gbps < bounds[i]) bounds[i] = by->disk_gbps;
        prepare(what->path, what->is_cold);
        double seconds = time_loads(what, &bytes);
        rates[i] = (double)bytes / 1e9 / seconds;
        parts[i] = rates[i] / bounds[i];
    }
    qsort(parts, (size_t)runs, sizeof *parts, compare);
    qsort(rates, (size_t)runs, sizeof *rates, compare);
    qsort(bounds, (size_t)runs, sizeof *bounds, compare);
    double slots = (double)bytes * runs / BLOCK_BYTES;
    printf("| %s | %.2f | %.2f | %.3f | %.3f-%.3f | %.1f | %.1f | %.1f |\n", what->title,
           bounds[runs / 2], rates[runs / 2], parts[runs / 2], parts[0], parts[runs - 1],
           (double)(get("queries") - queries) / slots,
           (double)(get("blocking_waits") - waits) / runs,
           (double)(get("bus_idle_us") - idle) / 1e3 / runs);
    fflush(stdout);
}

static void find_fake(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *address = library == NULL ? NULL : dlsym(library, "fake_gpu_set");
    if (address == NULL) {
        fprintf(stderr, "gpu_simulated: the stand-ins are not in LD_LIBRARY_PATH\n");
        exit(77);
    }
    memcpy(&set, &address, sizeof address);
    address = dlsym(library, "fake_gpu_get");
    memcpy(&get, &address, sizeof address);
}

/// What drivers take, about, beside the bus itself.
static void set_costs(void) {
    set("no_bytes", 1);
    set("memory", 1l << 40);
    set("copy_us", 2);
    set("wake_us", 60);
    set("alloc_us", 300);
    set("free_us", 500);
    set("lock_us", LOCK_US);
    set("lock_mib_us", LOCK_MIB_US);
    set("module_us", 1000);
}

/// Has the host find memory that the first load would wait for, which may take it milliseconds a
/// MiB: what a driver takes is to be seen.
static void have_memory(void) {
    size_t size = (size_t)256 << 20;
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(memory != MAP_FAILED, "no memory");
    madvise(memory, size, MADV_HUGEPAGE);
    memset(memory, 1, size);
    munmap(memory, size);
}

/// The first load of a process beside those that follow: what setting up takes.
static void tell_setup(const scenario *hot) {
    double again[5];
    uint64_t bytes;
    prepare(hot->path, 0);
    have_memory();
    double first = time_loads(hot, &bytes);
    long locks = get("lock_calls");
    for (int i = 0; i < 5; i++) again[i] = time_loads(hot, &bytes);
    qsort(again, 5, sizeof *again, compare);
    printf(
        "The first load took %.1f ms more than the median of five that followed; locking its %ld "
        "slots takes a driver %.1f ms of that.\n\n",
        (first - again[2]) * 1e3, locks, (double)locks * (LOCK_US + LOCK_MIB_US * 2) / 1e3);
}

static void measure_all(const char *folder, const limits *by, int runs) {
    char small[PATH_BYTES], shifted[PATH_BYTES], large[PATH_BYTES];
    const char *whole = by->path;
    size_t bytes = by->bytes;
    snprintf(small, sizeof small, "%s/small.safetensors", folder);
    snprintf(shifted, sizeof shifted, "%s/shifted.safetensors", folder);
    snprintf(large, sizeof large, "%s/large.safetensors", folder);
    set_bus(by);
    tell_setup(&(scenario){"", whole, 0, 1, 0});
    printf("| load | limit GB/s | GB/s | of the limit | lowest-highest | questions a slot | sleeps "
           "| bus idle ms |\n|---|---|---|---|---|---|---|---|\n");
    measure(&(scenario){"hot", whole, 0, 1, 0}, by, runs);
    measure(&(scenario){"hot, converted (BF16 to F16)", whole, 0, 1, 1}, by, runs);
    measure(&(scenario){"hot, two at once", whole, 0, 2, 0}, by, runs);
    measure(&(scenario){"cold", whole, 1, 1, 0}, by, runs < 3 ? runs : 3);
    write_model(shifted, 32, bytes / 32, 8);
    measure(&(scenario){"hot, misaligned (8 mod 16)", shifted, 0, 1, 0}, by, runs);
    unlink(shifted);
    write_model(small, 20000, bytes / 40000 * 2, 0);
    measure(&(scenario){"hot, in 20,000 tensors", small, 0, 1, 0}, by, runs);
    unlink(small);
    write_model(small, 20000, bytes / 107374 * 2, 0);
    measure(&(scenario){"hot, in 20,000 tensors, 0.37 times as large", small, 0, 1, 0}, by, runs);
    unlink(small);
    write_model(large, 64, bytes / 8, 0);
    measure(&(scenario){"hot, eight times as large", large, 0, 1, 0}, by, 3);
    unlink(large);
}

int main(int argc, char **argv) {
    size_t bytes = (size_t)(argc > 2 ? atoi(argv[2]) : 1024) << 20;
    int runs = argc > 3 ? atoi(argv[3]) : 7;
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    int threads = cpus > THREAD_COUNT_MAX ? THREAD_COUNT_MAX : (int)cpus;
    char folder[PATH_BYTES - 40], whole[PATH_BYTES];
    find_fake();
    fst_device_info info = {.struct_size = sizeof info};
    must(fst_device_info_get((fst_device){FST_DEVICE_CUDA, 0}, &info, NULL) == FST_OK, "no driver");
    snprintf(folder, sizeof folder, "%s/gpu_simulated.XXXXXX", argc > 1 ? argv[1] : "/tmp");
    must(mkdtemp(folder) != NULL, "making a folder");
    snprintf(whole, sizeof whole, "%s/whole.safetensors", folder);
    write_model(whole, 32, bytes / 32, 0);
    double copy = measure_reads(whole, bytes, threads, 0, 3);
    double one = measure_reads(whole, bytes, 1, 0, 3);
    limits by = {whole, bytes, threads, measure_reads(whole, bytes, 8, O_DIRECT, 3)};
    printf("%zu MiB; %ld processors, which copy %.2f GB/s (one alone: %.2f) at best; disk %.2f "
           "GB/s; medians of %d.\n\n",
           bytes >> 20, cpus, copy, one, by.disk_gbps, runs);
    set_costs();
    measure_all(folder, &by, runs);
    unlink(whole);
    rmdir(folder);
    return 0;
}
