// SPDX-License-Identifier: Apache-2.0
/// Recognises the schemes of URLs, and redacts URLs for messages.
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "primitives.h"

fsti_scheme fsti_url_scheme(const char *path) {
    static const struct {
        const char *start;
        fsti_scheme scheme;
    } schemes[] = {{"http:/", FSTI_SCHEME_HTTP}, {"https:/", FSTI_SCHEME_HTTP},
                   {"s3:/", FSTI_SCHEME_S3},     {"gs:/", FSTI_SCHEME_GS},
                   {"az:/", FSTI_SCHEME_AZ},     {"hf:/", FSTI_SCHEME_HF}};
    for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++)
        if (strncasecmp(path, schemes[i].start, strlen(schemes[i].start)) == 0)
            return schemes[i].scheme;
    return FSTI_SCHEME_NONE;
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
