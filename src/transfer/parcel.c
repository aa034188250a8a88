// SPDX-License-Identifier: Apache-2.0
/// From the parts of a chunk to copies, or to a table for the kernel.
#include "parcel.h"

#include <string.h>

/// A thread block's work: enough to be worth its start, little enough that a chunk feeds a device.
#define PIECE_BYTES ((uint32_t)16 << 10)
/// What the processors convert at a time.
#define BLOCK_BYTES ((uint64_t)256 << 10)

struct parcel_maker {
    fsti_ring *ring;
    uint32_t slot;
    bool has_kernels;
    bool needs_kernel; ///< something that the bus can't do was among the pieces
    char *data;
    fsti_piece *table; ///< in the slot
    fsti_piece open;   ///< the piece that grows; none while its units are 0
    uint32_t closed_count;
    bool was_sent; ///< a full table went ahead: copies would do its pieces once more
    fsti_ring_parcel parcel;
    char *block; ///< for the processors' conversions
    fst_status status;
    fst_error error;
    uint64_t copies, launches;
};

fst_status fsti_parcel_open(fsti_ring *ring, uint32_t slot, char *data, bool has_kernels,
                            parcel_maker **out, fst_error *error) {
    parcel_maker *maker = fsti_alloc_zeroed(1, sizeof *maker);
    if (maker == NULL) return fsti_error_memory(error, sizeof *maker);
    maker->ring = ring;
    maker->slot = slot;
    maker->data = data;
    maker->has_kernels = has_kernels;
    maker->table = (fsti_piece *)(void *)(data + FSTI_RING_SLOT_BYTES);
    *out = maker;
    return FST_OK;
}

void fsti_parcel_filled(parcel_maker *maker, uint64_t size_bytes) {
    maker->parcel.chunk_bytes = size_bytes;
}

static void note(parcel_maker *maker, fst_status status) {
    if (maker->status == FST_OK) maker->status = status;
}

/// Sends the table and waits: its memory is needed for the rest.
static void send_table(parcel_maker *maker) {
    bool arrived;
    if (maker->parcel.piece_count == 0 || maker->status != FST_OK) return;
    maker->launches++;
    fsti_ring_parcel parcel = maker->parcel;
    parcel.copy_count = 0;
    note(maker, fsti_ring_send(maker->ring, maker->slot, &parcel, &maker->error));
    if (maker->status == FST_OK)
        note(maker, fsti_ring_arrived(maker->ring, maker->slot, true, &arrived, &maker->error));
    maker->parcel.piece_count = 0;
    maker->was_sent = true;
}

static void append_piece(parcel_maker *maker, const fsti_piece *piece) {
    if (maker->parcel.piece_count == FSTI_RING_PIECE_COUNT_MAX) send_table(maker);
    maker->table[maker->parcel.piece_count++] = *piece;
}

/// Units of a piece that make a block's work.
static uint32_t block_units(const fsti_piece *piece) {
    uint32_t larger = piece->to_bytes > piece->from_bytes ? piece->to_bytes : piece->from_bytes;
    return PIECE_BYTES / larger;
}

/// Cuts a run for the kernel's blocks.
static void append_run(parcel_maker *maker, fsti_piece run) {
    uint32_t step = block_units(&run), units = run.units;
    for (uint32_t done = 0; done < units; done += step) {
        run.units = run.run_units = (uint32_t)fsti_min(step, units - done);
        append_piece(maker, &run);
        run.target += (uint64_t)step * run.to_bytes;
        run.source += step * run.from_bytes;
    }
}

/// Cuts a piece for the kernel's blocks: long runs within, many short ones between runs.
static void append_pieces(parcel_maker *maker, const fsti_piece *whole) {
    uint32_t run_units = whole->run_units, units = whole->units;
    uint32_t runs = block_units(whole) / run_units;
    if (runs == 0 || run_units == units) runs = 1;
    for (uint32_t done = 0; done < units; done += runs * run_units) {
        fsti_piece piece = *whole;
        piece.units = (uint32_t)fsti_min(runs * run_units, units - done);
        piece.target += (uint64_t)done * whole->to_bytes;
        piece.source += done / run_units * whole->stride_bytes;
        if (runs == 1)
            append_run(maker, piece);
        else
            append_piece(maker, &piece);
    }
}

static bool is_plain(const fsti_piece *piece) {
    return piece->from == piece->to && piece->run_units == piece->units;
}

static void send_copies(parcel_maker *maker) {
    if (maker->parcel.copy_count == 0 || maker->status != FST_OK) return;
    fsti_ring_parcel parcel = maker->parcel;
    parcel.piece_count = 0;
    maker->copies += parcel.copy_count;
    maker->parcel.copy_count = 0;
    note(maker, fsti_ring_send(maker->ring, maker->slot, &parcel, &maker->error));
}

static void append_copy(parcel_maker *maker, const fsti_piece *piece) {
    uint32_t index = maker->parcel.copy_count++;
    maker->parcel.copies[index].target = piece->target;
    maker->parcel.copies[index].source = piece->source;
    maker->parcel.copies[index].size = piece->units * piece->from_bytes;
}

/// Units [first, first + count) of a piece by the processors, packed, into the block.
static void work_by_hand(const parcel_maker *maker, const fsti_piece *piece, uint32_t first,
                         uint32_t count) {
    fsti_conversion conversion =
        fsti_dtype_conversion((fst_dtype)piece->from, (fst_dtype)piece->to);
    for (uint32_t done = 0; done < count;) {
        uint32_t unit = first + done, place = unit % piece->run_units;
        uint32_t units = (uint32_t)fsti_min(piece->run_units - place, count - done);
        const char *source = maker->data + piece->source +
                             (uint64_t)(unit / piece->run_units) * piece->stride_bytes +
                             (uint64_t)place * piece->from_bytes;
        char *target = maker->block + (uint64_t)done * piece->to_bytes;
        if (piece->from == piece->to)
            memcpy(target, source, (size_t)units * piece->from_bytes);
        else
            fsti_dtype_convert(conversion, target, source, units);
        done += units;
    }
}

/// A piece without the device's help.
static void send_by_hand(parcel_maker *maker, const fsti_piece *piece) {
    if (maker->block == NULL) maker->block = fsti_alloc(BLOCK_BYTES);
    if (maker->block == NULL) {
        note(maker, fsti_error_memory(&maker->error, BLOCK_BYTES));
        return;
    }
    uint32_t step = (uint32_t)(BLOCK_BYTES / piece->to_bytes);
    for (uint32_t done = 0; done < piece->units && maker->status == FST_OK; done += step) {
        uint32_t count = (uint32_t)fsti_min(step, piece->units - done);
        work_by_hand(maker, piece, done, count);
        maker->copies++;
        note(maker, fsti_ring_copy(maker->ring, maker->slot,
                                   piece->target + (uint64_t)done * piece->to_bytes, maker->block,
                                   (uint64_t)count * piece->to_bytes, &maker->error));
    }
}

/// The open piece grows no more. With a kernel it is put down both ways until it is clear which
/// way all of them go.
static void close_piece(parcel_maker *maker) {
    const fsti_piece *piece = &maker->open;
    if (piece->units == 0 || maker->status != FST_OK) return;
    maker->closed_count++;
    if (!maker->has_kernels && !is_plain(piece)) {
        send_by_hand(maker, piece);
    } else if (!maker->has_kernels) {
        if (maker->parcel.copy_count == FSTI_RING_COPY_COUNT_MAX) send_copies(maker);
        append_copy(maker, piece);
    } else {
        maker->needs_kernel |= !is_plain(piece) || maker->closed_count > FSTI_RING_COPY_COUNT_MAX;
        if (!maker->needs_kernel) append_copy(maker, piece);
        append_pieces(maker, piece);
    }
    maker->open.units = 0;
}

static fsti_piece make_piece(const parcel_maker *maker, const fsti_plan_item *item,
                             const char *target, const char *source, uint64_t size) {
    fsti_conversion conversion = item->conversion;
    fsti_piece piece = {.target = (uintptr_t)target, .source = (uint32_t)(source - maker->data)};
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

/// Adds a part to the open piece if it goes on with it: as more of the same run, or as the next of
/// equal runs at equal distances.
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

void fsti_parcel_emit(void *context, const fsti_plan_item *item, char *target, const char *source,
                      uint64_t size) {
    parcel_maker *maker = context;
    fsti_piece piece = make_piece(maker, item, target, source, size);
    if (join_piece(&maker->open, &piece)) return;
    close_piece(maker);
    maker->open = piece;
}

fst_status fsti_parcel_close(parcel_maker *maker, worker_counts *counts, fst_error *error) {
    close_piece(maker);
    bool by_kernel = maker->has_kernels && (maker->needs_kernel || maker->was_sent);
    if (by_kernel) {
        maker->parcel.copy_count = 0;
        maker->launches += maker->parcel.piece_count > 0;
    } else {
        maker->parcel.piece_count = 0;
        maker->copies += maker->parcel.copy_count;
    }
    // Also where nothing is left to send: the slot's event is what others wait for.
    if (maker->status == FST_OK)
        note(maker, fsti_ring_send(maker->ring, maker->slot, &maker->parcel, &maker->error));
    fst_status status = maker->status;
    if (status != FST_OK && error != NULL) *error = maker->error;
    counts->device_copies += maker->copies;
    counts->device_launches += maker->launches;
    fsti_free(maker->block);
    fsti_free(maker);
    return status;
}
