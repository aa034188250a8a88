// SPDX-License-Identifier: Apache-2.0
/// The reserve: threads of a load that start to read when the first threads are slow.
///
/// Reads from another machine wait, and many threads keep the way there busy. Reads through a FUSE
/// process of this machine only look like that: the process needs the CPUs, and more readers take
/// them away. Which one it is shows in the speed of the first threads.
#include "pipeline.h"

/// How often the speed is looked at.
#define LOOK_MS 8
/// A source is slow if a thread gets less than this per millisecond (0.54 GB/s) on average.
#define FAST_BYTES_PER_MS ((uint64_t)512 << 10)

static bool is_slow(const fsti_pipeline *pipeline, uint64_t start_ns) {
    uint64_t spent_ms = (fsti_now_ns() - start_ns) / 1000000;
    return atomic_load_explicit(&pipeline->view_bytes, memory_order_relaxed) <
           spent_ms * pipeline->first_count * FAST_BYTES_PER_MS;
}

void fsti_reserve_wake(fsti_pipeline *pipeline) {
    pthread_mutex_lock(&pipeline->lock);
    pipeline->needs_reserve = true;
    pthread_cond_broadcast(&pipeline->reserve_wanted);
    pthread_mutex_unlock(&pipeline->lock);
}

void fsti_reserve_wait(fsti_pipeline *pipeline, uint32_t index) {
    if (index < pipeline->first_count) return;
    bool is_observer = index == pipeline->first_count; // one thread of the reserve is enough
    uint64_t start_ns = fsti_now_ns();
    pthread_mutex_lock(&pipeline->lock);
    while (!pipeline->needs_reserve) {
        if (!is_observer) {
            pthread_cond_wait(&pipeline->reserve_wanted, &pipeline->lock);
            continue;
        }
        struct timespec until = fsti_deadline_after(LOOK_MS);
        pthread_cond_timedwait(&pipeline->reserve_wanted, &pipeline->lock, &until);
        if (!is_slow(pipeline, start_ns)) continue;
        pipeline->needs_reserve = true;
        pthread_cond_broadcast(&pipeline->reserve_wanted);
    }
    pthread_mutex_unlock(&pipeline->lock);
}
