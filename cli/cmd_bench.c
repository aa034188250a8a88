// SPDX-License-Identifier: Apache-2.0
/// bench: every way to load a file, side by side with plain reads. Each run is a process of its
/// own with warmed memory; ways take turns, so that what else the machine does hits all alike.
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"

#define RUNS_MAX 101
#define BALLAST_BYTES_MIN ((size_t)1 << 30)
#define READ_BYTES ((size_t)8 << 20)

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

typedef struct bench_run {
    int good;
    double seconds, cpu_seconds;
} bench_run;

typedef struct bench_way {
    const char *name;
    fst_load_mode mode;
    fst_engine engine;
    fst_ring ring;
    bool is_plain_read; ///< one thread of read(2), no tensors
    bool huge_pages;
} bench_way;

static const bench_way ways[] = {
    {"load", FST_MODE_LOAD, FST_ENGINE_AUTO, FST_RING_AUTO, false, false},
    {"load, uring to place", FST_MODE_LOAD, FST_ENGINE_URING, FST_RING_PLACE, false, false},
    {"load, uring by slots", FST_MODE_LOAD, FST_ENGINE_URING, FST_RING_SLOTS, false, false},
    {"load, direct threads", FST_MODE_LOAD, FST_ENGINE_DIRECT, FST_RING_AUTO, false, false},
    {"load, pread threads", FST_MODE_LOAD, FST_ENGINE_PREAD, FST_RING_AUTO, false, false},
    {"load, mmap", FST_MODE_LOAD, FST_ENGINE_MMAP, FST_RING_AUTO, false, false},
    {"map, pages present", FST_MODE_MAP, FST_ENGINE_AUTO, FST_RING_AUTO, false, false},
    {"read(), huge pages", FST_MODE_LOAD, FST_ENGINE_AUTO, FST_RING_AUTO, true, true},
    {"read(), malloc", FST_MODE_LOAD, FST_ENGINE_AUTO, FST_RING_AUTO, true, false},
};
#define WAY_COUNT (sizeof ways / sizeof *ways)

static void print_help(void) {
    printf("usage: fastsafetensors bench [--cold] [--runs N] FILE\n\n"
           "Times every way to load FILE, side by side with plain reads: median [lowest-highest],\n"
           "GB/s and processor seconds. Each run is a process of its own.\n\n"
           "  --cold     drop the file from the page cache before each run (default: read it into\n"
           "             the cache before each run)\n"
           "  --runs N   runs of each way (default 7)\n");
}

static double now_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/// Touches and drops memory: on virtual machines the first touch of memory that the host took back
/// costs more than a load.
static void warm_memory(size_t size) {
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return;
    madvise(memory, size, MADV_HUGEPAGE);
    if (madvise(memory, size, MADV_POPULATE_WRITE) != 0) memset(memory, 1, size);
    munmap(memory, size);
}

/// Reads the file in blocks into `memory`, or into one block again and again.
static bool read_file(const char *path, char *memory, size_t size, bool keep) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t done = 0;
    while (fd >= 0 && done < size) {
        size_t wanted = size - done < READ_BYTES ? size - done : READ_BYTES;
        ssize_t got = read(fd, memory + (keep ? done : 0), wanted);
        if (got <= 0) break;
        done += (size_t)got;
    }
    if (fd >= 0) close(fd);
    return done == size;
}

static void evict_file(const char *path) {
    int drop = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    sync();
    if (drop >= 0 && write(drop, "3", 1) != 1) perror("drop_caches");
    if (fd >= 0) posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (fd >= 0) close(fd);
    if (drop >= 0) close(drop);
}

static void set_state(const char *path, size_t size, bool cold) {
    char *block = malloc(READ_BYTES);
    if (cold)
        evict_file(path);
    else if (block != NULL)
        read_file(path, block, size, false);
    free(block);
}

static bool plain_read(const bench_way *way, const char *path, size_t size) {
    char *memory =
        way->huge_pages
            ? aligned_alloc((size_t)2 << 20, (size + ((size_t)2 << 20)) & ~(((size_t)2 << 20) - 1))
            : malloc(size);
    if (memory == NULL) return false;
    if (way->huge_pages) madvise(memory, size, MADV_HUGEPAGE);
    bool good = read_file(path, memory, size, true);
    free(memory);
    return good;
}

static bool load_file(const bench_way *way, const char *path) {
    fst_load_tuning tuning = {.struct_size = sizeof tuning, .ring = way->ring};
    fst_load_options options = {.struct_size = sizeof options,
                                .mode = way->mode,
                                .engine = way->engine,
                                .tuning = &tuning,
                                .map_populate = 1};
    fst_model *model;
    fst_loader *loader;
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) return false;
    bool good = fst_loader_open(model, &options, &loader, NULL) == FST_OK;
    if (good) {
        good = fst_loader_wait(loader, -1, NULL) == FST_OK;
        fst_loader_close(loader);
    }
    fst_model_close(model);
    return good;
}

static double cpu_seconds(const struct rusage *usage) {
    return (double)(usage->ru_utime.tv_sec + usage->ru_stime.tv_sec) +
           (double)(usage->ru_utime.tv_usec + usage->ru_stime.tv_usec) / 1e6;
}

/// One run, in the child.
static bench_run time_way(const bench_way *way, const char *path, size_t size, bool cold) {
    struct rusage before, after;
    warm_memory(size * 2 > BALLAST_BYTES_MIN ? size * 2 : BALLAST_BYTES_MIN);
    set_state(path, size, cold);
    getrusage(RUSAGE_SELF, &before);
    double start = now_seconds();
    bench_run run = {.good =
                         way->is_plain_read ? plain_read(way, path, size) : load_file(way, path)};
    run.seconds = now_seconds() - start;
    getrusage(RUSAGE_SELF, &after);
    run.cpu_seconds = cpu_seconds(&after) - cpu_seconds(&before);
    return run;
}

/// Runs in a child of its own and brings the result back.
static bench_run run_way(const bench_way *way, const char *path, size_t size, bool cold) {
    bench_run run = {0};
    int ends[2];
    if (pipe(ends) != 0) return run;
    pid_t child = fork();
    if (child == 0) {
        run = time_way(way, path, size, cold);
        ssize_t written = write(ends[1], &run, sizeof run);
        _exit(written == (ssize_t)sizeof run ? 0 : 1);
    }
    close(ends[1]);
    if (child > 0 && read(ends[0], &run, sizeof run) != (ssize_t)sizeof run) run.good = 0;
    close(ends[0]);
    if (child > 0) waitpid(child, NULL, 0);
    return run;
}

static int compare_runs(const void *a, const void *b) {
    double x = ((const bench_run *)a)->seconds, y = ((const bench_run *)b)->seconds;
    return (x > y) - (x < y);
}

static void print_way(const bench_way *way, bench_run *runs, unsigned long count, size_t size) {
    if (!runs[0].good) {
        printf("  %-22s not possible here (see 'fastsafetensors engines')\n", way->name);
        return;
    }
    qsort(runs, count, sizeof *runs, compare_runs);
    const bench_run *middle = &runs[count / 2];
    printf("  %s%-22s%s %8.2f ms [%.2f-%.2f]  %6.2f GB/s  cpu %.3f s/GiB\n",
           way == ways ? cli_bold() : "", way->name, way == ways ? cli_plain() : "",
           middle->seconds * 1e3, runs[0].seconds * 1e3, runs[count - 1].seconds * 1e3,
           (double)size / 1e9 / middle->seconds,
           middle->cpu_seconds / ((double)size / (double)(1u << 30)));
}

static int bench_file(const char *path, unsigned long count, bool cold) {
    static bench_run runs[WAY_COUNT][RUNS_MAX];
    struct stat info;
    fst_model *model;
    fst_error error;
    if (fst_model_open(path, NULL, &model, &error) != FST_OK) return cli_fail(&error);
    fst_model_close(model);
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode))
        return cli_usage("bench", "'%s' is not one file", path);
    size_t size = (size_t)info.st_size;
    char text[16];
    printf("%s, %s, %s, median of %lu runs\n", path, cli_size_text(size, text),
           cold ? "cold" : "hot", count);
    for (unsigned long run = 0; run < count; run++)
        for (size_t i = 0; i < WAY_COUNT; i++) {
            size_t way = (i + run) % WAY_COUNT; // take turns at being first
            runs[way][run] = run_way(&ways[way], path, size, cold);
        }
    for (size_t i = 0; i < WAY_COUNT; i++) print_way(&ways[i], runs[i], count, size);
    return EXIT_GOOD;
}

int cmd_bench(int argc, char **argv) {
    static const struct option options[] = {
        {"cold", no_argument, NULL, 'c'},
        {"runs", required_argument, NULL, 'r'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    bool cold = false;
    unsigned long count = 7;
    for (int option; (option = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        char *end = NULL;
        switch (option) {
        case 'c': cold = true; break;
        case 'r':
            count = strtoul(optarg, &end, 10);
            if (*end != '\0' || count == 0 || count > RUNS_MAX)
                return cli_usage("bench", "bad number '%s'", optarg);
            break;
        case 'h': print_help(); return EXIT_GOOD;
        default: return cli_usage("bench", "wrong option");
        }
    }
    if (optind + 1 != argc) return cli_usage("bench", "expected one FILE");
    return bench_file(argv[optind], count, cold);
}
