// SPDX-License-Identifier: Apache-2.0
/// How many processors this process may use: affinity mask and cgroup quota, not the core count.
#include <sched.h>
#include <stdio.h>

#include "base.h"

static uint32_t count_affinity(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    int count = CPU_COUNT(&set);
    return count < 1 ? 1 : (uint32_t)count;
}

/// The quota of cgroup v2 in whole processors, rounded up; 0: none.
static uint32_t count_quota(const char *path) {
    FILE *file = fopen(path, "re");
    unsigned long long quota = 0, period = 0;
    if (file == NULL) return 0;
    int fields = fscanf(file, "%llu %llu", &quota, &period); // "max 100000" gives no field
    fclose(file);
    return fields == 2 && period > 0 ? (uint32_t)((quota + period - 1) / period) : 0;
}

uint32_t fsti_cpu_count(void) {
    uint32_t count = count_affinity(), quota = count_quota("/sys/fs/cgroup/cpu.max");
    return quota > 0 && quota < count ? quota : count;
}
