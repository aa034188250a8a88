// SPDX-License-Identifier: Apache-2.0
/// Free space of a file system, queried before reserving any.
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "output_private.h"

uint64_t fsti_space_taken(int fd) {
    struct stat info;
    return fstat(fd, &info) == 0 ? (uint64_t)info.st_blocks * 512 : 0;
}

uint64_t fsti_space_free(int fd) {
    struct statvfs info;
    // A FUSE file system without statfs reports 0 blocks in total.
    if (fstatvfs(fd, &info) != 0 || info.f_blocks == 0) return UINT64_MAX;
    // Root may also use the reserved blocks.
    uint64_t blocks = geteuid() == 0 ? info.f_bfree : info.f_bavail, bytes;
    return fsti_mul(blocks, info.f_frsize, &bytes) ? bytes : UINT64_MAX;
}

fst_status fsti_space_refuse(const char *path, uint64_t size_bytes, uint64_t available,
                             fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    location.os_errno = ENOSPC;
    if (available == UINT64_MAX)
        return fsti_error_set(error, FST_E_NO_SPACE, location,
                              "not enough space for %" PRIu64 " bytes", size_bytes);
    return fsti_error_set(error, FST_E_NO_SPACE, location,
                          "not enough space for %" PRIu64 " bytes, %" PRIu64 " are free",
                          size_bytes, available);
}

fst_status fsti_folder_check_space(const char *folder, uint64_t size_bytes, fst_error *error) {
    int fd = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return FST_OK; // creating the first file reports the reason
    uint64_t available = fsti_space_free(fd);
    close(fd);
    return available < size_bytes ? fsti_space_refuse(folder, size_bytes, available, error)
                                  : FST_OK;
}
