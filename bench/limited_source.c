// SPDX-License-Identifier: Apache-2.0
/// limited_source MB_PER_SECOND FILE..: loads each file into memory of its own from a source that
/// gives no more than so many MB (10^6 bytes) a second, to all readers together, and prints
/// "SECONDS TRUE_GB_PER_SECOND READ_BYTES READ_CALLS FILE".
#include <errno.h>
#include <fastsafetensors.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef struct limited_source {
    int fd;
    double seconds_per_byte;
    pthread_mutex_t lock;
    double free_at; ///< when the line is free again
    uint64_t bytes, calls;
} limited_source;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void sleep_until(double moment) {
    struct timespec time = {.tv_sec = (time_t)moment};
    time.tv_nsec = (long)((moment - (double)time.tv_sec) * 1e9);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR) {
    }
}

static int64_t give(void *context, void *target, size_t size_bytes, uint64_t offset) {
    limited_source *source = context;
    ssize_t got = pread(source->fd, target, size_bytes, (off_t)offset);
    if (got < 0) return -errno;
    pthread_mutex_lock(&source->lock);
    double begin = now();
    if (source->free_at > begin) begin = source->free_at;
    source->free_at = begin + (double)got * source->seconds_per_byte;
    double done = source->free_at;
    source->bytes += (uint64_t)got;
    source->calls++;
    pthread_mutex_unlock(&source->lock);
    sleep_until(done);
    return got;
}

static fst_status load_all(limited_source *limited, const char *path, uint64_t size_bytes,
                           uint64_t *true_bytes, fst_error *error) {
    fst_model *model;
    fst_loader *loader;
    fst_source source = FST_STRUCT_INIT(fst_source);
    source.name = path;
    source.read = give;
    source.size_bytes = size_bytes;
    source.context = limited;
    fst_status status = fst_model_open_source(&source, NULL, &model, error);
    if (status != FST_OK) return status;
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    options.mode = FST_MODE_LOAD;
    status = fst_loader_open(model, &options, &loader, error);
    if (status == FST_OK) {
        fst_load_stats stats = FST_STRUCT_INIT(fst_load_stats);
        status = fst_loader_wait(loader, -1, error);
        if (status == FST_OK) status = fst_loader_stats_get(loader, &stats, error);
        *true_bytes = stats.bytes_requested;
        fst_loader_close(loader);
    }
    fst_model_close(model);
    return status;
}

static int time_file(double rate, const char *path) {
    limited_source limited = {.fd = open(path, O_RDONLY | O_CLOEXEC),
                              .seconds_per_byte = 1 / rate,
                              .lock = PTHREAD_MUTEX_INITIALIZER};
    struct stat info;
    uint64_t true_bytes = 0;
    fst_error error;
    if (limited.fd < 0 || fstat(limited.fd, &info) != 0) return 2;
    double start = now();
    fst_status status = load_all(&limited, path, (uint64_t)info.st_size, &true_bytes, &error);
    double seconds = now() - start;
    close(limited.fd);
    if (status != FST_OK) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    printf("%.3f %.3f %llu %llu %s\n", seconds, (double)true_bytes / seconds / 1e9,
           (unsigned long long)limited.bytes, (unsigned long long)limited.calls, path);
    return 0;
}

int main(int argc, char **argv) {
    double rate = argc > 2 ? strtod(argv[1], NULL) * 1e6 : 0;
    if (rate <= 0) return 3;
    for (int i = 2; i < argc; i++) {
        int code = time_file(rate, argv[i]);
        if (code != 0) return code;
    }
    return 0;
}
