// SPDX-License-Identifier: Apache-2.0
#include "device_reader.h"

bool fsti_save_is_on_device(const save_tensor *tensor) {
    return tensor->device.kind == FST_DEVICE_CUDA || tensor->device.kind == FST_DEVICE_HIP;
}

/// The tensor of the next block; NULL after the last one.
static const save_tensor *find_next(device_reader *reader) {
    const fst_writer *writer = reader->writer;
    const fst_layout *layout = &writer->contents.files[reader->file_index].layout;
    const uint32_t *members = fsti_contents_members(&writer->contents, reader->file_index);
    for (; reader->entry < layout->entry_count; reader->entry++, reader->done = 0) {
        uint32_t entry = layout->order[reader->entry];
        if (entry >= layout->tensor_count) continue; // padding
        const save_tensor *tensor = &writer->contents.tensors[members[entry]];
        if (tensor->data != NULL && fsti_save_is_on_device(tensor) &&
            reader->done < tensor->size_bytes)
            return tensor;
    }
    return NULL;
}

static void release_ring(device_reader *reader) {
    if (reader->ring == NULL) return;
    fsti_staging_drain(reader->ring);
    fsti_staging_release(reader->ring);
    reader->ring = NULL;
}

/// Acquires a staging ring with two slots. The device's context is current.
static fst_status acquire_ring(device_reader *reader, fst_error *error) {
    FST_TRY(fsti_staging_acquire(reader->device, &reader->ring, error));
    for (uint32_t i = 0; i < 2; i++)
        FST_TRY(fsti_staging_slot(reader->ring, i, &reader->slots[i], error));
    return FST_OK;
}

/// Starts copying the next block, unless a block of another device is in flight.
static fst_status fetch_next(device_reader *reader, fst_error *error) {
    const save_tensor *tensor = find_next(reader);
    fsti_device *device;
    if (tensor == NULL) return FST_OK;
    FST_TRY(fsti_device_get(tensor->device, &device, error));
    if (device != reader->device && reader->fetched_count > reader->taken_count) return FST_OK;
    if (device != reader->device) fsti_device_reader_close(reader);
    reader->device = device;
    FST_TRY(fsti_device_enter(device, error));
    fst_status status = reader->ring == NULL ? acquire_ring(reader, error) : FST_OK;
    uint32_t slot = (uint32_t)(reader->fetched_count % 2);
    uint64_t size = fsti_min(tensor->size_bytes - reader->done, FSTI_STAGING_CHUNK_BYTES_MAX);
    if (status == FST_OK)
        status = fsti_staging_fetch(reader->ring, slot, tensor->data + reader->done, size, error);
    fsti_device_leave(device);
    FST_TRY(status);
    reader->sizes[slot] = size;
    reader->done += size;
    reader->fetched_count++;
    return FST_OK;
}

fst_status fsti_device_reader_next(device_reader *reader, const char **data, uint64_t *size_bytes,
                                   fst_error *error) {
    bool arrived;
    if (reader->fetched_count == reader->taken_count) FST_TRY(fetch_next(reader, error));
    uint32_t slot = (uint32_t)(reader->taken_count % 2);
    // The slot of the previous block is free: copy the next block while this one is written.
    if (reader->fetched_count - reader->taken_count < 2) FST_TRY(fetch_next(reader, error));
    FST_TRY(fsti_device_enter(reader->device, error));
    fst_status status = fsti_staging_arrived(reader->ring, slot, true, &arrived, error);
    fsti_device_leave(reader->device);
    reader->taken_count++;
    *data = reader->slots[slot];
    *size_bytes = reader->sizes[slot];
    return status;
}

void fsti_device_reader_close(device_reader *reader) {
    if (reader->device == NULL || !fsti_device_enter_again(reader->device)) return;
    release_ring(reader);
    fsti_device_leave(reader->device);
}
