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
/// The largest file in which the key of an index is looked for.
#define INDEX_BYTES_MAX ((uint64_t)1 << 30)
#define BLOCK_BYTES ((size_t)16 << 10)
#define WEIGHT_MAP "\"weight_map\""

bool fsti_path_has_index_name(const char *path) {
    const char *slash = strrchr(path, '/');
    const char *name = slash == NULL ? path : slash + 1;
    return fsti_ends_with(name, ".index.json") ||
           (strstr(name, ".safetensors.index.") != NULL && fsti_ends_with(name, ".json"));
}

static bool has_model_name(const char *path) {
    return fsti_ends_with(path, ".safetensors") || fsti_path_has_index_name(path);
}

/// Whether a file begins with the size of a header and a brace.
static bool is_header(const unsigned char *start, size_t got, uint64_t file_bytes) {
    uint64_t size = 0;
    if (got < 9 || start[8] != '{') return false;
    for (int i = 7; i >= 0; i--) size = size << 8 | start[i];
    return size <= HEADER_BYTES_MAX && size <= file_bytes - 8;
}

/// Whether a file begins like a JSON object, possibly behind a byte order mark.
static bool is_object(const unsigned char *start, size_t got) {
    size_t at = got >= 3 && memcmp(start, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    while (at < got && strchr(" \t\r\n", start[at]) != NULL && start[at] != '\0') at++;
    return at < got && start[at] == '{';
}

/// Whether a file has the key weight_map, which any number of metadata may precede. A file that
/// cannot be read could have it.
static bool has_weight_map(int fd) {
    unsigned char block[BLOCK_BYTES];
    const size_t overlap = sizeof WEIGHT_MAP - 2;
    for (uint64_t at = 0; at < INDEX_BYTES_MAX;) {
        ssize_t got = pread(fd, block, sizeof block, (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return true;
        if (memmem(block, (size_t)got, WEIGHT_MAP, sizeof WEIGHT_MAP - 1) != NULL) return true;
        if ((size_t)got <= overlap) return false;
        at += (size_t)got - overlap;
    }
    return false;
}

/// Whether a file begins like a model or is an index. A file that may not be read could be one.
static bool has_model_bytes(const char *path) {
    unsigned char start[BLOCK_BYTES];
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return errno == EACCES || errno == EPERM;
    bool is_file = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
    ssize_t got = is_file ? pread(fd, start, sizeof start, 0) : 0;
    bool is_model = got > 0 && (is_header(start, (size_t)got, (uint64_t)info.st_size) ||
                                (is_object(start, (size_t)got) && has_weight_map(fd)));
    close(fd);
    return is_model;
}

bool fsti_path_is_model(const char *path) {
    char real[PATH_MAX];
    if (has_model_name(path) || fsti_location_looks_like_url(path)) return has_model_name(path);
    return realpath(path, real) != NULL && (has_model_name(real) || has_model_bytes(real));
}
