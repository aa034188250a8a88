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

/// One huge page is measured where that is enough, small ones beside it, and a second huge one
/// where the first may have been luck: one that takes longer than two may is dear whatever the
/// other is.
static bool are_dear(char *data) {
    uint64_t huge_ns = measure(data, true), known_ns = atomic_load(&small_ns);
    if (known_ns != 0 && !is_dear(huge_ns, known_ns)) return false;
    char *small = data + FSTI_HUGE_PAGE_BYTES;
    if (madvise(small, FSTI_HUGE_PAGE_BYTES, MADV_NOHUGEPAGE) != 0) return false;
    uint64_t ns = measure(small, false);
    atomic_store(&small_ns, ns);
    if (is_dear(huge_ns, 2 * ns)) return true;
    return is_dear(huge_ns + measure(small + FSTI_HUGE_PAGE_BYTES, true), 2 * ns);
}

bool fsti_pages_choose(char *data, uint64_t size_bytes) {
    if (size_bytes < CHOSEN_BYTES_MIN) return false;
    // The end: what is on its way comes to the beginning first.
    bool dear = are_dear(data + size_bytes - 3 * FSTI_HUGE_PAGE_BYTES);
    // Of one kind again, so that the system has one mapping to keep.
    madvise(data, size_bytes, dear ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    return !dear;
}

bool fsti_pages_watch(char *from, char *end, char *memory_end) {
    uint64_t known_ns = atomic_load(&small_ns);
    for (bool was_dear = false; from < end; from += FSTI_HUGE_PAGE_BYTES) {
        bool dear = is_dear(measure(from, true), known_ns);
        if (dear && was_dear) { // one may be chance
            madvise(from, (size_t)(memory_end - from), MADV_NOHUGEPAGE);
            return false;
        }
        was_dear = dear;
    }
    return true;
}

static void choose_now(fsti_buffer *buffer) {
    bool huge = fsti_pages_choose(buffer->data, buffer->size_bytes);
    atomic_store(&buffer->pages, huge ? FSTI_PAGES_WATCHED : FSTI_PAGES_LEFT);
}

void fsti_buffer_choose_pages(fsti_buffer *buffer, bool is_urgent) {
    if (is_urgent)
        choose_now(buffer);
    else
        atomic_store(&buffer->pages, FSTI_PAGES_UNCHOSEN);
}

void fsti_buffer_populate(fsti_buffer *buffer, uint64_t begin, uint64_t end) {
    int unchosen = FSTI_PAGES_UNCHOSEN;
    if (atomic_compare_exchange_strong(&buffer->pages, &unchosen, FSTI_PAGES_LEFT))
        choose_now(buffer);
    bool is_watched = atomic_load(&buffer->pages) == FSTI_PAGES_WATCHED;
    uint64_t page = is_watched ? FSTI_HUGE_PAGE_BYTES : fsti_page_bytes();
    uint64_t from = fsti_align_down(begin, page);
    end = fsti_min(is_watched ? fsti_align_up(end, page) : end, buffer->size_bytes);
    if (from >= end) return;
    if (!is_watched)
        fsti_pages_populate(buffer->data + from, end - from);
    else if (!fsti_pages_watch(buffer->data + from, buffer->data + end,
                               buffer->data + buffer->size_bytes))
        atomic_store(&buffer->pages, FSTI_PAGES_LEFT);
}
