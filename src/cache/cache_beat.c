// SPDX-License-Identifier: Apache-2.0
/// Signs of life: who brings blocks says so in the map, twice a second, so that others need not
/// wait for a process that is stopped. Locks tell who has died, and nothing of who stands still.
///
/// A map has numbers behind its head, of which each block has one (several share it). Who has a
/// claim changes those of its blocks; who waits looks whether they change. Time is counted by the
/// waiter's own signs, which it writes to the same file, to a number that is no block's: where
/// machine or disk are slow, they are as slow as the other's.
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "cache_private.h"

#define BEATS_AT ((uint64_t)2048) ///< in the map: behind the head, which is smaller
#define BEAT_COUNT 256u
/// Of the numbers, the last one is that of who waits.
#define BEAT_BLOCKS (BEAT_COUNT - 1)
#define BEAT_NS ((uint64_t)500000000)
/// Rounds without a sign: 3 seconds.
#define SILENT_ROUNDS 6u

_Static_assert(sizeof(cache_map_head) <= BEATS_AT, "they lie behind the head");
_Static_assert(BEATS_AT + BEAT_COUNT * sizeof(uint64_t) <= CACHE_MAP_HEAD_BYTES, "and fit");

static void beat_all(cache_task *task);

/// The process's; under the room's lock.
static struct {
    pid_t owner;
    cache_task task; ///< the next round
    bool is_waiting; ///< it is on its way
    fsti_cache_entry *entries;
    uint64_t value;             ///< of this round: nobody else's, and of no other round
    uint64_t period_ns, due_ns; ///< due_ns: of the next round
} beats;
static atomic_uint_fast64_t round_count;

void fsti_cache_beat_period(uint64_t period_ns) {
    fsti_cache_hold();
    beats.period_ns = period_ns;
    fsti_cache_release();
}

static void write_numbers(const fsti_cache_entry *entry, uint64_t first, uint64_t count) {
    uint64_t numbers[BEAT_COUNT];
    for (uint64_t i = 0; i < count; i++) numbers[i] = beats.value;
    // What fails makes others wait in vain, or bring it themselves.
    (void)!fsti_cache_pwrite(entry->map_fd, numbers, (size_t)count * sizeof *numbers,
                             BEATS_AT + first * sizeof *numbers);
}

/// Says that the blocks of a claim are coming.
static void beat_claim(const fsti_cache_entry *entry, const cache_claim *claim) {
    uint64_t count = claim->last - claim->first, first = claim->first % BEAT_BLOCKS;
    if (count >= BEAT_BLOCKS) {
        write_numbers(entry, 0, BEAT_BLOCKS);
        return;
    }
    uint64_t some = fsti_min(count, BEAT_BLOCKS - first);
    write_numbers(entry, first, some);
    if (some < count) write_numbers(entry, 0, count - some);
}

static void begin_round(void) {
    beats.value = beats.value == 0 ? fsti_net_random() | 1 : beats.value + 2; // never 0
    uint64_t period_ns = beats.period_ns == 0 ? BEAT_NS : beats.period_ns;
    beats.is_waiting = true;
    beats.due_ns = fsti_now_ns() + period_ns;
    fsti_cache_pool_add(&beats.task, beats.due_ns);
}

/// Of what the parent of a fork does the child knows nothing.
static void own_beats(void) {
    if (beats.owner == getpid()) return;
    uint64_t period_ns = beats.period_ns;
    memset(&beats, 0, sizeof beats);
    beats.owner = getpid();
    beats.period_ns = period_ns;
    beats.task.run = beat_all;
}

/// A round: signs of all entries; those that need none are left out of the next.
static void beat_entries(void) {
    fsti_cache_entry **at = &beats.entries;
    while (*at != NULL) {
        fsti_cache_entry *entry = *at;
        for (const cache_claim *claim = entry->claims; claim != NULL; claim = claim->next)
            beat_claim(entry, claim);
        if (entry->waiter_count > 0) write_numbers(entry, BEAT_BLOCKS, 1);
        bool is_wanted = entry->claims != NULL || entry->waiter_count > 0;
        if (is_wanted) {
            at = &entry->next_beating;
        } else {
            *at = entry->next_beating;
            entry->is_beating = false;
        }
    }
}

/// From a thread of the pool's, which wakes all that waits whenever something has come.
static void beat_all(cache_task *task) {
    fsti_cache_hold();
    if (fsti_now_ns() < beats.due_ns) {
        fsti_cache_pool_add(task, beats.due_ns);
    } else {
        beats.is_waiting = false;
        beat_entries();
        atomic_fetch_add(&round_count, 1);
        if (beats.entries != NULL) begin_round();
    }
    fsti_cache_release();
}

void fsti_cache_beat(fsti_cache_entry *entry, const cache_claim *claim) {
    own_beats();
    if (entry->beat_owner != beats.owner) {
        entry->is_beating = false;
        entry->waiter_count = 0;
        entry->beat_owner = beats.owner;
    }
    if (!entry->is_beating) {
        entry->is_beating = true;
        entry->next_beating = beats.entries;
        beats.entries = entry;
    }
    if (!beats.is_waiting) begin_round();
    if (claim != NULL) beat_claim(entry, claim);
}

void fsti_cache_beat_end(fsti_cache_entry *entry) {
    fsti_cache_hold();
    if (entry->is_beating && entry->beat_owner == beats.owner && beats.owner == getpid()) {
        fsti_cache_entry **at = &beats.entries;
        while (*at != NULL && *at != entry) at = &(*at)->next_beating;
        if (*at != NULL) *at = entry->next_beating;
    }
    fsti_cache_release();
}

bool fsti_cache_is_silent(fsti_cache_entry *entry, uint64_t block, cache_silence *silence) {
    uint64_t number = 0, round = atomic_load(&round_count);
    if (fsti_cache_pread(entry->map_fd, &number, sizeof number,
                         BEATS_AT + block % BEAT_BLOCKS * sizeof number) != 0)
        return false;
    if (!silence->is_begun || silence->block != block || silence->number != number)
        *silence = (cache_silence){true, block, number, round};
    fsti_cache_hold();
    // Of one that stands still all numbers do: of its other blocks nobody waits again.
    bool is_known = number != 0 && entry->silent_number == number;
    bool is_found = !is_known && round - silence->round >= SILENT_ROUNDS;
    if (is_found) entry->silent_number = number;
    fsti_cache_release();
    if (is_found) // by who may ask for locks of its own
        fsti_log(FST_LOG_INFO,
                 "a process that brings bytes of %s to the cache gives no sign of life: what it "
                 "has is read past the cache",
                 fsti_object_name(entry->object));
    return is_known || is_found;
}

void fsti_cache_wait_begin(fsti_cache_entry *entry) {
    fsti_cache_hold();
    fsti_cache_beat(entry, NULL);
    entry->waiter_count++;
    fsti_cache_release();
}

void fsti_cache_wait_end(fsti_cache_entry *entry) {
    fsti_cache_hold();
    entry->waiter_count--;
    fsti_cache_release();
}
