// SPDX-License-Identifier: Apache-2.0
/// Limits of this process: its address space (ulimit -v) and the size of its files (ulimit -f).
#include <sys/resource.h>

#include "primitives.h"

uint64_t fsti_address_space_left(void) {
    struct rlimit limit;
    uint64_t kib;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
    if (!fsti_proc_number("/proc/self/status", "VmSize:", &kib)) return UINT64_MAX;
    return limit.rlim_cur - fsti_min(kib * 1024, limit.rlim_cur);
}

uint64_t fsti_file_size_max(void) {
    struct rlimit limit;
    bool is_limited = getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    return is_limited ? limit.rlim_cur : UINT64_MAX;
}
