// SPDX-License-Identifier: Apache-2.0
/// Warnings about cache folders that can't be used. A program that loads many models would repeat
/// the same line for each of them, so every folder is reported once per process.
#include <string.h>

#include "cache_private.h"

#define REPORTED_COUNT 64u

/// Hashes of folders that were reported, 0: free. Two folders of one slot may be reported again.
static _Atomic uint64_t reported[REPORTED_COUNT];

void fsti_cache_warn(const char *folder, const char *why, int failure) {
    if (!fsti_log_wants(FST_LOG_WARNING)) return;
    uint64_t hash = fsti_hash(folder, strlen(folder), fsti_hash_key()) | 1;
    if (atomic_exchange(&reported[hash / 2 % REPORTED_COUNT], hash) == hash) return;
    fsti_log(FST_LOG_WARNING, "%s: the cache folder is not used: %s%s%s",
             folder[0] == '\0' ? "cache" : folder, why, failure == 0 ? "" : ": ",
             failure == 0 ? "" : strerror(failure));
}
