// SPDX-License-Identifier: Apache-2.0
/// Copies bytes of tensors into a block, from the CPU's memory or a device's.
#include <errno.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "snapshot_private.h"

/// Bytes of a device's memory that are transferred at a time. Two transfers are in flight.
#define DEVICE_PIECE_BYTES ((uint64_t)1 << 20)

static bool is_on_device(const fsti_extent *extent) {
    return extent->device.kind == FST_DEVICE_CUDA || extent->device.kind == FST_DEVICE_HIP;
}

/// Set once process_vm_readv() has failed: seccomp forbids it, or the kernel lacks it. From then on
/// copies are not guarded.
static atomic_bool reads_refused;

static fst_status refuse_gone(fst_error *error) {
    return fsti_error_set(error, FST_E_FILE_CHANGED, FSTI_NO_LOCATION,
                          "the memory of a tensor was freed while it was being saved. Keep tensors "
                          "until their bytes are staged.");
}

/// Copies by a system call, which reports unmapped memory as an error. A plain copy would end the
/// process with SIGSEGV.
static fst_status copy_guarded(char *target, const char *source, uint64_t size, fst_error *error) {
    for (uint64_t done = 0; done < size && !atomic_load(&reads_refused);) {
        struct iovec to = {target + done, size - done};
        struct iovec from = {(void *)(uintptr_t)(source + done), size - done};
        ssize_t got = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
        if (got > 0) {
            done += (uint64_t)got;
            if (done == size) return FST_OK;
            continue;
        }
        if (got == 0 || errno == EFAULT) return refuse_gone(error);
        atomic_store(&reads_refused, true);
    }
    fsti_copy_bytes(target, source, (size_t)size);
    return FST_OK;
}

/// Samples of a block. In the CPU's memory each is a cache line, and a block of 2 MiB has 2 KiB of
/// them. A step of an optimizer changes nearly all elements, so the samples detect it even if most
/// elements are rounded back to their old values. On a device each sample is a separate transfer,
/// so there are fewer.
#define SAMPLE_BYTES ((uint64_t)64)
/// A tensor of at most this many bytes in the CPU's memory is sampled completely. Other tensors are
/// sampled at their first and last bytes, on a device only at the first.
#define SMALL_BYTES ((uint64_t)4096)
#define SAMPLE_COUNT_MAX ((uint64_t)32)
#define SAMPLE_COUNT_DEVICE ((uint64_t)2)

static void leave_device(block_copier *copier) {
    if (copier->ring == NULL || !fsti_device_enter_again(copier->device)) return;
    fsti_staging_drain(copier->ring);
    fsti_staging_release(copier->ring);
    fsti_device_leave(copier->device);
    copier->ring = NULL;
    copier->device = NULL;
}

void fsti_block_copier_close(block_copier *copier) { leave_device(copier); }

/// Copies through two pinned staging buffers: the device fills one while the CPU reads the other.
/// The caller has entered the device.
static fst_status copy_by_slots(block_copier *copier, const char *source, uint64_t size,
                                char *target, fst_error *error) {
    uint64_t asked = 0, got = 0;
    bool arrived;
    for (uint32_t next = 0; got < size;) {
        while (asked < size && asked - got < 2 * DEVICE_PIECE_BYTES) {
            uint64_t piece = fsti_min(size - asked, DEVICE_PIECE_BYTES);
            uint32_t slot = (uint32_t)(asked / DEVICE_PIECE_BYTES % 2);
            FST_TRY(fsti_staging_fetch(copier->ring, slot, source + asked, piece, error));
            asked += piece;
        }
        uint64_t piece = fsti_min(size - got, DEVICE_PIECE_BYTES);
        FST_TRY(fsti_staging_arrived(copier->ring, next, true, &arrived, error));
        fsti_copy_bytes(target + got, copier->slots[next], (size_t)piece);
        got += piece;
        next = 1 - next;
    }
    return FST_OK;
}

static fst_status open_ring(block_copier *copier, fst_error *error) {
    if (copier->ring != NULL) return FST_OK;
    FST_TRY(fsti_staging_acquire(copier->device, &copier->ring, error));
    for (uint32_t i = 0; i < 2; i++)
        FST_TRY(fsti_staging_slot(copier->ring, i, &copier->slots[i], error));
    return FST_OK;
}

static fst_status copy_device(block_copier *copier, const fsti_extent *extent, uint64_t skip,
                              uint64_t size, char *target, fst_error *error) {
    fsti_device *device;
    FST_TRY(fsti_device_get(extent->device, &device, error));
    if (device != copier->device) leave_device(copier);
    copier->device = device;
    FST_TRY(fsti_device_enter(device, error));
    fst_status status = open_ring(copier, error);
    if (status == FST_OK) status = copy_by_slots(copier, extent->data + skip, size, target, error);
    if (status != FST_OK && copier->ring != NULL) fsti_staging_drain(copier->ring);
    fsti_device_leave(device);
    return status;
}

fst_status fsti_block_fill(block_copier *copier, const fsti_extent *first, uint64_t begin,
                           uint64_t end, char *target, fst_error *error) {
    for (const fsti_extent *extent = first; begin < end; extent++) {
        if (extent->end <= begin) continue;
        uint64_t size = fsti_min(end, extent->end) - begin, skip = begin - extent->begin;
        if (extent->data == NULL)
            memset(target, 0, (size_t)size);
        else if (is_on_device(extent))
            FST_TRY(copy_device(copier, extent, skip, size, target, error));
        else if (copier->is_guarded)
            FST_TRY(copy_guarded(target, extent->data + skip, size, error));
        else
            fsti_copy_bytes(target, extent->data + skip, (size_t)size);
        begin += size;
        target += size;
    }
    return FST_OK;
}

static uint64_t sample_count(const fsti_extent *first, byte_span span) {
    uint64_t size = span.end - span.begin, most = SAMPLE_COUNT_MAX;
    for (const fsti_extent *extent = first;; extent++) {
        if (is_on_device(extent)) most = SAMPLE_COUNT_DEVICE;
        if (extent->end >= span.end) break;
    }
    return fsti_min(most, (size + SAMPLE_BYTES - 1) / SAMPLE_BYTES);
}

/// A block that is being sampled, and the hash of the samples so far.
typedef struct sampling {
    block_copier *copier;
    byte_span span;
    const char *copy; ///< the block's copy; NULL: read the extents
    uint64_t hash;
} sampling;

/// Hashes the bytes [begin, begin + size), at most SMALL_BYTES. `extent` is at or before `begin`.
static fst_status add_piece(sampling *all, const fsti_extent *extent, uint64_t begin, uint64_t size,
                            fst_error *error) {
    char piece[SMALL_BYTES];
    const char *from = all->copy == NULL ? piece : all->copy + (begin - all->span.begin);
    if (all->copy == NULL)
        FST_TRY(fsti_block_fill(all->copier, extent, begin, begin + size, piece, error));
    all->hash = fsti_hash(from, (size_t)size, all->hash);
    return FST_OK;
}

/// Hashes samples at equal distances, including the first and the last bytes of the block.
static fst_status add_grid(sampling *all, const fsti_extent *first, fst_error *error) {
    uint64_t size = all->span.end - all->span.begin, count = sample_count(first, all->span);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t piece = fsti_min(size, SAMPLE_BYTES);
        uint64_t skip = count == 1 ? 0 : (size - piece) / (count - 1) * i;
        if (i > 0 && i == count - 1) skip = size - piece;
        uint64_t begin = all->span.begin + skip;
        while (first->end <= begin) first++;
        FST_TRY(add_piece(all, first, begin, piece, error));
    }
    return FST_OK;
}

/// Hashes samples of each tensor that begins or ends in the block. A small trained tensor between
/// frozen ones could lie between the samples of add_grid().
static fst_status add_ends(sampling *all, const fsti_extent *first, fst_error *error) {
    for (const fsti_extent *extent = first;; extent++) {
        bool is_last = extent->end >= all->span.end;
        uint64_t begin = extent->begin < all->span.begin ? all->span.begin : extent->begin;
        uint64_t end = fsti_min(extent->end, all->span.end), piece = SAMPLE_BYTES;
        bool is_whole_span = begin == all->span.begin && end == all->span.end;
        if (extent->data != NULL && begin < end && !is_whole_span) {
            bool is_device = is_on_device(extent);
            if (!is_device && end - begin <= SMALL_BYTES) piece = SMALL_BYTES;
            piece = fsti_min(piece, end - begin);
            FST_TRY(add_piece(all, extent, begin, piece, error));
            if (!is_device && piece < end - begin)
                FST_TRY(add_piece(all, extent, end - piece, piece, error));
        }
        if (is_last) return FST_OK;
    }
}

fst_status fsti_block_sample(block_copier *copier, const fsti_extent *first, byte_span span,
                             const char *copy, uint64_t *out, fst_error *error) {
    sampling all = {.copier = copier, .span = span, .copy = copy};
    FST_TRY(add_grid(&all, first, error));
    FST_TRY(add_ends(&all, first, error));
    *out = all.hash;
    return FST_OK;
}
