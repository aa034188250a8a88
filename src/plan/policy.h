// SPDX-License-Identifier: Apache-2.0
/// Policy of loads and saves: from what is asked and what is so to what is done, and why. Pure: the
/// facts are gathered elsewhere, so every decision is a row of a test's table. Asked again when a
/// route fails.
#ifndef FSTI_POLICY_H
#define FSTI_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "fastsafetensors/loader.h"
#include "fastsafetensors/writer.h"

/// What lies between two wanted ranges of a file is read over where that costs less than one more
/// read: up to `any_bytes` always, up to `most_bytes` while the read comes to no more than
/// FSTI_GAPS_READ_MAX times what is wanted of it.
typedef struct fsti_gaps {
    uint64_t any_bytes, most_bytes;
} fsti_gaps;
#define FSTI_GAPS_READ_MAX 2u

/// All that is known of a load before it is planned.
typedef struct fsti_load_facts {
    // What is asked:
    fst_load_mode mode;
    fst_cache cache;
    fst_engine engine;
    bool to_device;    ///< tensors are a device's, or lie in memory that its driver has locked
    bool has_device;   ///< it is us who ask that driver for their memory, or copy to it
    bool locks_memory; ///< of the processors
    bool has_destinations, converts, has_allocator, in_order;
    uint64_t budget_bytes; ///< of it, what buffers may take; 0: none
    uint64_t gap_bytes;    ///< as fst_load_tuning.coalesce_gap_bytes
    // What is so:
    bool view_refused;        ///< the system does not map the files
    bool verifies;            ///< bytes are held against digests
    bool asks_servers;        ///< some files are behind addresses
    bool lacks_cache;         ///< no file of it is read by way of the page cache
    uint64_t bytes;           ///< of the request, as they lie in the files
    uint64_t own_bytes;       ///< the same as they come to memory
    uint64_t apart_bytes;     ///< of `bytes`, those that no view can serve
    uint64_t model_bytes;     ///< of all files that it is a part of
    uint64_t available_bytes; ///< memory that may be used; UINT64_MAX: no limit is known
} fsti_load_facts;

/// Memory that the processors write to, or a device's; given by us or by the caller.
typedef enum fsti_memory_kind {
    FSTI_MEMORY_CALLERS,
    FSTI_MEMORY_LOCKED, ///< of the processors, page-locked by a device's driver
    FSTI_MEMORY_DEVICE,
    FSTI_MEMORY_ARENA,
} fsti_memory_kind;

/// The kind of a load, the same for all its files.
typedef struct fsti_load_policy {
    fst_load_mode mode;      ///< LOAD or MAP
    bool keeps_cache;        ///< what is absent is brought into the page cache, and stays there
    bool clears_cache;       ///< what has to come by way of it all the same is dropped from it
    fsti_memory_kind memory; ///< of views: for what can't be one
    /// How large a batch may be, whose tensors share a buffer; an item above it is a batch alone.
    /// UINT64_MAX: as large as its file.
    uint64_t batch_bytes_max;
    fsti_gaps gaps;
    char reason[200]; ///< of mode and cache
} fsti_load_policy;
void fsti_policy_choose(const fsti_load_facts *facts, fsti_load_policy *out);

/// A load this small is done by the caller, through the page cache: threads, and looking for other
/// ways, would cost more than they save.
#define FSTI_POLICY_CALLER_BYTES ((uint64_t)1 << 20)
/// Requests up to this size fit any machine: nobody asks what memory there is.
#define FSTI_POLICY_SMALL_BYTES ((uint64_t)32 << 20)

/// Who does a load's work.
typedef enum fsti_who {
    FSTI_WHO_THREADS,
    FSTI_WHO_CALLER_IF_CACHED, ///< the thread that asks, if nothing has to be waited for
    FSTI_WHO_CALLER,
} fsti_who;
typedef struct fsti_who_facts {
    uint64_t bytes; ///< that are planned to be read
    bool has_budget;
    bool may_wait;     ///< the thread that asks may wait for storage
    bool is_mere_view; ///< of what is cached only pages are made
} fsti_who_facts;
fsti_who fsti_policy_who(const fsti_who_facts *facts);
/// Whether to probe files, or to start threads, would cost more than it saves.
bool fsti_policy_is_small(uint64_t bytes, bool has_budget);

/// Who reads the absent chunks of a file, fastest first.
typedef enum fsti_route {
    FSTI_ROUTE_FAR,     ///< straight to a device; what can't go there takes the file's next route
    FSTI_ROUTE_RING,    ///< io_uring past the page cache
    FSTI_ROUTE_DIRECT,  ///< blocking reads past it
    FSTI_ROUTE_MAPPING, ///< brought into it as views are, and copied from a mapping
    FSTI_ROUTE_CACHE,   ///< reads through it
} fsti_route;

typedef struct fsti_route_facts {
    bool has_direct, has_ring; ///< what was probed
    bool copies_mapping;       ///< the file is mapped, and pages can be copied from there
    bool keeps_cache;
    bool is_small; ///< probing would cost more than it can save: nothing was probed
} fsti_route_facts;
fsti_route fsti_policy_route(const fsti_route_facts *facts);

/// The next route when one has failed: `in_setup` before anything was read by it. A file that is
/// further down already stays there.
fsti_route fsti_policy_demote(fsti_route route, bool in_setup);

/// Whether a file's absent bytes go straight to a device. What does not count is not looked for:
/// `is_cached` and `has_room` where the file `is_known` by an earlier probe.
typedef struct fsti_far_facts {
    fst_gds wish;
    bool is_known, is_good; ///< a probe was there, and what it found
    bool is_cached;         ///< the page cache has the file
    bool has_room;          ///< on the device, to probe with
} fsti_far_facts;
typedef enum fsti_far_way { FSTI_FAR_NO, FSTI_FAR_YES, FSTI_FAR_IF_PROBED } fsti_far_way;
/// *reason: in words, where it is not for what an earlier probe has found.
fsti_far_way fsti_policy_far(const fsti_far_facts *facts, const char **reason);

/// How absent bytes of views come into the page cache.
typedef enum fsti_view_way {
    FSTI_VIEW_BY_READING,    ///< streams of reads, for which the kernel takes pages that grow
    FSTI_VIEW_BY_HUGE_PAGES, ///< in huge pages: later starts map them for next to nothing
    FSTI_VIEW_BY_MAPPING,    ///< as the kernel brings in what a mapping lacks
} fsti_view_way;

/// An extent of a view, in bytes of its file.
typedef struct fsti_view_facts {
    uint64_t begin, end, file_bytes;
    bool is_cached;     ///< the file system has no large pages, and ways of its own
    bool fresh_is_dear; ///< whole huge pages are slow to come by; small ones may lie about in use
} fsti_view_facts;
/// What the kernel brings into the page cache as one, where it may.
#define FSTI_POLICY_HUGE_PAGE_BYTES ((uint64_t)2 << 20)
/// Of what is read by way of huge pages, at most this part may lie beyond the extent.
#define FSTI_POLICY_WASTE_DIVISOR 8u
fsti_view_way fsti_policy_view(const fsti_view_facts *facts);

/// A save's facts. Asked first with both ways past the page cache taken for granted, to see whether
/// they are worth looking for, then with what was found.
typedef struct fsti_save_facts {
    fst_save_engine engine;
    bool is_durable;
    uint64_t file_bytes;
    bool has_direct, has_ring;
} fsti_save_facts;
/// *reason: in words, where the facts alone decide. A way that was asked for and is not there is
/// the caller's to refuse.
fsti_route fsti_policy_save(const fsti_save_facts *facts, const char **reason);

typedef struct fsti_thread_facts {
    uint32_t wanted; ///< 0: by the machine
    uint32_t processor_count;
    size_t chunk_count;
    bool any_ring;     ///< some file is read by a ring
    bool any_blocking; ///< some file is read by calls that block
    bool reads_far;    ///< straight to a device, by calls that block
    bool verifies;     ///< whoever reads digests what came
    bool is_limited;   ///< the address space is, to so much more than buffers will take:
    uint64_t address_bytes;
} fsti_thread_facts;

typedef struct fsti_thread_policy {
    uint32_t thread_count; ///< 0: none fits, and whoever waits works
    uint32_t lane_count;   ///< of them, those that keep a ring of reads in flight
} fsti_thread_policy;
#define FSTI_POLICY_THREADS_MAX 64u
fsti_thread_policy fsti_policy_threads(const fsti_thread_facts *facts);

#endif
