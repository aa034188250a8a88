// SPDX-License-Identifier: Apache-2.0
/// Huge pages or small ones, by what they cost here and now. Huge ones take a tenth of the time of
/// small ones as a rule. But in a virtual machine whose host has to find their memory first, which
/// small ones that lie about in use do without, they take several times as long.
#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>

#include "memory.h"

/// Below this there is nothing to choose: what the choice costs is a part of it.
#define CHOSEN_BYTES_MIN (8 * FSTI_HUGE_PAGE_BYTES)
/// A huge page is dear when it takes this much longer than small ones for the same bytes.
#define DEAR_PERCENT 150u

/// What small pages took for the bytes of a huge one, as last measured; 0: never yet.
static atomic_uint_fast64_t small_ns;

/// Time of the processor, so that other threads do not count: what the host does meanwhile does.
static uint64_t measure_populate(char *data, bool is_huge) {
    (void)is_huge; // for who fakes it
    struct timespec before, after;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &before);
    fsti_pages_populate(data, FSTI_HUGE_PAGE_BYTES);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &after);
    int64_t ns =
        (int64_t)(after.tv_sec - before.tv_sec) * 1000000000 + after.tv_nsec - before.tv_nsec;
    return (uint64_t)ns;
}

static fsti_pages_measure measure = measure_populate;

void fsti_pages_fake(fsti_pages_measure fake) {
    measure = fake == NULL ? measure_populate : fake;
    atomic_store(&small_ns, 0);
}

static bool is_dear(uint64_t huge_ns, uint64_t limit_ns) {
    return huge_ns > limit_ns / 100 * DEAR_PERCENT;
}

/// One huge page is measured where that is enough; else two, one of which may have been luck, and
/// small ones beside them.
static bool are_dear(char *data) {
    uint64_t huge_ns = measure(data, true), known_ns = atomic_load(&small_ns);
    if (known_ns != 0 && !is_dear(huge_ns, known_ns)) return false;
    huge_ns += measure(data + FSTI_HUGE_PAGE_BYTES, true);
    char *small = data + 2 * FSTI_HUGE_PAGE_BYTES;
    if (madvise(small, FSTI_HUGE_PAGE_BYTES, MADV_NOHUGEPAGE) != 0) return false;
    uint64_t ns = measure(small, false);
    atomic_store(&small_ns, ns);
    return is_dear(huge_ns, 2 * ns);
}

void fsti_pages_choose(char *data, uint64_t size_bytes) {
    if (size_bytes < CHOSEN_BYTES_MIN) return;
    // Of one kind again, so that the system has one mapping to keep.
    madvise(data, size_bytes, are_dear(data) ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
}
