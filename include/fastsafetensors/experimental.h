// SPDX-License-Identifier: Apache-2.0
/// What may change or go with any release: knobs for measuring, and for machines that nobody has
/// met yet. fastsafetensors.h does not include this header.
#ifndef FASTSAFETENSORS_EXPERIMENTAL_H
#define FASTSAFETENSORS_EXPERIMENTAL_H

#include "loader.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Where the io_uring engine reads whole pieces of files to.
typedef enum fst_ring {
    FST_RING_AUTO = 0,  ///< measured on the first chunks of a device, kept for the process
    FST_RING_PLACE = 1, ///< straight to their place
    FST_RING_SLOTS = 2, ///< to slots that stay in the processor's cache, and copied from there
} fst_ring;
#define FST_RING_COUNT 3

/// Where pages of our own memory come from on machines of several NUMA nodes.
typedef enum fst_numa {
    FST_NUMA_DEFAULT = 0,    ///< as the process is set up
    FST_NUMA_LOCAL = 1,      ///< from the node of the thread that touches them first
    FST_NUMA_INTERLEAVE = 2, ///< from all nodes in turn
} fst_numa;
#define FST_NUMA_COUNT 3

/// Whether memory is shared by a GPU and the processors.
typedef enum fst_unified {
    FST_UNIFIED_AUTO = 0, ///< as the driver says
    FST_UNIFIED_ON = 1,   ///< tensors lie in locked memory of the processors, which the GPU reads
    FST_UNIFIED_OFF = 2,  ///< tensors lie in memory that the driver allocates for the GPU
} fst_unified;
#define FST_UNIFIED_COUNT 3

/// See fst_load_options.tuning. Everything but struct_size may be zero.
typedef struct fst_load_tuning {
    size_t struct_size; ///< sizeof(fst_load_tuning)
    fst_ring ring;
    fst_numa numa;
    fst_unified unified;
    /// Ranges of one file at most this far apart are read as one. 0: 64 KiB, and behind an address
    /// up to 1 MiB where no more than twice the bytes are read for it. UINT64_MAX: 0.
    uint64_t coalesce_gap_bytes;
    uint64_t staging_bytes; ///< locked memory that loads to a GPU go through; 0: 64 MiB, the most
} fst_load_tuning;

#ifdef __cplusplus
}
#endif

#endif
