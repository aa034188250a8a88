// SPDX-License-Identifier: Apache-2.0
/// Heartbeats. A process that fetches blocks updates counters in the map twice a second, so that
/// waiters can distinguish stopped from slow processes. Locks only reveal that a process has died.
///
/// The map has counters after its header. Each block maps to one (several blocks share a counter).
/// The owner of a claim changes the counters of its blocks; a waiter checks whether they change.
/// The waiter measures time by its own heartbeats, written to the same file at a counter that no
/// block uses: if the machine or the disk is slow, both sides are equally slow.
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "cache_private.h"

#define HEARTBEATS_AT ((uint64_t)2048) ///< offset in the map, after the header
#define HEARTBEAT_COUNT 256u
/// The last counter belongs to waiters.
#define HEARTBEAT_BLOCKS (HEARTBEAT_COUNT - 1)
#define HEARTBEAT_NS ((uint64_t)500000000)
/// Rounds without a heartbeat after which a process counts as stalled, equal to 3 seconds.
#define STALLED_ROUNDS 6u

_Static_assert(sizeof(cache_map_header) <= HEARTBEATS_AT, "heartbeats follow the header");
_Static_assert(HEARTBEATS_AT + HEARTBEAT_COUNT * sizeof(uint64_t) <= CACHE_MAP_HEADER_BYTES,
               "heartbeats fit in the header area");

static void write_all_heartbeats(cache_task *task);

/// One per process. Protected by the module's lock.
static struct {
    pid_t owner;
    cache_task task; ///< the next round
    bool is_waiting; ///< the next round is scheduled
    fsti_cache_entry *entries;
    uint64_t value; ///< the counter value of this round, unique to this process and round
    uint64_t period_ns, due_ns; ///< due_ns: time of the next round
} heartbeats;
static atomic_uint_fast64_t round_count;

void fsti_cache_heartbeat_period(uint64_t period_ns) {
    fsti_cache_lock();
    heartbeats.period_ns = period_ns;
    fsti_cache_unlock();
}

static void write_counters(const fsti_cache_entry *entry, uint64_t first, uint64_t count) {
    uint64_t counters[HEARTBEAT_COUNT];
    for (uint64_t i = 0; i < count; i++) counters[i] = heartbeats.value;
    // If this fails, others wait in vain or fetch the blocks themselves.
    (void)!fsti_write_at(entry->map_fd, counters, (size_t)count * sizeof *counters,
                         HEARTBEATS_AT + first * sizeof *counters);
}

/// Writes the heartbeat of a claim.
static void write_claim(const fsti_cache_entry *entry, const cache_claim *claim) {
    uint64_t count = claim->last - claim->first, first = claim->first % HEARTBEAT_BLOCKS;
    if (count >= HEARTBEAT_BLOCKS) {
        write_counters(entry, 0, HEARTBEAT_BLOCKS);
        return;
    }
    uint64_t some = fsti_min(count, HEARTBEAT_BLOCKS - first);
    write_counters(entry, first, some);
    if (some < count) write_counters(entry, 0, count - some);
}

/// Schedules the next round and chooses its counter value. Values are odd: never 0, which means
/// that no process has written yet, and random at first, so that two processes with claims on the
/// same counter do not look like one.
static void begin_round(void) {
    heartbeats.value = heartbeats.value == 0 ? fsti_random() | 1 : heartbeats.value + 2;
    uint64_t period_ns = heartbeats.period_ns == 0 ? HEARTBEAT_NS : heartbeats.period_ns;
    heartbeats.is_waiting = true;
    heartbeats.due_ns = fsti_now_ns() + period_ns;
    fsti_cache_pool_add(&heartbeats.task, heartbeats.due_ns);
}

/// After fork() the child starts with no heartbeats.
static void reset_after_fork(void) {
    if (heartbeats.owner == getpid()) return;
    uint64_t period_ns = heartbeats.period_ns;
    memset(&heartbeats, 0, sizeof heartbeats);
    heartbeats.owner = getpid();
    heartbeats.period_ns = period_ns;
    heartbeats.task.run = write_all_heartbeats;
}

/// One round: writes heartbeats for all entries and drops entries that need no more.
static void heartbeat_entries(void) {
    fsti_cache_entry **at = &heartbeats.entries;
    while (*at != NULL) {
        fsti_cache_entry *entry = *at;
        for (const cache_claim *claim = entry->claims; claim != NULL; claim = claim->next)
            write_claim(entry, claim);
        if (entry->waiter_count > 0) write_counters(entry, HEARTBEAT_BLOCKS, 1);
        bool is_wanted = entry->claims != NULL || entry->waiter_count > 0;
        if (is_wanted) {
            at = &entry->next_with_heartbeat;
        } else {
            *at = entry->next_with_heartbeat;
            entry->has_heartbeat = false;
        }
    }
}

/// Runs on a pool thread, which also wakes waiting tasks when blocks arrive.
static void write_all_heartbeats(cache_task *task) {
    fsti_cache_lock();
    if (fsti_now_ns() < heartbeats.due_ns) {
        fsti_cache_pool_add(task, heartbeats.due_ns);
    } else {
        heartbeats.is_waiting = false;
        heartbeat_entries();
        atomic_fetch_add(&round_count, 1);
        if (heartbeats.entries != NULL) begin_round();
    }
    fsti_cache_unlock();
}

void fsti_cache_heartbeat_start(fsti_cache_entry *entry, const cache_claim *claim) {
    reset_after_fork();
    if (entry->heartbeat_owner != heartbeats.owner) {
        entry->has_heartbeat = false;
        entry->waiter_count = 0;
        entry->heartbeat_owner = heartbeats.owner;
    }
    if (!entry->has_heartbeat) {
        entry->has_heartbeat = true;
        entry->next_with_heartbeat = heartbeats.entries;
        heartbeats.entries = entry;
    }
    if (!heartbeats.is_waiting) begin_round();
    if (claim != NULL) write_claim(entry, claim);
}

void fsti_cache_heartbeat_end(fsti_cache_entry *entry) {
    fsti_cache_lock();
    if (entry->has_heartbeat && entry->heartbeat_owner == heartbeats.owner &&
        heartbeats.owner == getpid()) {
        fsti_cache_entry **at = &heartbeats.entries;
        while (*at != NULL && *at != entry) at = &(*at)->next_with_heartbeat;
        if (*at != NULL) *at = entry->next_with_heartbeat;
    }
    fsti_cache_unlock();
}

bool fsti_cache_is_stalled(fsti_cache_entry *entry, uint64_t block, cache_stall *stall) {
    uint64_t number = 0, round = atomic_load(&round_count);
    if (fsti_read_at(entry->map_fd, &number, sizeof number,
                     HEARTBEATS_AT + block % HEARTBEAT_BLOCKS * sizeof number) != 0)
        return false;
    if (!stall->is_begun || stall->block != block || stall->number != number)
        *stall = (cache_stall){true, block, number, round};
    fsti_cache_lock();
    // A stalled process is stalled for all its blocks: do not wait for its other claims.
    bool is_known_stalled = number != 0 && entry->stalled_process == number;
    bool is_newly_stalled = !is_known_stalled && round - stall->round >= STALLED_ROUNDS;
    if (is_newly_stalled) entry->stalled_process = number;
    fsti_cache_unlock();
    // The program's log callback may call the library, so it runs without the lock.
    if (is_newly_stalled)
        fsti_log(FST_LOG_INFO,
                 "a process that downloads %s into the cache does not respond. Its blocks are "
                 "read from the server instead",
                 fsti_object_name(entry->object));
    return is_known_stalled || is_newly_stalled;
}

void fsti_cache_wait_begin(fsti_cache_entry *entry) {
    fsti_cache_lock();
    fsti_cache_heartbeat_start(entry, NULL);
    entry->waiter_count++;
    fsti_cache_unlock();
}

void fsti_cache_wait_end(fsti_cache_entry *entry) {
    fsti_cache_lock();
    entry->waiter_count--;
    fsti_cache_unlock();
}
