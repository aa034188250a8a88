// SPDX-License-Identifier: Apache-2.0
/// What is done, by what is asked and what is so.
#include "policy.h"

#include <stdio.h>

#include "base/base.h"

/// A request fits comfortably when it takes at most this part of the memory that is left: others
/// need some, and the program will need more.
#define COMFORT_PERCENT 60u

/// Loads to memory of one's own above this go around the page cache: what is kept costs the first
/// start fresh pages beside its own, and a copy. 300 MB are still there before every peer and the
/// disk's own limit, later starts 3 times as fast; of 1 GiB a first start would take twice as long
/// as around the cache, and longer than peers (docs/benchmarks/starts-grid-2026-11-23.md).
#define OWNED_CACHE_BYTES_MAX ((uint64_t)512 << 20)
/// The same of less than half of a model: all parts are read once by who loads it in parts.
#define PART_CACHE_BYTES_MAX ((uint64_t)128 << 20)

/// Saves below this are not worth a ring: writes through the page cache, pushed out early, take the
/// same time.
#define DIRECT_SAVE_BYTES_MIN ((uint64_t)64 << 20)

#define THREADS_DEFAULT_MAX 16u
/// Blocking reads need this many threads to keep a disk busy, however few the processors.
#define BLOCKING_THREADS_MIN 4u
/// GPUDirect Storage wants more of them: a read there takes no processor.
#define FAR_THREADS_MIN 8u

/// Whether so many bytes fit comfortably.
static bool fits(const fsti_load_facts *facts, uint64_t bytes) {
    return bytes <= FSTI_POLICY_SMALL_BYTES ||
           bytes <= facts->available_bytes / 100 * COMFORT_PERCENT;
}

/// Why views can't be what is asked for; NULL: they can.
static const char *why_not_views(const fsti_load_facts *facts) {
    if (facts->to_device)
        return facts->locks_memory ? "to a device, whose driver locks the memory" : "to a device";
    if (facts->has_destinations) return "the caller gives the memory";
    if (facts->converts) return "elements are converted";
    if (facts->engine != FST_ENGINE_AUTO || facts->has_allocator || facts->budget_bytes != 0)
        return "an engine, allocator or budget was asked for";
    if (facts->cache == FST_CACHE_BYPASS) return "the page cache is to be left alone";
    if (facts->view_refused) return "no view can be had";
    if (facts->verifies) return "what is verified is memory that nobody else can change";
    // What would be copied out of a map anyway is read at once, where there is memory for it.
    if (facts->apart_bytes > facts->bytes / 2 && fits(facts, facts->own_bytes))
        return "most of it can be no view: odd addresses in the file, or slices of many pieces";
    return NULL;
}

/// Less than half of a large model.
static bool is_part(const fsti_load_facts *facts) {
    return facts->model_bytes > PART_CACHE_BYTES_MAX && facts->bytes < facts->model_bytes / 2;
}

/// Whether absent bytes come by way of the page cache. *why: in words.
static bool keeps_cache(const fsti_load_facts *facts, fst_load_mode mode, const char **why) {
    if (facts->cache != FST_CACHE_AUTO) {
        *why = "as asked";
        return facts->cache == FST_CACHE_KEEP;
    }
    // Views are made by no engine.
    if (facts->engine != FST_ENGINE_AUTO && mode == FST_MODE_LOAD) {
        *why = "by the engine that was asked for";
        return facts->engine == FST_ENGINE_PREAD || facts->engine == FST_ENGINE_MMAP;
    }
    // Memory of one's own is there besides.
    bool is_twice = mode == FST_MODE_LOAD && !facts->to_device;
    if (facts->bytes <= FSTI_POLICY_CALLER_BYTES && facts->budget_bytes == 0) {
        *why = "it is little";
        return true;
    }
    if (is_twice && (facts->bytes > OWNED_CACHE_BYTES_MAX || is_part(facts))) {
        *why = is_part(facts) ? "it is a part of a large model"
                              : "memory of one's own would hold much twice";
        return false;
    }
    uint64_t own_bytes = is_twice ? fsti_min(facts->own_bytes, UINT64_MAX - facts->bytes) : 0;
    bool comfortable = fits(facts, facts->bytes + own_bytes);
    if (is_twice)
        *why = comfortable ? "it fits twice" : "it does not fit the memory that is left twice";
    else
        *why = comfortable ? "it fits" : "it does not fit the memory that is left";
    return comfortable;
}

/// Batches of a load whose memory is not limited. Tensors share memory by batches: who keeps one
/// tensor keeps no more than this, or than the tensor itself where that is larger.
#define BATCH_BYTES ((uint64_t)64 << 20)
/// The same of verified loads: the chunk that two batches share is read and digested for each, so
/// that small batches of large tensors would read 3 % more.
#define VERIFIED_BATCH_BYTES ((uint64_t)256 << 20)
/// A budget is cut into this many batches, so that reading and using overlap.
#define BATCHES_PER_BUDGET 4u

static uint64_t find_batch_bytes(const fsti_load_facts *facts, bool is_view) {
    bool is_given = is_view || facts->has_device || facts->has_allocator;
    if (facts->budget_bytes != 0) return facts->budget_bytes / BATCHES_PER_BUDGET;
    // Views need no memory, and devices and callers give it in few large pieces.
    if (is_given && !facts->in_order) return UINT64_MAX;
    return facts->verifies ? VERIFIED_BATCH_BYTES : BATCH_BYTES;
}

static fsti_memory_kind find_memory(const fsti_load_facts *facts) {
    if (facts->has_allocator) return FSTI_MEMORY_CALLERS;
    if (facts->locks_memory) return FSTI_MEMORY_LOCKED;
    return facts->has_device ? FSTI_MEMORY_DEVICE : FSTI_MEMORY_ARENA;
}

/// A disk's read on its own costs 25 to 50 us, in which it brings this much
/// (docs/benchmarks/engines-2026-11-23.md).
#define DISK_GAP_BYTES ((uint64_t)64 << 10)
/// A request to a store costs a round trip of 10 to 100 ms, in which a connection brings more than
/// this; but what is brought for nothing has its price, too.
#define OBJECT_GAP_BYTES ((uint64_t)1 << 20)

static fsti_gaps find_gaps(uint64_t wanted_bytes, bool is_object) {
    if (wanted_bytes == UINT64_MAX) return (fsti_gaps){0, 0};
    if (wanted_bytes != 0) return (fsti_gaps){wanted_bytes, wanted_bytes};
    return (fsti_gaps){DISK_GAP_BYTES, is_object ? OBJECT_GAP_BYTES : DISK_GAP_BYTES};
}

void fsti_policy_choose(const fsti_load_facts *facts, fsti_load_policy *out) {
    const char *obstacle = why_not_views(facts), *why_cache;
    const char *why = "the default on the CPU";
    out->mode = facts->mode;
    if (facts->mode == FST_MODE_AUTO) {
        out->mode = obstacle == NULL ? FST_MODE_MAP : FST_MODE_LOAD;
        if (obstacle != NULL) why = obstacle;
    } else {
        why = "as asked";
    }
    out->keeps_cache = keeps_cache(facts, out->mode, &why_cache);
    out->clears_cache = facts->cache == FST_CACHE_BYPASS && out->mode == FST_MODE_LOAD;
    bool is_view = out->mode == FST_MODE_MAP;
    out->memory = find_memory(facts);
    out->batch_bytes_max = find_batch_bytes(facts, is_view);
    out->gaps = find_gaps(facts->gap_bytes, facts->asks_servers);
    const char *way = is_view && facts->verifies ? "read through the page cache as it is verified"
                      : out->keeps_cache         ? "kept in the page cache"
                      : is_view                  ? "read when it is touched"
                                                 : "read around the page cache";
    int used = snprintf(out->reason, sizeof out->reason, "%s: %s", is_view ? "map" : "load", why);
    if (!facts->lacks_cache)
        snprintf(out->reason + used, sizeof out->reason - (size_t)used,
                 "; what is absent is %s: %s", way, why_cache);
}

/// Of views of what the page cache holds only the pages are made: a thread takes longer to wake.
#define CALLER_VIEW_BYTES_MAX ((uint64_t)16 << 20)
/// Of it, what the page cache is not known to hold: a file server may take its time, and callers
/// have time limits. So little is not worth a thread all the same.
#define CALLER_ABSENT_BYTES_MAX ((uint64_t)64 << 10)

bool fsti_policy_is_small(uint64_t bytes, bool has_budget) {
    return bytes <= FSTI_POLICY_CALLER_BYTES && !has_budget;
}

fsti_who fsti_policy_who(const fsti_who_facts *facts) {
    bool is_small = fsti_policy_is_small(facts->bytes, facts->has_budget);
    if (is_small && facts->may_wait && facts->bytes <= CALLER_ABSENT_BYTES_MAX)
        return FSTI_WHO_CALLER;
    bool is_view = facts->is_mere_view && facts->bytes <= CALLER_VIEW_BYTES_MAX;
    return is_small || is_view ? FSTI_WHO_CALLER_IF_CACHED : FSTI_WHO_THREADS;
}

fsti_route fsti_policy_route(const fsti_route_facts *facts) {
    if (facts->is_small) return FSTI_ROUTE_CACHE;
    if (facts->keeps_cache && facts->copies_mapping) return FSTI_ROUTE_MAPPING;
    if (facts->keeps_cache || !facts->has_direct) return FSTI_ROUTE_CACHE;
    return facts->has_ring ? FSTI_ROUTE_RING : FSTI_ROUTE_DIRECT;
}

fsti_route fsti_policy_demote(fsti_route route, bool in_setup) {
    // A way to the device that is closed says nothing of those into memory.
    if (route == FSTI_ROUTE_FAR) return FSTI_ROUTE_RING;
    // A ring that can't be had says nothing of direct reads; a read that it failed does.
    return route == FSTI_ROUTE_RING && in_setup ? FSTI_ROUTE_DIRECT : FSTI_ROUTE_CACHE;
}

fsti_far_way fsti_policy_far(const fsti_far_facts *facts, const char **reason) {
    *reason = NULL;
    if (facts->wish == FST_GDS_OFF)
        *reason = "switched off";
    else if (facts->is_known)
        return facts->is_good ? FSTI_FAR_YES : FSTI_FAR_NO;
    else if (facts->is_cached && facts->wish != FST_GDS_STRICT)
        *reason = "the file is in the page cache";
    else if (!facts->has_room)
        *reason = "the load is too small";
    return *reason == NULL ? FSTI_FAR_IF_PROBED : FSTI_FAR_NO;
}

fsti_view_way fsti_policy_view(const fsti_view_facts *facts) {
    uint64_t begin = fsti_align_down(facts->begin, FSTI_POLICY_HUGE_PAGE_BYTES);
    uint64_t end =
        fsti_min(fsti_align_up(facts->end, FSTI_POLICY_HUGE_PAGE_BYTES), facts->file_bytes);
    uint64_t wanted = facts->end - facts->begin;
    if (facts->is_cached) return FSTI_VIEW_BY_MAPPING;
    bool is_worth_it = end - begin - wanted <= wanted / FSTI_POLICY_WASTE_DIVISOR;
    return is_worth_it && !facts->fresh_is_dear ? FSTI_VIEW_BY_HUGE_PAGES : FSTI_VIEW_BY_READING;
}

fsti_route fsti_policy_save(const fsti_save_facts *facts, const char **reason) {
    bool is_ours = facts->engine == FST_SAVE_ENGINE_AUTO;
    *reason = NULL;
    if (facts->engine == FST_SAVE_ENGINE_BUFFERED)
        *reason = "buffered was asked for";
    else if (is_ours && !facts->is_durable)
        *reason = "the page cache is faster than the disk";
    else if (is_ours && facts->file_bytes < DIRECT_SAVE_BYTES_MIN)
        *reason = "the file is small";
    bool has_ring = facts->has_ring && facts->engine != FST_SAVE_ENGINE_DIRECT;
    fsti_route_facts route = {
        .has_direct = facts->has_direct, .has_ring = has_ring, .keeps_cache = *reason != NULL};
    return fsti_policy_route(&route);
}

/// Address space that a thread takes: its stack, and what the C library's allocator reserves for
/// it.
#define THREAD_ADDRESS_BYTES ((uint64_t)72 << 20)
/// Of what is left, threads take this part at most: the program will need some, too.
#define THREADS_ADDRESS_DIVISOR 2u

fsti_thread_policy fsti_policy_threads(const fsti_thread_facts *facts) {
    uint64_t threads = facts->wanted;
    // One chunk is one thread's work.
    if (threads == 0 && facts->chunk_count > 1) {
        threads = fsti_min(facts->processor_count, THREADS_DEFAULT_MAX);
        if (facts->any_ring) threads = fsti_max(threads, 2); // one reads, one makes memory
        if (facts->any_blocking) threads = fsti_max(threads, BLOCKING_THREADS_MIN);
        if (facts->reads_far) threads = fsti_max(threads, FAR_THREADS_MIN);
    }
    threads = fsti_min(threads, FSTI_POLICY_THREADS_MAX);
    threads = fsti_min(fsti_max(threads, 1), fsti_max(facts->chunk_count, 1));
    if (facts->is_limited)
        threads = fsti_min(threads,
                           facts->address_bytes / THREADS_ADDRESS_DIVISOR / THREAD_ADDRESS_BYTES);
    // One lane keeps a disk busy; more serve arrays of them where there are processors to copy.
    // Reads straight to a device block, so everybody does them.
    uint64_t lanes = !facts->any_ring || facts->reads_far ? 0 : threads >= 8 ? 2 : 1;
    // A digest may be slower than the disk: then all processors have to work on it.
    if (facts->verifies && facts->any_ring) lanes = threads;
    return (fsti_thread_policy){.thread_count = (uint32_t)threads, .lane_count = (uint32_t)lanes};
}
