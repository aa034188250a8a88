// SPDX-License-Identifier: Apache-2.0
/// Structs of callers that were built against an older or newer header.
#include "api_check.h"

#include <string.h>

/// Larger than any version of a struct will be: a wild struct_size is caught.
#define STRUCT_BYTES_MAX 65536u

fst_status fsti_api_copy_struct(void *target, size_t size, const void *source, size_t source_size,
                                fst_error *error) {
    API_REQUIRE(source_size >= sizeof(size_t) && source_size <= STRUCT_BYTES_MAX, error,
                "struct_size %zu is not the size of the options", source_size);
    const char *bytes = source;
    for (size_t i = size; i < source_size; i++)
        API_REQUIRE(bytes[i] == 0, error, "the options have a field that this version lacks");
    memset(target, 0, size);
    memcpy(target, source, source_size < size ? source_size : size);
    return FST_OK;
}
