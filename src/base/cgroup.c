// SPDX-License-Identifier: Apache-2.0
/// What this process may use: processors by affinity mask and cgroup quota, memory by cgroup limit.
/// Files of cgroup v2: https://docs.kernel.org/admin-guide/cgroup-v2.html.
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base.h"

#define PATH_BYTES 512

static const char *cgroup_root = "/sys/fs/cgroup", *self_path = "/proc/self/cgroup";

void fsti_cgroup_fake(const char *root, const char *self) {
    cgroup_root = root != NULL ? root : "/sys/fs/cgroup";
    self_path = self != NULL ? self : "/proc/self/cgroup";
}

/// The first bytes of a small file as text; false when there is none.
static bool read_text(const char *path, char *text, size_t text_size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, text, text_size - 1);
    if (fd >= 0) close(fd);
    if (size < 0) return false;
    text[size] = '\0';
    return true;
}

/// A file of this process's own group ("0::/path" in its list; a container sees "/").
static bool read_cgroup(const char *name, char *text, size_t text_size) {
    char groups[PATH_BYTES], path[2 * PATH_BYTES];
    if (!read_text(self_path, groups, sizeof groups)) return false;
    char *group = strstr(groups, "0::");
    if (group == NULL) return false;
    group += 3;
    group[strcspn(group, "\n")] = '\0';
    snprintf(path, sizeof path, "%s%s/%s", cgroup_root, strcmp(group, "/") == 0 ? "" : group, name);
    return read_text(path, text, text_size);
}

static uint32_t count_affinity(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    int count = CPU_COUNT(&set);
    return count < 1 ? 1 : (uint32_t)count;
}

/// The quota in whole processors, rounded up; 0: none.
static uint32_t count_quota(void) {
    char text[64], *end;
    if (!read_cgroup("cpu.max", text, sizeof text)) return 0;
    uint64_t quota = strtoull(text, &end, 10); // "max 100000" is no number: no quota
    uint64_t period = end == text ? 0 : strtoull(end, NULL, 10);
    return period > 0 ? (uint32_t)((quota + period - 1) / period) : 0;
}

uint32_t fsti_cpu_count(void) {
    uint32_t count = count_affinity(), quota = count_quota();
    return quota > 0 && quota < count ? quota : count;
}

/// A number of memory.stat; 0 when it is not there.
static uint64_t stat_number(const char *text, const char *name) {
    size_t size = strlen(name);
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        if (*line == '\n') line++;
        if (strncmp(line, name, size) == 0 && line[size] == ' ')
            return strtoull(line + size, NULL, 10);
    }
    return 0;
}

uint64_t fsti_memory_available(void) {
    char text[4096], *end;
    if (!read_cgroup("memory.max", text, sizeof text)) return UINT64_MAX;
    uint64_t limit = strtoull(text, &end, 10);
    if (end == text) return UINT64_MAX; // "max"
    if (!read_cgroup("memory.current", text, sizeof text)) return UINT64_MAX;
    uint64_t used = strtoull(text, NULL, 10);
    // Pages of files are given up before anything is refused.
    if (read_cgroup("memory.stat", text, sizeof text))
        used -=
            fsti_min(used, stat_number(text, "active_file") + stat_number(text, "inactive_file"));
    return limit - fsti_min(limit, used);
}

uint64_t fsti_memory_left(void) {
    uint64_t kib, left = fsti_memory_available();
    if (!fsti_proc_number("/proc/meminfo", "MemAvailable:", &kib)) return left;
    return fsti_min(left, kib << 10);
}
