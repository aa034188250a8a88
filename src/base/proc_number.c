// SPDX-License-Identifier: Apache-2.0
/// Reads numbers from the kernel's text files.
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "primitives.h"

bool fsti_proc_number(const char *path, const char *name, uint64_t *out) {
    char text[2048];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (size <= 0) return false;
    text[size] = '\0';
    const char *line = strstr(text, name);
    if (line == NULL) return false;
    char *end;
    const char *number = line + strlen(name);
    *out = strtoull(number, &end, 10);
    return end != number;
}
