// SPDX-License-Identifier: Apache-2.0
/// Time limits of the caller, and the time spent waiting.
#include "load.h"

int64_t fsti_loader_time_left(int64_t timeout_ms, uint64_t start_ns) {
    int64_t waited_ms = (int64_t)((fsti_now_ns() - start_ns) / 1000000);
    if (timeout_ms <= 0) return timeout_ms;
    return timeout_ms > waited_ms ? timeout_ms - waited_ms : 0;
}

void fsti_loader_add_wait(fst_loader *loader, uint64_t start_ns) {
    uint64_t waited_ns = fsti_now_ns() - start_ns;
    pthread_mutex_lock(&loader->lock);
    loader->wait_ns += waited_ns;
    pthread_mutex_unlock(&loader->lock);
}
