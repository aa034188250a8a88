// SPDX-License-Identifier: Apache-2.0
/// NUMA memory policy, using the kernel's list of nodes and mbind(2) directly, without libnuma.
/// Tests replace both.
#include <errno.h>
#include <fcntl.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "memory.h"

#ifndef MPOL_LOCAL
#define MPOL_LOCAL 4
#endif

#define NODE_COUNT_MAX 1024u
#define WORD_BITS (8 * sizeof(unsigned long))

typedef struct node_set {
    unsigned long words[NODE_COUNT_MAX / WORD_BITS];
    uint32_t count;
} node_set;

static long bind_memory(void *address, size_t size, int mode, const unsigned long *nodes,
                        unsigned long node_max) {
    return syscall(SYS_mbind, address, size, mode, nodes, node_max, 0);
}

#define NODES_FOLDER "/sys/devices/system/node"
#define BUS_FOLDER "/sys/bus/pci/devices"
static const char *nodes_folder = NODES_FOLDER, *bus_folder = BUS_FOLDER;
static fsti_numa_bind bind_call = bind_memory;

void fsti_numa_fake(const char *folder, fsti_numa_bind bind) {
    nodes_folder = folder != NULL ? folder : NODES_FOLDER;
    bus_folder = folder != NULL ? folder : BUS_FOLDER;
    bind_call = bind != NULL ? bind : bind_memory;
}

/// Reads a small kernel file. False if it cannot be read.
static bool read_text(const char *folder, const char *name, char *text, size_t capacity) {
    char path[256];
    int length = snprintf(path, sizeof path, "%s/%s", folder, name);
    if (length < 0 || (size_t)length >= sizeof path) return false;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, text, capacity - 1);
    if (fd >= 0) close(fd);
    text[size > 0 ? size : 0] = '\0';
    return size > 0;
}

static void add_nodes(node_set *set, unsigned long first, unsigned long last) {
    for (unsigned long node = first; node <= last && node < NODE_COUNT_MAX; node++) {
        set->words[node / WORD_BITS] |= 1ul << node % WORD_BITS;
        set->count++;
    }
}

/// Parses a list such as "0-1,4".
static void read_nodes(node_set *set) {
    char text[256];
    memset(set, 0, sizeof *set);
    if (!read_text(nodes_folder, "online", text, sizeof text)) return;
    for (char *at = text; *at >= '0' && *at <= '9';) {
        char *end;
        unsigned long first = strtoul(at, &end, 10), last = first;
        if (*end == '-') last = strtoul(end + 1, &end, 10);
        add_nodes(set, first, last);
        at = *end == ',' ? end + 1 : end;
    }
}

uint32_t fsti_numa_node_count(void) {
    node_set set;
    read_nodes(&set);
    return set.count == 0 ? 1 : set.count;
}

bool fsti_numa_set_policy(void *address, uint64_t size_bytes, fst_numa policy) {
    node_set set;
    if (policy == FST_NUMA_DEFAULT) return false;
    read_nodes(&set);
    if (set.count < 2) return false; // no choice with one node
    bool interleave = policy == FST_NUMA_INTERLEAVE;
    long result = bind_call(address, size_bytes, interleave ? MPOL_INTERLEAVE : MPOL_LOCAL,
                            interleave ? set.words : NULL, interleave ? NODE_COUNT_MAX : 0);
    return result == 0;
}

int32_t fsti_numa_node_of_bus(const char *name) {
    char file[64], text[16];
    // Drivers report PCI addresses in upper-case hexadecimal; sysfs uses lower case.
    int length = snprintf(file, sizeof file, "%s/numa_node", name);
    if (length < 0 || (size_t)length >= sizeof file || name[0] == '/' || name[0] == '.') return -1;
    for (char *at = file; *at != '/'; at++)
        if (*at >= 'A' && *at <= 'F') *at = (char)(*at - 'A' + 'a');
    if (!read_text(bus_folder, file, text, sizeof text)) return -1;
    char *end;
    long node = strtol(text, &end, 10);
    return end == text || node < 0 || node >= (long)NODE_COUNT_MAX ? -1 : (int32_t)node;
}

bool fsti_numa_prefer(void *address, uint64_t size_bytes, int32_t node) {
    node_set online, wanted = {{0}, 0};
    if (node < 0) return false;
    read_nodes(&online);
    if (online.count < 2) return false;
    add_nodes(&wanted, (unsigned long)node, (unsigned long)node);
    return bind_call(address, size_bytes, MPOL_PREFERRED, wanted.words, NODE_COUNT_MAX) == 0;
}
