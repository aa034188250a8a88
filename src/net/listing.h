// SPDX-License-Identifier: Apache-2.0
/// Listings of stores (ListObjectsV2 and Azure's), read from XML: private to the net room. Pure.
#ifndef FSTI_LISTING_H
#define FSTI_LISTING_H

#include "base/base.h"

/// Called with each key, unescaped, ended by a NUL. False ends the reading.
typedef bool (*listing_visitor)(void *context, const char *key);

/// The text of the first element of a name, unescaped; false where there is none, or it does not
/// fit.
bool fsti_xml_find(const char *text, size_t size, const char *name, char *out, size_t out_size);

#define LISTING_KEY_BYTES_MAX 1025u ///< of S3, with its NUL
#define LISTING_TOKEN_BYTES_MAX 2048u

typedef struct listing {
    char next[LISTING_TOKEN_BYTES_MAX]; ///< "" at the end
} listing;

/// NULL, or what is wrong with the text. Entities that are not of XML itself are wrong, and so are
/// keys and tokens that are too long. Stopped by the visitor it is fine.
const char *fsti_listing_read(const char *text, size_t size, listing_visitor visit, void *context,
                              listing *out);

#endif
