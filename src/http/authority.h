// SPDX-License-Identifier: Apache-2.0
/// Who answers for a request: signs it, says what a rejection means, and knows its secrets. A
/// request that needs no signature has none. Part of http.h.
#ifndef FSTI_AUTHORITY_H
#define FSTI_AUTHORITY_H

#include "header_list.h"
#include "response.h"

/// A request to sign.
typedef struct http_call {
    const char *method, *url;
    const char *const *lines;  ///< headers, NULL-terminated; or NULL
    const char *range, *match; ///< values of Range and If-Match; NULL: none
    const char *body_hash;     ///< SHA-256 in hexadecimal digits; NULL: not signed
    size_t body_bytes;
    int64_t now_s;
    uint32_t *key_number; ///< set to the number of the keys that signed it, if they are renewed
} http_call;

/// What may make a rejected request succeed. Each is tried once.
typedef enum http_remedy {
    HTTP_REMEDY_NONE = 0,
    HTTP_REMEDY_REPEAT = 1, ///< sign it again, with what the response said
    HTTP_REMEDY_RENEW = 2,  ///< sign it again when the keys have been renewed
} http_remedy;

typedef struct http_rejection {
    const http_response *answer;
    uint32_t key_number;    ///< from http_call
    uint32_t tried;         ///< the remedies that did not help
    uint64_t request_count; ///< attempts so far
} http_rejection;

/// Called by the event loops, so they must not wait.
typedef struct http_authority_functions {
    /// Adds the signature's headers. The URL is on the host that the caller named. False: no
    /// memory, or too long.
    bool (*sign)(const void *context, const http_call *call, http_headers *headers);
    /// Chooses a remedy for a rejection, and starts it.
    http_remedy (*refused)(const void *context, const http_rejection *rejection);
    /// Whether the keys are being renewed.
    bool (*is_renewing)(const void *context);
    /// Whether a redirect may be followed. Otherwise the request fails with that response.
    bool (*may_follow)(const void *context, const http_response *answer);
    /// Whether a text from a server contains part of a secret.
    bool (*has_secret)(const void *context, const char *text);
    /// The source of the keys, for messages.
    const char *(*source)(const void *context);
} http_authority_functions;

typedef struct http_authority {
    const http_authority_functions *functions; ///< NULL: no authority
    const void *context;                       ///< lives as long as the request
} http_authority;

#endif
