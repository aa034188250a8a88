// SPDX-License-Identifier: Apache-2.0
/// Parses and builds URLs. Pure.
#ifndef FSTI_URL_H
#define FSTI_URL_H

#include "base/primitives.h"

/// Longer URLs are refused. Presigned ones have up to 2,000 bytes.
#define URL_BYTES_MAX 8192u

/// A part of a URL's text.
typedef struct url_part {
    const char *at;
    size_t size;
} url_part;

/// scheme://host[:port]/path[?query]. Fragments, and users with passwords, are refused.
typedef struct url_parts {
    url_part scheme, host; ///< host: without brackets and port
    uint32_t port;         ///< 0: the scheme's default
    bool has_brackets;     ///< the host is an IPv6 address
    url_part authority;    ///< host and port as written
    url_part path;         ///< with its first slash, or empty
    url_part query;        ///< without the question mark
    bool has_query;
} url_parts;

/// Parses a URL. Returns NULL, or the error. The parts point into `text`.
const char *fsti_url_parse(const char *text, url_parts *out);
bool fsti_url_part_is(url_part part, const char *text);
/// Whether both name the same scheme, host and port.
bool fsti_url_same_host(const url_parts *a, const url_parts *b);
/// The same for two texts. False if one of them is not a URL.
bool fsti_url_host_is(const char *a, const char *b);
/// The key of a store's URL, from its path: %3F, %23 and %25 are decoded, other text is literal.
/// False if it is too long.
bool fsti_url_key(const url_parts *url, char *out, size_t size);
/// Escapes every byte except A-Z a-z 0-9 - . _ ~ (and / if `keeps_slash`) as %XX. False if it is
/// too long.
bool fsti_url_escape(url_part text, bool keeps_slash, char *out, size_t size);
/// Decodes escapes; other bytes stay. False if it is too long, or for %00.
bool fsti_url_unescape(url_part text, char *out, size_t size);

/// The URL of `name` in the folder of `base`, with the query of `base`. Bytes not allowed in such a
/// URL are escaped. From fsti_alloc(); NULL: no memory.
char *fsti_url_sibling(const char *base, const char *name);
/// The path of a URL relative to `folder` (redacted, with a final slash), without query and
/// unescaped. If it is not below `folder`, or that is NULL, its last part. False if it is too long.
bool fsti_url_relative(const char *url, const char *folder, char *out, size_t size);

#endif
