// SPDX-License-Identifier: Apache-2.0
/// The door of the plan room: from headers and a request to ordered reads and places in memory.
/// Pure: no system calls, no threads, no pointers followed but headers and the request itself.
///
/// A plan is made of
///   items     tensors (or slices) asked for, each with a place in its batch's buffer or a
///             destination of the caller's;
///   batches   items that share one buffer and are admitted to memory together;
///   extents   ranges of a file that are read as one; a *linear* extent lies in the buffer as it
///             lies in the file, the bytes of any other are scattered by its segments;
///   segments  which bytes of an extent belong to which item;
///   chunks    pieces of extents, the units of work, in the order in which they are wanted.
#ifndef FSTI_PLAN_H
#define FSTI_PLAN_H

#include "fastsafetensors/loader.h"
#include "format/format.h"
#include "policy.h"

/// Unit of work: large enough to hide the cost of handing it out, a multiple of the huge page so
/// that two threads never share one in a linear extent. Small requests are cut finer, so that the
/// threads end together.
#define FSTI_PLAN_CHUNK_BYTES ((uint64_t)8 << 20)
#define FSTI_PLAN_SMALL_CHUNK_BYTES ((uint64_t)2 << 20)
#define FSTI_PLAN_VIEW_CHUNK_BYTES FSTI_POLICY_HUGE_PAGE_BYTES
#define FSTI_PLAN_SMALL_REQUEST_BYTES ((uint64_t)128 << 20)
/// A file of holes may have any size: its plan must not. 16 TiB to memory are refused.
#define FSTI_PLAN_CHUNK_COUNT_MAX ((uint64_t)1 << 21)
/// File offset and buffer offset of a linear extent agree modulo this (direct I/O wants it).
#define FSTI_PLAN_PAGE_BYTES 4096u
/// Alignment of tensors that are placed one by one.
#define FSTI_PLAN_TENSOR_ALIGNMENT 64u
/// The same for devices, and what is asked of a tensor that lies there as it lies in the file: half
/// of all files begin their data at 8 modulo 16, and one scalar shifts all that follows it.
#define FSTI_PLAN_DEVICE_ALIGNMENT 256u
#define FSTI_PLAN_VECTOR_BYTES 16u

/// A tensor asked for, resolved to file and header entry.
typedef struct fsti_plan_want {
    uint32_t file;
    uint32_t tensor;             ///< in that file's header
    const uint64_t *slice_begin; ///< NULL: whole
    const uint64_t *slice_end;
    void *destination; ///< NULL: the batch's buffer
    uint64_t destination_bytes;
    fst_dtype dtype;     ///< what its elements become: the tensor's own, or one it converts to
    size_t tensor_index; ///< the asker's own number of the tensor; the plan does not look at it
} fsti_plan_want;

typedef struct fsti_plan_rules {
    fst_order order;
    uint64_t batch_bytes_max; ///< UINT64_MAX: a batch a file
    fsti_gaps gaps;           ///< less than a chunk counts: no chunk is a gap alone
    uint64_t chunk_bytes_max; ///< a power of two; 0: no limit
    bool is_view;   ///< chunks lie at multiples of their size in the file, and grow when too many
    bool to_device; ///< kernels read vectors of 16 bytes, and expect what allocators align
    /// What is read is whole pieces of this size of the file, for whoever checks them: a power of
    /// two, at most 1 MiB; 0: only what is needed. Elements that are converted must not lie across
    /// their borders.
    uint32_t verify_bytes;
    const uint64_t *file_bytes; ///< by file, its size; needed with verify_bytes
    /// By file, the bytes of a tensor, from its first on, that are made at once, so that who wants
    /// some of them pays for all: chunks end where these do. 0: any number; NULL: in all files.
    const uint64_t *made_bytes;
} fsti_plan_rules;

typedef struct fsti_plan_item {
    uint32_t file, tensor, batch;
    uint32_t chunk_first, chunk_end;     ///< chunks that hold its bytes: first <= c < end
    uint32_t segment_first, segment_end; ///< all of its segments are among these
    uint64_t size_bytes;                 ///< as it comes to memory
    uint64_t source_bytes;               ///< as it lies in the file
    uint64_t buffer_offset;              ///< in the batch's buffer; unused with a destination
    void *destination;
    const uint64_t *shape; ///< of the slice, or the header's
    fsti_conversion conversion;
    bool is_converted;
    /// Where its bytes lie in the file when they are one piece; UINT64_MAX when they are not.
    uint64_t file_offset;
} fsti_plan_item;

/// `run_count` runs of `run_bytes` bytes, `stride_bytes` apart in the file and packed in the item.
/// All of it in bytes of the file; a conversion scales places by its units.
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
    uint64_t wanted_bytes;  ///< of them; what two segments share counts for each
    uint64_t buffer_offset; ///< of `begin`, when linear
    size_t segment_first, segment_count;
    uint32_t file, batch;
    bool linear;
    bool converts; ///< some item is converted: its units must not be cut by the ends of reads
} fsti_plan_extent;
/// No unit of a conversion is larger than this.
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
    fsti_plan_item *items; ///< as wanted
    size_t item_count;
    uint32_t *delivery; ///< items in the order in which they are handed out
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
    uint64_t bytes_planned; ///< bytes that the extents cover
    uint64_t chunk_bytes;   ///< the size of a whole chunk
} fsti_plan;

/// Plans `want_count` wants over the files' headers. On failure *out is empty. Errors:
/// FST_E_ARGUMENT (slice or destination), FST_E_MISALIGNED_SLICE, FST_E_NO_MEMORY.
fst_status fsti_plan_make(const fsti_header *const *headers, const fsti_plan_want *wants,
                          size_t want_count, const fsti_plan_rules *rules, fsti_plan *out,
                          fst_error *error);
void fsti_plan_clear(fsti_plan *plan);

/// Where the bytes of a segment's item begin.
static inline char *fsti_plan_item_address(const fsti_plan_item *item, char *batch_buffer) {
    return item->destination != NULL ? (char *)item->destination
                                     : batch_buffer + item->buffer_offset;
}

/// What a caller keeps of a model.
typedef struct fsti_plan_selection {
    const char *const *globs;
    size_t glob_count;
    fst_tensor_predicate predicate;
    void *predicate_context;
} fsti_plan_selection;

bool fsti_plan_selects(const fsti_plan_selection *selection, const fst_tensor_info *info);

#endif
