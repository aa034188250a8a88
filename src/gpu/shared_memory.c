// SPDX-License-Identifier: Apache-2.0
/// A list of the memory that the CPU and a device share. The library reads such memory with the
/// CPU: a copy by the driver would be slower, and some drivers refuse the address as a source.
#include "gpu_private.h"

/// Maximum number of ranges. Buffers beyond it are read through the driver.
#define RANGE_COUNT_MAX ((size_t)1 << 20)

typedef struct shared_range {
    const char *begin;
    uint64_t size;
} shared_range;

static struct {
    pthread_mutex_t lock;
    shared_range *ranges;
    size_t count, capacity;
} shared = {.lock = PTHREAD_MUTEX_INITIALIZER};

static pthread_once_t shared_once = PTHREAD_ONCE_INIT;
static void register_lock(void) { fsti_fork_lock(&shared.lock); }

void fsti_shared_memory_add(const void *begin, uint64_t size) {
    pthread_once(&shared_once, register_lock);
    pthread_mutex_lock(&shared.lock);
    void *ranges = shared.ranges;
    // If the list cannot grow, the driver copies from the range.
    if (fsti_array_reserve(&ranges, &shared.capacity, shared.count, sizeof *shared.ranges,
                           RANGE_COUNT_MAX)) {
        shared.ranges = ranges;
        shared.ranges[shared.count++] = (shared_range){begin, size};
    }
    pthread_mutex_unlock(&shared.lock);
}

void fsti_shared_memory_remove(const void *begin) {
    pthread_mutex_lock(&shared.lock);
    for (size_t i = 0; i < shared.count; i++) {
        if (shared.ranges[i].begin != (const char *)begin) continue;
        shared.ranges[i] = shared.ranges[--shared.count];
        break;
    }
    if (shared.count == 0) {
        fsti_free(shared.ranges);
        shared.ranges = NULL;
        shared.capacity = 0;
    }
    pthread_mutex_unlock(&shared.lock);
}

bool fsti_shared_memory_has(const void *begin, uint64_t size) {
    const char *first = begin;
    bool found = false;
    pthread_mutex_lock(&shared.lock);
    for (size_t i = 0; i < shared.count && !found; i++) {
        const shared_range *range = &shared.ranges[i];
        found = first >= range->begin && size <= range->size &&
                (uint64_t)(first - range->begin) <= range->size - size;
    }
    pthread_mutex_unlock(&shared.lock);
    return found;
}
