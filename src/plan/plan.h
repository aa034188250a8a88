// SPDX-License-Identifier: Apache-2.0
/// Interface of the plan module: from headers and a request to ordered reads and offsets in memory.
/// Pure: no system calls and no threads; it only reads headers and the request.
///
/// A plan consists of
///   items     requested tensors or slices, each with an offset in its batch's buffer, or with a
///             destination of the caller;
///   batches   items that share one buffer and are admitted to memory together;
///   extents   ranges of a file that are read in one go; a *linear* extent has the layout of the
///             file in the buffer, the bytes of others are scattered by their segments;
///   segments  the bytes of an extent that belong to one item;
///   chunks    pieces of extents, the units of work, in the order in which they are needed.
///
/// Knows: headers, requests, offsets.
/// Does not know: open files, threads, time; it makes no system calls.
/// Main types: fsti_plan_want, fsti_plan_item, fsti_plan.
#ifndef FSTI_PLAN_H
#define FSTI_PLAN_H

#include "fastsafetensors/loader.h"
#include "format/format.h"
#include "policy.h"

/// The unit of work: large enough to hide scheduling costs, and a multiple of the huge page, so
/// that two threads never share one in a linear extent. Small requests use smaller chunks, so that
/// threads finish together.
#define FSTI_PLAN_CHUNK_BYTES ((uint64_t)8 << 20)
#define FSTI_PLAN_SMALL_CHUNK_BYTES ((uint64_t)2 << 20)
#define FSTI_PLAN_VIEW_CHUNK_BYTES FSTI_POLICY_HUGE_PAGE_BYTES
#define FSTI_PLAN_SMALL_REQUEST_BYTES ((uint64_t)128 << 20)
/// A sparse file can have any size, so the plan is limited. Loads of 16 TiB to memory are refused.
#define FSTI_PLAN_CHUNK_COUNT_MAX ((uint64_t)1 << 21)
/// In a linear extent, file offset and buffer offset are equal modulo this, as direct I/O requires.
#define FSTI_PLAN_PAGE_BYTES 4096u
/// Alignment of tensors that are placed separately.
#define FSTI_PLAN_TENSOR_ALIGNMENT 64u
/// Alignment for devices. Vector loads need 16 bytes also for tensors in linear extents: half of
/// all files start their data at 8 modulo 16, and a scalar shifts the tensors after it.
#define FSTI_PLAN_DEVICE_ALIGNMENT 256u
#define FSTI_PLAN_VECTOR_BYTES 16u

/// A requested tensor, resolved to file and header entry.
typedef struct fsti_plan_want {
    uint32_t file;
    uint32_t tensor;             ///< index in that file's header
    const uint64_t *slice_begin; ///< NULL: the whole tensor
    const uint64_t *slice_end;
    void *destination; ///< NULL: the batch's buffer
    uint64_t destination_bytes;
    fst_dtype dtype;     ///< the tensor's dtype, or one that it is converted to
    size_t tensor_index; ///< the caller's index of the tensor, not used by the plan
} fsti_plan_want;

typedef struct fsti_plan_rules {
    fst_order order;
    uint64_t batch_bytes_max; ///< UINT64_MAX: one batch per file
    fsti_gaps gaps;           ///< smaller than a chunk, so that no chunk is only a gap
    uint64_t chunk_bytes_max; ///< a power of two; 0: no limit
    bool is_view;   ///< chunk boundaries are multiples of their size in the file; chunks grow if
                    ///< there are too many
    bool to_device; ///< kernels load vectors of 16 bytes and expect the alignment of allocators
    /// For verification, reads cover whole pieces of this size in the file: a power of two, at most
    /// 1 MiB. 0: only the needed bytes. Converted elements must not cross piece boundaries.
    uint32_t verify_bytes;
} fsti_plan_rules;

/// A file of a model.
typedef struct fsti_plan_file {
    const fsti_header *header;
    uint64_t size_bytes; ///< needed with verify_bytes
    /// The size of the pieces of a tensor that a derived file decodes as a unit; chunks end at
    /// their boundaries. 0: no pieces.
    uint64_t made_bytes;
} fsti_plan_file;

typedef struct fsti_plan_item {
    uint32_t file, tensor, batch;
    uint32_t chunk_first, chunk_end;     ///< chunks with its bytes: first <= c < end
    uint32_t segment_first, segment_end; ///< range that contains all its segments
    uint64_t size_bytes;                 ///< in memory
    uint64_t source_bytes;               ///< in the file
    uint64_t buffer_offset;              ///< in the batch's buffer; unused with a destination
    void *destination;
    const uint64_t *shape; ///< of the slice, or in the header
    fsti_conversion conversion;
    bool is_converted;
    /// Its file offset if it is one piece; else UINT64_MAX.
    uint64_t file_offset;
} fsti_plan_item;

/// `run_count` runs of `run_bytes` bytes, `stride_bytes` apart in the file and contiguous in the
/// item. All sizes are in bytes of the file; a conversion scales item offsets.
typedef struct fsti_plan_segment {
    uint64_t file_offset; ///< from the first byte of the file
    uint64_t run_bytes;
    uint64_t stride_bytes;
    uint64_t item_offset;
    uint32_t run_count;
    uint32_t item;
} fsti_plan_segment;

static inline uint64_t fsti_plan_segment_end(const fsti_plan_segment *segment) {
    return segment->file_offset + (segment->run_count - 1) * segment->stride_bytes +
           segment->run_bytes;
}

typedef struct fsti_plan_extent {
    uint64_t begin, end;    ///< bytes of the file
    uint64_t wanted_bytes;  ///< bytes shared by two segments count twice
    uint64_t buffer_offset; ///< of `begin`, when linear
    size_t segment_first, segment_count;
    uint32_t file, batch;
    bool linear;
    bool converts; ///< some item is converted: reads must not split its units
} fsti_plan_extent;
/// The largest conversion unit.
#define FSTI_PLAN_UNIT_BYTES_MAX 16u

typedef struct fsti_plan_chunk {
    uint64_t begin, end; ///< bytes of the file
    uint32_t extent;
} fsti_plan_chunk;

typedef struct fsti_plan_batch {
    uint64_t buffer_bytes;
    uint64_t item_bytes;
    size_t delivery_first, delivery_count; ///< in plan->delivery
    uint32_t chunk_first, chunk_end;
} fsti_plan_batch;

typedef struct fsti_plan {
    fsti_plan_item *items; ///< in request order
    size_t item_count;
    uint32_t *delivery; ///< items in delivery order
    fsti_plan_segment *segments;
    size_t segment_count;
    fsti_plan_extent *extents;
    size_t extent_count;
    fsti_plan_chunk *chunks;
    size_t chunk_count;
    fsti_plan_batch *batches;
    size_t batch_count;
    uint64_t *shapes; ///< of slices
    uint64_t bytes_requested;
    uint64_t bytes_planned; ///< bytes covered by extents
    uint64_t chunk_bytes;   ///< size of a full chunk
} fsti_plan;

/// Plans `want_count` tensors over the files' headers. On failure *out is empty. Errors:
/// FST_E_ARGUMENT (slice or destination), FST_E_MISALIGNED_SLICE, FST_E_NO_MEMORY.
fst_status fsti_plan_make(const fsti_plan_file *files, const fsti_plan_want *wants,
                          size_t want_count, const fsti_plan_rules *rules, fsti_plan *out,
                          fst_error *error);
void fsti_plan_clear(fsti_plan *plan);

/// The index of an extent's first segment that ends after the file position `begin`. If all end
/// before it, the index after its last segment.
size_t fsti_plan_first_segment(const fsti_plan *plan, const fsti_plan_extent *extent,
                               uint64_t begin);

/// The address of an item.
static inline char *fsti_plan_item_address(const fsti_plan_item *item, char *batch_buffer) {
    return item->destination != NULL ? (char *)item->destination
                                     : batch_buffer + item->buffer_offset;
}

/// Which tensors of a model a caller selects.
typedef struct fsti_plan_selection {
    const char *const *globs;
    size_t glob_count;
    fst_tensor_predicate predicate;
    void *predicate_context;
} fsti_plan_selection;

bool fsti_plan_selects(const fsti_plan_selection *selection, const fst_tensor_info *info);

#endif
