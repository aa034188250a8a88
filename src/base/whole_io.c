// SPDX-License-Identifier: Apache-2.0
/// Reads and writes of a file descriptor that continue after signals and short calls.
#include <errno.h>
#include <unistd.h>

#include "primitives.h"

int fsti_read_at(int fd, void *target, size_t size, uint64_t offset) {
    for (size_t done = 0; done < size;) {
        ssize_t got = pread(fd, (char *)target + done, size - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got < 0 ? errno : EIO;
        done += (size_t)got;
    }
    return 0;
}

int fsti_write_at(int fd, const void *bytes, size_t size, uint64_t offset) {
    for (size_t done = 0; done < size;) {
        ssize_t put = pwrite(fd, (const char *)bytes + done, size - done, (off_t)(offset + done));
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return put < 0 ? errno : EIO;
        done += (size_t)put;
    }
    return 0;
}
