// SPDX-License-Identifier: Apache-2.0
/// Settings of shared segments, from the environment.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "share_private.h"

#define GRACE_S_MAX ((uint64_t)366 * 86400)

/// The value of a variable, or NULL if it is unset or empty.
static const char *value_of(const char *name) {
    const char *text = secure_getenv(name);
    return text == NULL || text[0] == '\0' ? NULL : text;
}

/// Seconds that a segment stays. False with words for anything but digits.
static bool read_grace(uint64_t *out, char *why, size_t why_size) {
    const char *text = value_of("FASTSAFETENSORS_SHARE_GRACE");
    if (text == NULL) return true;
    bool is_number = text[strspn(text, "0123456789")] == '\0';
    if (is_number && fsti_size_parse(text, out) && *out <= GRACE_S_MAX) return true;
    snprintf(why, why_size, "FASTSAFETENSORS_SHARE_GRACE must be a number of seconds up to %llu",
             (unsigned long long)GRACE_S_MAX);
    return false;
}

static bool read_max(uint64_t *out, char *why, size_t why_size) {
    const char *text = value_of("FASTSAFETENSORS_SHARE_MAX");
    if (text == NULL || fsti_size_parse(text, out)) return true;
    snprintf(why, why_size, "FASTSAFETENSORS_SHARE_MAX must be a size such as 40GiB");
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
    if (!read_grace(&grace_s, why, why_size) || !read_max(&bytes_max, why, why_size)) return false;
    out->grace_s = (uint32_t)grace_s;
    out->bytes_max = bytes_max;
    return true;
}
