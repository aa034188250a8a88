// SPDX-License-Identifier: Apache-2.0
/// Recognises secrets that messages must not contain. Part of http.h. Pure.
#ifndef FSTI_SECRET_TEXT_H
#define FSTI_SECRET_TEXT_H

#include <stdbool.h>

/// Whether one of the two texts contains the other.
bool fsti_text_has_secret(const char *secret, const char *text);
/// Whether a text from a server contains a field of a URL's query.
bool fsti_url_has_secret(const char *url, const char *text);

#endif
