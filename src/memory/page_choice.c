// SPDX-License-Identifier: Apache-2.0
/// Chooses huge or small pages by measurement. Huge pages usually take a tenth of the time. In a
/// virtual machine whose host must first find free huge pages, they can take several times as long
/// as small ones, which the guest may have free.
#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>

#include "memory.h"

/// Smaller buffers are not measured, because the measurement would be a large part of their cost.
#define CHOSEN_BYTES_MIN (8 * FSTI_HUGE_PAGE_BYTES)
/// Huge pages count as slow if they take this percentage of the time of small pages.
#define SLOW_PERCENT 150u

/// Time of small pages for the bytes of one huge page, as last measured. 0: not measured.
static atomic_uint_fast64_t small_ns;

/// CPU time of this thread, so that other threads do not count. The host's work does count.
static uint64_t measure_populate(char *data, bool is_huge) {
    (void)is_huge; // for replacements in tests
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

static bool is_slow(uint64_t huge_ns, uint64_t limit_ns) {
    return huge_ns > limit_ns / 100 * SLOW_PERCENT;
}

/// Times one huge page, then small pages if needed, and a second huge page if the first result may
/// be an outlier. A single page that takes more than two may is slow in any case.
static bool are_slow(char *data) {
    uint64_t huge_ns = measure(data, true), known_ns = atomic_load(&small_ns);
    if (known_ns != 0 && !is_slow(huge_ns, known_ns)) return false;
    char *small = data + FSTI_HUGE_PAGE_BYTES;
    if (madvise(small, FSTI_HUGE_PAGE_BYTES, MADV_NOHUGEPAGE) != 0) return false;
    uint64_t ns = measure(small, false);
    atomic_store(&small_ns, ns);
    if (is_slow(huge_ns, 2 * ns)) return true;
    return is_slow(huge_ns + measure(small + FSTI_HUGE_PAGE_BYTES, true), 2 * ns);
}

bool fsti_pages_choose(char *data, uint64_t size_bytes) {
    if (size_bytes < CHOSEN_BYTES_MIN) return false;
    // Measure at the end of the buffer, because reads fill its beginning first.
    bool slow = are_slow(data + size_bytes - 3 * FSTI_HUGE_PAGE_BYTES);
    // Use one page size for all of it, so that it stays one mapping.
    madvise(data, size_bytes, slow ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    return !slow;
}

/// Prefaults the huge pages of [from, end), both aligned, and times them. False: they have become
/// slow, and the remaining memory up to `memory_end` gets small pages.
static bool watch_pages(char *from, char *end, char *memory_end) {
    uint64_t known_ns = atomic_load(&small_ns);
    for (bool was_slow = false; from < end; from += FSTI_HUGE_PAGE_BYTES) {
        bool slow = is_slow(measure(from, true), known_ns);
        if (slow && was_slow) { // a single slow page may be an outlier
            madvise(from, (size_t)(memory_end - from), MADV_NOHUGEPAGE);
            return false;
        }
        was_slow = slow;
    }
    return true;
}

static void choose_now(fsti_buffer *buffer) {
    bool huge = fsti_pages_choose(buffer->data, buffer->size_bytes);
    atomic_store(&buffer->pages, huge ? FSTI_PAGES_WATCHED : FSTI_PAGES_UNCHANGED);
}

void fsti_buffer_choose_pages(fsti_buffer *buffer, bool is_urgent) {
    if (is_urgent)
        choose_now(buffer);
    else
        atomic_store(&buffer->pages, FSTI_PAGES_UNCHOSEN);
}

void fsti_buffer_populate(fsti_buffer *buffer, uint64_t begin, uint64_t end) {
    // Several threads may populate parts of a new buffer. The exchange lets exactly one of them
    // measure; meanwhile the others use small pages.
    int unchosen = FSTI_PAGES_UNCHOSEN;
    if (atomic_compare_exchange_strong(&buffer->pages, &unchosen, FSTI_PAGES_UNCHANGED))
        choose_now(buffer);
    bool is_watched = atomic_load(&buffer->pages) == FSTI_PAGES_WATCHED;
    uint64_t page = is_watched ? FSTI_HUGE_PAGE_BYTES : fsti_page_bytes();
    uint64_t from = fsti_align_down(begin, page);
    end = fsti_min(is_watched ? fsti_align_up(end, page) : end, buffer->size_bytes);
    if (from >= end) return;
    if (!is_watched)
        fsti_pages_populate(buffer->data + from, end - from);
    else if (!watch_pages(buffer->data + from, buffer->data + end,
                          buffer->data + buffer->size_bytes))
        atomic_store(&buffer->pages, FSTI_PAGES_UNCHANGED);
}
