// SPDX-License-Identifier: Apache-2.0
/// The expected digest of a file, from a list or a signature.
#include <string.h>

#include "file_digests.h"
#include "file_digests_scan.h"

const unsigned char *fsti_file_digests_lookup(const file_digests *expected, const char *name) {
    const fsti_signed_file *files = expected->sums.files;
    size_t count = expected->sums.file_count, size = strlen(name);
    if (expected->has_bundle) {
        files = expected->bundle.statement.files;
        count = expected->bundle.statement.file_count;
    }
    for (size_t i = 0; i < count; i++)
        if (!files[i].is_listed_otherwise && files[i].name_size == size &&
            memcmp(files[i].name, name, size) == 0)
            return files[i].digest;
    return NULL;
}
