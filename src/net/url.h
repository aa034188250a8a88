// SPDX-License-Identifier: Apache-2.0
/// Addresses taken apart and put together: private to the net room. Pure.
#ifndef FSTI_URL_H
#define FSTI_URL_H

#include "base/base.h"

/// A longer address is refused: presigned ones have up to 2,000.
#define URL_BYTES_MAX 8192u

/// A part of an address's text.
typedef struct url_part {
    const char *at;
    size_t size;
} url_part;

/// scheme://host[:port]/path[?query]. A fragment, and a user with a password, are refused.
typedef struct net_url {
    url_part scheme, host; ///< host: without brackets and port
    uint32_t port;         ///< 0: the scheme's own
    bool has_brackets;     ///< the host is an IPv6 address
    url_part authority;    ///< host and port as written
    url_part path;         ///< with its first slash; or empty
    url_part query;        ///< without the question mark
    bool has_query;
} net_url;

/// NULL when `text` is an address that can be used; else why not. The parts point into it.
const char *fsti_url_parse(const char *text, net_url *out);
bool fsti_url_part_is(url_part part, const char *text);
/// Whether both name the same scheme, host and port.
bool fsti_url_same_host(const net_url *a, const net_url *b);
/// The same for two texts; false where one of them is no address.
bool fsti_url_host_is(const char *a, const char *b);
/// The key of an address of a store, from its path: %3F, %23 and %25 are ? # and %, and all else
/// stands for itself. False where it does not fit.
bool fsti_url_key(const net_url *url, char *out, size_t size);
/// Text with every byte but A-Z a-z 0-9 - . _ ~ (and / if `keeps_slash`) as %XX; false where it
/// does not fit.
bool fsti_url_escape(url_part text, bool keeps_slash, char *out, size_t size);
/// The other way; bytes that are no escapes stay. False where it does not fit, or for %00.
bool fsti_url_unescape(url_part text, char *out, size_t size);

#endif
