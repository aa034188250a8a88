// SPDX-License-Identifier: Apache-2.0
/// Settings of shared segments, from the environment.
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "share_private.h"

#define GRACE_S_MAX ((uint64_t)366 * 86400)

/// Reads a number with an optional suffix K, M, G or T (powers of 1024).
static bool parse_size(const char *text, uint64_t *out) {
    char *end = NULL;
    if (!isdigit((unsigned char)text[0])) return false;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    static const char suffixes[] = "KMGT";
    const char *suffix = *end != '\0' ? strchr(suffixes, toupper((unsigned char)*end)) : NULL;
    uint64_t unit = 1;
    if (suffix != NULL) {
        unit = (uint64_t)1 << (10 * (suffix - suffixes + 1));
        end++;
    }
    return errno == 0 && *end == '\0' && fsti_mul(number, unit, out);
}

/// A variable's number. False with words if it is not one.
static bool read_number(const char *name, uint64_t number_max, uint64_t *out, char *why,
                        size_t why_size) {
    const char *text = secure_getenv(name);
    if (text == NULL || text[0] == '\0') return true;
    if (parse_size(text, out) && *out <= number_max) return true;
    snprintf(why, why_size, "%s is not a number up to %llu", name, (unsigned long long)number_max);
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
