// SPDX-License-Identifier: Apache-2.0
/// When to ask again, and how much to ask for at a time: private to the net room. Pure: clock and
/// random numbers come from whoever asks.
#ifndef FSTI_RETRY_H
#define FSTI_RETRY_H

#include "base/base.h"

/// How long to wait before try `tries` (from 1): random between 0 and the smaller of `cap_ms` and
/// base_ms x 2^tries, but no less than what the server asks for (-1: nothing). `random`: any bits.
uint64_t fsti_retry_wait_ms(uint32_t tries, uint32_t base_ms, uint32_t cap_ms,
                            int64_t retry_after_ms, uint64_t random);

/// How many requests are under way at one host.
typedef struct net_window {
    uint32_t size, size_max;
    uint64_t epoch_ns, epoch_bytes; ///< since the size was last changed
    uint32_t epoch_count;
    uint64_t best_rate; ///< bytes a second at the size before
    uint64_t halved_ns;
    bool has_settled;
} net_window;
#define NET_WINDOW_FIRST 8u
void fsti_window_begin(net_window *window, uint32_t size_max, uint64_t now_ns);
/// A request has come to its end, `bytes` of it. Grows while that makes all of them faster.
void fsti_window_grow(net_window *window, uint64_t bytes, uint64_t now_ns);
/// The server asks for less. What was under way together counts once.
void fsti_window_halve(net_window *window, uint64_t now_ns);

/// How long requests have taken: the median of the last ones tells which are late.
#define NET_TIMES_COUNT 31u
typedef struct net_times {
    uint64_t times_ns[NET_TIMES_COUNT];
    uint32_t count;
} net_times;
void fsti_times_add(net_times *times, uint64_t time_ns);
/// 0: too few of them.
uint64_t fsti_times_median(const net_times *times);

#endif
