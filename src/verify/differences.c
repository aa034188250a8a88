// SPDX-License-Identifier: Apache-2.0
/// Differences told, counted, and the first of them kept.
#include "differences.h"

#include <stdio.h>

void fsti_differences_tell(fsti_differences *told, const char *name, size_t name_size,
                           const char *what) {
    fst_error difference;
    fsti_error_set(&difference, FST_E_DIGEST, FSTI_NOWHERE, "%.*s: %s", (int)name_size, name, what);
    snprintf(difference.file, sizeof difference.file, "%.*s", (int)name_size, name);
    if (told->count++ == 0) told->first = difference;
    if (told->listener->callback != NULL)
        told->listener->callback(told->listener->context, &difference);
}

fst_status fsti_differences_end(const fsti_differences *told, fst_error *error) {
    if (told->count == 0) return FST_OK;
    if (error != NULL) *error = told->first;
    return FST_E_DIGEST;
}
