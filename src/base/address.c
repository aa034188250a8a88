// SPDX-License-Identifier: Apache-2.0
/// Addresses where paths are expected, and how they may be told.
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base.h"

bool fsti_path_is_address(const char *path) {
    // With one slash: as an object of paths of the file system leaves an address.
    static const char *const starts[] = {"http:/", "https:/", "s3:/", "gs:/", "az:/", "hf:/"};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++)
        if (strncasecmp(path, starts[i], strlen(starts[i])) == 0) return true;
    return false;
}

void fsti_url_tell(const char *text, char *out, size_t size) {
    size_t length = strcspn(text, "?#");
    const char *slashes = strstr(text, ":/");
    const char *host = slashes == NULL ? text : slashes + 1 + strspn(slashes + 1, "/");
    size_t host_size = strcspn(host, "/?#");
    // What stands before an @ is a password as likely as not.
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

fst_status fsti_address_refuse(const char *path, const char *what, fst_error *error) {
    fsti_error_place place = FSTI_NOWHERE;
    place.file = path;
    return fsti_error_set(error, FST_E_UNSUPPORTED, place, "%s", what);
}
