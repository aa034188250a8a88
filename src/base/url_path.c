// SPDX-License-Identifier: Apache-2.0
/// Recognises URLs in paths, and redacts them for messages.
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "primitives.h"

bool fsti_path_is_url(const char *path) {
    // A single slash: path objects such as pathlib.Path collapse the second one.
    static const char *const starts[] = {"http:/", "https:/", "s3:/", "gs:/", "az:/", "hf:/"};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++)
        if (strncasecmp(path, starts[i], strlen(starts[i])) == 0) return true;
    return false;
}

/// Returns the size of the scheme with its colon; *with_slashes counts the slashes as well.
static size_t scheme_size(const char *url, size_t *with_slashes) {
    size_t size = strcspn(url, ":") + 1;
    *with_slashes = size + strspn(url + size, "/");
    return size;
}

bool fsti_url_is_same(const char *one, const char *other) {
    if (!fsti_path_is_url(one) || !fsti_path_is_url(other)) return strcmp(one, other) == 0;
    size_t one_at, other_at, size = scheme_size(one, &one_at);
    if (scheme_size(other, &other_at) != size || strncasecmp(one, other, size) != 0) return false;
    one += one_at;
    other += other_at;
    size_t host = strcspn(one, "/?#");
    return strncasecmp(one, other, host) == 0 && strcmp(one + host, other + host) == 0;
}

void fsti_url_redact(const char *text, char *out, size_t size) {
    size_t length = strcspn(text, "?#");
    const char *slashes = strstr(text, ":/");
    const char *host = slashes == NULL ? text : slashes + 1 + strspn(slashes + 1, "/");
    size_t host_size = strcspn(host, "/?#");
    // Text before an @ is often a password.
    const char *user_end = memchr(host, '@', host_size);
    if (user_end == NULL) {
        snprintf(out, size, "%.*s", (int)length, text);
    } else {
        const char *rest = user_end + 1;
        snprintf(out, size, "%.*s%.*s", (int)(host - text), text, (int)(text + length - rest),
                 rest);
    }
    fsti_text_make_printable(out);
}
