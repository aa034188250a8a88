// SPDX-License-Identifier: Apache-2.0
/// When to retry, and how many requests to send in parallel. Part of http.h. Pure: the
/// caller provides time and random numbers.
#ifndef FSTI_RETRY_H
#define FSTI_RETRY_H

#include "base/primitives.h"

/// The wait after `failures` failed attempts: random between 0 and the smaller of `cap_ms` and
/// base_ms x 2^failures, but at least what the server asks for (-1: nothing). `random`: random
/// bits.
uint64_t fsti_retry_wait_ms(uint32_t failures, uint32_t base_ms, uint32_t cap_ms,
                            int64_t retry_after_ms, uint64_t random);
/// The wait after `failures` failed attempts at a host that has responded before and now refuses
/// connections: random between half the longest wait and all of it. With the defaults, eight
/// attempts wait at least 12.7 s in sum, enough for a server to restart.
uint64_t fsti_retry_restart_wait_ms(uint32_t failures, uint32_t base_ms, uint32_t cap_ms,
                                    uint64_t random);

/// The number of parallel requests to one host.
typedef struct http_window {
    uint32_t size, size_max;
    uint64_t epoch_ns, epoch_bytes; ///< since the size last changed
    uint32_t epoch_count;
    uint64_t best_rate; ///< bytes per second at the previous size
    uint64_t halved_ns;
    bool has_settled;
} http_window;
#define HTTP_WINDOW_FIRST 8u
void fsti_window_begin(http_window *window, uint32_t size_max, uint64_t now_ns);
/// A request of `bytes` bytes has ended. Grows the window while that increases throughput.
void fsti_window_grow(http_window *window, uint64_t bytes, uint64_t now_ns);
/// The server throttles. Requests that ran together count once.
void fsti_window_halve(http_window *window, uint64_t now_ns);

/// Durations of the latest requests; late ones are detected by the median.
#define HTTP_TIMES_COUNT 31u
typedef struct http_times {
    uint64_t times_ns[HTTP_TIMES_COUNT];
    uint32_t count;
} http_times;
void fsti_times_add(http_times *times, uint64_t time_ns);
/// 0: too few measurements.
uint64_t fsti_times_median(const http_times *times);

#endif
