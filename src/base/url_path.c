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
