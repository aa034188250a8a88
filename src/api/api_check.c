// SPDX-License-Identifier: Apache-2.0
/// Structs of callers that were compiled against an older or newer header.
#include "api_check.h"

#include <string.h>

#include "format/format.h"

/// No version of a struct will be larger, so this catches uninitialised struct_size values.
#define STRUCT_BYTES_MAX 65536u

static bool is_zero(const void *bytes, size_t size_bytes) {
    const char *at = bytes;
    for (size_t i = 0; i < size_bytes; i++)
        if (at[i] != 0) return false;
    return true;
}

fst_status fsti_api_check_size(size_t size, fst_error *error) {
    // That of each version is a multiple; another one could end within a pointer.
    API_REQUIRE(size >= sizeof(size_t) && size <= STRUCT_BYTES_MAX && size % sizeof(size_t) == 0,
                error, "struct_size is %zu: set it to the size of the struct (FST_STRUCT_INIT)",
                size);
    return FST_OK;
}

fst_status fsti_api_copy_struct(void *target, size_t size, const void *source, size_t source_size,
                                fst_error *error) {
    FST_TRY(fsti_api_check_size(source_size, error));
    API_REQUIRE(source_size <= size || is_zero((const char *)source + size, source_size - size),
                error, "a field is set that this version of the library does not know");
    memset(target, 0, size);
    memcpy(target, source, source_size < size ? source_size : size);
    return FST_OK;
}

fst_status fsti_api_give_struct(void *target, size_t size, const void *full, size_t full_size,
                                fst_error *error) {
    FST_TRY(fsti_api_check_size(size, error));
    memset(target, 0, size);
    memcpy(target, full, size < full_size ? size : full_size);
    memcpy(target, &size, sizeof size);
    return FST_OK;
}

fst_status fsti_api_copy_element(void *target, size_t size, const void *elements, size_t index,
                                 fst_error *error) {
    size_t pitch, own;
    memcpy(&pitch, elements, sizeof pitch);
    FST_TRY(fsti_api_check_size(pitch, error));
    const char *element = (const char *)elements + index * pitch;
    memcpy(&own, element, sizeof own);
    API_REQUIRE(own == pitch, error, "element %zu has another struct_size than the first", index);
    return fsti_api_copy_struct(target, size, element, pitch, error);
}

fst_status fsti_api_check_device(fst_device device, fst_error *error) {
    API_REQUIRE((unsigned)device.kind < FST_DEVICE_KIND_COUNT, error,
                "unknown kind of device %d; expected a value of fst_device_kind", (int)device.kind);
    API_REQUIRE(device.kind != FST_DEVICE_CPU || device.index == 0 || device.index == -1, error,
                "device index %d: the CPU has only index 0", (int)device.index);
    return FST_OK;
}

size_t fsti_api_text_size(const char *text, size_t size) {
    return size == 0 || size == SIZE_MAX ? strlen(text) : size;
}

fst_status fsti_api_check_stem(const char *stem, fst_error *error) {
    size_t fault_at;
    if (stem == NULL) return FST_OK;
    API_REQUIRE(stem[0] != '\0' && strchr(stem, '/') == NULL, error,
                "a stem must not be empty or hold a slash");
    API_REQUIRE(stem[0] != '.', error, "a stem must not begin with a dot: the set would be hidden");
    // An index is JSON, which cannot contain other bytes.
    API_REQUIRE(fsti_utf8_valid((const unsigned char *)stem, strlen(stem), &fault_at), error,
                "a stem must be UTF-8");
    return FST_OK;
}
