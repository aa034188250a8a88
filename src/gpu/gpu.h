// SPDX-License-Identifier: Apache-2.0
/// The door of the GPU room: devices by their drivers, the ring of locked memory that loads go
/// through, and the kernel that takes chunks apart.
#ifndef FSTI_GPU_H
#define FSTI_GPU_H

#include "memory/memory.h"

// ---- GPUs. Functions that take a device want its context to be current (enter, leave) unless
// ---- they say otherwise; all may be called from any thread.

/// Opens a device, once a process; for FST_DEVICE_PINNED and index -1 the thread's, or one whose
/// context the process has already. NULL for the CPU. Needs no context. Errors: FST_E_UNSUPPORTED,
/// FST_E_ARGUMENT, FST_E_DEVICE.
fst_status fsti_device_get(fst_device wanted, fsti_device **out, fst_error *error);
/// Makes the device the thread's, and gives the thread back what it had: its context or device, and
/// what it may do while graphs are captured.
fst_status fsti_device_enter(const fsti_device *device, fst_error *error);
void fsti_device_leave(const fsti_device *device);
/// The same for who gives something back: nobody comes for it later, so one failure is not the end.
bool fsti_device_enter_once_more(const fsti_device *device);

int32_t fsti_device_count(fst_device_kind kind);
fst_device fsti_device_id(const fsti_device *device);
/// Whether it shares the processors' memory.
bool fsti_device_unified(const fsti_device *device);
/// Whether it does, and its driver locks memory and finds it at the same address: tried with a
/// little, until that works. Needs no context.
bool fsti_device_shares(fsti_device *device);
/// Whether it can take chunks apart and convert; compiles the kernel on the first call.
bool fsti_device_has_kernels(fsti_device *device);
fst_status fsti_device_parse(const char *text, fst_device *out, fst_error *error);
/// *out is zeroed but for struct_size. Needs no context.
fst_status fsti_device_info(fst_device wanted, fst_device_info *out, fst_error *error);

/// Memory of the device. Needs no context; neither does its release, which waits for nothing: a
/// thread of its own gives memory back, when all that still uses it is done.
fst_status fsti_buffer_device(fsti_device *device, uint64_t size_bytes, fsti_buffer **out,
                              fst_error *error);
/// Memory of the processors that is locked, and that the device finds at the same address.
fst_status fsti_buffer_registered(fsti_device *device, uint64_t size_bytes, fsti_buffer **out,
                                  fst_error *error);
/// Waits until what was released has been given back; false when nothing was on its way.
bool fsti_device_settle(void);
/// Copies from the device and waits for it, through a ring. Needs no context.
fst_status fsti_device_copy_out(fsti_device *device, void *target, const void *source,
                                uint64_t size_bytes, fst_error *error);

/// A slot holds a chunk as it lies in the file, up to FSTI_RING_CHUNK_BYTES_MAX and a page, and
/// behind it (at FSTI_RING_SLOT_BYTES) a table of pieces.
#define FSTI_RING_CHUNK_BYTES_MAX ((uint64_t)2 << 20)
#define FSTI_RING_SLOT_BYTES (FSTI_RING_CHUNK_BYTES_MAX + 8192)
#define FSTI_RING_TABLE_BYTES ((uint64_t)57344)
#define FSTI_RING_PIECE_COUNT_MAX ((uint32_t)(FSTI_RING_TABLE_BYTES / sizeof(fsti_piece)))
#define FSTI_RING_SLOT_COUNT_MAX 32u
#define FSTI_RING_COPY_COUNT_MAX 8u

/// What a thread block of the kernel does; the layout is the kernel's (kernels/scatter.cu).
typedef struct fsti_piece {
    uint64_t target; ///< device address
    uint32_t source; ///< place of the first unit in the chunk
    uint32_t units;  ///< of all runs
    uint32_t run_units, stride_bytes;
    uint8_t from, to; ///< fst_dtype; equal: units are moved
    uint8_t from_bytes, to_bytes, unit_elements;
    uint8_t unused[3];
} fsti_piece;

/// What becomes of a slot: copies, or a chunk with its table (in the slot) for the kernel.
typedef struct fsti_ring_parcel {
    struct {
        uint64_t target;
        uint32_t source;
        uint32_t size;
    } copies[FSTI_RING_COPY_COUNT_MAX];
    uint32_t copy_count, piece_count;
    uint64_t chunk_bytes; ///< to be copied for the kernel
} fsti_ring_parcel;

typedef struct fsti_ring fsti_ring;

/// A ring of FSTI_RING_SLOT_COUNT_MAX slots, new or kept; what is not used of it costs nothing.
fst_status fsti_ring_take(fsti_device *device, fsti_ring **out, fst_error *error);
/// Keeps the ring for the next load, or frees it where enough are kept. Nothing may be in flight.
/// NULL is allowed.
void fsti_ring_give(fsti_ring *ring);
/// Frees idle rings; returns the bytes that were locked. Needs no context.
uint64_t fsti_ring_trim(void);
uint64_t fsti_ring_locked_bytes(void);

/// A slot's memory, locked on first use. One thread a slot.
fst_status fsti_ring_slot(fsti_ring *ring, uint32_t index, char **data, fst_error *error);
/// False when some slot could not be locked.
bool fsti_ring_is_locked(const fsti_ring *ring);
/// Nothing is copied from now on before what the caller has queued on `stream` (a driver's handle;
/// 1: the default stream, of both drivers) is done.
fst_status fsti_ring_follow(fsti_ring *ring, uintptr_t stream, fst_error *error);
/// Copies `size` bytes of any memory and waits for them: the slow way, for what the processors
/// have converted. In order with what was sent of the slot.
fst_status fsti_ring_copy(fsti_ring *ring, uint32_t slot_index, uint64_t target, const void *source,
                          uint64_t size, fst_error *error);
/// Makes sure that a chunk of the slot has a place on the device for the kernel; false when its
/// memory is full.
bool fsti_ring_stage(fsti_ring *ring, uint32_t slot_index);
/// Queues what becomes of a slot (pieces: fsti_ring_stage()); parcels of one slot are carried out
/// in order. On failure nothing of it is in flight any more.
fst_status fsti_ring_send(fsti_ring *ring, uint32_t slot_index, const fsti_ring_parcel *parcel,
                          fst_error *error);
/// Copies `size` bytes (at most FSTI_RING_CHUNK_BYTES_MAX) from the device into a slot; they are
/// there when they have arrived.
fst_status fsti_ring_fetch(fsti_ring *ring, uint32_t slot_index, const void *source, uint64_t size,
                           fst_error *error);
/// Whether what was sent or fetched is done.
fst_status fsti_ring_arrived(fsti_ring *ring, uint32_t slot_index, bool wait, bool *arrived,
                             fst_error *error);
/// Waits for all that is in flight.
void fsti_ring_drain(fsti_ring *ring);

#endif
