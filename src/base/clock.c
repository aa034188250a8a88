// SPDX-License-Identifier: Apache-2.0
/// Monotonic time, and the page.
#include <time.h>
#include <unistd.h>

#include "base.h"

uint64_t fsti_page_bytes(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }

uint64_t fsti_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
