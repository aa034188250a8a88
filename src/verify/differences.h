// SPDX-License-Identifier: Apache-2.0
/// What a check has told: private to the verify room.
#ifndef FSTI_DIFFERENCES_H
#define FSTI_DIFFERENCES_H

#include "verify.h"

typedef struct fsti_differences {
    const fsti_check_listener *listener;
    uint64_t count;
    fst_error first;
} fsti_differences;

/// Tells of a file, by its name in the folder.
void fsti_differences_tell(fsti_differences *told, const char *name, size_t name_size,
                           const char *what);
/// What the check returns: FST_E_DIGEST, and the first one in *error, where there is any.
fst_status fsti_differences_end(const fsti_differences *told, fst_error *error);

#endif
