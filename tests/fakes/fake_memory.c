// SPDX-License-Identifier: Apache-2.0
/// Memory of the fake drivers, and copies. Small device memory is aligned to only 512 bytes.
/// Freeing or unpinning memory that a queued copy still uses aborts the program. Copies of all
/// streams take turns on a simulated bus.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "fake_driver.h"

enum { RANGE_COUNT_MAX = 4096, ALIGNMENT = 512, PAGE = 4096 };

typedef struct range {
    char *begin;
    size_t size;
    int device; ///< -1: pinned memory of the CPU
} range;

static struct {
    pthread_mutex_t lock;
    range ranges[RANGE_COUNT_MAX];
    size_t range_count;
    long used[DEVICE_COUNT_MAX];
} state = {.lock = PTHREAD_MUTEX_INITIALIZER};

static pthread_mutex_t locking = PTHREAD_MUTEX_INITIALIZER; // one registration at a time

FUNCTION(cuMemGetInfo_v2, hipMemGetInfo)(size_t *available, size_t *all) {
    BEGIN_IN_CONTEXT("cuMemGetInfo");
    pthread_mutex_lock(&state.lock);
    *all = (size_t)fake_number(MEMORY);
    *available = *all - (size_t)state.used[fake_current_device()];
    if (fake_number(REPORTED_FREE) != 0) *available = (size_t)fake_number(REPORTED_FREE);
    pthread_mutex_unlock(&state.lock);
    return 0;
}

/// The range that holds [begin, begin + size), or NULL. The lock is held.
static range *find_range(const void *begin, size_t size) {
    for (size_t i = 0; i < state.range_count; i++) {
        range *one = &state.ranges[i];
        if ((const char *)begin >= one->begin &&
            (const char *)begin + size <= one->begin + one->size)
            return one;
    }
    return NULL;
}

static bool add_range(char *begin, size_t size, int device) {
    if (state.range_count == RANGE_COUNT_MAX) return false;
    state.ranges[state.range_count++] = (range){begin, size, device};
    return true;
}

/// What drivers promise; below a megabyte they divide pages, and no more than that is to be had.
static size_t shift_of(size_t size) { return size < 1u << 20 ? ALIGNMENT : 0; }

/// Only what is touched is there.
static char *map_device(size_t size) {
    char *base = mmap(NULL, size + PAGE, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? NULL : base + shift_of(size);
}

static void unmap_device(char *data, size_t size) { munmap(data - shift_of(size), size + PAGE); }

FUNCTION(cuMemAlloc_v2, hipMalloc)(uint64_t *address, size_t size) {
    BEGIN_IN_CONTEXT("cuMemAlloc");
    int device = fake_current_device();
    char *memory = NULL;
    fake_number_add(ALLOC_CALLS, 1);
    fake_sleep_us(fake_number(ALLOC_US));
    pthread_mutex_lock(&state.lock);
    bool fits = size > 0 && state.used[device] + (long)size <= fake_number(MEMORY);
    if (fits) memory = map_device(size);
    if (memory != NULL && add_range(memory, size, device)) {
        // Reveals memory that was never written.
        if (fake_number(NO_BYTES) == 0) memset(memory, 0xa5, size < 8u << 20 ? size : 8u << 20);
        state.used[device] += (long)size;
        fake_number_add(ALLOCATIONS, 1);
        fake_number_add(ALLOCATED_BYTES, (long)size);
    }
    pthread_mutex_unlock(&state.lock);
    bool is_aligned = fake_number(ALIGNED_FIRST) > 0;
    if (is_aligned) fake_number_add(ALIGNED_FIRST, -1);
    *address = (uintptr_t)memory;
    if (memory != NULL && !is_aligned) *address += (uintptr_t)fake_number(MISALIGNED);
    return fake_error(memory == NULL ? OUT_OF_MEMORY : 0);
}

/// Memory of a queued copy must not be freed: an allocator may give it to another owner, whose
/// bytes would then be overwritten.
static void check_unused(const char *function, const void *begin, size_t size) {
    if (!fake_streams_use(begin, size)) return;
    fprintf(stderr, "fake GPU: %s of memory that a queued copy uses\n", function);
    abort();
}

FUNCTION(cuMemFree_v2, hipFree)(uint64_t address) {
    END_IN_CONTEXT("cuMemFree");
    fake_number_add(FREE_CALLS, 1);
    pthread_mutex_lock(&state.lock);
    const range *one = find_range((void *)(uintptr_t)address, 1);
    uint64_t shift = one == NULL ? 0 : address - (uint64_t)(uintptr_t)one->begin;
    bool good = one != NULL && one->device >= 0 &&
                (shift == 0 || shift == (uint64_t)fake_number(MISALIGNED));
    range freed = good ? *one : (range){0};
    pthread_mutex_unlock(&state.lock);
    if (!good) return INVALID_VALUE;
    check_unused("cuMemFree", freed.begin, freed.size);
    fake_streams_sync(); // the call waits for all that the device does
    fake_sleep_us(fake_number(FREE_US));
    pthread_mutex_lock(&state.lock);
    range *place = find_range(freed.begin, 1);
    good = place != NULL;
    if (good) *place = state.ranges[--state.range_count];
    if (good) state.used[freed.device] -= (long)freed.size;
    pthread_mutex_unlock(&state.lock);
    if (!good) return INVALID_VALUE; // another thread freed it meanwhile
    fake_number_add(ALLOCATIONS, -1);
    fake_number_add(ALLOCATED_BYTES, -(long)freed.size);
    unmap_device(freed.begin, freed.size);
    return 0;
}

FUNCTION(cuMemHostRegister_v2, hipHostRegister)(void *address, size_t size, unsigned flags) {
    BEGIN_IN_CONTEXT("cuMemHostRegister");
    if (flags > 1) return INVALID_VALUE; // 1: for all contexts; other flags are unknown
    fake_number_add(LOCK_CALLS, 1);
    if (fake_number(NO_LOCK) != 0) return fake_error(OUT_OF_MEMORY);
    pthread_mutex_lock(&locking);
    fake_sleep_us(fake_number(LOCK_US) + fake_number(LOCK_MIB_US) * (long)(size >> 20));
    pthread_mutex_unlock(&locking);
    pthread_mutex_lock(&state.lock);
    bool good = find_range(address, size) == NULL && add_range(address, size, -1);
    if (good) fake_number_add(LOCKED_BYTES, (long)size);
    pthread_mutex_unlock(&state.lock);
    return good ? 0 : INVALID_VALUE;
}

FUNCTION(cuMemHostUnregister, hipHostUnregister)(void *address) {
    END_IN_CONTEXT("cuMemHostUnregister");
    if (fake_number(STUCK_PINS) > 0) {
        fake_number_add(STUCK_PINS, -1);
        return fake_error(999);
    }
    pthread_mutex_lock(&state.lock);
    range *one = find_range(address, 1);
    bool good = one != NULL && one->begin == address && one->device == -1;
    size_t size = good ? one->size : 0;
    if (good) *one = state.ranges[--state.range_count];
    pthread_mutex_unlock(&state.lock);
    if (!good) return NOT_REGISTERED;
    check_unused("cuMemHostUnregister", address, size);
    fake_number_add(LOCKED_BYTES, -(long)size);
    return 0;
}

FUNCTION(cuMemHostGetDevicePointer_v2, hipHostGetDevicePointer)(uint64_t *device, void *host,
                                                                unsigned flags) {
    (void)flags;
    BEGIN_IN_CONTEXT("cuMemHostGetDevicePointer");
    *device = (uintptr_t)host + (fake_number(OTHER_ADDRESS) != 0 ? 4096u : 0u);
    return 0;
}

/// Whether `size` bytes at `address` are memory of a device.
static bool is_device_memory(uint64_t address, size_t size) {
    pthread_mutex_lock(&state.lock);
    const range *one = find_range((void *)(uintptr_t)address, size);
    bool good = one != NULL && one->device >= 0;
    pthread_mutex_unlock(&state.lock);
    return good;
}

static bool is_locked(const void *address, size_t size) {
    pthread_mutex_lock(&state.lock);
    const range *one = find_range(address, size);
    bool locked = one != NULL && one->device == -1;
    pthread_mutex_unlock(&state.lock);
    return locked;
}

// ---- the bus ----

int64_t fake_now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

int64_t fake_bus_take(size_t size, int64_t not_before_ns) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static int64_t free_ns;
    int64_t queued_ns = fake_now_ns();
    if (not_before_ns > queued_ns) queued_ns = not_before_ns;
    pthread_mutex_lock(&lock);
    int64_t start = free_ns > queued_ns ? free_ns : queued_ns;
    // Only short pauses count as idle; the bus is expected to be idle between loads.
    if (free_ns != 0 && start - free_ns < 5000000)
        fake_number_add(BUS_IDLE_US, (start - free_ns) / 1000);
    free_ns = start + (int64_t)size * 1000 / fake_number(BUS_MBPS) + fake_number(COPY_US) * 1000;
    int64_t end = free_ns;
    pthread_mutex_unlock(&lock);
    return end;
}

/// Of some of its bytes; 0 where nothing moves.
static unsigned long long sum_of(const void *source, size_t size) {
    unsigned long long sum = 1;
    if (fake_number(BUS_MBPS) != 0 || fake_number(NO_BYTES) != 0) return 0;
    for (size_t at = 0; at < size; at += 512) sum = sum * 31 + ((const unsigned char *)source)[at];
    return sum;
}

static void wait_at_gate(fake_work *work);
static atomic_bool copies_wait;

static void copy(fake_work *work) {
    if (atomic_load(&copies_wait)) wait_at_gate(work);
    if (work->sum != 0 && sum_of(work->source, work->size) != work->sum)
        fake_number_add(OVERWRITTEN, 1);
    if (fake_number(NO_BYTES) == 0) memcpy(work->target, work->source, work->size);
}

static void fill(fake_work *work) { memset(work->target, work->byte, work->size); }

__attribute__((visibility("default"))) void fake_gpu_fill(void *stream, long delay_us, void *target,
                                                          int byte, unsigned long size) {
    fake_work work = {.run = fill, .target = target, .byte = byte, .size = size};
    fake_stream_add((uintptr_t)stream < 3 ? fake_stream_legacy() : stream, &work, 2 * delay_us);
}

// Work that ends when the test says so.
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_held;
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void wait_at_gate(fake_work *work) {
    (void)work;
    pthread_mutex_lock(&gate.lock);
    while (gate.is_held) pthread_cond_wait(&gate.changed, &gate.lock);
    pthread_mutex_unlock(&gate.lock);
}

__attribute__((visibility("default"))) void fake_gpu_hold(void *stream) {
    fake_work work = {.run = wait_at_gate};
    gate.is_held = true;
    fake_stream_add((uintptr_t)stream < 3 ? fake_stream_legacy() : stream, &work, 0);
}

__attribute__((visibility("default"))) void fake_gpu_let_go(void) {
    pthread_mutex_lock(&gate.lock);
    gate.is_held = false;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.lock);
}

/// Copies stop at the gate from now on, or continue.
__attribute__((visibility("default"))) void fake_gpu_hold_copies(bool hold) {
    pthread_mutex_lock(&gate.lock);
    gate.is_held = hold;
    atomic_store(&copies_wait, hold);
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.lock);
}

static void (*first_copy_hook)(void);

/// Calls `hook` when the first copy since "copies" was set to 0 is queued.
__attribute__((visibility("default"))) void fake_gpu_on_first_copy(void (*hook)(void)) {
    first_copy_hook = hook;
}

/// Records the number of driver calls when the first copy was queued.
static void note_first_copy(void) {
    if (fake_loaded_module) fake_number_add(MODULE_COPIES, 1);
    if (fake_number_add(COPIES, 1) != 0) return;
    fake_number_set(FIRST_COPY_CALLS, fake_number(CALLS));
    fake_number_set(FIRST_COPY_ALLOCS, fake_number(ALLOC_CALLS));
    if (first_copy_hook != NULL) first_copy_hook();
}

FUNCTION(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync)(uint64_t target, const void *source, size_t size,
                                                   void *stream) {
    BEGIN_IN_CONTEXT("cuMemcpyHtoDAsync");
    if (!is_device_memory(target, size)) return ILLEGAL_ADDRESS;
    note_first_copy();
    fake_work work = {.run = copy,
                      .target = (void *)(uintptr_t)target,
                      .source = source,
                      .size = size,
                      .sum = sum_of(source, size),
                      .is_copy = true};
    fake_stream_add(stream, &work, fake_number(DELAY_US));
    // Memory that is not locked is taken before the call returns, and no sooner.
    if (is_locked(source, size)) return 0;
    fake_number_add(PAGEABLE, 1);
    fake_stream_sync(stream);
    return 0;
}

static atomic_int coming; ///< copies back that are not done

static void copy_back(fake_work *work) {
    copy(work);
    atomic_fetch_sub(&coming, 1);
}

FUNCTION(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync)(void *target, uint64_t source, size_t size,
                                                   void *stream) {
    BEGIN_IN_CONTEXT("cuMemcpyDtoHAsync");
    // Some drivers refuse memory of the CPU as the source, also where the device shares it.
    if (!is_device_memory(source, size)) return ILLEGAL_ADDRESS;
    fake_number_add(COPIED_OUT, 1);
    if (atomic_fetch_add(&coming, 1) > 0) fake_number_add(OUT_AHEAD, 1);
    fake_work work = {.run = copy_back,
                      .target = target,
                      .source = (void *)(uintptr_t)source,
                      .size = size,
                      .is_copy = true};
    fake_stream_add(stream, &work, fake_number(DELAY_US));
    if (is_locked(target, size)) return 0;
    fake_number_add(PAGEABLE, 1);
    fake_stream_sync(stream); // the driver copies through its own memory
    return 0;
}

FUNCTION(cuMemsetD8Async, hipMemsetD8Async)(uint64_t target, unsigned char byte, size_t size,
                                            void *stream) {
    BEGIN_IN_CONTEXT("cuMemsetD8Async");
    if (!is_device_memory(target, size)) return ILLEGAL_ADDRESS;
    fake_work work = {.run = fill, .target = (void *)(uintptr_t)target, .byte = byte, .size = size};
    fake_stream_add(stream, &work, fake_number(DELAY_US));
    return 0;
}
