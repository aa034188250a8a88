// SPDX-License-Identifier: Apache-2.0
/// Limits of this process: CPUs by affinity mask and cgroup quota, memory by cgroup limit. The
/// limits of parent groups count too. Supports cgroup v2, v1 and hybrid systems. Files:
/// https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/.
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "primitives.h"

#define PATH_BYTES 1024
/// More CPUs than any kernel supports.
#define CPUS_MAX 65536

static const char *cgroup_root = "/sys/fs/cgroup", *self_path = "/proc/self/cgroup";

/// The CPU quota is read again after this time.
#define QUOTA_NS_MAX 1000000000u
static atomic_uint_fast32_t known_quota;
static atomic_uint_fast64_t quota_read_ns; ///< 0: not read

/// Whether a file could not be opened because descriptors or memory are short: its limit is
/// unknown.
static _Thread_local bool is_unknown;
/// Free bytes when they were last known.
static atomic_uint_fast64_t known_available = UINT64_MAX;

void fsti_cgroup_fake(const char *root, const char *self) {
    cgroup_root = root != NULL ? root : "/sys/fs/cgroup";
    self_path = self != NULL ? self : "/proc/self/cgroup";
    atomic_store(&quota_read_ns, 0);
    atomic_store(&known_available, UINT64_MAX);
}

/// Reads the first bytes of a small file as text. False if it cannot be read.
static bool read_text(const char *path, char *text, size_t text_size) {
    size_t size = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    is_unknown |= fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM);
    if (fd < 0) return false;
    while (size + 1 < text_size) {
        ssize_t got = read(fd, text + size, text_size - 1 - size);
        if (got <= 0) break;
        size += (size_t)got;
    }
    close(fd);
    text[size] = '\0';
    return true;
}

/// A cgroup of this process: its folder and the version, which decides the file names.
typedef struct group {
    char folder[PATH_BYTES]; ///< below `root`; "" is the root itself
    char root[PATH_BYTES];
    bool is_v1; ///< version 1
} group;

/// Whether a line of /proc/self/cgroup ("5:cpu,cpuacct:/path") belongs to a controller. "" matches
/// version 2.
static bool line_has_controller(const char *line, const char *controller, const char **path) {
    const char *names = strchr(line, ':');
    if (names == NULL) return false;
    const char *end = strchr(++names, ':');
    if (end == NULL) return false;
    *path = end + 1;
    size_t size = strlen(controller);
    if (size == 0) return names == end;
    for (const char *name = names; name < end;) {
        size_t length = strcspn(name, ",:");
        if (length == size && memcmp(name, controller, size) == 0) return true;
        name += length + 1;
    }
    return false;
}

/// Finds the group of this process for `controller`, in version 2 or version 1. In a container the
/// folder may be missing below the root; then only limits of the parents are found.
static bool find_group(const char *controller, bool is_v1, group *out) {
    char list[16384]; // version 1 has about a dozen lines, each with a path
    if (!read_text(self_path, list, sizeof list)) return false;
    for (char *line = list, *next; line != NULL && *line != '\0'; line = next) {
        next = strchr(line, '\n');
        if (next != NULL) *next++ = '\0';
        const char *path;
        if (!line_has_controller(line, is_v1 ? controller : "", &path)) continue;
        out->is_v1 = is_v1;
        snprintf(out->folder, sizeof out->folder, "%s", strcmp(path, "/") == 0 ? "" : path);
        snprintf(out->root, sizeof out->root, "%.900s%s%s", cgroup_root, is_v1 ? "/" : "",
                 is_v1 ? controller : "");
        return true;
    }
    return false;
}

/// Moves to the parent group, whose limits apply as well. False at the root.
static bool move_to_parent(group *at) {
    char *slash = strrchr(at->folder, '/');
    if (slash == NULL) return false;
    *slash = '\0';
    return true;
}

static bool read_group(const group *at, const char *name, char *text, size_t text_size) {
    char path[3 * PATH_BYTES];
    snprintf(path, sizeof path, "%s%s/%s", at->root, at->folder, name);
    return read_text(path, text, text_size);
}

static bool read_number(const group *at, const char *name, uint64_t *out) {
    char text[64], *end;
    if (!read_group(at, name, text, sizeof text) || text[0] == '-') return false;
    *out = strtoull(text, &end, 10); // "max" is not a number
    return end != text;
}

/// The CPUs of the affinity mask; 1 if it cannot be read. The kernel refuses a mask that is smaller
/// than its own, so the size doubles until it is accepted.
static uint32_t count_affinity(void) {
    for (size_t count = CPU_SETSIZE; count <= CPUS_MAX; count *= 2) {
        cpu_set_t *set = CPU_ALLOC(count);
        if (set == NULL) return 1;
        size_t size = CPU_ALLOC_SIZE(count);
        int failed = sched_getaffinity(0, size, set), reason = errno;
        int found = failed == 0 ? CPU_COUNT_S(size, set) : 0;
        CPU_FREE(set);
        if (failed == 0) return found < 1 ? 1 : (uint32_t)found;
        if (reason != EINVAL) return 1; // EINVAL: the kernel supports more CPUs than the mask
    }
    return 1;
}

/// A group's CPU quota, rounded up to whole CPUs. 0: unlimited.
static uint32_t group_quota(const group *at) {
    uint64_t quota = 0, period = 0;
    if (at->is_v1) {
        if (!read_number(at, "cpu.cfs_quota_us", &quota)) return 0;
        if (!read_number(at, "cpu.cfs_period_us", &period)) return 0;
    } else {
        char text[64], *end;
        if (!read_group(at, "cpu.max", text, sizeof text)) return 0;
        quota = strtoull(text, &end, 10); // "max 100000" does not parse: unlimited
        period = end == text ? 0 : strtoull(end, NULL, 10);
    }
    return period > 0 && quota > 0 ? (uint32_t)((quota + period - 1) / period) : 0;
}

/// The smallest quota of this process's groups. UINT32_MAX: unlimited.
static uint32_t smallest_quota(void) {
    uint32_t smallest = UINT32_MAX;
    for (int is_v1 = 0; is_v1 < 2; is_v1++) {
        group at;
        if (!find_group("cpu", is_v1 != 0, &at)) continue;
        do {
            uint32_t quota = group_quota(&at);
            if (quota > 0 && quota < smallest) smallest = quota;
        } while (move_to_parent(&at));
    }
    return smallest;
}

uint32_t fsti_cpu_count(void) {
    uint64_t now_ns = fsti_now_ns(), read_ns = atomic_load(&quota_read_ns);
    if (read_ns == 0 || now_ns - read_ns > QUOTA_NS_MAX) {
        // Threads that arrive here together store the same quota.
        atomic_store(&known_quota, smallest_quota());
        atomic_store(&quota_read_ns, now_ns);
    }
    return (uint32_t)fsti_min(count_affinity(), atomic_load(&known_quota));
}

/// Reads a number of memory.stat; 0 if it is missing.
static uint64_t stat_number(const char *text, const char *name) {
    size_t size = strlen(name);
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        if (*line == '\n') line++;
        if (strncmp(line, name, size) == 0 && line[size] == ' ')
            return strtoull(line + size, NULL, 10);
    }
    return 0;
}

/// Version 1 stores "no limit" as the largest number of pages, a little less than 2^63 bytes.
#define UNLIMITED_BYTES_MIN ((uint64_t)1 << 62)

/// Free bytes within a group's limit. UINT64_MAX: no limit.
static uint64_t group_memory(const group *at) {
    char text[8192];
    uint64_t limit, used;
    if (!read_number(at, at->is_v1 ? "memory.limit_in_bytes" : "memory.max", &limit))
        return UINT64_MAX;
    // The other files matter only with a limit. The kernel sums up all CPUs' counts for them.
    if (limit >= UNLIMITED_BYTES_MIN ||
        !read_number(at, at->is_v1 ? "memory.usage_in_bytes" : "memory.current", &used))
        return UINT64_MAX;
    // Usage includes the page cache. The kernel reclaims file pages before it refuses an
    // allocation, so they count as free.
    if (read_group(at, "memory.stat", text, sizeof text))
        used -= fsti_min(
            used, stat_number(text, at->is_v1 ? "total_active_file" : "active_file") +
                      stat_number(text, at->is_v1 ? "total_inactive_file" : "inactive_file"));
    return limit - fsti_min(limit, used);
}

uint64_t fsti_memory_available(void) {
    uint64_t left = UINT64_MAX;
    is_unknown = false;
    for (int is_v1 = 0; is_v1 < 2; is_v1++) {
        group at;
        if (!find_group("memory", is_v1 != 0, &at)) continue;
        do left = fsti_min(left, group_memory(&at));
        while (move_to_parent(&at));
    }
    if (is_unknown) return fsti_min(left, atomic_load(&known_available));
    atomic_store(&known_available, left);
    return left;
}

uint64_t fsti_memory_total(void) {
    struct sysinfo info;
    if (sysinfo(&info) != 0) return UINT64_MAX;
    return ((uint64_t)info.totalram + info.totalswap) * info.mem_unit;
}

uint64_t fsti_memory_left(void) {
    uint64_t kib, left = fsti_memory_available();
    if (!fsti_proc_number("/proc/meminfo", "MemAvailable:", &kib)) return left;
    return fsti_min(left, kib << 10);
}
