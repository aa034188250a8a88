// SPDX-License-Identifier: Apache-2.0
/// User-space file systems (FUSE), played by the linker: many drop a file's cached pages whenever
/// it is opened. Then loads into owned memory read past the page cache.
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "check.h"
#include "fastsafetensors.h"
#include "fixture.h"
#include "io/io.h"

#define COUNT 12
#define BYTES ((uint64_t)4 << 20)
#define FUSE_MAGIC 0x65735546 // linux/magic.h

/// The file system: whether an open drops pages, and whether it refuses O_DIRECT.
static struct {
    bool is_on, drops, refuses;
    unsigned direct_opens;
} kernel;

int __real_fstatfs64(int fd, struct statfs64 *out);
int __wrap_fstatfs64(int fd, struct statfs64 *out);
int __real_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...);
int __wrap___open64_2(const char *path, int flags); // of builds with _FORTIFY_SOURCE

int __wrap_fstatfs64(int fd, struct statfs64 *out) {
    int result = __real_fstatfs64(fd, out);
    if (kernel.is_on) out->f_type = FUSE_MAGIC;
    return result;
}

int __wrap_open64(const char *path, int flags, ...) {
    bool is_direct = kernel.is_on && (flags & O_DIRECT) != 0;
    if (is_direct && kernel.refuses) {
        errno = EINVAL;
        return -1;
    }
    int fd = __real_open64(path, flags, 0600);
    if (is_direct && kernel.drops) posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    kernel.direct_opens += is_direct && fd >= 0;
    return fd;
}

int __wrap___open64_2(const char *path, int flags) { return __wrap_open64(path, flags); }

static int check_tensors(fst_loader *loader) {
    for (size_t i = 0; i < COUNT; i++) {
        fst_tensor *tensor = NULL;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        if (fst_loader_tensor_at(loader, i, -1, &tensor, NULL) != FST_OK) return 1;
        bool good = fst_tensor_view_get(tensor, &view, NULL) == FST_OK &&
                    fixture_matches(view.data, i * BYTES, BYTES);
        fst_tensor_unref(tensor);
        if (!good) return 2;
    }
    return 0;
}

/// Loads a file that is not in the page cache into owned memory.
static fst_load_stats load(fst_cache cache) {
    fst_load_stats stats = FST_STRUCT_INIT(fst_load_stats);
    fst_load_options options = {
        .struct_size = sizeof options, .mode = FST_MODE_LOAD, .cache = cache};
    const char *path = fixture_tensors("fuse", COUNT, BYTES);
    fst_model *model;
    fst_loader *loader;
    fixture_evict(path);
    kernel.is_on = true;
    kernel.direct_opens = 0;
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) abort();
    if (fst_loader_open(model, &options, &loader, NULL) != FST_OK) abort();
    if (fst_loader_wait(loader, -1, NULL) != FST_OK) abort();
    if (check_tensors(loader) != 0) abort();
    if (fst_loader_stats_get(loader, &stats, NULL) != FST_OK) abort();
    fst_loader_close(loader);
    fst_model_close(model);
    kernel.is_on = false;
    return stats;
}

static bool can_be_direct(void) {
    const char *path = fixture_tensors("direct", 1, BYTES);
    int fd = __real_open64(path, O_RDONLY | O_DIRECT);
    if (fd >= 0) close(fd);
    return fd >= 0;
}

/// Bytes that the next open drops need not be cached.
TEST(a_file_system_without_a_lasting_cache_is_read_directly)
{
    kernel.drops = true, kernel.refuses = false;
    if (!can_be_direct()) SKIP("no direct reads here");
    fst_load_stats stats = load(FST_CACHE_AUTO);
    if (stats.chunks_resident > 0) SKIP("this file system does not evict");
    CHECK_INT(stats.bytes_direct, COUNT * BYTES);
    CHECK_INT(stats.bytes_read, COUNT * BYTES);
    CHECK_INT(stats.cache_bytes, 0);
    CHECK_INT(kernel.direct_opens, 1);
    // Unless the program asks for it.
    stats = load(FST_CACHE_KEEP);
    CHECK_INT(stats.bytes_direct, 0);
    CHECK_INT(stats.cache_bytes, COUNT * BYTES);
}

TEST(a_lasting_cache_is_filled)
{
    kernel.drops = kernel.refuses = false;
    fst_load_stats stats = load(FST_CACHE_AUTO);
    CHECK_INT(stats.bytes_direct, 0);
    CHECK_INT(stats.bytes_read, COUNT * BYTES);
}

TEST(a_file_system_without_direct_reads_is_read_through_the_cache)
{
    kernel.drops = kernel.refuses = true;
    fst_load_stats stats = load(FST_CACHE_AUTO);
    CHECK_INT(stats.bytes_direct, 0);
    CHECK_INT(stats.bytes_read, COUNT * BYTES);
    CHECK_INT(kernel.direct_opens, 0);
}
