// SPDX-License-Identifier: Apache-2.0
/// User-space file systems (FUSE), simulated by replaced system calls. If the file system drops a
/// file's cached pages whenever it is opened, loads into owned memory bypass the page cache. If it
/// takes long to answer each read, reads are large.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "check.h"
#include "fastsafetensors.h"
#include "fixture.h"
#include "io/io.h"
#include "memory/memory.h"

#define COUNT 12
#define BYTES ((uint64_t)4 << 20)
#define FUSE_MAGIC 0x65735546 // linux/magic.h

/// The file system: whether an open drops pages, whether it refuses O_DIRECT, whether it is slow to
/// answer reads of a byte, and whether it hides what is cached.
static struct {
    bool is_on, drops, refuses, is_slow, hides;
    unsigned direct_opens, timed_reads, blocked_opens;
    pthread_t opener;
    dev_t number; ///< of the device, another one in each test
} kernel;

int __real_fstatfs64(int fd, struct statfs64 *out);
int __wrap_fstatfs64(int fd, struct statfs64 *out);
bool __real_fsti_file_resident(fsti_file *file, uint64_t begin, uint64_t end, uint64_t *bytes);
bool __wrap_fsti_file_resident(fsti_file *file, uint64_t begin, uint64_t end, uint64_t *bytes);
uint64_t __real_fsti_now_ns(void);
uint64_t __wrap_fsti_now_ns(void);
int __real_madvise(void *address, size_t size, int advice);
int __wrap_madvise(void *address, size_t size, int advice);
int __real_fstat64(int fd, struct stat64 *out);
int __wrap_fstat64(int fd, struct stat64 *out);
ssize_t __real_pread64(int fd, void *target, size_t size, off_t at);
ssize_t __wrap_pread64(int fd, void *target, size_t size, off_t at);
int __real_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...);
int __wrap___open64_2(const char *path, int flags); // of builds with _FORTIFY_SOURCE

int __wrap_fstatfs64(int fd, struct statfs64 *out) {
    int result = __real_fstatfs64(fd, out);
    if (kernel.is_on) out->f_type = FUSE_MAGIC;
    return result;
}

bool __wrap_fsti_file_resident(fsti_file *file, uint64_t begin, uint64_t end, uint64_t *bytes) {
    return !kernel.hides && __real_fsti_file_resident(file, begin, end, bytes);
}

static atomic_ullong populated_bytes;
static const char *changed_path; ///< modified while its pages are read, or NULL
int __wrap_madvise(void *address, size_t size, int advice) {
    if (advice == 22) populated_bytes += size; // MADV_POPULATE_READ, Linux 5.14
    if (advice == 22 && changed_path != NULL) utimensat(AT_FDCWD, changed_path, NULL, 0);
    return __real_madvise(address, size, advice);
}

/// Bytes for which the kernel got the advice POSIX_FADV_WILLNEED.
static atomic_ullong announced_bytes;
int __real_posix_fadvise64(int fd, off64_t begin, off64_t size, int advice);
int __wrap_posix_fadvise64(int fd, off64_t begin, off64_t size, int advice);
int __wrap_posix_fadvise64(int fd, off64_t begin, off64_t size, int advice) {
    if (advice == POSIX_FADV_WILLNEED) announced_bytes += (uint64_t)size;
    return __real_posix_fadvise64(fd, begin, size, advice);
}

/// The clock after a timed read, so that no other program's work counts.
static _Thread_local uint64_t last_now, next_now;
uint64_t __wrap_fsti_now_ns(void) {
    last_now = next_now != 0 ? next_now : __real_fsti_now_ns();
    next_now = 0;
    return last_now;
}

static atomic_uint stat_count;
int __wrap_fstat64(int fd, struct stat64 *out) {
    int result = __real_fstat64(fd, out);
    stat_count++;
    if (kernel.is_on) out->st_dev = kernel.number;
    return result;
}

ssize_t __wrap_pread64(int fd, void *target, size_t size, off_t at) {
    if (kernel.is_on && size == 1 && at > 0) {
        kernel.timed_reads++;
        kernel.blocked_opens += pthread_equal(pthread_self(), kernel.opener) != 0;
        next_now = last_now + (kernel.is_slow ? 3000000 : 1);
    }
    return __real_pread64(fd, target, size, at);
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

/// Whether page faults of a tensor in the middle read large parts.
static bool faults_are_large(fst_loader *loader) {
    fst_tensor *tensor = NULL;
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    if (fst_loader_tensor_at(loader, COUNT / 2, -1, &tensor, NULL) != FST_OK ||
        fst_tensor_view_get(tensor, &view, NULL) != FST_OK)
        abort();
    bool are_large = fixture_mapping_has(view.data, "hg") && fixture_mapping_has(view.data, "rr");
    fst_tensor_unref(tensor);
    return are_large;
}

/// Loads a file that is not in the page cache.
static fst_load_stats load_as(fst_load_mode mode, fst_cache cache, bool *are_large) {
    fst_load_stats stats = FST_STRUCT_INIT(fst_load_stats);
    fst_load_options options = {.struct_size = sizeof options, .mode = mode, .cache = cache};
    const char *path = fixture_tensors("fuse", COUNT, BYTES);
    fst_model *model;
    fst_loader *loader;
    fixture_evict(path);
    kernel.is_on = true;
    kernel.number++;
    kernel.opener = pthread_self();
    kernel.direct_opens = kernel.timed_reads = 0;
    populated_bytes = announced_bytes = 0;
    stat_count = 0;
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) abort();
    if (fst_loader_open(model, &options, &loader, NULL) != FST_OK) abort();
    if (fst_loader_wait(loader, -1, NULL) != FST_OK) abort();
    if (!fixture_is_loaded(loader, COUNT, BYTES)) abort();
    *are_large = faults_are_large(loader);
    if (fst_loader_stats_get(loader, &stats, NULL) != FST_OK) abort();
    fst_loader_close(loader);
    fst_model_close(model);
    kernel.is_on = false;
    return stats;
}

static fst_load_stats load(fst_cache cache) {
    bool are_large;
    return load_as(FST_MODE_LOAD, cache, &are_large);
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

/// With the readahead of the device, a page fault reads 128 KiB and then waits again.
TEST(page_faults_of_a_slow_file_system_read_large_parts)
{
    char *data = fsti_pages_map(4 << 20);
    bool has_huge = fixture_mapping_has(data, "hg"), are_large;
    munmap(data, 4 << 20);
    if (!has_huge || fsti_page_bytes() != 4096) SKIP("the system has no huge pages of 2 MiB");
    kernel.drops = kernel.refuses = false;
    for (int is_slow = 0; is_slow < 2; is_slow++) {
        kernel.is_slow = is_slow != 0;
        fst_load_stats stats = load_as(FST_MODE_MAP, FST_CACHE_AUTO, &are_large);
        if (stats.chunks_resident > 0) SKIP("this file system does not evict");
        CHECK_INT(are_large, is_slow);
        CHECK_INT(announced_bytes, is_slow ? 0 : stats.bytes_read);
        CHECK_INT(kernel.blocked_opens, 0); // fst_loader_open() does not wait for the read
        CHECK_INT(kernel.timed_reads, 1);
        stats = load_as(FST_MODE_LOAD, FST_CACHE_AUTO, &are_large);
        CHECK_INT(populated_bytes >= COUNT * BYTES, is_slow);
        CHECK_INT(stats.bytes_read, COUNT * BYTES);
        CHECK_INT(stats.cache_bytes, COUNT * BYTES);
        CHECK_INT(kernel.timed_reads, 1);
    }
}

/// For files of other users the kernel does not say what is cached.
TEST(slow_answers_are_noticed_without_residency)
{
    bool are_large;
    kernel.drops = kernel.refuses = false;
    for (int is_slow = 0; is_slow < 2; is_slow++) {
        kernel.is_slow = is_slow != 0;
        kernel.hides = true;
        (void)load_as(FST_MODE_MAP, FST_CACHE_AUTO, &are_large);
        kernel.hides = false;
        CHECK(is_slow ? kernel.timed_reads == 1 : kernel.timed_reads > 1);
    }
}

/// Each question is a request to the server, if the kernel keeps no attributes.
TEST(views_ask_once_whether_the_file_has_changed)
{
    bool are_large;
    kernel.is_slow = kernel.drops = kernel.refuses = false;
    (void)load_as(FST_MODE_MAP, FST_CACHE_AUTO, &are_large);
    // On opening, before the mapping, for the rights to mincore(), and after the last page.
    CHECK(stat_count <= 4);
}

TEST(a_change_while_pages_are_read_is_noticed)
{
    fst_load_options options = {.struct_size = sizeof options, .mode = FST_MODE_MAP};
    fst_error error = {0};
    fst_model *model;
    fst_loader *loader;
    kernel.is_slow = kernel.drops = kernel.refuses = false;
    const char *path = fixture_tensors("changed", COUNT, BYTES);
    fixture_evict(path);
    kernel.is_on = true;
    kernel.number++;
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    populated_bytes = 0;
    changed_path = path; // the load begins in the call
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    if (fst_loader_wait(loader, -1, &error) == FST_OK && populated_bytes == 0)
        SKIP("this file system does not evict");
    changed_path = NULL;
    CHECK_INT(error.status, FST_E_FILE_CHANGED);
    fst_loader_close(loader);
    fst_model_close(model);
    kernel.is_on = false;
}
