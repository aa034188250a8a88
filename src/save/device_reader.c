// SPDX-License-Identifier: Apache-2.0
#include "far.h"

bool fsti_far_is(const save_tensor *tensor) {
    return tensor->device.kind == FST_DEVICE_CUDA || tensor->device.kind == FST_DEVICE_HIP;
}

/// The tensor of the next block; NULL after the last one.
static const save_tensor *find_next(save_far *far) {
    const fst_writer *writer = far->writer;
    const fst_layout *layout = &writer->files[far->file_index].layout;
    const uint32_t *members = writer->members + writer->member_begin[far->file_index];
    for (; far->entry < layout->entry_count; far->entry++, far->done = 0) {
        uint32_t entry = layout->order[far->entry];
        if (entry >= layout->tensor_count) continue; // padding
        const save_tensor *tensor = &writer->tensors[members[entry]];
        if (tensor->data != NULL && fsti_far_is(tensor) && far->done < tensor->size_bytes)
            return tensor;
    }
    return NULL;
}

static void release_ring(save_far *far) {
    if (far->ring == NULL) return;
    fsti_staging_drain(far->ring);
    fsti_staging_release(far->ring);
    far->ring = NULL;
}

/// Acquires a staging ring with two slots. The device's context is current.
static fst_status acquire_ring(save_far *far, fst_error *error) {
    FST_TRY(fsti_staging_acquire(far->device, &far->ring, error));
    for (uint32_t i = 0; i < 2; i++)
        FST_TRY(fsti_staging_slot(far->ring, i, &far->slots[i], error));
    return FST_OK;
}

/// Starts copying the next block, unless a block of another device is in flight.
static fst_status fetch_next(save_far *far, fst_error *error) {
    const save_tensor *tensor = find_next(far);
    fsti_device *device;
    if (tensor == NULL) return FST_OK;
    FST_TRY(fsti_device_get(tensor->device, &device, error));
    if (device != far->device && far->fetched_count > far->taken_count) return FST_OK;
    if (device != far->device) fsti_far_close(far);
    far->device = device;
    FST_TRY(fsti_device_enter(device, error));
    fst_status status = far->ring == NULL ? acquire_ring(far, error) : FST_OK;
    uint32_t slot = (uint32_t)(far->fetched_count % 2);
    uint64_t size = fsti_min(tensor->size_bytes - far->done, FSTI_STAGING_CHUNK_BYTES_MAX);
    if (status == FST_OK)
        status = fsti_staging_fetch(far->ring, slot, tensor->data + far->done, size, error);
    fsti_device_leave(device);
    FST_TRY(status);
    far->sizes[slot] = size;
    far->done += size;
    far->fetched_count++;
    return FST_OK;
}

fst_status fsti_far_take(save_far *far, const char **data, uint64_t *size_bytes, fst_error *error) {
    bool arrived;
    if (far->fetched_count == far->taken_count) FST_TRY(fetch_next(far, error));
    uint32_t slot = (uint32_t)(far->taken_count % 2);
    // The slot of the previous block is free: copy the next block while this one is written.
    if (far->fetched_count - far->taken_count < 2) FST_TRY(fetch_next(far, error));
    FST_TRY(fsti_device_enter(far->device, error));
    fst_status status = fsti_staging_arrived(far->ring, slot, true, &arrived, error);
    fsti_device_leave(far->device);
    far->taken_count++;
    *data = far->slots[slot];
    *size_bytes = far->sizes[slot];
    return status;
}

void fsti_far_close(save_far *far) {
    if (far->device == NULL || !fsti_device_enter_once_more(far->device)) return;
    release_ring(far);
    fsti_device_leave(far->device);
}
