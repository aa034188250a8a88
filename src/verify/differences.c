// SPDX-License-Identifier: Apache-2.0
/// Reports and counts differences, and keeps the first one.
#include "differences.h"

#include <stdio.h>

void fsti_differences_report(fsti_differences *differences, const char *name, size_t name_size,
                             const char *what) {
    fst_error difference;
    fsti_error_set(&difference, FST_E_DIGEST, FSTI_NO_LOCATION, "%.*s: %s", (int)name_size, name,
                   what);
    snprintf(difference.file, sizeof difference.file, "%.*s", (int)name_size, name);
    if (differences->count++ == 0) differences->first = difference;
    if (differences->listener->callback != NULL)
        differences->listener->callback(differences->listener->context, &difference);
}

fst_status fsti_differences_end(const fsti_differences *differences, fst_error *error) {
    if (differences->count == 0) return FST_OK;
    if (error != NULL) *error = differences->first;
    return FST_E_DIGEST;
}
