// SPDX-License-Identifier: Apache-2.0
/// Settings of a load for measurements and unusual machines, the counters of its statistics as a
/// table, and what this machine supports.
///
///     fst_load_tuning tuning = FST_STRUCT_INIT(fst_load_tuning);
///     tuning.engine = FST_ENGINE_URING;
///     fst_load_options options = FST_STRUCT_INIT(fst_load_options);
///     options.mode = FST_MODE_LOAD;
///     options.tuning = &tuning;
#ifndef FASTSAFETENSORS_LOAD_TUNING_H
#define FASTSAFETENSORS_LOAD_TUNING_H

#include "../loader.h"

#ifdef __cplusplus
extern "C" {
#endif

/// How bytes of local files are read in FST_MODE_LOAD.
typedef enum fst_engine {
    FST_ENGINE_AUTO = 0,   ///< for each chunk: copied from a mapping if cached, else read directly
    FST_ENGINE_PREAD = 1,  ///< threads with buffered pread
    FST_ENGINE_DIRECT = 2, ///< threads with pread that bypass the page cache (O_DIRECT)
    FST_ENGINE_URING = 3,  ///< io_uring that bypasses the page cache (O_DIRECT)
    FST_ENGINE_MMAP = 4,   ///< copies from a mapping
} fst_engine;
#define FST_ENGINE_COUNT 5

/// Whether files are read directly to the memory of a GPU (GPUDirect Storage: cuFile, hipFile).
typedef enum fst_gds {
    FST_GDS_AUTO = 0, ///< if a probe of the file shows real direct transfers
    FST_GDS_OFF = 1,  ///< never
    /// Required: FST_E_UNSUPPORTED, with a message that begins with "gds", if no read can be
    /// direct; a direct read that fails is an error.
    FST_GDS_STRICT = 2,
} fst_gds;
#define FST_GDS_COUNT 3

/// Where the io_uring engine reads ranges of whole blocks to.
typedef enum fst_ring {
    FST_RING_AUTO = 0,  ///< measured with the first chunks of a device, once per process
    FST_RING_PLACE = 1, ///< directly to their destination
    FST_RING_SLOTS = 2, ///< to buffers that stay in the CPU's cache, and copied from there
} fst_ring;
#define FST_RING_COUNT 3

/// Where the library's memory for tensors is allocated on machines with several NUMA nodes.
typedef enum fst_numa {
    FST_NUMA_DEFAULT = 0,    ///< the policy of the process
    FST_NUMA_LOCAL = 1,      ///< the node of the thread that touches a page first
    FST_NUMA_INTERLEAVE = 2, ///< all nodes in turn
} fst_numa;
#define FST_NUMA_COUNT 3

/// Whether a GPU and the CPU share memory.
typedef enum fst_unified {
    FST_UNIFIED_AUTO = 0, ///< what the driver reports
    FST_UNIFIED_ON = 1,   ///< tensors are in pinned memory of the CPU that the GPU reads
    FST_UNIFIED_OFF = 2,  ///< tensors are in memory that the driver allocates for the GPU
} fst_unified;
#define FST_UNIFIED_COUNT 3

/// See fst_load_options.tuning. All fields except struct_size may be zero.
typedef struct fst_load_tuning {
    size_t struct_size; ///< sizeof(fst_load_tuning)
    fst_engine engine;
    fst_gds gds;
    fst_ring ring;
    fst_numa numa;
    fst_unified unified;
    /// 1: FST_MODE_MAP maps pages that are in the page cache ahead of use, in threads, and
    /// fst_loader_wait() waits for that. 0: see FST_MODE_MAP.
    int map_populate;
    /// 1: never install the SIGBUS handler that turns a file that shrinks under a mapping into an
    /// error; cached chunks are read with pread instead of copied from a mapping.
    int keep_sigbus_handler;
    /// Ranges of one file that are at most this far apart are read as one. 0: 64 KiB, and for URLs
    /// up to 1 MiB unless more than twice the bytes would be read. UINT64_MAX: never.
    uint64_t coalesce_gap_bytes;
    uint64_t staging_bytes; ///< the most pinned memory of a load to a GPU; 0: 64 MiB
} fst_load_tuning;

/// One counter of fst_load_stats.
typedef struct fst_load_counter {
    const char *name; ///< the name of its field
    size_t offset;    ///< of the field, a uint64_t, in fst_load_stats
} fst_load_counter;

/// Returns all 64-bit counters of fst_load_stats in the order of the struct, and sets *count.
FST_API const fst_load_counter *fst_load_counters(size_t *count);

/// An I/O method, or a GPU driver, and whether it works here.
typedef struct fst_engine_info {
    size_t struct_size; ///< sizeof(fst_engine_info)
    const char *name;   ///< a constant
    int usable;
    int chosen;       ///< 1: a load of `path` uses it by default
    char reason[192]; ///< in words
} fst_engine_info;

/// Probes the I/O engines, the GPU drivers and GPUDirect Storage for `path`, a model or any file;
/// NULL: for the machine. Fills at most `capacity` entries, all with the struct_size of the first,
/// and sets *count to the number that there are. Opens the first GPU of each driver.
FST_API FST_NODISCARD fst_status fst_engines_probe(const char *path, fst_engine_info *infos,
                                                   size_t capacity, size_t *count,
                                                   fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
