// SPDX-License-Identifier: Apache-2.0
/// Names of files of the Hugging Face Hub, and their URLs.
#include <stdio.h>
#include <string.h>

#include "hub.h"

#define HUB "https://huggingface.co"

static const char wrong_form[] = "of the Hub it is hf://OWNER/NAME[@REVISION]/FILE";

/// The end of a revision that starts at `at`. refs/pr/N and refs/convert/NAME contain slashes.
static const char *find_revision_end(const char *at, const char *end) {
    static const char *const starts[] = {"refs/pr/", "refs/convert/"};
    const char *from = at;
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        size_t size = strlen(starts[i]);
        if ((size_t)(end - at) > size && memcmp(at, starts[i], size) == 0) from = at + size;
    }
    const char *slash = memchr(from, '/', (size_t)(end - from));
    return slash == NULL ? end : slash;
}

const char *fsti_hub_parse(const url_parts *url, hub_name *out) {
    const char *at = url->path.at, *end = at + url->path.size;
    *out = (hub_name){.owner = url->host, .revision = "main"};
    if (at < end) at++;
    const char *name_end = at;
    while (name_end < end && *name_end != '/' && *name_end != '@') name_end++;
    out->repository = (url_part){at, (size_t)(name_end - at)};
    const char *slash = name_end;
    if (name_end < end && *name_end == '@') {
        const char *begin = name_end + 1;
        slash = find_revision_end(begin, end);
        const url_part revision = {begin, (size_t)(slash - begin)};
        if (revision.size == 0 ||
            !fsti_url_unescape(revision, out->revision, sizeof out->revision)) // refs%2Fpr%2F1
            return wrong_form;
    }
    out->path = (url_part){slash, (size_t)(end - slash)};
    return out->repository.size == 0 || slash == end ? wrong_form : NULL;
}

const char *fsti_hub_endpoint(const object_store *store) {
    return store->endpoint[0] != '\0' ? store->endpoint : HUB;
}

bool fsti_hub_escape_revision(const hub_name *name, char *out, size_t size) {
    return fsti_url_escape((url_part){name->revision, strlen(name->revision)}, false, out, size);
}

const char *fsti_hub_address(const object_store *store, const url_parts *url, char *out,
                             size_t size) {
    hub_name name;
    char revision[3 * sizeof name.revision], key[URL_BYTES_MAX], path[3 * 1024];
    const char *why = fsti_hub_parse(url, &name);
    if (why != NULL) return why;
    const url_parts rest = {.path = name.path};
    if (!fsti_hub_escape_revision(&name, revision, sizeof revision) ||
        !fsti_url_key(&rest, key, sizeof key) ||
        !fsti_url_escape((url_part){key, strlen(key)}, true, path, sizeof path))
        return "it is too long";
    int used = snprintf(out, size, "%s/%.*s/%.*s/resolve/%s/%s", fsti_hub_endpoint(store),
                        (int)name.owner.size, name.owner.at, (int)name.repository.size,
                        name.repository.at, revision, path);
    return used > 0 && (size_t)used < size ? NULL : "it is too long";
}
