// SPDX-License-Identifier: Apache-2.0
/// Reference-counted buffers of any origin.
#include "memory.h"

#include <errno.h>
#include <sys/mman.h>

static atomic_size_t live_count;
static atomic_uint_fast64_t live_bytes;

fst_status fsti_buffer_wrap(void *data, uint64_t size_bytes, void (*release)(fsti_buffer *buffer),
                            fsti_buffer **out, fst_error *error) {
    fsti_buffer *buffer = fsti_alloc_zeroed(1, sizeof *buffer);
    if (buffer == NULL) return fsti_error_memory(error, sizeof *buffer);
    fsti_refcount_init(&buffer->refs);
    buffer->data = data;
    buffer->size_bytes = size_bytes;
    buffer->release = release;
    buffer->writable = true;
    atomic_init(&buffer->fill_fd, -1);
    atomic_fetch_add(&live_count, 1);
    atomic_fetch_add(&live_bytes, size_bytes);
    *out = buffer;
    return FST_OK;
}

fsti_buffer *fsti_buffer_ref(fsti_buffer *buffer) {
    if (buffer != NULL) fsti_refcount_ref(&buffer->refs);
    return buffer;
}

void fsti_buffer_unref(fsti_buffer *buffer) {
    if (buffer == NULL || !fsti_refcount_unref(&buffer->refs)) return;
    atomic_fetch_sub(&live_count, 1);
    atomic_fetch_sub(&live_bytes, buffer->size_bytes);
    buffer->release(buffer);
    fsti_free(buffer);
}

bool fsti_buffer_is_last_ref(const fsti_buffer *buffer) {
    return atomic_load_explicit(&buffer->refs.count, memory_order_relaxed) == 1;
}

void fsti_buffer_live(size_t *count, uint64_t *size_bytes) {
    *count = atomic_load(&live_count);
    *size_bytes = atomic_load(&live_bytes);
}

static void release_foreign(fsti_buffer *buffer) {
    buffer->allocator.release(buffer->allocator.context, buffer->allocation,
                              buffer->allocation_bytes);
}

fst_status fsti_buffer_foreign(const fsti_foreign *request, fsti_buffer **out, fst_error *error) {
    const fst_allocator *allocator = request->allocator;
    // Driver allocators guarantee this alignment; only direct reads need more.
    uint32_t alignment = request->device != NULL ? FSTI_DEVICE_ALIGNMENT : FSTI_BUFFER_ALIGNMENT;
    uint64_t bytes = request->size_bytes;
    if (request->at_page && !fsti_add(bytes, FSTI_DEVICE_PAGE_BYTES, &bytes))
        return fsti_error_memory(error, request->size_bytes);
    errno = 0;
    char *allocation = allocator->allocate(allocator->context, bytes, alignment);
    if (allocation == NULL && errno == ECANCELED)
        return fsti_error_set(error, FST_E_CANCELLED, FSTI_NO_LOCATION,
                              "the caller's allocator cancelled the load");
    if (allocation == NULL) return fsti_error_memory(error, bytes);
    char *data = allocation;
    if (request->at_page) data += -(uintptr_t)allocation % FSTI_DEVICE_PAGE_BYTES;
    fst_status status = FST_OK;
    if ((uintptr_t)allocation % alignment != 0)
        status = fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                                "the allocator's memory is not aligned to %u bytes", alignment);
    else
        status = fsti_buffer_wrap(data, request->size_bytes, release_foreign, out, error);
    if (status != FST_OK) {
        allocator->release(allocator->context, allocation, bytes);
        return status;
    }
    (*out)->allocator = *allocator;
    (*out)->allocation = allocation;
    (*out)->allocation_bytes = bytes;
    (*out)->device = request->device;
    return FST_OK;
}
