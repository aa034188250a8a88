// SPDX-License-Identifier: Apache-2.0
/// Turns the parts of a chunk into a list of copies, or a table for the kernel.
///
/// Invariant: until it is known whether the kernel is needed, each piece is recorded both as a copy
/// and in the table. The first piece that plain copies cannot do (a conversion, or one too many)
/// switches to the table for all pieces.
#include "copy_list.h"

#include <assert.h>
#include <string.h>

/// Work of one thread block: enough to justify its start, small enough that a chunk occupies the
/// device.
#define PIECE_BYTES ((uint32_t)16 << 10)
/// How much the CPU converts at a time.
#define BLOCK_BYTES ((uint64_t)256 << 10)

struct copy_list_builder {
    fsti_staging_ring *ring;
    uint32_t slot;
    bool has_kernels;
    bool needs_kernel; ///< some piece needs the kernel: a conversion, or too many pieces for copies
    char *data;
    fsti_piece *table;               ///< located in the slot
    fsti_piece open;                 ///< the piece being extended; units 0: no piece
    const fsti_plan_item *open_item; ///< of the open piece's last part
    uint32_t closed_count;
    bool was_sent; ///< a full table was sent, so its pieces must not also be copied
    fsti_copy_list list;
    char *block; ///< for conversions on the CPU
    fst_status status;
    fst_error error;
    uint64_t copies, launches;
};

fst_status fsti_copy_list_open(fsti_staging_ring *ring, uint32_t slot, char *data, bool has_kernels,
                               copy_list_builder **out, fst_error *error) {
    copy_list_builder *builder = fsti_alloc_zeroed(1, sizeof *builder);
    if (builder == NULL) return fsti_error_memory(error, sizeof *builder);
    builder->ring = ring;
    builder->slot = slot;
    builder->data = data;
    builder->has_kernels = has_kernels;
    *out = builder;
    return FST_OK;
}

void fsti_copy_list_set_size(copy_list_builder *builder, uint64_t size_bytes) {
    assert(fsti_staging_table(size_bytes) <= FSTI_STAGING_SLOT_BYTES);
    builder->list.chunk_bytes = size_bytes;
    builder->table = (fsti_piece *)(void *)(builder->data + fsti_staging_table(size_bytes));
}

static void record_status(copy_list_builder *builder, fst_status status) {
    if (builder->status == FST_OK) builder->status = status;
}

/// Sends the table and waits, because its memory is needed for more pieces.
static void send_table(copy_list_builder *builder) {
    bool arrived;
    if (builder->list.piece_count == 0 || builder->status != FST_OK) return;
    builder->launches++;
    fsti_copy_list list = builder->list;
    list.copy_count = 0;
    record_status(builder, fsti_staging_send(builder->ring, builder->slot, &list, &builder->error));
    if (builder->status == FST_OK)
        record_status(builder, fsti_staging_arrived(builder->ring, builder->slot, true, &arrived,
                                                    &builder->error));
    builder->list.piece_count = 0;
    builder->was_sent = true;
}

static void append_piece(copy_list_builder *builder, const fsti_piece *piece) {
    if (builder->list.piece_count == FSTI_STAGING_PIECE_COUNT_MAX) send_table(builder);
    builder->table[builder->list.piece_count++] = *piece;
}

/// Units of a piece for one thread block.
static uint32_t block_units(const fsti_piece *piece) {
    uint32_t larger = piece->to_bytes > piece->from_bytes ? piece->to_bytes : piece->from_bytes;
    return PIECE_BYTES / larger;
}

/// Splits a run into work for thread blocks.
static void append_run(copy_list_builder *builder, fsti_piece run) {
    uint32_t step = block_units(&run), units = run.units;
    for (uint32_t done = 0; done < units; done += step) {
        run.units = run.run_units = (uint32_t)fsti_min(step, units - done);
        append_piece(builder, &run);
        run.target += (uint64_t)step * run.to_bytes;
        run.source += step * run.from_bytes;
    }
}

/// Splits a piece into work for thread blocks: long runs inside, many short runs between them.
static void append_pieces(copy_list_builder *builder, const fsti_piece *whole) {
    uint32_t run_units = whole->run_units, units = whole->units;
    uint32_t runs = block_units(whole) / run_units;
    if (runs == 0 || run_units == units) runs = 1;
    for (uint32_t done = 0; done < units; done += runs * run_units) {
        fsti_piece piece = *whole;
        piece.units = (uint32_t)fsti_min(runs * run_units, units - done);
        piece.target += (uint64_t)done * whole->to_bytes;
        piece.source += done / run_units * whole->stride_bytes;
        if (runs == 1)
            append_run(builder, piece);
        else
            append_piece(builder, &piece);
    }
}

static bool is_plain(const fsti_piece *piece) {
    return piece->from == piece->to && piece->run_units == piece->units;
}

static void send_copies(copy_list_builder *builder) {
    if (builder->list.copy_count == 0 || builder->status != FST_OK) return;
    fsti_copy_list list = builder->list;
    list.piece_count = 0;
    builder->copies += list.copy_count;
    builder->list.copy_count = 0;
    record_status(builder, fsti_staging_send(builder->ring, builder->slot, &list, &builder->error));
}

static void append_copy(copy_list_builder *builder, const fsti_piece *piece) {
    uint32_t index = builder->list.copy_count++;
    builder->list.copies[index].target = piece->target;
    builder->list.copies[index].source = piece->source;
    builder->list.copies[index].size = piece->units * piece->from_bytes;
}

/// Converts units [first, first + count) of a piece on the CPU into the block, packed.
static void convert_by_cpu(const copy_list_builder *builder, const fsti_piece *piece,
                           uint32_t first, uint32_t count) {
    fsti_conversion conversion =
        fsti_dtype_conversion((fst_dtype)piece->from, (fst_dtype)piece->to);
    for (uint32_t done = 0; done < count;) {
        uint32_t unit = first + done, run_offset = unit % piece->run_units;
        uint32_t units = (uint32_t)fsti_min(piece->run_units - run_offset, count - done);
        const char *source = builder->data + piece->source +
                             (uint64_t)(unit / piece->run_units) * piece->stride_bytes +
                             (uint64_t)run_offset * piece->from_bytes;
        char *target = builder->block + (uint64_t)done * piece->to_bytes;
        if (piece->from == piece->to)
            memcpy(target, source, (size_t)units * piece->from_bytes);
        else
            fsti_dtype_convert(conversion, target, source, units);
        done += units;
    }
}

/// Copies a piece without the kernel.
static void send_by_cpu(copy_list_builder *builder, const fsti_piece *piece) {
    if (builder->block == NULL) builder->block = fsti_alloc(BLOCK_BYTES);
    if (builder->block == NULL) {
        record_status(builder, fsti_error_memory(&builder->error, BLOCK_BYTES));
        return;
    }
    uint32_t step = (uint32_t)(BLOCK_BYTES / piece->to_bytes);
    for (uint32_t done = 0; done < piece->units && builder->status == FST_OK; done += step) {
        uint32_t count = (uint32_t)fsti_min(step, piece->units - done);
        convert_by_cpu(builder, piece, done, count);
        builder->copies++;
        record_status(builder, fsti_staging_copy(builder->ring, builder->slot,
                                                 piece->target + (uint64_t)done * piece->to_bytes,
                                                 builder->block, (uint64_t)count * piece->to_bytes,
                                                 &builder->error));
    }
}

/// Closes the open piece. With a kernel it is recorded both as a copy and in the table until it is
/// clear which of them is used.
static void close_piece(copy_list_builder *builder) {
    const fsti_piece *piece = &builder->open;
    if (piece->units == 0 || builder->status != FST_OK) return;
    builder->closed_count++;
    if (!builder->has_kernels && !is_plain(piece)) {
        send_by_cpu(builder, piece);
    } else if (!builder->has_kernels) {
        if (builder->list.copy_count == FSTI_STAGING_COPY_COUNT_MAX) send_copies(builder);
        append_copy(builder, piece);
    } else {
        builder->needs_kernel |=
            !is_plain(piece) || builder->closed_count > FSTI_STAGING_COPY_COUNT_MAX;
        if (!builder->needs_kernel) append_copy(builder, piece);
        append_pieces(builder, piece);
    }
    builder->open.units = 0;
}

static fsti_piece make_piece(const copy_list_builder *builder, const fsti_plan_item *item,
                             const char *target, const char *source, uint64_t size) {
    fsti_conversion conversion = item->conversion;
    fsti_piece piece = {.target = (uintptr_t)target, .source = (uint32_t)(source - builder->data)};
    if (item->is_converted) {
        piece.from = conversion.from;
        piece.to = conversion.to;
        piece.from_bytes = conversion.from_bytes;
        piece.to_bytes = conversion.to_bytes;
        piece.unit_elements = conversion.unit_elements;
    } else {
        piece.from_bytes = piece.to_bytes = piece.unit_elements = 1;
    }
    piece.units = piece.run_units = (uint32_t)(size / piece.from_bytes);
    return piece;
}

/// Extends the open piece by a part, if it continues the same run or is the next of equal runs at
/// equal distances.
static bool join_piece(fsti_piece *open, const fsti_piece *next) {
    bool same = open->units > 0 && open->from == next->from && open->to == next->to &&
                next->target == open->target + (uint64_t)open->units * open->to_bytes;
    if (!same || next->source <= open->source) return false;
    bool is_run = open->run_units == open->units;
    uint32_t distance = next->source - open->source;
    if (is_run && distance == open->units * open->from_bytes) {
        open->units += next->units;
        open->run_units = open->units;
        return true;
    }
    if (next->units != open->run_units) return false;
    if (is_run)
        open->stride_bytes = distance;
    else if (distance != open->units / open->run_units * open->stride_bytes)
        return false;
    open->units += next->units;
    return true;
}

/// Whether two tensors certainly lie in one allocation. A caller's tensors may be neighbours in
/// different allocations, and drivers refuse a copy across two of them.
static bool share_allocation(const fsti_plan_item *one, const fsti_plan_item *other) {
    return one == other || (one != NULL && one->destination == NULL && other->destination == NULL);
}

void fsti_copy_list_add(void *context, const fsti_plan_item *item, char *target, const char *source,
                        uint64_t size) {
    copy_list_builder *builder = context;
    fsti_piece piece = make_piece(builder, item, target, source, size);
    bool may_join = share_allocation(builder->open_item, item);
    builder->open_item = item;
    if (may_join && join_piece(&builder->open, &piece)) return;
    close_piece(builder);
    builder->open = piece;
}

fst_status fsti_copy_list_close(copy_list_builder *builder, worker_counts *counts,
                                fst_error *error) {
    close_piece(builder);
    bool by_kernel = builder->has_kernels && (builder->needs_kernel || builder->was_sent);
    if (by_kernel) {
        builder->list.copy_count = 0;
        builder->launches += builder->list.piece_count > 0;
    } else {
        builder->list.piece_count = 0;
        builder->copies += builder->list.copy_count;
    }
    // Send also an empty list, because waiters need the slot's event.
    if (builder->status == FST_OK)
        record_status(builder, fsti_staging_send(builder->ring, builder->slot, &builder->list,
                                                 &builder->error));
    fst_status status = builder->status;
    if (status != FST_OK && error != NULL) *error = builder->error;
    counts->device_copies += builder->copies;
    counts->device_launches += builder->launches;
    fsti_free(builder->block);
    fsti_free(builder);
    return status;
}
