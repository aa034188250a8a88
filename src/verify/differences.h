// SPDX-License-Identifier: Apache-2.0
/// Differences found by a check. Private to the verify module.
#ifndef FSTI_DIFFERENCES_H
#define FSTI_DIFFERENCES_H

#include "folder_check.h"

typedef struct fsti_differences {
    const fsti_check_listener *listener;
    uint64_t count;
    fst_error first;
} fsti_differences;

/// Reports a file by its name in the folder.
void fsti_differences_report(fsti_differences *differences, const char *name, size_t name_size,
                             const char *what);
/// The result of the check: FST_E_DIGEST with the first difference in *error, if there was one.
fst_status fsti_differences_end(const fsti_differences *differences, fst_error *error);

#endif
