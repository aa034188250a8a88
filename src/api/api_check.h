// SPDX-License-Identifier: Apache-2.0
/// Argument checks that the public functions share.
#ifndef FSTI_API_CHECK_H
#define FSTI_API_CHECK_H

#include "base/base.h"

#define API_REQUIRE(condition, error, ...)                                                         \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return fsti_error_set((error), FST_E_ARGUMENT, FSTI_NOWHERE, __VA_ARGS__);             \
    } while (0)

/// Copies a caller's struct of another version's size into `size` bytes: fields that the caller
/// does not know are zero, fields that we do not know must be.
fst_status fsti_api_copy_struct(void *target, size_t size, const void *source, size_t source_size,
                                fst_error *error);

/// Whether a caller's struct_size is one.
fst_status fsti_api_check_size(size_t size, fst_error *error);
/// Gives `full` (this version's, of `full_size` bytes) to a caller whose struct has `size` bytes:
/// cut, or with zeros for fields that this version lacks. Sets struct_size back to the caller's.
fst_status fsti_api_give_struct(void *target, size_t size, const void *full, size_t full_size,
                                fst_error *error);

/// Whether a set may be named by a stem; NULL: by the default one.
fst_status fsti_api_check_stem(const char *stem, fst_error *error);

/// Whether an array of reserved words is zero.
bool fsti_api_is_zero(const void *bytes, size_t size_bytes);
#define API_ALL_ZERO(array) fsti_api_is_zero((array), sizeof(array))

#endif
