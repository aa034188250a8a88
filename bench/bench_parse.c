// SPDX-License-Identifier: Apache-2.0
/// bench_parse: nanoseconds per tensor of opening a model, everything included: reading the
/// header, JSON, UTF-8, names, duplicates, offsets, coverage. Names are those of a
/// mixture-of-experts model (about 150 bytes of header a tensor). Prints the median of 15 runs.
#include <fastsafetensors.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define RUNS 15

static void write_model(const char *path, size_t count) {
    FILE *file = fopen(path, "we");
    char *json = malloc(count * 200 + 16), *end = json;
    if (file == NULL || json == NULL) exit(1);
    *end++ = '{';
    for (size_t i = 0; i < count; i++)
        end += sprintf(end,
                       "%s\"model.layers.%zu.block_sparse_moe.experts.%zu.gate_up_proj.weight\":"
                       "{\"dtype\":\"BF16\",\"shape\":[4096,0,14336],\"data_offsets\":[0,0]}",
                       i > 0 ? "," : "", i / 384, i % 384);
    *end++ = '}';
    while ((end - json) % 8 != 0) *end++ = ' ';
    unsigned long long size = (unsigned long long)(end - json);
    if (fwrite(&size, 8, 1, file) != 1 || fwrite(json, size, 1, file) != 1 || fclose(file) != 0)
        exit(1);
    free(json);
}

static double now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(void) {
    static const size_t counts[] = {1000, 10000, 100000, 500000};
    char path[] = "/tmp/bench_parse-XXXXXX";
    int fd = mkstemp(path);
    if (fd < 0) return 1;
    close(fd);
    printf("%9s %12s %12s %14s %16s\n", "tensors", "ns/tensor", "ms", "header bytes",
           "memory/header");
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        double times[RUNS];
        fst_file_info info = FST_STRUCT_INIT(fst_file_info);
        write_model(path, counts[c]);
        for (int run = 0; run < RUNS; run++) {
            fst_model *model;
            fst_error error;
            double start = now_ns();
            if (fst_model_open(path, NULL, &model, &error) != FST_OK) {
                fprintf(stderr, "%s\n", error.message);
                return 1;
            }
            times[run] = now_ns() - start;
            if (fst_model_file_info(model, 0, &info, NULL) != FST_OK) return 1;
            fst_model_close(model);
        }
        qsort(times, RUNS, sizeof *times, compare);
        printf("%9zu %5.0f [%.0f-%.0f] %9.2f %14llu %16.2f\n", counts[c],
               times[RUNS / 2] / (double)counts[c], times[0] / (double)counts[c],
               times[RUNS - 1] / (double)counts[c], times[RUNS / 2] / 1e6,
               (unsigned long long)info.header_bytes,
               (double)info.table_bytes / (double)info.header_bytes);
    }
    unlink(path);
    return 0;
}
