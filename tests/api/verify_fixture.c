// SPDX-License-Identifier: Apache-2.0
/// Models with manifests, and flipped bits.
#include "verify_fixture.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fixture.h"

void flip(const char *path, uint64_t bit) {
    struct stat info;
    unsigned char byte;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    off_t at = (off_t)(bit / 8);
    if (fd < 0 || fstat(fd, &info) != 0 || pread(fd, &byte, 1, at) != 1) abort();
    byte ^= (unsigned char)(1u << bit % 8);
    if (pwrite(fd, &byte, 1, at) != 1) abort();
    const struct timespec times[2] = {info.st_atim, info.st_mtim};
    if (futimens(fd, times) != 0) abort();
    close(fd);
}

uint64_t size_of(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 ? (uint64_t)info.st_size : 0;
}

const char *make_listed(const char *name, fst_digest digest, uint32_t chunk_bytes) {
    const char *path = fixture_tensors(name, COUNT, BYTES);
    fst_manifest_options options = FST_STRUCT_INIT(fst_manifest_options);
    fst_error error = {0};
    options.digest = digest;
    options.chunk_bytes = chunk_bytes;
    if (fst_manifest_write(path, NULL, &options, NULL, &error) != FST_OK) {
        fprintf(stderr, "%s\n", error.message);
        return NULL;
    }
    return path;
}

static void count_difference(void *context, const fst_error *difference) {
    ++*(int *)context;
    if (difference->status != FST_E_DIGEST && difference->status != FST_E_NOT_FOUND) abort();
}

fst_status count_differences(const char *path, const char *manifest, int *count,
                             fst_manifest_stats *stats, fst_error *error) {
    fst_check_options options = {.struct_size = sizeof options,
                                 .manifest = manifest,
                                 .callback = count_difference,
                                 .context = count};
    return fst_manifest_check(path, &options, stats, error);
}
