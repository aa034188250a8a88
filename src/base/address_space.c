// SPDX-License-Identifier: Apache-2.0
/// Remaining address space under a limit (ulimit -v).
#include <sys/resource.h>

#include "primitives.h"

uint64_t fsti_address_space_left(void) {
    struct rlimit limit;
    uint64_t kib;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
    if (!fsti_proc_number("/proc/self/status", "VmSize:", &kib)) return UINT64_MAX;
    return limit.rlim_cur - fsti_min(kib * 1024, limit.rlim_cur);
}
