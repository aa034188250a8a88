// SPDX-License-Identifier: Apache-2.0
/// The public functions of base.h, dtype.h and version.h.
#include "base/base.h"
#include "device/device.h"
#include "dtype/dtype.h"
#include "fastsafetensors.h"

#define TEXT_OF(value) #value
#define TEXT(value) TEXT_OF(value)

const char *fst_version(void) {
    return TEXT(FST_VERSION_MAJOR) "." TEXT(FST_VERSION_MINOR) "." TEXT(FST_VERSION_PATCH);
}

const char *fst_status_name(fst_status status) { return fsti_status_name(status); }

const char *fst_status_meaning(fst_status status) { return fsti_status_meaning(status); }

const char *fst_dtype_name(fst_dtype dtype) { return fsti_dtype_name(dtype); }

uint32_t fst_dtype_bits(fst_dtype dtype) { return fsti_dtype_bits(dtype); }

uint32_t fst_dtype_alignment(fst_dtype dtype) { return fsti_dtype_alignment(dtype); }

void fst_keep_memory(uint64_t size_bytes) { fsti_arena_keep_max(size_bytes); }

size_t fst_trim(void) { return (size_t)(fsti_ring_trim() + fsti_arena_trim()); }

void fst_live_buffers(size_t *buffer_count, uint64_t *size_bytes) {
    size_t count;
    uint64_t bytes;
    fsti_buffer_live(&count, &bytes);
    if (buffer_count != NULL) *buffer_count = count;
    if (size_bytes != NULL) *size_bytes = bytes;
}
