// SPDX-License-Identifier: Apache-2.0
/// Interface of the GPU module: devices, the ring of pinned staging buffers that loads use, and the
/// kernel that scatters chunks.
///
/// Knows: drivers, devices, staging buffers, copies.
/// Does not know: files, tensors.
/// Main types: fsti_staging_ring, fsti_copy_list.
#ifndef FSTI_GPU_H
#define FSTI_GPU_H

#include "memory/memory.h"

// ---- GPUs. Functions that take a device require its context to be current (enter, leave) unless
//
// ---- noted otherwise. All are thread-safe.

/// Opens a device, once per process. FST_DEVICE_PINNED and index -1 mean the thread's current
/// device, or one that the process has a context for. *out is NULL for the CPU. Needs no context.
/// Errors: FST_E_UNSUPPORTED, FST_E_ARGUMENT, FST_E_DEVICE.
fst_status fsti_device_get(fst_device wanted, fsti_device **out, fst_error *error);
/// Makes the device current on this thread. fsti_device_leave() restores the thread's previous
/// context or device and its graph capture mode.
fst_status fsti_device_enter(const fsti_device *device, fst_error *error);
void fsti_device_leave(const fsti_device *device);
/// The same for releasing memory, which is not repeated later: tries twice.
bool fsti_device_enter_again(const fsti_device *device);

int32_t fsti_device_count(fst_device_kind kind);
fst_device fsti_device_id(const fsti_device *device);
/// Whether it shares memory with the CPU.
bool fsti_device_unified(const fsti_device *device);
/// Whether it shares memory with the CPU and maps pinned memory at the same address. Tests this
/// with a small buffer until it succeeds once. Needs no context.
bool fsti_device_shares(fsti_device *device);
/// Whether it can scatter chunks and convert elements. Compiles the kernel on the first call.
bool fsti_device_has_kernels(fsti_device *device);
fst_status fsti_device_parse(const char *text, fst_device *out, fst_error *error);
/// *out is zeroed except for struct_size. Needs no context.
fst_status fsti_device_info(fst_device wanted, fst_device_info *out, fst_error *error);

/// Allocates device memory. Needs no context. Releasing it needs none either and does not block: a
/// separate thread frees the memory when the device has finished using it.
fst_status fsti_buffer_device(fsti_device *device, uint64_t size_bytes, fsti_buffer **out,
                              fst_error *error);
/// The error of an allocator of the caller that has no memory on a device: FST_E_NO_MEMORY.
fst_status fsti_device_full(fsti_device *device, uint64_t size_bytes, fst_error *error);
/// Pinned CPU memory that the device maps at the same address.
fst_status fsti_buffer_registered(fsti_device *device, uint64_t size_bytes, fsti_buffer **out,
                                  fst_error *error);
/// Waits until released memory has been freed. False if nothing was pending.
bool fsti_device_wait_released(void);
/// Copies from the device through a staging ring, and waits. Memory that the CPU shares is copied
/// by the CPU. Needs no context.
fst_status fsti_device_copy_out(fsti_device *device, void *target, const void *source,
                                uint64_t size_bytes, fst_error *error);

/// A staging buffer (slot) holds a chunk with the layout of the file, up to
/// FSTI_STAGING_CHUNK_BYTES_MAX and two pages, followed at fsti_staging_table() by a table of
/// pieces, so that one copy has both.
#define FSTI_STAGING_CHUNK_BYTES_MAX ((uint64_t)2 << 20)
#define FSTI_STAGING_SLOT_BYTES (FSTI_STAGING_CHUNK_BYTES_MAX + 8192)
#define FSTI_STAGING_TABLE_BYTES ((uint64_t)57344)
#define FSTI_STAGING_PIECE_COUNT_MAX ((uint32_t)(FSTI_STAGING_TABLE_BYTES / sizeof(fsti_piece)))
#define FSTI_STAGING_SLOT_COUNT_MAX 32u
#define FSTI_STAGING_COPY_COUNT_MAX 8u

/// The work of one thread block of the kernel. The layout must match kernels/scatter.cu.
typedef struct fsti_piece {
    uint64_t target; ///< device address
    uint32_t source; ///< first unit, as an offset in the chunk
    uint32_t units;  ///< in all runs
    uint32_t run_units, stride_bytes;
    uint8_t from, to; ///< fst_dtype; equal: units are copied
    uint8_t from_bytes, to_bytes, unit_elements;
    uint8_t unused[3];
} fsti_piece;

/// What to do with a slot: separate copies, or one chunk with its table for the kernel.
typedef struct fsti_copy_list {
    struct {
        uint64_t target;
        uint32_t source;
        uint32_t size;
    } copies[FSTI_STAGING_COPY_COUNT_MAX];
    uint32_t copy_count, piece_count;
    uint64_t chunk_bytes; ///< bytes to copy for the kernel
} fsti_copy_list;

/// The offset of the table in a slot.
static inline uint64_t fsti_staging_table(uint64_t chunk_bytes) {
    return fsti_align_up(chunk_bytes, 64);
}

typedef struct fsti_staging_ring fsti_staging_ring;

/// Returns a cached or new ring of FSTI_STAGING_SLOT_COUNT_MAX slots. Unused slots take no memory.
fst_status fsti_staging_acquire(fsti_device *device, fsti_staging_ring **out, fst_error *error);
/// Caches the ring for the next load, or frees it if enough are cached. No copy may be in flight.
/// NULL is allowed.
void fsti_staging_release(fsti_staging_ring *ring);
/// Frees idle rings. Returns the number of bytes that were pinned. Needs no context.
uint64_t fsti_staging_trim(void);
uint64_t fsti_staging_pinned_bytes(void);

/// The memory of a slot, pinned on first use. A slot may be used by one thread at a time.
fst_status fsti_staging_slot(fsti_staging_ring *ring, uint32_t index, char **data,
                             fst_error *error);
/// False if a slot could not be pinned.
bool fsti_staging_is_pinned(const fsti_staging_ring *ring);
/// Makes later copies wait for the work that the caller has queued on `stream` (a driver handle; 1
/// is the default stream of both drivers).
fst_status fsti_staging_follow(fsti_staging_ring *ring, uintptr_t stream, fst_error *error);
/// Copies `size` bytes from pageable memory and waits. Slow; used for elements that the CPU has
/// converted. Ordered after earlier copies of the slot.
fst_status fsti_staging_copy(fsti_staging_ring *ring, uint32_t slot_index, uint64_t target,
                             const void *source, uint64_t size, fst_error *error);
/// Ensures that device memory for the slot's chunk exists, which the kernel needs. False if the
/// device memory is full.
bool fsti_staging_stage(fsti_staging_ring *ring, uint32_t slot_index);
/// Queues the copies of a slot (for pieces after fsti_staging_stage()). Lists of one slot run in
/// order. After a failure no copy of the list is in flight.
fst_status fsti_staging_send(fsti_staging_ring *ring, uint32_t slot_index,
                             const fsti_copy_list *list, fst_error *error);
/// Copies `size` bytes (at most FSTI_STAGING_CHUNK_BYTES_MAX) from the device into a slot, by the
/// CPU if it shares the memory. Complete when fsti_staging_arrived() says so.
fst_status fsti_staging_fetch(fsti_staging_ring *ring, uint32_t slot_index, const void *source,
                              uint64_t size, fst_error *error);
/// Whether the queued copies of a slot are complete.
fst_status fsti_staging_arrived(fsti_staging_ring *ring, uint32_t slot_index, bool wait,
                                bool *arrived, fst_error *error);
/// Waits for all copies in flight.
void fsti_staging_drain(fsti_staging_ring *ring);

#endif
