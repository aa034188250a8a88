// SPDX-License-Identifier: Apache-2.0
/// Recognises secrets in texts from servers.
#include "secret_text.h"

#include <string.h>

#include "location/location.h"

/// Shorter texts are not treated as secrets.
#define SECRET_BYTES_MIN 4u

static bool overlaps(url_part secret, const char *text) {
    size_t size = strlen(text);
    if (size < SECRET_BYTES_MIN || secret.size < SECRET_BYTES_MIN) return false;
    return memmem(text, size, secret.at, secret.size) != NULL ||
           memmem(secret.at, secret.size, text, size) != NULL;
}

bool fsti_url_has_secret(const char *url, const char *text) {
    const char *at = strchr(url, '?');
    while (at != NULL && *at != '\0') {
        at++;
        size_t size = strcspn(at, "&");
        const char *value = memchr(at, '=', size);
        if (value == NULL) value = at - 1;
        url_part secret = {value + 1, (size_t)(at + size - value) - 1};
        if (overlaps(secret, text) || overlaps((url_part){at, size}, text)) return true;
        at += size;
    }
    return false;
}

bool fsti_text_has_secret(const char *secret, const char *text) {
    return overlaps((url_part){secret, strlen(secret)}, text);
}
