// SPDX-License-Identifier: Apache-2.0
/// Reads listings of stores (ListObjectsV2 and Azure's) from XML. Private to the store module.
/// Pure.
#ifndef FSTI_LISTING_H
#define FSTI_LISTING_H

#include "base/primitives.h"

/// Called with each key, unescaped and NUL-terminated. Returns false to stop.
typedef bool (*listing_visitor)(void *context, const char *key);

/// The text of the first element with that name, unescaped. False if it is missing or too long.
bool fsti_xml_find(const char *text, size_t size, const char *name, char *out, size_t out_size);

#define LISTING_KEY_BYTES_MAX 1025u ///< S3's limit, with a NUL
#define LISTING_TOKEN_BYTES_MAX 2048u

typedef struct listing {
    char next[LISTING_TOKEN_BYTES_MAX]; ///< "" at the end
} listing;

/// Returns NULL, or the error. Unknown entities and too long keys or tokens are errors. Stopping by
/// the visitor is not.
const char *fsti_listing_read(const char *text, size_t size, listing_visitor visit, void *context,
                              listing *out);

#endif
