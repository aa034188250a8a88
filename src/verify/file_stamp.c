// SPDX-License-Identifier: Apache-2.0
/// Stamps of files: times and inode.
#include "file_stamp.h"

#define SETTLING_SECONDS 2

static uint64_t time_ns(const struct timespec *time) {
    return (uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_nsec;
}

fsti_file_stamp fsti_file_stamp_of(const struct stat *info) {
    return (fsti_file_stamp){.modified_ns = time_ns(&info->st_mtim),
                             .changed_ns = time_ns(&info->st_ctim),
                             .inode = info->st_ino};
}

bool fsti_file_stamp_equals(const fsti_file_stamp *a, const fsti_file_stamp *b) {
    return a->modified_ns == b->modified_ns && a->changed_ns == b->changed_ns &&
           a->inode == b->inode;
}

bool fsti_file_stamp_is_settled(const struct stat *info, const struct timespec *begun) {
    const struct timespec *times[] = {&info->st_mtim, &info->st_ctim};
    for (int i = 0; i < 2; i++)
        if (times[i]->tv_sec < 0 || times[i]->tv_sec + SETTLING_SECONDS >= begun->tv_sec)
            return false;
    return true;
}
