// SPDX-License-Identifier: Apache-2.0
/// Settings of shared segments, from the environment.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "share_private.h"

#define GRACE_S_MAX ((uint64_t)366 * 86400)

/// A variable's number or size. False with words if it is not one.
static bool read_number(const char *name, uint64_t number_max, uint64_t *out, char *why,
                        size_t why_size) {
    const char *text = secure_getenv(name);
    if (text == NULL || text[0] == '\0') return true;
    if (fsti_size_parse(text, out) && *out <= number_max) return true;
    snprintf(why, why_size, "%s must be a number up to %llu", name, (unsigned long long)number_max);
    return false;
}

bool fsti_share_settings(const char *folder, share_settings *out, char *why, size_t why_size) {
    const char *wanted = folder != NULL ? folder : secure_getenv("FASTSAFETENSORS_SHARE_DIR");
    uint64_t grace_s = 0, bytes_max = fsti_memory_total() / 2;
    int used;
    if (wanted != NULL && wanted[0] != '\0')
        used = snprintf(out->folder, sizeof out->folder, "%s", wanted);
    else
        used = snprintf(out->folder, sizeof out->folder, "/dev/shm/fastsafetensors-%lu",
                        (unsigned long)geteuid());
    if ((size_t)used >= sizeof out->folder) {
        snprintf(why, why_size, "the name of the folder for shared segments is too long");
        return false;
    }
    if (!read_number("FASTSAFETENSORS_SHARE_GRACE", GRACE_S_MAX, &grace_s, why, why_size) ||
        !read_number("FASTSAFETENSORS_SHARE_MAX", UINT64_MAX, &bytes_max, why, why_size))
        return false;
    out->grace_s = (uint32_t)grace_s;
    out->bytes_max = bytes_max;
    return true;
}
