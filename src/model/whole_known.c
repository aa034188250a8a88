// SPDX-License-Identifier: Apache-2.0
/// What a list or a signature says of a file.
#include <string.h>

#include "whole_digests.h"
#include "whole_scan.h"

const unsigned char *fsti_whole_known(const whole_digests *whole, const char *name) {
    const fsti_signed_file *files = whole->sums.files;
    size_t count = whole->sums.file_count, size = strlen(name);
    if (whole->has_bundle) {
        files = whole->bundle.statement.files;
        count = whole->bundle.statement.file_count;
    }
    for (size_t i = 0; i < count; i++)
        if (!files[i].is_listed_otherwise && files[i].name_size == size &&
            memcmp(files[i].name, name, size) == 0)
            return files[i].digest;
    return NULL;
}
