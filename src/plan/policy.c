// SPDX-License-Identifier: Apache-2.0
/// What is done, by what is asked and what is so.
#include "policy.h"

#include <stdio.h>

#include "base/base.h"

/// A request fits comfortably when it takes at most this part of the memory that is left: others
/// need some, and the program will need more.
#define COMFORT_PERCENT 60u

/// Parts of models above this, in memory of one's own, go around the page cache: all parts are read
/// once by who loads the model in parts (docs/benchmarks/engines-2026-11-23.md). What is no part
/// stays in it: a first start pays for pages of the cache beside its own and for the copy, 0.2 to
/// 0.4 s of 1 GiB, every later one is 2 to 3 times as fast (docs/benchmarks/starts-owned-*.md).
#define PART_CACHE_BYTES_MAX ((uint64_t)128 << 20)

/// Saves below this are not worth a ring: writes through the page cache, pushed out early, take the
/// same time.
#define DIRECT_SAVE_BYTES_MIN ((uint64_t)64 << 20)

#define THREADS_DEFAULT_MAX 16u
/// Blocking reads need this many threads to keep a disk busy, however few the processors.
#define BLOCKING_THREADS_MIN 4u
/// GPUDirect Storage wants more of them: a read there takes no processor.
#define FAR_THREADS_MIN 8u

/// Why views can't be what is asked for; NULL: they can.
static const char *why_not_views(const fsti_load_facts *facts) {
    if (facts->to_device)
        return facts->locks_memory ? "to a device, whose driver locks the memory" : "to a device";
    if (facts->has_destinations) return "the caller gives the memory";
    if (facts->converts) return "elements are converted";
    if (facts->engine != FST_ENGINE_AUTO || facts->has_allocator || facts->has_budget)
        return "an engine, allocator or budget was asked for";
    if (facts->cache == FST_CACHE_BYPASS) return "the page cache is to be left alone";
    if (facts->view_refused) return "no view can be had";
    if (facts->verifies) return "what is verified is memory that nobody else can change";
    return NULL;
}

/// `copies`: how often the bytes will be in memory.
static bool fits(const fsti_load_facts *facts, uint64_t copies) {
    return facts->bytes <= FSTI_POLICY_SMALL_BYTES ||
           facts->bytes <= facts->available_bytes / 100 * COMFORT_PERCENT / copies;
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
    if (is_twice && is_part(facts)) {
        *why = "it is a part of a large model";
        return false;
    }
    bool comfortable = fits(facts, is_twice ? 2 : 1);
    if (is_twice)
        *why = comfortable ? "it fits twice" : "it does not fit the memory that is left twice";
    else
        *why = comfortable ? "it fits" : "it does not fit the memory that is left";
    return comfortable;
}

void fsti_policy_choose(const fsti_load_facts *facts, fsti_load_policy *out) {
    const char *obstacle = why_not_views(facts), *why_cache;
    const char *why = "the default of a load to the CPU";
    out->mode = facts->mode;
    if (facts->mode == FST_MODE_AUTO) {
        out->mode = obstacle == NULL ? FST_MODE_MAP : FST_MODE_LOAD;
        if (obstacle != NULL) why = obstacle;
    } else {
        why = "as asked";
    }
    out->keeps_cache = keeps_cache(facts, out->mode, &why_cache);
    out->clears_cache = facts->cache == FST_CACHE_BYPASS && out->mode == FST_MODE_LOAD;
    const char *way = out->keeps_cache            ? "kept in the page cache"
                      : out->mode == FST_MODE_MAP ? "read when it is touched"
                                                  : "read around the page cache";
    snprintf(out->reason, sizeof out->reason, "%s: %s; what is absent is %s: %s",
             out->mode == FST_MODE_MAP ? "map" : "load", why, way, why_cache);
}

/// A disk's read on its own costs 25 to 50 us, in which it brings this much
/// (docs/benchmarks/engines-2026-11-23.md).
#define DISK_GAP_BYTES ((uint64_t)64 << 10)
/// A request to a store costs a round trip of 10 to 100 ms, in which a connection brings more than
/// this; but what is brought for nothing has its price, too.
#define OBJECT_GAP_BYTES ((uint64_t)1 << 20)

fsti_gaps fsti_policy_gaps(uint64_t wanted_bytes, bool is_object) {
    if (wanted_bytes == UINT64_MAX) return (fsti_gaps){0, 0};
    if (wanted_bytes != 0) return (fsti_gaps){wanted_bytes, wanted_bytes};
    return (fsti_gaps){DISK_GAP_BYTES, is_object ? OBJECT_GAP_BYTES : DISK_GAP_BYTES};
}

fsti_route fsti_policy_route(const fsti_route_facts *facts) {
    if (facts->is_small) return FSTI_ROUTE_CACHE;
    if (facts->keeps_cache && facts->copies_mapping) return FSTI_ROUTE_MAPPING;
    if (facts->keeps_cache || !facts->has_direct) return FSTI_ROUTE_CACHE;
    return facts->has_ring ? FSTI_ROUTE_RING : FSTI_ROUTE_DIRECT;
}

fsti_route fsti_policy_demote(fsti_route route, bool in_setup) {
    // A ring that can't be had says nothing of direct reads; a read that it failed does.
    return route == FSTI_ROUTE_RING && in_setup ? FSTI_ROUTE_DIRECT : FSTI_ROUTE_CACHE;
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
