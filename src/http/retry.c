// SPDX-License-Identifier: Apache-2.0
/// Waits before retries, the number of parallel requests to a host (its window), and the median
/// response time.
#include "retry.h"

#include <stdlib.h>
#include <string.h>

/// The longest wait before an attempt.
static uint64_t longest_wait_ms(uint32_t failures, uint32_t base_ms, uint32_t cap_ms) {
    return fsti_min((uint64_t)base_ms << fsti_min(failures, 20), cap_ms);
}

uint64_t fsti_retry_wait_ms(uint32_t failures, uint32_t base_ms, uint32_t cap_ms,
                            int64_t retry_after_ms, uint64_t random) {
    uint64_t wait_ms = random % (longest_wait_ms(failures, base_ms, cap_ms) + 1);
    if (retry_after_ms <= 0) return wait_ms;
    return fsti_max(wait_ms, fsti_min((uint64_t)retry_after_ms, cap_ms));
}

uint64_t fsti_retry_restart_wait_ms(uint32_t failures, uint32_t base_ms, uint32_t cap_ms,
                                    uint64_t random) {
    uint64_t most_ms = longest_wait_ms(failures, base_ms, cap_ms), least_ms = most_ms / 2;
    return least_ms + random % (most_ms - least_ms + 1);
}

// ---- the window ----

/// A larger window must be faster by this percentage, or growth stops.
#define GAIN_PERCENT 5u
#define RATE_UNKNOWN 0u
#define HALVE_NS_MIN ((uint64_t)200000000)

static void begin_epoch(http_window *window, uint64_t now_ns) {
    window->epoch_ns = now_ns;
    window->epoch_bytes = 0;
    window->epoch_count = 0;
}

void fsti_window_begin(http_window *window, uint32_t size_max, uint64_t now_ns) {
    *window = (http_window){.size = (uint32_t)fsti_min(HTTP_WINDOW_FIRST, size_max),
                            .size_max = size_max,
                            .best_rate = RATE_UNKNOWN};
    begin_epoch(window, now_ns);
}

void fsti_window_grow(http_window *window, uint64_t bytes, uint64_t now_ns) {
    window->epoch_bytes += bytes;
    window->epoch_count++;
    // An epoch ends when all requests of one window have ended.
    if (window->epoch_count < window->size || now_ns <= window->epoch_ns) return;
    uint64_t rate =
        (uint64_t)((double)window->epoch_bytes * 1e9 / (double)(now_ns - window->epoch_ns));
    bool is_faster = rate > window->best_rate + window->best_rate / 100 * GAIN_PERCENT;
    if (!is_faster) window->has_settled = true;
    if (is_faster && !window->has_settled) {
        window->best_rate = rate;
        window->size = (uint32_t)fsti_min(2 * (uint64_t)window->size, window->size_max);
    } else if (window->size < fsti_min(HTTP_WINDOW_FIRST, window->size_max)) {
        window->size++; // recover after a throttled server reduced it
    }
    begin_epoch(window, now_ns);
}

void fsti_window_halve(http_window *window, uint64_t now_ns) {
    if (window->halved_ns != 0 && now_ns - window->halved_ns < HALVE_NS_MIN) return;
    window->halved_ns = now_ns;
    window->size = (uint32_t)fsti_max(window->size / 2, 1);
    window->has_settled = true;
    begin_epoch(window, now_ns);
}

// ---- late requests ----

void fsti_times_add(http_times *times, uint64_t time_ns) {
    times->times_ns[times->count++ % HTTP_TIMES_COUNT] = time_ns;
}

static int compare_times(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

#define MEDIAN_COUNT_MIN 8u

uint64_t fsti_times_median(const http_times *times) {
    uint64_t sorted[HTTP_TIMES_COUNT];
    size_t count = (size_t)fsti_min(times->count, HTTP_TIMES_COUNT);
    if (count < MEDIAN_COUNT_MIN) return 0;
    memcpy(sorted, times->times_ns, sizeof sorted);
    qsort(sorted, count, sizeof *sorted, compare_times);
    return sorted[count / 2];
}
