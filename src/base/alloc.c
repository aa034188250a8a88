// SPDX-License-Identifier: Apache-2.0
/// The allocator of the library: malloc with failure injection and a count of live blocks.
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "primitives.h"

#if !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23
#endif
#define FSTI_ALLOC_PAGE_BYTES ((size_t)4096)

static atomic_long fail_countdown = -1;
static atomic_long live_blocks = 0;

void fsti_alloc_fail_after(long countdown) { atomic_store(&fail_countdown, countdown); }

long fsti_alloc_live(void) { return atomic_load(&live_blocks); }

void fsti_alloc_count(long blocks) { atomic_fetch_add(&live_blocks, blocks); }

bool fsti_alloc_fails(void) {
    // The countdown is negative in normal use, which costs one relaxed load. Once it reaches 0, it
    // stays there.
    if (atomic_load_explicit(&fail_countdown, memory_order_relaxed) < 0) return false;
    long left = atomic_load(&fail_countdown);
    while (left > 0)
        if (atomic_compare_exchange_weak(&fail_countdown, &left, left - 1)) return false;
    return left == 0;
}

static void *count_block(void *block) {
    if (block != NULL) atomic_fetch_add_explicit(&live_blocks, 1, memory_order_relaxed);
    return block;
}

void *fsti_alloc(size_t size_bytes) {
    if (fsti_alloc_fails()) return NULL;
    return count_block(malloc(size_bytes == 0 ? 1 : size_bytes));
}

/// Below this size the pages of a block cost less than the call that asks for them.
#define FILLED_BYTES_MIN ((size_t)256 << 10)

void *fsti_alloc_filled(size_t size_bytes) {
    char *block = fsti_alloc(size_bytes);
    if (block == NULL || size_bytes < FILLED_BYTES_MIN) return block;
    size_t before = -(size_t)(uintptr_t)block % FSTI_ALLOC_PAGE_BYTES;
    size_t pages = (size_bytes - before) / FSTI_ALLOC_PAGE_BYTES;
    // Without the call (Linux before 5.14) each page is fetched when it is written.
    int errno_before = errno;
    (void)madvise(block + before, pages * FSTI_ALLOC_PAGE_BYTES, MADV_POPULATE_WRITE);
    errno = errno_before;
    return block;
}

void *fsti_alloc_zeroed(size_t count, size_t size_bytes) {
    if (fsti_alloc_fails()) return NULL;
    return count_block(calloc(count == 0 ? 1 : count, size_bytes == 0 ? 1 : size_bytes));
}

void *fsti_realloc(void *pointer, size_t size_bytes) {
    if (pointer == NULL) return fsti_alloc(size_bytes);
    if (fsti_alloc_fails()) return NULL;
    return realloc(pointer, size_bytes == 0 ? 1 : size_bytes);
}

void fsti_free(void *pointer) {
    if (pointer == NULL) return;
    atomic_fetch_sub_explicit(&live_blocks, 1, memory_order_relaxed);
    free(pointer);
}

bool fsti_ends_with(const char *text, const char *ending) {
    size_t size = strlen(text), ending_size = strlen(ending);
    return size >= ending_size && strcmp(text + size - ending_size, ending) == 0;
}

char *fsti_string_copy(const char *bytes, size_t size_bytes) {
    char *copy = fsti_alloc(size_bytes + 1);
    if (copy == NULL) return NULL;
    memcpy(copy, bytes, size_bytes);
    copy[size_bytes] = '\0';
    return copy;
}

bool fsti_array_reserve(void **array, size_t *capacity, size_t count, size_t element_bytes,
                        size_t limit) {
    if (count < *capacity) return true;
    if (count >= limit) return false;
    // Grow by 1.5, not 2: a header may use at most twice its size in memory.
    size_t wanted = *capacity < 16 ? 16 : *capacity + *capacity / 2;
    if (wanted > limit) wanted = limit;
    uint64_t size_bytes;
    if (!fsti_mul(wanted, element_bytes, &size_bytes) || size_bytes > SIZE_MAX) return false;
    void *grown = fsti_realloc(*array, (size_t)size_bytes);
    if (grown == NULL) return false;
    *array = grown;
    *capacity = wanted;
    return true;
}
