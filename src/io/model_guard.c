// SPDX-License-Identifier: Apache-2.0
/// Recognises files that a manifest, a checksum list or a signature must not replace.
#include <errno.h>
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
/// Bytes at the beginning of a file that are looked at.
#define START_BYTES ((size_t)16 << 10)

/// NAME.safetensors, NAME.index.json, and variants such as NAME.safetensors.index.V.json.
static bool has_model_name(const char *path) {
    const char *slash = strrchr(path, '/');
    const char *name = slash == NULL ? path : slash + 1;
    return fsti_ends_with(name, ".safetensors") || fsti_ends_with(name, ".index.json") ||
           (strstr(name, ".safetensors.index.") != NULL && fsti_ends_with(name, ".json"));
}

/// Whether a file begins with the size of a header and a brace.
static bool is_header(const unsigned char *start, size_t got, uint64_t file_bytes) {
    uint64_t size = 0;
    if (got < 9 || start[8] != '{') return false;
    for (int i = 7; i >= 0; i--) size = size << 8 | start[i];
    return size <= HEADER_BYTES_MAX && size <= file_bytes - 8;
}

/// Whether a file begins like a JSON object with the key weight_map, which is near the beginning.
static bool is_index(const unsigned char *start, size_t got) {
    size_t at = 0;
    while (at < got && strchr(" \t\r\n", start[at]) != NULL && start[at] != '\0') at++;
    return at < got && start[at] == '{' && memmem(start, got, "\"weight_map\"", 12) != NULL;
}

/// Whether a file begins like a model or an index. A file that may not be read could be one.
static bool begins_like_model(const char *path) {
    unsigned char start[START_BYTES];
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return errno == EACCES || errno == EPERM;
    bool is_file = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
    ssize_t got = is_file ? pread(fd, start, sizeof start, 0) : 0;
    close(fd);
    return got > 0 &&
           (is_header(start, (size_t)got, (uint64_t)info.st_size) || is_index(start, (size_t)got));
}

bool fsti_path_is_model(const char *path) {
    char real[PATH_MAX];
    if (has_model_name(path) || fsti_location_looks_like_url(path)) return has_model_name(path);
    return realpath(path, real) != NULL && (has_model_name(real) || begins_like_model(real));
}
