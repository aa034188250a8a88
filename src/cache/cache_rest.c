// SPDX-License-Identifier: Apache-2.0
/// The rest of an object: blocks that loads never ask for.
#include <pthread.h>
#include <string.h>

#include "cache_private.h"

/// So little is brought when the object is opened again: of the object, or in all.
#define REST_SHARE 32u
#define REST_BYTES_MIN ((uint64_t)4 << 20)
/// At least so much of the object is there: else somebody wants just some of it.
#define KEPT_QUARTERS 3u
/// Requests at once, and blocks of each.
#define READ_COUNT 64u
#define READ_BLOCKS 2u

typedef struct rest_reads {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t begun, done;
    bool failed;
    fsti_net_counts counts;
    fst_error errors[READ_COUNT];
    fsti_range_read reads[READ_COUNT];
    char bytes[READ_COUNT][READ_BLOCKS * CACHE_BLOCK_BYTES];
} rest_reads;

/// From a thread of the room's.
static void finish_read(fsti_range_read *read) {
    rest_reads *rest = read->context;
    pthread_mutex_lock(&rest->lock);
    rest->done++;
    if (read->result < 0) rest->failed = true;
    fsti_net_count(&rest->counts, &read->counts);
    pthread_cond_signal(&rest->changed);
    pthread_mutex_unlock(&rest->lock);
}

/// Waits for all that were begun; false where one has failed.
static bool wait_for_reads(rest_reads *rest) {
    pthread_mutex_lock(&rest->lock);
    while (rest->done < rest->begun) pthread_cond_wait(&rest->changed, &rest->lock);
    bool is_good = !rest->failed;
    pthread_mutex_unlock(&rest->lock);
    rest->begun = rest->done = 0;
    return is_good;
}

static bool begin_read(fsti_cache_entry *entry, uint64_t first, uint64_t count, rest_reads *rest) {
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

/// Calls for runs of absent blocks, of READ_BLOCKS at most; with NULL it counts the blocks alone.
static bool visit_absent(fsti_cache_entry *entry, rest_reads *rest, uint64_t *absent_count) {
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

static bool is_few(const fsti_cache_entry *entry, uint64_t absent_count) {
    uint64_t most = fsti_max(entry->size_bytes / REST_SHARE, REST_BYTES_MIN);
    uint64_t kept_count = entry->block_count - absent_count;
    return absent_count > 0 && absent_count * CACHE_BLOCK_BYTES <= most &&
           kept_count >= (entry->block_count + 3) / 4 * KEPT_QUARTERS;
}

void fsti_cache_bring_rest(fsti_cache_entry *entry) {
    uint64_t absent_count = 0;
    if (fsti_net_is_offline() || atomic_load(&entry->is_broken) ||
        !visit_absent(entry, NULL, &absent_count) || !is_few(entry, absent_count))
        return;
    rest_reads *rest = fsti_alloc_zeroed(1, sizeof *rest);
    if (rest == NULL) return; // the next start tries again
    pthread_mutex_init(&rest->lock, NULL);
    pthread_cond_init(&rest->changed, NULL);
    absent_count = 0;
    (void)visit_absent(entry, rest, &absent_count);
    (void)wait_for_reads(rest); // what fails is asked for again by who needs it
    fsti_cache_hold();
    fsti_net_count(&entry->counts, &rest->counts);
    fsti_cache_release();
    pthread_cond_destroy(&rest->changed);
    pthread_mutex_destroy(&rest->lock);
    fsti_free(rest);
}
