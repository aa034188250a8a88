// SPDX-License-Identifier: Apache-2.0
/// Limits of this process: its address space (ulimit -v), its writable memory (ulimit -d) and the
/// size of its files (ulimit -f).
#include <sys/resource.h>

#include "primitives.h"

/// What is left of a limit. `use`: the line of /proc/self/status that has its use.
static uint64_t left_of(const struct rlimit *limit, const char *use) {
    uint64_t kib;
    if (limit->rlim_cur == RLIM_INFINITY || !fsti_proc_number("/proc/self/status", use, &kib))
        return UINT64_MAX;
    return limit->rlim_cur - fsti_min(kib * 1024, limit->rlim_cur);
}

uint64_t fsti_address_space_left(void) {
    struct rlimit space, data;
    uint64_t left = UINT64_MAX;
    if (getrlimit(RLIMIT_AS, &space) == 0) left = left_of(&space, "VmSize:");
    if (getrlimit(RLIMIT_DATA, &data) == 0) left = fsti_min(left, left_of(&data, "VmData:"));
    return left;
}

uint64_t fsti_file_size_max(void) {
    struct rlimit limit;
    bool is_limited = getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    return is_limited ? limit.rlim_cur : UINT64_MAX;
}
