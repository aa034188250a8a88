// SPDX-License-Identifier: Apache-2.0
/// The policy of loads and saves: request and facts in, decisions with reasons out. Pure, so each
/// decision is a row in a table of the tests. It is called again when a route fails.
#ifndef FSTI_POLICY_H
#define FSTI_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "fastsafetensors/experimental/load_tuning.h"
#include "fastsafetensors/writer.h"

/// Gaps between two requested ranges that are read over instead of starting another read: up to
/// `any_bytes` always; up to `most_bytes` while the read stays below FSTI_GAPS_READ_MAX times the
/// requested bytes.
typedef struct fsti_gaps {
    uint64_t any_bytes, most_bytes;
} fsti_gaps;
#define FSTI_GAPS_READ_MAX 2u

/// Everything known about a load before planning.
typedef struct fsti_load_facts {
    // The request:
    fst_load_mode mode;
    fst_cache cache;
    fst_engine engine;
    bool to_device;   ///< tensors are on a device, or in memory pinned by its driver
    bool has_device;  ///< the library itself uses the device's driver
    bool pins_memory; ///< pinned CPU memory
    bool has_destinations, converts, has_allocator, in_order;
    uint64_t budget_bytes; ///< the budget for buffers; 0: unlimited
    uint64_t gap_bytes;    ///< see fst_load_tuning.coalesce_gap_bytes
    // The facts:
    bool view_refused;         ///< the system cannot map the files
    bool verifies;             ///< bytes are verified against digests
    bool is_remote;            ///< some files are remote
    bool lacks_cache;          ///< no file is read through the page cache
    uint64_t bytes;            ///< requested bytes, in the files
    uint64_t loaded_bytes;     ///< the same bytes, in memory after conversion
    uint64_t unmappable_bytes; ///< requested bytes that cannot be memory-mapped
    uint64_t scattered_bytes;  ///< requested bytes in slices of many pieces
    uint64_t spanned_bytes;    ///< of their tensors, because the bytes between are read, too
    uint64_t model_bytes;      ///< all bytes of the files involved
    uint64_t available_bytes;  ///< available memory; UINT64_MAX: no known limit
} fsti_load_facts;

/// The memory of a load: CPU or device, allocated by the library or by the caller.
typedef enum fsti_memory_kind {
    FSTI_MEMORY_CALLERS,
    FSTI_MEMORY_PINNED, ///< CPU memory, page-locked by a device's driver
    FSTI_MEMORY_DEVICE,
    FSTI_MEMORY_ARENA,
} fsti_memory_kind;

/// The decisions for a load, common to all its files.
typedef struct fsti_load_policy {
    fst_load_mode mode;      ///< LOAD or MAP
    bool keeps_cache;        ///< absent bytes are read into the page cache and stay there
    bool must_keep_cache;    ///< the request says so
    bool clears_cache;       ///< bytes that must go through the page cache are dropped from it
    fsti_memory_kind memory; ///< for views: memory of items that cannot be mapped
    /// Maximum size of a batch, whose tensors share a buffer; a larger item has its own batch.
    /// UINT64_MAX: one batch per file.
    uint64_t batch_bytes_max;
    fsti_gaps gaps;
    char reason[200]; ///< for mode and cache
} fsti_load_policy;
void fsti_policy_choose(const fsti_load_facts *facts, fsti_load_policy *out);

/// The calling thread does loads up to this size, through the page cache, because starting threads
/// and probing files would cost more than they save.
#define FSTI_POLICY_CALLER_BYTES ((uint64_t)1 << 20)
/// Requests up to this size fit every machine, so free memory is not queried.
#define FSTI_POLICY_SMALL_BYTES ((uint64_t)32 << 20)

/// Which threads do the work of a load.
typedef enum fsti_executor {
    FSTI_EXECUTOR_THREADS,
    FSTI_EXECUTOR_CALLER_IF_CACHED, ///< the calling thread, if it does not have to wait
    FSTI_EXECUTOR_CALLER,
} fsti_executor;
typedef struct fsti_executor_facts {
    uint64_t bytes; ///< bytes planned to be read
    /// Of cached bytes, those that are touched: only those of the tensors if they are copied from a
    /// mapping, else all that are planned.
    uint64_t touched_bytes;
    bool has_budget;
    bool may_wait;     ///< the calling thread may wait for storage
    bool is_view_only; ///< cached views: only page tables are filled
} fsti_executor_facts;
fsti_executor fsti_policy_executor(const fsti_executor_facts *facts);
/// Whether probing files and starting threads would cost more than it saves.
bool fsti_policy_is_small(uint64_t bytes, bool has_budget);

/// How absent chunks of a file are read, fastest first.
typedef enum fsti_route {
    FSTI_ROUTE_GDS,     ///< GPUDirect; chunks that cannot use it take the file's next route
    FSTI_ROUTE_RING,    ///< io_uring with direct I/O
    FSTI_ROUTE_DIRECT,  ///< blocking direct reads
    FSTI_ROUTE_MAPPING, ///< read into the page cache and copied from a mapping
    FSTI_ROUTE_CACHE,   ///< buffered reads
} fsti_route;

typedef struct fsti_route_facts {
    bool has_direct, has_ring; ///< probe results
    bool copies_mapping;       ///< the file is mapped and can be copied from
    bool keeps_cache;
    bool is_small; ///< not probed, because probing would cost more than it saves
} fsti_route_facts;
fsti_route fsti_policy_route(const fsti_route_facts *facts);

/// The next route after a failure. `in_setup`: it failed before reading anything. A file that is
/// already on a later route stays there.
fsti_route fsti_policy_demote(fsti_route route, bool in_setup);

/// Whether absent bytes of a file are read by GPUDirect. Facts that do not matter are not gathered:
/// `is_cached` and `has_space` if the file `is_known` from an earlier probe.
typedef struct fsti_gds_facts {
    fst_gds requested;
    bool is_known, is_good; ///< was probed, and the result
    bool is_cached;         ///< the file is in the page cache
    bool has_space;         ///< there is device memory for a probe
} fsti_gds_facts;
typedef enum fsti_gds_decision { FSTI_GDS_NO, FSTI_GDS_YES, FSTI_GDS_IF_PROBED } fsti_gds_decision;
/// *reason: text, unless an earlier probe decided.
fsti_gds_decision fsti_policy_gds(const fsti_gds_facts *facts, const char **reason);

/// The size of a huge page in the page cache.
#define FSTI_POLICY_HUGE_PAGE_BYTES ((uint64_t)2 << 20)

/// Facts of a save. The policy is called first assuming that direct I/O and io_uring work, to
/// decide whether to probe them, and then with the probe results.
typedef struct fsti_save_facts {
    fst_save_engine engine;
    bool is_durable;
    uint64_t file_bytes;
    bool has_direct, has_ring;
} fsti_save_facts;
/// *reason: text, if the facts alone decide. If a forced engine is unavailable, the caller refuses
/// the save.
fsti_route fsti_policy_save(const fsti_save_facts *facts, const char **reason);

typedef struct fsti_thread_facts {
    uint32_t wanted; ///< 0: chosen from the machine
    uint32_t processor_count;
    size_t chunk_count;
    bool any_async;    ///< some file is read asynchronously (io_uring, HTTP)
    bool any_blocking; ///< some file is read by blocking calls
    bool any_distant;  ///< a read of some file may wait long, see fsti_file_is_distant()
    bool to_device;    ///< the bus to a device is the limit, not the threads
    bool reads_by_gds; ///< GPUDirect, which blocks
    bool verifies;     ///< the reading thread digests the bytes
    bool is_limited;   ///< address space is limited, and buffers leave this much:
    uint64_t address_bytes;
} fsti_thread_facts;

typedef struct fsti_thread_policy {
    uint32_t thread_count; ///< 0: no thread fits, so the waiting thread does the work
    uint32_t lane_count;   ///< threads among them that keep an io_uring busy
} fsti_thread_policy;
#define FSTI_POLICY_THREADS_MAX 64u
fsti_thread_policy fsti_policy_threads(const fsti_thread_facts *facts);

#endif
