// SPDX-License-Identifier: Apache-2.0
/// Device memory, pinned CPU memory, and copies from the device.
#include <stdio.h>
#include <string.h>

#include "gpu_private.h"

/// The program may drop a tensor whose last kernel is still running. The driver waits for the
/// kernel, and fsti_gpu_release_later() waits for the driver.
static void release_device(fsti_buffer *buffer) {
    fsti_gpu_release_later(buffer->device, buffer->data, NULL);
}

static fst_status out_of_memory(const fsti_device *device, uint64_t size_bytes, fst_error *error) {
    size_t available = 0, all = 0;
    char free_text[64] = "";
    if (device->api->memory_info(&available, &all) == 0)
        snprintf(free_text, sizeof free_text, ", %llu of %llu available",
                 (unsigned long long)fsti_min(available, all), (unsigned long long)all);
    fsti_error_set(error, FST_E_NO_MEMORY, FSTI_NO_LOCATION,
                   "out of device memory: %llu bytes needed%s on %s:%d",
                   (unsigned long long)size_bytes, free_text,
                   device->api->kind == FST_DEVICE_CUDA ? "cuda" : "hip", (int)device->index);
    if (error != NULL) error->device_code = GPU_OUT_OF_MEMORY;
    return FST_E_NO_MEMORY;
}

fst_status fsti_device_full(fsti_device *device, uint64_t size_bytes, fst_error *error) {
    FST_TRY(fsti_device_enter(device, error));
    fst_status status = out_of_memory(device, size_bytes, error);
    if (error != NULL) error->device_code = 0; // the driver itself was not asked
    fsti_device_leave(device);
    return status;
}

fst_status fsti_buffer_device(fsti_device *device, uint64_t size_bytes, fsti_buffer **out,
                              fst_error *error) {
    uint64_t address = 0;
    FST_TRY(fsti_device_enter(device, error));
    fsti_gpu_calls calls = {.api = device->api};
    FSTI_GPU_CALL(&calls, memory_alloc, &address, size_bytes);
    // Memory that was released a moment ago may not be freed yet.
    if (calls.code == GPU_OUT_OF_MEMORY && fsti_device_wait_released())
        calls.code = device->api->memory_alloc(&address, size_bytes);
    calls.code = fsti_gpu_made(calls.code, (void *)(uintptr_t)address);
    if (calls.code == 0 && address % GPU_ALIGNMENT != 0) {
        device->api->memory_free(address);
        calls.code = GPU_MISALIGNED;
    }
    fst_status status = calls.code == GPU_OUT_OF_MEMORY
                            ? out_of_memory(device, size_bytes, error)
                            : fsti_gpu_error(&calls, "allocating device memory", error);
    if (status == FST_OK) {
        status =
            fsti_buffer_wrap((void *)(uintptr_t)address, size_bytes, release_device, out, error);
        if (status != FST_OK) device->api->memory_free(address);
    }
    fsti_device_leave(device);
    if (status == FST_OK) (*out)->device = device;
    return status;
}

// ---- CPU memory that a device reads and writes ----

/// Unregisters a pinned buffer and releases its memory.
static void release_registered(fsti_buffer *buffer) {
    fsti_shared_memory_remove(buffer->data);
    fsti_gpu_release_later(buffer->device, buffer->data, buffer->host_buffer);
}

/// Available memory of the system without swapping; UINT64_MAX: unknown.
static uint64_t system_available(void) {
    uint64_t kilobytes;
    bool known = fsti_proc_number("/proc/meminfo", "MemAvailable:", &kilobytes);
    return known ? kilobytes * 1024 : UINT64_MAX;
}

/// Pins memory. After an error the memory is released.
static fst_status register_buffer(const fsti_device *device, fsti_buffer *memory,
                                  fst_error *error) {
    uint64_t address = 0;
    if (!fsti_gpu_may_pin()) {
        fsti_buffer_unref(memory);
        return fsti_error_set(error, FST_E_DEVICE, FSTI_NO_LOCATION,
                              "memory cannot be pinned: the driver did not unpin earlier memory");
    }
    // The driver pins page by page, so prefault the memory with huge pages first.
    fsti_buffer_populate(memory, 0, memory->size_bytes);
    fsti_gpu_calls calls = {.api = device->api};
    FSTI_GPU_CALL(&calls, host_register, memory->data, memory->size_bytes,
                  GPU_HOST_REGISTER_PORTABLE);
    if (calls.code != 0) fsti_buffer_unref(memory);
    FST_TRY(fsti_gpu_error(&calls, "pinning memory", error));
    FSTI_GPU_CALL(&calls, host_address, &address, memory->data, 0);
    if (calls.code == 0 && address == (uintptr_t)memory->data) return FST_OK;
    fsti_gpu_unpin(device, memory);
    FST_TRY(fsti_gpu_error(&calls, "mapping pinned memory to the device", error));
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                          "the device maps host memory at a different address");
}

/// Large enough to be a separate mapping.
#define SHARED_TRY_BYTES ((uint64_t)64 << 10)

/// Tries to pin a small buffer.
static bool can_share(const fsti_device *device) {
    fsti_buffer *memory;
    if (fsti_buffer_arena(SHARED_TRY_BYTES, &memory, NULL) != FST_OK) return false;
    if (fsti_device_enter(device, NULL) != FST_OK) {
        fsti_buffer_unref(memory);
        return false;
    }
    bool can = register_buffer(device, memory, NULL) == FST_OK;
    if (can) fsti_gpu_unpin(device, memory);
    fsti_device_leave(device);
    return can;
}

bool fsti_device_shares(fsti_device *device) {
    if (!fsti_device_unified(device) || !fsti_gpu_may_pin()) return false;
    pthread_mutex_lock(&device->lock);
    if (!device->shares) device->shares = can_share(device);
    bool shares = device->shares;
    pthread_mutex_unlock(&device->lock);
    return shares;
}

fst_status fsti_buffer_registered(fsti_device *device, uint64_t size_bytes, fsti_buffer **out,
                                  fst_error *error) {
    uint64_t available = system_available();
    if (size_bytes > available)
        return fsti_error_set(error, FST_E_NO_MEMORY, FSTI_NO_LOCATION,
                              "out of memory: %llu bytes to pin, %llu available",
                              (unsigned long long)size_bytes, (unsigned long long)available);
    fsti_buffer *memory;
    FST_TRY(fsti_buffer_arena(size_bytes, &memory, error));
    fst_status status = fsti_device_enter(device, error);
    if (status != FST_OK) {
        fsti_buffer_unref(memory);
        return status;
    }
    status = register_buffer(device, memory, error);
    if (status == FST_OK) {
        status = fsti_buffer_wrap(memory->data, memory->size_bytes, release_registered, out, error);
        if (status != FST_OK) fsti_gpu_unpin(device, memory);
    }
    fsti_device_leave(device);
    if (status != FST_OK) return status;
    (*out)->device = device;
    (*out)->host_buffer = memory;
    fsti_shared_memory_add(memory->data, memory->size_bytes);
    fsti_buffer_use(memory, UINT64_MAX); // pinning has allocated the pages
    return FST_OK;
}

// ---- copies from the device ----

/// Copies block by block through two slots: one receives data while the other is copied out.
static fst_status copy_blocks(fsti_staging_ring *ring, char *target, const char *source,
                              uint64_t size, fst_error *error) {
    const uint64_t step = FSTI_STAGING_CHUNK_BYTES_MAX;
    char *slots[2];
    bool arrived;
    for (uint32_t i = 0; i < 2; i++) FST_TRY(fsti_staging_slot(ring, i, &slots[i], error));
    FST_TRY(fsti_staging_fetch(ring, 0, source, fsti_min(size, step), error));
    for (uint64_t done = 0, block = 0; done < size; done += step, block++) {
        uint64_t next = done + step;
        uint32_t slot = (uint32_t)(block % 2);
        if (next < size)
            FST_TRY(fsti_staging_fetch(ring, 1 - slot, source + next, fsti_min(size - next, step),
                                       error));
        FST_TRY(fsti_staging_arrived(ring, slot, true, &arrived, error));
        memcpy(target + done, slots[slot], (size_t)fsti_min(size - done, step));
    }
    return FST_OK;
}

fst_status fsti_device_copy_out(fsti_device *device, void *target, const void *source,
                                uint64_t size_bytes, fst_error *error) {
    fsti_staging_ring *ring;
    if (size_bytes == 0) return FST_OK;
    if (fsti_shared_memory_has(source, size_bytes)) {
        fsti_copy_bytes(target, source, (size_t)size_bytes);
        return FST_OK;
    }
    FST_TRY(fsti_device_enter(device, error));
    fst_status status = fsti_staging_acquire(device, &ring, error);
    if (status == FST_OK) {
        status = copy_blocks(ring, target, source, size_bytes, error);
        if (status != FST_OK) fsti_staging_drain(ring);
        fsti_staging_release(ring);
    }
    fsti_device_leave(device);
    return status;
}
