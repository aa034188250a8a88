// SPDX-License-Identifier: Apache-2.0
/// bench: times every loading method, and plain reads. Each run is a separate process with warmed
/// memory. Methods are interleaved, so that other load on the machine affects all of them alike.
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "commands.h"

#define RUNS_MAX 101
#define BUFFER_BYTES ((size_t)128 << 20) // more than the buffers of a load
#define READ_BYTES ((size_t)8 << 20)

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

typedef struct bench_run {
    int good;
    double seconds, cpu_seconds;
} bench_run;

typedef struct bench_method {
    const char *name;
    fst_load_mode mode;
    fst_engine engine;
    fst_ring ring;
    bool is_plain_read; ///< one thread of read(2), no tensors
    bool huge_pages;
} bench_method;

typedef struct bench_request {
    uint64_t count;
    bool cold;
} bench_request;

static const bench_method methods[] = {
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
#define METHOD_COUNT (sizeof methods / sizeof *methods)

/// Touches and frees memory: in a virtual machine, the first access to memory that the host has
/// reclaimed costs more than a load.
static void warm_memory(size_t size) {
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return;
    madvise(memory, size, MADV_HUGEPAGE);
    if (madvise(memory, size, MADV_POPULATE_WRITE) != 0) memset(memory, 1, size);
    munmap(memory, size);
}

/// Reads the file in blocks, into `memory` or always into the same block.
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

static bool plain_read(const bench_method *method, const char *path, size_t size) {
    char *memory =
        method->huge_pages
            ? aligned_alloc((size_t)2 << 20, (size + ((size_t)2 << 20)) & ~(((size_t)2 << 20) - 1))
            : malloc(size);
    if (memory == NULL) return false;
    if (method->huge_pages) madvise(memory, size, MADV_HUGEPAGE);
    bool good = read_file(path, memory, size, true);
    free(memory);
    return good;
}

static bool load_file(const bench_method *method, const char *path) {
    fst_load_tuning tuning = {.struct_size = sizeof tuning,
                              .engine = method->engine,
                              .ring = method->ring,
                              .map_populate = 1};
    fst_load_options options = {
        .struct_size = sizeof options, .mode = method->mode, .tuning = &tuning};
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

/// Runs one measurement, in the child process.
static bench_run time_method(const bench_method *method, const char *path, size_t size, bool cold) {
    struct rusage before, after;
    warm_memory(size * 2 + BUFFER_BYTES);
    set_state(path, size, cold);
    getrusage(RUSAGE_SELF, &before);
    double start = cli_seconds_now();
    bench_run run = {.good = method->is_plain_read ? plain_read(method, path, size)
                                                   : load_file(method, path)};
    run.seconds = cli_seconds_now() - start;
    getrusage(RUSAGE_SELF, &after);
    run.cpu_seconds = cpu_seconds(&after) - cpu_seconds(&before);
    return run;
}

/// Runs one measurement in a child process and returns its result.
static bench_run run_method(const bench_method *method, const char *path, size_t size, bool cold) {
    bench_run run = {0};
    int ends[2];
    if (pipe(ends) != 0) return run;
    pid_t child = fork();
    if (child == 0) {
        run = time_method(method, path, size, cold);
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

static double gib(size_t size) { return (double)size / (double)(1u << 30); }

/// The median time of sorted runs: of an even count the mean of the two in the middle.
static bench_run median_of(const bench_run *runs, uint64_t count) {
    const bench_run *low = &runs[(count - 1) / 2], *high = &runs[count / 2];
    bench_run median = *high;
    median.seconds = (low->seconds + high->seconds) / 2;
    median.cpu_seconds = (low->cpu_seconds + high->cpu_seconds) / 2;
    return median;
}

static void print_method(const bench_method *method, const bench_run *runs, uint64_t count,
                         size_t size) {
    bench_run median = median_of(runs, count);
    if (!runs[0].good) {
        printf("  %-22s not possible here (see 'fastsafetensors engines')\n", method->name);
        return;
    }
    printf("  %s%-22s%s %8.2f ms [%.2f-%.2f]  %6.2f GB/s  cpu %.3f s/GiB\n",
           method == methods ? cli_bold() : "", method->name, method == methods ? cli_plain() : "",
           median.seconds * 1e3, runs[0].seconds * 1e3, runs[count - 1].seconds * 1e3,
           (double)size / 1e9 / median.seconds, median.cpu_seconds / gib(size));
}

static void print_method_json(const bench_method *method, const bench_run *runs, uint64_t count,
                              size_t size) {
    bench_run median = median_of(runs, count);
    printf("%s\n  {\"method\": \"%s\", \"possible\": %s", method == methods ? "" : ",",
           method->name, runs[0].good ? "true" : "false");
    if (runs[0].good)
        printf(", \"seconds\": %.6f, \"lowest\": %.6f, \"highest\": %.6f, \"bytes_per_second\": "
               "%.0f, \"cpu_seconds\": %.6f",
               median.seconds, runs[0].seconds, runs[count - 1].seconds,
               (double)size / median.seconds, median.cpu_seconds);
    printf("}");
}

static void print_all(const char *path, size_t size, const bench_request *request,
                      bench_run (*runs)[RUNS_MAX]) {
    char text[16];
    const char *state = request->cold ? "cold" : "hot";
    if (cli_wants_json()) {
        printf("{\"file\": ");
        cli_print_json(path, strlen(path));
        printf(", \"bytes\": %zu, \"state\": \"%s\", \"runs\": %" PRIu64 ", \"methods\": [", size,
               state, request->count);
    } else {
        cli_print_path(path);
        printf(", %s, %s, median of %" PRIu64 " runs\n", cli_size_text(size, text), state,
               request->count);
    }
    for (size_t i = 0; i < METHOD_COUNT; i++) {
        qsort(runs[i], request->count, sizeof *runs[i], compare_runs);
        (cli_wants_json() ? print_method_json : print_method)(&methods[i], runs[i], request->count,
                                                              size);
    }
    if (cli_wants_json()) printf("]}\n");
}

static int bench_file(const char *path, const bench_request *request) {
    static bench_run runs[METHOD_COUNT][RUNS_MAX];
    struct stat info;
    if (stat(path, &info) != 0) return cli_fail_errno("opening", path);
    size_t size = (size_t)info.st_size;
    fst_progress_callback progress = cli_progress_begin();
    uint64_t all = request->count * METHOD_COUNT * size, done = 0;
    for (uint64_t run = 0; run < request->count; run++)
        for (size_t i = 0; i < METHOD_COUNT; i++) {
            size_t method = (i + run) % METHOD_COUNT; // start with another method each time
            runs[method][run] = run_method(&methods[method], path, size, request->cold);
            done += size;
            if (progress != NULL) progress(NULL, done, all, 0, 0);
        }
    cli_progress_end(false);
    print_all(path, size, request, runs);
    return EXIT_OK;
}

/// The files of a sharded model are timed one after the other.
static int bench_model(const char *path, const bench_request *request) {
    fst_model *model;
    fst_error error;
    int code = EXIT_OK;
    if (fst_model_open(path, NULL, &model, &error) != FST_OK) return cli_fail(&error);
    for (size_t i = 0; i < fst_model_file_count(model) && code == EXIT_OK; i++) {
        fst_file_info info = FST_STRUCT_INIT(fst_file_info);
        if (fst_model_file_info(model, i, &info, &error) == FST_OK)
            code = bench_file(info.path, request);
        else
            code = cli_fail(&error);
    }
    fst_model_close(model);
    return code;
}

static int take(void *context, int key, cli_value value) {
    bench_request *request = context;
    if (key == 'c') request->cold = true;
    if (key == 'r' &&
        (!cli_parse_count(value.text, RUNS_MAX, &request->count) || request->count == 0))
        return cli_usage("bench", "--repeat must be from 1 to %d, not '%s'", RUNS_MAX, value.text);
    return EXIT_OK;
}

static int run(const cli_command *command, char **argv) {
    bench_request request = {.count = 7};
    cli_operands operands;
    int code = cli_parse(command, argv, &request, &operands);
    if (code != EXIT_OK || operands.is_answered) return code;
    if (cli_is_address(operands.words[0])) return cli_refuse_address("bench", operands.words[0]);
    return bench_model(operands.words[0], &request);
}

static const cli_option options[] = {
    {'c', "cold", NULL, NULL,
     "drop the file from the page cache before each run (default: read it into the cache)", 0},
    {'r', "repeat", "N", NULL, "run each method N times (default: 7)", 0},
    {0},
};

const cli_command bench_command = {
    .name = "bench",
    .operands = "PATH",
    .summary = "compare all loading methods and plain reads on a file",
    .about = "Time every loading method on each file of a model, and plain reads of the same\n"
             "bytes. Print median, smallest and largest time, GB/s and CPU seconds. Each run is a\n"
             "separate process.",
    .examples = "  fastsafetensors bench --cold --repeat 5 model.safetensors\n",
    .options = options,
    .operand_min = 1,
    .operand_max = 1,
    .has_json = true,
    .has_progress = true,
    .take = take,
    .run = run,
};
