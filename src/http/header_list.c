// SPDX-License-Identifier: Apache-2.0
/// The headers of a request, as a list of libcurl.
#include "header_list.h"

#include <stdio.h>
#include <string.h>

#include "curl_library.h"

/// A bearer token or session token, and its name.
#define LINE_BYTES 4200u

bool fsti_headers_add_line(http_headers *headers, const char *line) {
    const curl_library *curl;
    if (fsti_curl_open(&curl, NULL) != FST_OK) return false;
    curl_list *grown = curl->curl_slist_append(headers->list, line);
    if (grown != NULL) headers->list = grown;
    return grown != NULL;
}

bool fsti_headers_add(http_headers *headers, const char *name, const char *value) {
    char line[LINE_BYTES];
    int used = snprintf(line, sizeof line, "%s: %s", name, value);
    bool good = used > 0 && (size_t)used < sizeof line && fsti_headers_add_line(headers, line);
    explicit_bzero(line, sizeof line);
    return good;
}

void fsti_headers_clear(http_headers *headers) {
    typedef struct line {
        char *text;
        struct line *next;
    } line;
    const curl_library *curl;
    // libcurl has copied the lines.
    for (const line *each = headers->list; each != NULL; each = each->next)
        explicit_bzero(each->text, strlen(each->text));
    if (headers->list != NULL && fsti_curl_open(&curl, NULL) == FST_OK)
        curl->curl_slist_free_all(headers->list);
    headers->list = NULL;
}
