// SPDX-License-Identifier: Apache-2.0
/// The headers of a request. Private to the http module.
#ifndef FSTI_HEADER_LIST_H
#define FSTI_HEADER_LIST_H

#include "base/primitives.h"

typedef struct http_headers {
    void *list; ///< curl_list; NULL: empty
} http_headers;

/// Adds a line. False without memory.
bool fsti_headers_add_line(http_headers *headers, const char *line);
/// Adds "name: value". False without memory, or if it is too long.
bool fsti_headers_add(http_headers *headers, const char *name, const char *value);
/// Wipes and frees all headers, which may contain credentials.
void fsti_headers_clear(http_headers *headers);

#endif
