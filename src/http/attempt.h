// SPDX-License-Identifier: Apache-2.0
/// The attempts of a request. Private to the http module.
#ifndef FSTI_ATTEMPT_H
#define FSTI_ATTEMPT_H

#include "curl_library.h"
#include "http.h"

/// Maximum size of error bodies that are read.
#define ERROR_BODY_BYTES_MAX ((size_t)16384)
#define REDIRECT_COUNT_MAX 5u

/// One attempt: a request that was sent, and the response received so far.
typedef struct http_attempt {
    http_request *request;
    curl_easy *easy;
    http_headers headers;
    http_response answer;
    http_verdict verdict;
    const char *why;
    bool is_evaluated, is_hedge;
    bool has_stalled;    ///< given up, because no bytes arrived for too long
    bool is_too_long;    ///< received more than requested
    bool is_redirected;  ///< sent to the target of a redirect
    bool has_first_byte; ///< of the response headers
    uint64_t host_key;   ///< see fsti_host_key()
    uint64_t begin, at;  ///< in the resource; at: the next byte
    uint64_t started_ns, last_data_ns;
    uint32_t key_number; ///< of the keys that signed it
    int64_t sent_bytes;  ///< body bytes sent, when last examined
    char *text;          ///< text that is no range: an error's body, or a complete text
    size_t text_bytes, text_capacity;
    bool is_out_of_memory;
    bool has_refused_address; ///< refused a redirect to a private address
    char refused_address[48]; ///< the refused address
} http_attempt;

/// Link-local services respond at once or do not exist.
#define LINK_LOCAL_MS 1000u

/// Prepares a handle for the next attempt. NULL: no memory.
http_attempt *fsti_attempt_make(http_request *request, bool is_hedge, uint64_t now_ns);
void fsti_attempt_free(http_attempt *attempt);
/// Called at the first byte of the body, or at the end: evaluates the response headers.
void fsti_attempt_evaluate(http_attempt *attempt);

/// The next step of a request after an attempt ended with `result` (CURLcode).
typedef enum request_step { REQUEST_DONE, REQUEST_RETRY } request_step;
/// *is_throttled: the host asks for fewer parallel requests.
request_step fsti_request_finish(http_request *request, http_attempt *attempt, int result,
                                 bool *is_throttled);

// ---- redirects to private addresses (redirect_guard.c) ----

/// Whether a redirect to that URL is refused because of its host name: private, and not the
/// request's own host.
bool fsti_redirect_is_refused(const http_request *request, const char *to);
/// Makes libcurl refuse private addresses for a redirected attempt to another host, however the
/// name is spelled and whatever it resolves to.
void fsti_redirect_guard(const curl_library *curl, http_attempt *attempt, const char *url);

#endif
