// SPDX-License-Identifier: Apache-2.0
/// Monotonic time and the page size.
#include <time.h>
#include <unistd.h>

#include "primitives.h"

uint64_t fsti_page_bytes(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }

uint64_t fsti_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

struct timespec fsti_deadline_after(int64_t timeout_ms) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    time.tv_sec += (time_t)(timeout_ms / 1000);
    time.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (time.tv_nsec >= 1000000000) {
        time.tv_sec++;
        time.tv_nsec -= 1000000000;
    }
    return time;
}
