// SPDX-License-Identifier: Apache-2.0
/// Interface of the location module: what a path names, and the parts of URLs. Pure.
#ifndef FSTI_LOCATION_H
#define FSTI_LOCATION_H

#include "base/primitives.h"
#include "url.h"

/// Whether a path is a URL that can be read.
bool fsti_location_is_url(const char *path);
/// The URL of `name` in the folder of `base`, with the query of `base`. Bytes not allowed in such a
/// URL are escaped. From fsti_alloc(); NULL: no memory.
char *fsti_url_sibling(const char *base, const char *name);

/// The path of a URL relative to `folder` (redacted, with a final slash), without query and
/// unescaped. If it is not below `folder`, or that is NULL, its last part. False if it is too long.
bool fsti_url_relative(const char *url, const char *folder, char *out, size_t size);

#endif
