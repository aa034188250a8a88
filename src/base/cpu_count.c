// SPDX-License-Identifier: Apache-2.0
/// How many processors this process may use: affinity mask and cgroup quota, not the core count.
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

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
    char line[64] = "", *end;
    if (file == NULL) return 0;
    const char *text = fgets(line, sizeof line, file);
    fclose(file);
    if (text == NULL) return 0;
    uint64_t quota = strtoull(text, &end, 10); // "max 100000" is no number: no quota
    uint64_t period = end == text ? 0 : strtoull(end, NULL, 10);
    return period > 0 ? (uint32_t)((quota + period - 1) / period) : 0;
}

uint32_t fsti_cpu_count(void) {
    uint32_t count = count_affinity(), quota = count_quota("/sys/fs/cgroup/cpu.max");
    return quota > 0 && quota < count ? quota : count;
}
