// SPDX-License-Identifier: Apache-2.0
/// What identifies a version of a file, as text.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "io_private.h"
#include "store/store.h"

/// The address and the version of a remote object.
static bool describe_object(const fsti_object *object, char *out, size_t size) {
    static const char begin[] = "object ";
    if (!fsti_object_has_version(object) || size <= sizeof begin) return false;
    memcpy(out, begin, sizeof begin);
    size_t used = sizeof begin - 1;
    if (!fsti_object_address(object, out + used, size - used)) return false;
    used += strlen(out + used);
    if (used + 2 > size) return false;
    out[used++] = '\n';
    return fsti_object_version_text(object, out + used, size - used);
}

bool fsti_file_version_text(const fsti_file *file, char *out, size_t size) {
    const fsti_file *stored = file->derivation.origin != NULL ? file->derivation.origin : file;
    struct stat stamp;
    if (stored->object != NULL) return describe_object(stored->object, out, size);
    int fd = fsti_file_identity(file);
    if (fd < 0 || fstat(fd, &stamp) != 0) return false;
    int used =
        snprintf(out, size, "file %ju %ju %jd %jd.%09ld %jd.%09ld", (uintmax_t)stamp.st_dev,
                 (uintmax_t)stamp.st_ino, (intmax_t)stamp.st_size, (intmax_t)stamp.st_mtim.tv_sec,
                 stamp.st_mtim.tv_nsec, (intmax_t)stamp.st_ctim.tv_sec, stamp.st_ctim.tv_nsec);
    return used > 0 && (size_t)used < size;
}
