// SPDX-License-Identifier: Apache-2.0
/// Fetches blocks that loads never read, so that an object becomes complete.
#include <pthread.h>
#include <string.h>

#include "cache_private.h"

/// Backfilling fetches at most this share of the object, or BACKFILL_BYTES_MIN.
#define BACKFILL_SHARE 32u
#define BACKFILL_BYTES_MIN ((uint64_t)4 << 20)
/// Backfill only if at least three quarters of the object are cached. Otherwise the program wants a
/// part of it.
#define KEPT_QUARTERS 3u
/// Concurrent requests, and blocks per request.
#define READ_COUNT 64u
#define READ_BLOCKS 2u

typedef struct backfill_reads {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t begun, done;
    bool failed;
    fsti_http_counts counts;
    fst_error errors[READ_COUNT];
    fsti_range_read reads[READ_COUNT];
    char bytes[READ_COUNT][READ_BLOCKS * CACHE_BLOCK_BYTES];
} backfill_reads;

/// Runs on a thread of the http module.
static void finish_read(fsti_range_read *read) {
    backfill_reads *rest = read->context;
    pthread_mutex_lock(&rest->lock);
    rest->done++;
    if (read->result < 0) rest->failed = true;
    fsti_http_count(&rest->counts, &read->counts);
    pthread_cond_signal(&rest->changed);
    pthread_mutex_unlock(&rest->lock);
}

/// Waits for all running reads. False if one failed.
static bool wait_for_reads(backfill_reads *rest) {
    pthread_mutex_lock(&rest->lock);
    while (rest->done < rest->begun) pthread_cond_wait(&rest->changed, &rest->lock);
    bool succeeded = !rest->failed;
    pthread_mutex_unlock(&rest->lock);
    rest->begun = rest->done = 0;
    return succeeded;
}

static bool begin_read(fsti_cache_entry *entry, uint64_t first, uint64_t count,
                       backfill_reads *rest) {
    if (rest->begun == READ_COUNT && !wait_for_reads(rest)) return false;
    uint32_t at = rest->begun++;
    uint64_t begin = first * CACHE_BLOCK_BYTES;
    uint64_t end = fsti_min(begin + count * CACHE_BLOCK_BYTES, entry->size_bytes);
    rest->reads[at] = (fsti_range_read){.object = entry->object,
                                        .offset = begin,
                                        .size = (size_t)(end - begin),
                                        .buffer = rest->bytes[at],
                                        .done = finish_read,
                                        .context = rest,
                                        .error = &rest->errors[at]};
    fsti_cache_read_begin(entry, &rest->reads[at]);
    return true;
}

/// Calls the function for runs of absent blocks, at most READ_BLOCKS long. With NULL it only counts
/// blocks.
static bool visit_absent(fsti_cache_entry *entry, backfill_reads *rest, uint64_t *absent_count) {
    uint64_t digests[512], some;
    for (uint64_t at = 0; at < entry->block_count; at += some) {
        some = fsti_min(entry->block_count - at, sizeof digests / sizeof *digests);
        if (fsti_cache_map_read(entry->map_fd, at, some, digests) != 0) return false;
        for (uint64_t i = 0, count; i < some; i += count) {
            bool is_absent = digests[i] == 0;
            for (count = 1; is_absent && count < READ_BLOCKS && i + count < some;) {
                if (digests[i + count] != 0) break;
                count++;
            }
            if (!is_absent) continue;
            *absent_count += count;
            if (rest != NULL && !begin_read(entry, at + i, count, rest)) return false;
        }
    }
    return true;
}

static bool is_nearly_complete(const fsti_cache_entry *entry, uint64_t absent_count) {
    uint64_t most = fsti_max(entry->size_bytes / BACKFILL_SHARE, BACKFILL_BYTES_MIN);
    uint64_t kept_count = entry->block_count - absent_count;
    return absent_count > 0 && absent_count * CACHE_BLOCK_BYTES <= most &&
           kept_count >= (entry->block_count + 3) / 4 * KEPT_QUARTERS;
}

void fsti_cache_backfill(fsti_cache_entry *entry) {
    uint64_t absent_count = 0;
    if (fsti_http_is_offline() || atomic_load(&entry->is_broken) ||
        !visit_absent(entry, NULL, &absent_count) || !is_nearly_complete(entry, absent_count))
        return;
    backfill_reads *rest = fsti_alloc_zeroed(1, sizeof *rest);
    if (rest == NULL) return; // the next open tries again
    pthread_mutex_init(&rest->lock, NULL);
    pthread_cond_init(&rest->changed, NULL);
    absent_count = 0;
    (void)visit_absent(entry, rest, &absent_count);
    (void)wait_for_reads(rest); // failed blocks are fetched when they are read
    fsti_cache_lock();
    fsti_http_count(&entry->counts, &rest->counts);
    fsti_cache_unlock();
    pthread_cond_destroy(&rest->changed);
    pthread_mutex_destroy(&rest->lock);
    fsti_free(rest);
}
