// SPDX-License-Identifier: Apache-2.0
/// Signatures of Azure blob requests with the account key. Private to the store module. Pure.
#ifndef FSTI_SHARED_KEY_H
#define FSTI_SHARED_KEY_H

#include "location/location.h"

typedef struct shared_key_request {
    const char *method, *account;
    url_part path, query;     ///< escaped
    const char *const *lines; ///< headers; those that start with x-ms- are signed, in order
    size_t line_count;
    const char *type;                       ///< of the body, or ""
    const char *range, *match, *none_match; ///< or ""
    size_t body_bytes;
    const unsigned char *key; ///< of the account
    size_t key_size;
} shared_key_request;

#define SHARED_KEY_LINE_BYTES 160u
/// Writes the value of the Authorization header. False if it is too long.
bool fsti_shared_key_sign(const shared_key_request *request, char *line, size_t size);

#endif
