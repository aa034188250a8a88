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

#endif
