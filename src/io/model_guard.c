// SPDX-License-Identifier: Apache-2.0
/// Recognises files that a manifest, a checksum list or a signature must not replace.
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io.h"
#include "location/location.h"

/// The largest header that readers of the format accept, in bytes.
#define HEADER_BYTES_MAX 100000000u

/// NAME.safetensors, NAME.index.json, and variants such as NAME.safetensors.index.V.json.
static bool has_model_name(const char *path) {
    const char *slash = strrchr(path, '/');
    const char *name = slash == NULL ? path : slash + 1;
    return fsti_ends_with(name, ".safetensors") || fsti_ends_with(name, ".index.json") ||
           (strstr(name, ".safetensors.index.") != NULL && fsti_ends_with(name, ".json"));
}

/// A safetensors file begins with the size of its header, which begins with a brace.
static bool begins_like_model(const char *path) {
    unsigned char head[9];
    struct stat info;
    uint64_t size = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return false;
    bool good = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
                pread(fd, head, sizeof head, 0) == (ssize_t)sizeof head;
    close(fd);
    if (!good) return false;
    for (int i = 7; i >= 0; i--) size = size << 8 | head[i];
    return head[8] == '{' && size <= HEADER_BYTES_MAX && size <= (uint64_t)info.st_size - 8;
}

bool fsti_path_is_model(const char *path) {
    char real[PATH_MAX];
    if (has_model_name(path) || fsti_location_looks_like_url(path)) return has_model_name(path);
    return realpath(path, real) != NULL && (has_model_name(real) || begins_like_model(real));
}
