// SPDX-License-Identifier: Apache-2.0
/// Decides how to load and save, from the request and the facts.
#include "policy.h"

#include <stdio.h>

#include "base/primitives.h"

/// A request fits comfortably if it takes at most this percentage of free memory. The program and
/// other processes need the rest.
#define COMFORT_PERCENT 60u

/// Larger loads into owned memory bypass the page cache, because keeping the file cached doubles
/// the memory of a cold load and adds a copy. At 300 MB a cold load is still as fast as the disk,
/// and warm loads are 3 times as fast; at 1 GiB it would take twice as long
/// (docs/benchmarks/README.md).
#define OWNED_CACHE_BYTES_MAX ((uint64_t)512 << 20)
/// Reads of less than half of a model that is larger than this bypass the page cache, because
/// programs that load parts read each part once.
#define PART_CACHE_BYTES_MAX ((uint64_t)128 << 20)

/// For smaller saves, writing through the page cache with early writeback takes the same time as
/// io_uring.
#define DIRECT_SAVE_BYTES_MIN ((uint64_t)64 << 20)

#define THREADS_DEFAULT_MAX 16u
/// Blocking reads need at least this many threads to keep a disk busy, even with fewer CPUs.
#define BLOCKING_THREADS_MIN 4u
/// Reads that wait for other machines need many threads to keep the way there busy. Each has two of
/// the kernel's requests of 128 KiB under way. From a FUSE process of this machine with 2 CPUs, 32
/// threads load views of 1 GiB in 0.29 s, 2 threads in 0.34 s.
#define DISTANT_THREADS_MIN 32u
/// On an H200 with 16 CPUs, loads by 12 or 16 threads took 1.2 to 1.3 times as long as loads by 8
/// (docs/benchmarks). The cause was not measured.
#define DEVICE_THREADS_MAX 8u
/// GPUDirect reads take no CPU time, so more threads are useful.
#define GDS_THREADS_MIN 8u

/// Whether so many bytes fit comfortably in memory.
static bool fits(const fsti_load_facts *facts, uint64_t bytes) {
    return bytes <= FSTI_POLICY_SMALL_BYTES ||
           bytes <= facts->available_bytes / 100 * COMFORT_PERCENT;
}

/// Why memory-mapped tensors are impossible; NULL if they are possible.
static const char *find_view_obstacle(const fsti_load_facts *facts) {
    if (facts->to_device)
        return facts->pins_memory ? "to a device, whose driver pins the memory" : "to a device";
    if (facts->has_destinations) return "the caller provides the memory";
    if (facts->converts) return "elements are converted";
    if (facts->engine != FST_ENGINE_AUTO || facts->has_allocator || facts->budget_bytes != 0)
        return "an engine, allocator or budget was requested";
    if (facts->cache == FST_CACHE_BYPASS) return "the page cache is bypassed";
    if (facts->view_refused) return "the file cannot be memory-mapped";
    if (facts->verifies) return "verified tensors need private memory";
    // If most bytes would be copied out of the mapping anyway, load them directly, given enough
    // memory.
    if (facts->unmappable_bytes > facts->bytes / 2 && fits(facts, facts->loaded_bytes))
        return "most tensors can't be views: unaligned in the file, or slices of many pieces";
    return NULL;
}

/// Bytes that the request brings into the page cache, and into owned memory.
static uint64_t doubled_bytes(const fsti_load_facts *facts) {
    uint64_t cached_bytes = fsti_max(facts->bytes, facts->spanned_bytes);
    return cached_bytes + fsti_min(facts->loaded_bytes, UINT64_MAX - cached_bytes);
}

/// Whether the request is less than half of a large model. Slices of many pieces are not, if memory
/// has room for their tensors: this or another process reads the bytes between them next.
static bool is_part(const fsti_load_facts *facts) {
    bool reads_between =
        facts->scattered_bytes > facts->bytes / 2 && fits(facts, doubled_bytes(facts));
    return facts->model_bytes > PART_CACHE_BYTES_MAX && facts->bytes < facts->model_bytes / 2 &&
           !reads_between;
}

/// Whether absent bytes are read through the page cache. *why: the reason.
static bool keeps_cache(const fsti_load_facts *facts, fst_load_mode mode, const char **why) {
    if (facts->cache != FST_CACHE_AUTO) {
        *why = "as requested";
        return facts->cache == FST_CACHE_KEEP;
    }
    // Engines only matter for owned memory.
    if (facts->engine != FST_ENGINE_AUTO && mode == FST_MODE_LOAD) {
        *why = "with the requested engine";
        return facts->engine == FST_ENGINE_PREAD || facts->engine == FST_ENGINE_MMAP;
    }
    // Owned memory exists in addition to the page cache.
    bool doubles_memory = mode == FST_MODE_LOAD && !facts->to_device;
    if (facts->bytes <= FSTI_POLICY_CALLER_BYTES && facts->budget_bytes == 0) {
        *why = "the load is small";
        return true;
    }
    if (doubles_memory && (facts->bytes > OWNED_CACHE_BYTES_MAX || is_part(facts))) {
        *why = is_part(facts) ? "it is part of a large model"
                              : "the page cache would hold a second copy of it";
        return false;
    }
    bool comfortable = fits(facts, doubles_memory ? doubled_bytes(facts) : facts->bytes);
    if (doubles_memory)
        *why = comfortable ? "it fits in memory twice"
                           : "it does not fit in the available memory twice";
    else
        *why = comfortable ? "it fits" : "it does not fit in the available memory";
    return comfortable;
}

/// Batch size without a memory limit. Tensors of a batch share memory, so keeping one tensor alive
/// keeps at most this, or the tensor itself if it is larger.
#define BATCH_BYTES ((uint64_t)64 << 20)
/// The same for verified loads. A chunk on a batch boundary is read and digested twice, so small
/// batches of large tensors would read 3 % more.
#define VERIFIED_BATCH_BYTES ((uint64_t)256 << 20)
/// A budget is split into this many batches, so that reading and using tensors overlap.
#define BATCHES_PER_BUDGET 4u

static uint64_t find_batch_bytes(const fsti_load_facts *facts, bool is_view) {
    bool is_given = is_view || facts->has_device || facts->has_allocator;
    if (facts->budget_bytes != 0) return facts->budget_bytes / BATCHES_PER_BUDGET;
    // Views need no memory; devices and callers allocate few large blocks.
    if (is_given && !facts->in_order) return UINT64_MAX;
    return facts->verifies ? VERIFIED_BATCH_BYTES : BATCH_BYTES;
}

static fsti_memory_kind find_memory(const fsti_load_facts *facts) {
    if (facts->has_allocator) return FSTI_MEMORY_CALLERS;
    if (facts->pins_memory) return FSTI_MEMORY_PINNED;
    return facts->has_device ? FSTI_MEMORY_DEVICE : FSTI_MEMORY_ARENA;
}

/// A separate disk read costs 25-50 us, in which a disk transfers this much
/// (docs/benchmarks/README.md).
#define DISK_GAP_BYTES ((uint64_t)64 << 10)
/// A separate request costs a round trip of 10-100 ms, in which a connection transfers more than
/// this. But transferred bytes may cost money.
#define OBJECT_GAP_BYTES ((uint64_t)1 << 20)

static fsti_gaps find_gaps(uint64_t wanted_bytes, bool is_object) {
    if (wanted_bytes == UINT64_MAX) return (fsti_gaps){0, 0};
    if (wanted_bytes != 0) return (fsti_gaps){wanted_bytes, wanted_bytes};
    return (fsti_gaps){DISK_GAP_BYTES, is_object ? OBJECT_GAP_BYTES : DISK_GAP_BYTES};
}

void fsti_policy_choose(const fsti_load_facts *facts, fsti_load_policy *out) {
    const char *obstacle = find_view_obstacle(facts), *why_cache;
    const char *why = "the default on the CPU";
    out->mode = facts->mode;
    if (facts->mode == FST_MODE_AUTO) {
        out->mode = obstacle == NULL ? FST_MODE_MAP : FST_MODE_LOAD;
        if (obstacle != NULL) why = obstacle;
    } else {
        why = "as requested";
    }
    out->keeps_cache = keeps_cache(facts, out->mode, &why_cache);
    out->must_keep_cache = facts->cache == FST_CACHE_KEEP;
    out->clears_cache = facts->cache == FST_CACHE_BYPASS && out->mode == FST_MODE_LOAD;
    bool is_view = out->mode == FST_MODE_MAP;
    out->memory = find_memory(facts);
    out->batch_bytes_max = find_batch_bytes(facts, is_view);
    out->gaps = find_gaps(facts->gap_bytes, facts->is_remote);
    const char *reading = is_view && facts->verifies
                              ? "read through the page cache for verification"
                          : out->keeps_cache ? "kept in the page cache"
                          : is_view          ? "read on first access"
                                             : "read bypassing the page cache";
    int used = snprintf(out->reason, sizeof out->reason, "%s: %s", is_view ? "map" : "load", why);
    if (!facts->lacks_cache)
        snprintf(out->reason + used, sizeof out->reason - (size_t)used,
                 "; uncached bytes are %s: %s", reading, why_cache);
}

/// For cached views only page tables are filled, which is faster than waking a thread.
#define CALLER_VIEW_BYTES_MAX ((uint64_t)16 << 20)
/// Requests up to this size run on the calling thread even if they are not cached. Larger ones do
/// not, because a file server may be slow and callers have timeouts.
#define CALLER_ABSENT_BYTES_MAX ((uint64_t)64 << 10)

bool fsti_policy_is_small(uint64_t bytes, bool has_budget) {
    return bytes <= FSTI_POLICY_CALLER_BYTES && !has_budget;
}

fsti_executor fsti_policy_executor(const fsti_executor_facts *facts) {
    bool is_small = fsti_policy_is_small(facts->bytes, facts->has_budget);
    if (is_small && facts->may_wait && facts->bytes <= CALLER_ABSENT_BYTES_MAX)
        return FSTI_EXECUTOR_CALLER;
    bool is_view = facts->is_view_only && facts->bytes <= CALLER_VIEW_BYTES_MAX;
    is_small = fsti_policy_is_small(facts->touched_bytes, facts->has_budget);
    return is_small || is_view ? FSTI_EXECUTOR_CALLER_IF_CACHED : FSTI_EXECUTOR_THREADS;
}

fsti_route fsti_policy_route(const fsti_route_facts *facts) {
    if (facts->is_small) return FSTI_ROUTE_CACHE;
    if (facts->keeps_cache && facts->copies_mapping) return FSTI_ROUTE_MAPPING;
    if (facts->keeps_cache || !facts->has_direct) return FSTI_ROUTE_CACHE;
    return facts->has_ring ? FSTI_ROUTE_RING : FSTI_ROUTE_DIRECT;
}

fsti_route fsti_policy_demote(fsti_route route, bool in_setup) {
    // If GPUDirect fails, the other routes are still possible.
    if (route == FSTI_ROUTE_GDS) return FSTI_ROUTE_RING;
    // If io_uring is unavailable, direct reads may work; if a direct read failed in it, they will
    // not.
    return route == FSTI_ROUTE_RING && in_setup ? FSTI_ROUTE_DIRECT : FSTI_ROUTE_CACHE;
}

fsti_gds_decision fsti_policy_gds(const fsti_gds_facts *facts, const char **reason) {
    *reason = NULL;
    if (facts->requested == FST_GDS_OFF)
        *reason = "switched off";
    else if (facts->is_known)
        return facts->is_good ? FSTI_GDS_YES : FSTI_GDS_NO;
    else if (facts->is_cached && facts->requested != FST_GDS_STRICT)
        *reason = "the file is in the page cache";
    else if (!facts->has_space)
        *reason = "the load is too small";
    return *reason == NULL ? FSTI_GDS_IF_PROBED : FSTI_GDS_NO;
}

fsti_route fsti_policy_save(const fsti_save_facts *facts, const char **reason) {
    bool is_automatic = facts->engine == FST_SAVE_ENGINE_AUTO;
    *reason = NULL;
    if (facts->engine == FST_SAVE_ENGINE_BUFFERED)
        *reason = "buffered was requested";
    else if (is_automatic && !facts->is_durable)
        *reason = "the page cache is faster than the disk";
    else if (is_automatic && facts->file_bytes < DIRECT_SAVE_BYTES_MIN)
        *reason = "the file is small";
    bool has_ring = facts->has_ring && facts->engine != FST_SAVE_ENGINE_DIRECT;
    fsti_route_facts route = {
        .has_direct = facts->has_direct, .has_ring = has_ring, .keeps_cache = *reason != NULL};
    return fsti_policy_route(&route);
}

/// Address space of a thread: its stack and the C library's allocation arena.
#define THREAD_ADDRESS_BYTES ((uint64_t)72 << 20)
/// Threads take at most this fraction of the remaining address space.
#define THREADS_ADDRESS_DIVISOR 2u

fsti_thread_policy fsti_policy_threads(const fsti_thread_facts *facts) {
    uint64_t threads = facts->wanted;
    // One chunk needs one thread.
    if (threads == 0 && facts->chunk_count > 1) {
        threads = fsti_min(facts->processor_count, facts->to_device && !facts->verifies
                                                       ? DEVICE_THREADS_MAX
                                                       : THREADS_DEFAULT_MAX);
        if (facts->any_async) threads = fsti_max(threads, 2); // one reads, one prefaults memory
        if (facts->any_blocking) threads = fsti_max(threads, BLOCKING_THREADS_MIN);
        if (facts->reads_by_gds) threads = fsti_max(threads, GDS_THREADS_MIN);
        if (facts->any_distant) threads = fsti_max(threads, DISTANT_THREADS_MIN);
    }
    threads = fsti_min(threads, FSTI_POLICY_THREADS_MAX);
    threads = fsti_min(fsti_max(threads, 1), fsti_max(facts->chunk_count, 1));
    if (facts->is_limited)
        threads = fsti_min(threads,
                           facts->address_bytes / THREADS_ADDRESS_DIVISOR / THREAD_ADDRESS_BYTES);
    // One lane keeps a disk busy. More lanes help disk arrays, if there are CPUs to copy. GPUDirect
    // reads block, so all threads issue them.
    uint64_t lanes = !facts->any_async || facts->reads_by_gds ? 0 : threads >= 8 ? 2 : 1;
    // Digesting may be slower than the disk, so all threads read and digest.
    if (facts->verifies && facts->any_async) lanes = threads;
    return (fsti_thread_policy){.thread_count = (uint32_t)threads, .lane_count = (uint32_t)lanes};
}
