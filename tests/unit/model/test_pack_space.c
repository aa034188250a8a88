// SPDX-License-Identifier: Apache-2.0
/// Compression with little disk space: space is reserved as the file grows. If it does not fit,
/// nothing is left behind, and the error has the size reached.
#include <dirent.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "packed_fixture.h"

#define WEIGHTS ((size_t)3 << 20)

// ---- a fake disk: the linker redirects calls to these functions ----

typedef enum disk_kind { DISK_REAL, DISK_SMALL, DISK_PLAIN } disk_kind;
static atomic_int disk;                 ///< DISK_PLAIN: small, and without fallocate()
static atomic_uint_fast64_t disk_bytes; ///< no file may be larger
static atomic_uint_fast64_t asked,
    written; ///< the end of the reserved bytes, and of the written ones

int __real_fallocate64(int fd, int mode, off64_t offset, off64_t size);
ssize_t __real_pwrite64(int fd, const void *data, size_t size, off64_t offset);
int __real_fstatvfs64(int fd, struct statvfs64 *out);
int __wrap_fallocate64(int fd, int mode, off64_t offset, off64_t size);
ssize_t __wrap_pwrite64(int fd, const void *data, size_t size, off64_t offset);
int __wrap_fstatvfs64(int fd, struct statvfs64 *out);

static void note_end(atomic_uint_fast64_t *most, uint64_t end) {
    uint_fast64_t old = atomic_load(most);
    while (old < end && !atomic_compare_exchange_weak(most, &old, end)) continue;
}

int __wrap_fallocate64(int fd, int mode, off64_t offset, off64_t size) {
    uint64_t end = (uint64_t)(offset + size);
    if (atomic_load(&disk) == DISK_PLAIN) return errno = EOPNOTSUPP, -1;
    if (atomic_load(&disk) == DISK_SMALL && end > atomic_load(&disk_bytes))
        return errno = ENOSPC, -1;
    note_end(&asked, end);
    return __real_fallocate64(fd, mode, offset, size);
}

ssize_t __wrap_pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    uint64_t end = (uint64_t)offset + size;
    if (atomic_load(&disk) != DISK_REAL && end > atomic_load(&disk_bytes))
        return errno = ENOSPC, -1;
    note_end(&written, end);
    return __real_pwrite64(fd, data, size, offset);
}

int __wrap_fstatvfs64(int fd, struct statvfs64 *out) {
    struct stat64 info;
    int result = __real_fstatvfs64(fd, out);
    if (result != 0 || atomic_load(&disk) == DISK_REAL || fstat64(fd, &info) != 0) return result;
    uint64_t taken = (uint64_t)info.st_blocks * 512, all = atomic_load(&disk_bytes);
    out->f_frsize = 512;
    out->f_bavail = out->f_bfree = (taken < all ? all - taken : 0) / 512;
    return result;
}

// ---- what is compressed ----

/// 12 MiB of F32 that were BF16, 4 MiB compressed, in a separate folder.
static const char *make_source(void) {
    static const uint64_t shape[] = {WEIGHTS};
    static const char *path;
    if (path != NULL) return path;
    uint32_t *data = malloc(WEIGHTS * sizeof *data);
    uint64_t state = 3;
    for (size_t i = 0; i < WEIGHTS; i++) {
        uint32_t some = (uint32_t)(fixture_random(&state) >> 20);
        uint32_t exponent = 0x7a - (uint32_t)__builtin_ctz(some | 64);
        data[i] = (some & 0x80) << 24 | exponent << 23 | (some & 0x7f) << 16;
    }
    fst_save_tensor tensor = {.struct_size = sizeof tensor,
                              .name = "weights",
                              .name_size = SIZE_MAX,
                              .dtype = FST_DTYPE_F32,
                              .rank = 1,
                              .shape = shape,
                              .data = data};
    path = strdup(fixture_path("space.plain"));
    if (fst_save(path, &tensor, 1, NULL, NULL, NULL) != FST_OK) abort();
    free(data);
    return path;
}

static const char *target_folder(void) {
    static const char *folder;
    if (folder != NULL) return folder;
    folder = strdup(fixture_path("space"));
    if (mkdir(folder, 0777) != 0) abort();
    return folder;
}

/// Compresses on a kind of disk. Returns the size of the result; 0 if the save failed;
/// UINT64_MAX if the failed save left a file behind.
static uint64_t compress_on(disk_kind kind, uint64_t bytes, fst_error *error) {
    char target[512];
    struct stat info = {.st_size = 0};
    fst_pack_options options = FST_STRUCT_INIT(fst_pack_options);
    const char *source = make_source();
    options.promise = FST_SAVE_QUICK;
    snprintf(target, sizeof target, "%s/target", target_folder());
    atomic_store(&disk_bytes, bytes);
    atomic_store(&asked, 0);
    atomic_store(&written, 0);
    atomic_store(&disk, kind);
    fst_status status = fst_file_compress(source, target, &options, NULL, error);
    atomic_store(&disk, DISK_REAL);
    if (status == FST_OK && stat(target, &info) != 0) return 0;
    unlink(target);
    bool is_empty = rmdir(target_folder()) == 0 && mkdir(target_folder(), 0777) == 0;
    return is_empty ? (uint64_t)info.st_size : UINT64_MAX;
}

static uint64_t packed_size(void) {
    fst_error error = {.status = FST_OK};
    return make_packed() == NULL ? 0 : compress_on(DISK_REAL, 0, &error);
}

TEST(space_is_reserved_as_the_file_grows)
{
    fst_error error = {.status = FST_OK};
    uint64_t size = packed_size();
    if (size == 0) return;
    CHECK(size < WEIGHTS * 4 / 2);
    CHECK(atomic_load(&asked) >= atomic_load(&written));
    CHECK(atomic_load(&asked) <= size + size / 8 + ((uint64_t)2 << 20));
    for (disk_kind kind = DISK_SMALL; kind <= DISK_PLAIN; kind++)
        CHECK_INT(compress_on(kind, size + ((uint64_t)1 << 18), &error), size);
}

TEST(full_disk_is_an_error_and_leaves_no_file)
{
    uint64_t size = packed_size();
    if (size == 0) return;
    for (disk_kind kind = DISK_SMALL; kind <= DISK_PLAIN; kind++)
        for (uint64_t have = 0; have < size; have += size / 7) {
            fst_error error = {.status = FST_OK};
            CHECK_INT(compress_on(kind, have, &error), 0);
            CHECK_INT(error.status, FST_E_NO_SPACE);
            if (have > size / 4) CHECK_CONTAINS(error.message, "compressed");
        }
}

TEST(file_size_limit_counts_compressed_bytes)
{
    struct rlimit old, limit;
    fst_error error = {.status = FST_OK};
    uint64_t size = packed_size();
    if (size == 0 || getrlimit(RLIMIT_FSIZE, &old) != 0) return;
    limit = old;
    limit.rlim_cur = size + 4096;
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &limit), 0);
    CHECK_INT(compress_on(DISK_REAL, 0, &error), size);
    limit.rlim_cur = size / 2;
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &limit), 0);
    CHECK_INT(compress_on(DISK_REAL, 0, &error), 0);
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &old), 0);
    CHECK_INT(error.status, FST_E_NO_SPACE);
    CHECK_CONTAINS(error.message, "ulimit");
}
