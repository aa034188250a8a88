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

/// Slow huge pages are not measured again for a while: for these bytes, which double with each
/// result, and for this time.
#define UNMEASURED_BYTES_MAX ((uint64_t)1 << 30)
#define UNMEASURED_NS_MAX 2000000000u
static atomic_uint_fast64_t unmeasured_bytes, unmeasured_left, measured_at_ns;

static void note_result(bool slow, uint64_t size_bytes) {
    uint64_t bytes =
        fsti_min(2 * atomic_load(&unmeasured_bytes) + 8 * size_bytes, UNMEASURED_BYTES_MAX);
    if (!slow) bytes = 0;
    atomic_store(&unmeasured_bytes, bytes);
    atomic_store(&unmeasured_left, bytes);
    atomic_store(&measured_at_ns, fsti_now_ns());
}

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
    note_result(false, 0);
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

/// Whether the last result, that huge pages are slow, holds for a buffer.
static bool are_known_slow(uint64_t size_bytes) {
    uint64_t left = atomic_load(&unmeasured_left);
    if (left < size_bytes || fsti_now_ns() - atomic_load(&measured_at_ns) > UNMEASURED_NS_MAX)
        return false;
    // A concurrent call may take the same bytes, which only moves the next measurement.
    atomic_store(&unmeasured_left, left - size_bytes);
    return true;
}

fsti_buffer_pages fsti_pages_choose(char *data, uint64_t size_bytes) {
    bool slow = are_known_slow(size_bytes);
    if (!slow) {
        if (size_bytes < CHOSEN_BYTES_MIN) return FSTI_PAGES_UNCHANGED;
        // Measure at the end of the buffer, because reads fill its beginning first.
        slow = are_slow(data + size_bytes - 3 * FSTI_HUGE_PAGE_BYTES);
        note_result(slow, size_bytes);
    }
    // Use one page size for all of it, so that it stays one mapping.
    madvise(data, size_bytes, slow ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    return slow ? FSTI_PAGES_SMALL : FSTI_PAGES_WATCHED;
}

/// Prefaults the huge pages of [from, end), both aligned, and times them. False: they have become
/// slow, and the remaining memory up to `memory_end` gets small pages.
static bool watch_pages(char *from, char *end, char *memory_end) {
    uint64_t known_ns = atomic_load(&small_ns), ns = 0;
    for (unsigned count = 1; from < end; from += FSTI_HUGE_PAGE_BYTES, count++) {
        ns += measure(from, true);
        if (!is_slow(ns, count * known_ns)) {
            count = 0, ns = 0;
            continue;
        }
        // As in are_slow(): one page that takes more than two may is slow in any case.
        if (count < 2 && !is_slow(ns, 2 * known_ns)) continue;
        from += FSTI_HUGE_PAGE_BYTES;
        madvise(from, (size_t)(memory_end - from), MADV_NOHUGEPAGE);
        note_result(true, (uint64_t)(memory_end - from));
        return false;
    }
    return true;
}

static void populate_small(fsti_buffer *buffer, uint64_t begin, uint64_t end) {
    begin = fsti_align_down(begin, fsti_page_bytes());
    end = fsti_min(end, buffer->size_bytes);
    if (begin < end) fsti_pages_populate(buffer->data + begin, end - begin);
}

/// Gives a buffer small pages if huge pages have become slow while another buffer was populated.
/// size_bytes: of the memory that has no pages yet.
static bool shrink_pages(fsti_buffer *buffer, uint64_t size_bytes) {
    if (!are_known_slow(size_bytes)) return false;
    madvise(buffer->data, buffer->size_bytes, MADV_NOHUGEPAGE);
    atomic_store(&buffer->pages, FSTI_PAGES_SMALL);
    return true;
}

static void choose_now(fsti_buffer *buffer) {
    atomic_store(&buffer->pages, fsti_pages_choose(buffer->data, buffer->size_bytes));
}

void fsti_buffer_choose_pages(fsti_buffer *buffer, bool is_urgent) {
    if (is_urgent)
        choose_now(buffer);
    else
        atomic_store(&buffer->pages, FSTI_PAGES_UNCHOSEN);
}

void fsti_buffer_choose_late(fsti_buffer *buffer, bool takes_small) {
    int unchosen = FSTI_PAGES_UNCHOSEN,
        chosen = takes_small ? FSTI_PAGES_SMALL : FSTI_PAGES_UNCHANGED;
    if (!atomic_compare_exchange_strong(&buffer->pages, &unchosen, chosen)) return;
    if (takes_small)
        madvise(buffer->data, buffer->size_bytes, MADV_NOHUGEPAGE);
    else
        choose_now(buffer);
}

void fsti_buffer_populate(fsti_buffer *buffer, uint64_t begin, uint64_t end) {
    if (atomic_load(&buffer->fill_fd) >= 0) return; // the fill creates its pages
    // Several threads may populate parts of a new buffer. The exchange lets exactly one of them
    // measure; meanwhile the others use small pages.
    int unchosen = FSTI_PAGES_UNCHOSEN;
    if (atomic_compare_exchange_strong(&buffer->pages, &unchosen, FSTI_PAGES_UNCHANGED))
        choose_now(buffer);
    if (atomic_load(&buffer->pages) != FSTI_PAGES_WATCHED) {
        populate_small(buffer, begin, end);
        return;
    }
    char *from = buffer->data + fsti_align_down(begin, FSTI_HUGE_PAGE_BYTES);
    char *memory_end = buffer->data + buffer->size_bytes;
    end = fsti_min(fsti_align_up(end, FSTI_HUGE_PAGE_BYTES), buffer->size_bytes);
    if (shrink_pages(buffer, (uint64_t)(memory_end - from)))
        populate_small(buffer, begin, end);
    else if (!watch_pages(from, buffer->data + end, memory_end))
        atomic_store(&buffer->pages, FSTI_PAGES_SMALL);
}

bool fsti_buffer_has_small_pages(fsti_buffer *buffer) {
    int pages = atomic_load(&buffer->pages);
    return pages == FSTI_PAGES_SMALL ||
           (pages == FSTI_PAGES_WATCHED && shrink_pages(buffer, buffer->size_bytes));
}

void fsti_buffer_prepare(fsti_buffer *buffer, uint64_t begin, uint64_t end) {
    int pages = atomic_load(&buffer->pages);
    if (pages == FSTI_PAGES_WATCHED || pages == FSTI_PAGES_SMALL)
        fsti_buffer_populate(buffer, begin, end);
}
