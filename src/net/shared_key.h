// SPDX-License-Identifier: Apache-2.0
/// Signatures of requests to Azure's blobs by the account's key: private to the net room. Pure.
#ifndef FSTI_SHARED_KEY_H
#define FSTI_SHARED_KEY_H

#include "url.h"

typedef struct shared_key_request {
    const char *method, *account;
    url_part path, query;     ///< escaped
    const char *const *lines; ///< of its head: those that begin with x-ms-, in order, are signed
    size_t line_count;
    const char *type;                       ///< of the body, or ""
    const char *range, *match, *none_match; ///< or ""
    size_t body_bytes;
    const unsigned char *key; ///< of the account
    size_t key_size;
} shared_key_request;

#define SHARED_KEY_LINE_BYTES 160u
/// The value of the Authorization header; false where it does not fit.
bool fsti_shared_key_sign(const shared_key_request *request, char *line, size_t size);

#endif
