// SPDX-License-Identifier: Apache-2.0
/// Disks that are too small: the error is reported before anything is written, with the free space.
#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "check.h"
#include "fastsafetensors/writer.h"
#include "fixture.h"

// ---- a fake disk: the linker redirects calls to these functions ----

static bool is_wrapped;
static uint64_t block_count, free_blocks; ///< what the file system reports, in blocks of 4 KiB
static unsigned reserve_count;            ///< calls of fallocate()
static bool reserve_takes_all;            ///< as ext4: takes what there is, then fails
static int reserve_errno;                 ///< of each reservation; EOPNOTSUPP as on ext2
static int write_errno;                   ///< of larger writes than a header's

static const char *removed_first; ///< a file that vanishes before its rights are checked

int __real_faccessat(int folder, const char *path, int mode, int flags);
int __wrap_faccessat(int folder, const char *path, int mode, int flags);
int __wrap_faccessat(int folder, const char *path, int mode, int flags) {
    if (is_wrapped && removed_first != NULL && strcmp(path, removed_first) == 0) unlink(path);
    return __real_faccessat(folder, path, mode, flags);
}

int __real_fallocate64(int fd, int mode, off64_t offset, off64_t size);
int __real_fstatvfs64(int fd, struct statvfs64 *out);
int __wrap_fallocate64(int fd, int mode, off64_t offset, off64_t size);
int __wrap_fstatvfs64(int fd, struct statvfs64 *out);
ssize_t __real_pwrite64(int fd, const void *data, size_t size, off64_t offset);
ssize_t __wrap_pwrite64(int fd, const void *data, size_t size, off64_t offset);

ssize_t __wrap_pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    if (write_errno == 0 || size < 4096) return __real_pwrite64(fd, data, size, offset);
    errno = write_errno;
    return -1;
}

int __wrap_fallocate64(int fd, int mode, off64_t offset, off64_t size) {
    if (!is_wrapped) return __real_fallocate64(fd, mode, offset, size);
    reserve_count++;
    if (reserve_errno != 0) {
        errno = reserve_errno;
        return -1;
    }
    if (!reserve_takes_all) return __real_fallocate64(fd, mode, offset, size);
    if (__real_fallocate64(fd, mode, 0, 1 << 20) != 0) return -1;
    free_blocks = 0;
    errno = ENOSPC;
    return -1;
}

int __wrap_fstatvfs64(int fd, struct statvfs64 *out) {
    int result = __real_fstatvfs64(fd, out);
    if (!is_wrapped) return result;
    out->f_frsize = 4096;
    out->f_blocks = block_count;
    out->f_bavail = out->f_bfree = free_blocks;
    return result;
}

/// Saves two tensors of 4 MiB, in separate files if `file_count` is 2.
static fst_status save_on_disk(const char *path, uint32_t file_count, fst_error *error) {
    static const uint64_t shape[] = {4 << 20};
    static char bytes[4 << 20];
    fst_save_tensor tensors[2];
    fst_save_options options = FST_STRUCT_INIT(fst_save_options);
    for (uint32_t i = 0; i < 2; i++)
        tensors[i] = (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                                       .name = i == 0 ? "a" : "b",
                                       .name_size = 1,
                                       .dtype = FST_DTYPE_U8,
                                       .rank = 1,
                                       .shape = shape,
                                       .data = bytes,
                                       .file_index = file_count == 2 ? i : 0};
    options.file_count = file_count;
    is_wrapped = true;
    reserve_count = 0;
    fst_status status = fst_save(path, tensors, 2, &options, NULL, error);
    is_wrapped = false;
    return status;
}

TEST(small_disk_is_refused_before_reserving)
{
    fst_error error;
    block_count = 1 << 20;
    free_blocks = 1024; // 4 MiB
    CHECK_INT(save_on_disk(fixture_path("m.safetensors"), 0, &error), FST_E_NO_SPACE);
    CHECK_INT(reserve_count, 0);
    CHECK_CONTAINS(error.message, "4194304 are free");
    CHECK(access(fixture_path("m.safetensors"), F_OK) != 0);
}

TEST(a_sharded_model_is_refused_before_its_first_file)
{
    fst_error error;
    block_count = 1 << 20;
    free_blocks = 1536; // 6 MiB: enough for one file of the two
    CHECK_INT(save_on_disk(fixture_path("set"), 2, &error), FST_E_NO_SPACE);
    CHECK_INT(reserve_count, 0);
    CHECK_CONTAINS(error.message, "6291456 are free");
    CHECK(access(fixture_path("set"), F_OK) != 0);
}

TEST(failed_reservation_counts_as_free)
{
    fst_error error;
    struct stat info;
    block_count = 1 << 20;
    free_blocks = 1 << 18;
    reserve_takes_all = true;
    CHECK_INT(save_on_disk(fixture_path("m.safetensors"), 0, &error), FST_E_NO_SPACE);
    reserve_takes_all = false;
    CHECK_INT(reserve_count, 1);
    CHECK_CONTAINS(error.message, "1048576 are free");
    CHECK(stat(fixture_path("m.safetensors"), &info) != 0);
}

/// Free space of the disk says nothing about a user's quota or the largest file.
TEST(a_quota_and_the_largest_file_are_not_a_full_disk)
{
    const int failures[] = {EDQUOT, EFBIG};
    fst_error error;
    block_count = free_blocks = 1 << 20;
    for (size_t i = 0; i < 4; i++) {
        int failure = failures[i / 2];
        reserve_errno = i % 2 == 0 ? failure : EOPNOTSUPP;
        write_errno = failure;
        CHECK_INT(save_on_disk(fixture_path("m.safetensors"), 0, &error), FST_E_NO_SPACE);
        CHECK_INT(error.os_errno, failure);
        CHECK_CONTAINS(error.message, strerror(failure));
        CHECK(strstr(error.message, "free") == NULL);
        CHECK(access(fixture_path("m.safetensors"), F_OK) != 0);
    }
    reserve_errno = write_errno = 0;
}

TEST(file_system_without_sizes_is_not_full)
{
    block_count = free_blocks = 0;
    CHECK_INT(save_on_disk(fixture_path("m.safetensors"), 0, NULL), FST_OK);
    CHECK_INT(unlink(fixture_path("m.safetensors")), 0);
}

/// Another save of the same model, or a program, may delete the old file at any moment.
TEST(an_old_file_that_vanishes_is_no_error)
{
    fst_error error = {0};
    block_count = free_blocks = 1 << 20;
    CHECK_INT(save_on_disk(fixture_path("gone.safetensors"), 0, &error), FST_OK);
    removed_first = fixture_path("gone.safetensors");
    fst_status status = save_on_disk(removed_first, 0, &error);
    removed_first = NULL;
    CHECK_INT(status, FST_OK);
    CHECK_INT(access(fixture_path("gone.safetensors"), F_OK), 0);
}

/// Opens a writer for one tensor of 4 MiB without data, and maps it.
static fst_status map_tensor(uint8_t others_write, fst_error *error) {
    static const uint64_t shape[] = {4 << 20};
    fst_save_tensor tensor = {.struct_size = sizeof tensor,
                              .name = "a",
                              .name_size = 1,
                              .dtype = FST_DTYPE_U8,
                              .rank = 1,
                              .shape = shape};
    fst_save_options options = FST_STRUCT_INIT(fst_save_options);
    fst_writer *writer = NULL;
    void *mapping;
    options.file_count = others_write; // several processes save a set
    options.others_write = others_write;
    is_wrapped = true;
    fst_status status =
        fst_writer_open(fixture_path("mapped"), &tensor, 1, &options, &writer, error);
    if (status == FST_OK) status = fst_writer_map(writer, 0, &mapping, error);
    is_wrapped = false;
    fst_writer_close(writer);
    return status;
}

/// Otherwise writing to the mapping would end the process with SIGBUS.
TEST(a_mapped_tensor_has_its_space_where_none_can_be_reserved)
{
    fst_error error;
    block_count = free_blocks = 1 << 20;
    reserve_errno = EOPNOTSUPP;
    for (uint8_t others_write = 0; others_write < 2; others_write++) {
        CHECK_INT(map_tensor(others_write, &error), FST_OK);
        write_errno = ENOSPC;
        CHECK_INT(map_tensor(others_write, &error), FST_E_NO_SPACE);
        write_errno = 0;
        CHECK_CONTAINS(error.message, "not enough space");
    }
    reserve_errno = 0;
}
