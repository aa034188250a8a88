// SPDX-License-Identifier: Apache-2.0
/// Response headers, evaluated before the body is used. Part of http.h. Pure.
#ifndef FSTI_RESPONSE_H
#define FSTI_RESPONSE_H

#include "base/primitives.h"

/// Maximum size of response headers; larger ones are refused.
#define RESPONSE_HEAD_BYTES_MAX 65536u
#define RESPONSE_TEXT_BYTES 192u
#define RESPONSE_UNKNOWN UINT64_MAX

/// The parsed headers. Values longer than their field are ignored.
typedef struct http_response {
    uint32_t status;
    size_t head_bytes;
    bool is_broken; ///< a header is invalid: `broken` names it
    const char *broken;
    bool has_range;
    uint64_t range_begin, range_end; ///< Content-Range; equal for "*"
    uint64_t total_bytes;            ///< RESPONSE_UNKNOWN: missing, or "*"
    uint64_t length_bytes;           ///< Content-Length; RESPONSE_UNKNOWN
    bool is_encoded, is_multipart;
    char etag[RESPONSE_TEXT_BYTES];
    char modified[64];
    char generation[32]; ///< x-goog-generation
    char request_id[80]; ///< of the store
    char code[64];       ///< x-ms-error-code, or from the body
    char region[40];     ///< x-amz-bucket-region
    char date[48];
    int64_t received_s;     ///< Unix time of the status line, by this machine's clock
    int64_t retry_after_ms; ///< -1: missing
} http_response;

void fsti_response_begin(http_response *answer);
/// Parses one header line. `now_s`: Unix time, for dates. False: too many headers.
bool fsti_response_line(http_response *answer, const char *line, size_t size, int64_t now_s);
/// Parses an HTTP date to Unix time; -1 if it is invalid.
int64_t fsti_response_date(const char *text);
/// Copies the text between <Code> and </Code> of a store's XML error to answer->code.
void fsti_response_read_code(http_response *answer, const char *body, size_t size);

/// The version of a resource, from its first response.
typedef struct resource_version {
    bool is_set;
    uint64_t total_bytes;
    char etag[RESPONSE_TEXT_BYTES]; ///< "" if there is no ETag
    char modified[64];
    char generation[32];
    /// Whether `modified` is so much older than the response that a later version has another one.
    bool has_strong_date;
} resource_version;
/// Whether the ETag alone identifies the version and can be used in conditions.
bool fsti_version_is_strong(const resource_version *version);
/// Whether two responses with this version are of the same content: by ETag, generation or date.
bool fsti_version_is_exact(const resource_version *version);
void fsti_version_set(resource_version *version, const http_response *answer);

/// The meaning of a response to a request for [begin, end).
typedef enum http_verdict {
    HTTP_OK,        ///< the body has the requested bytes
    HTTP_UNCHANGED, ///< the known version is current; no body
    HTTP_RETRY,     ///< a later attempt may succeed
    HTTP_SLOWER,    ///< the same, and the server asks for fewer requests
    HTTP_REDIRECT,  ///< a redirect
    HTTP_CHANGED,   ///< another version
    HTTP_NOT_FOUND,
    HTTP_FORBIDDEN,
    HTTP_REFUSED, ///< any other status
    HTTP_WRONG,   ///< invalid response; nothing in it can be trusted
} http_verdict;

typedef struct response_expectation {
    bool is_range;
    bool is_first; ///< the size is unknown, so [begin, end) may exceed it
    uint64_t begin, end;
    const resource_version *required; ///< the required version; NULL: none
    const resource_version *known;    ///< NULL, or a version that needs no body
} response_expectation;
/// *why (may be left unchanged): text for errors.
http_verdict fsti_response_evaluate(const http_response *answer,
                                    const response_expectation *expected, const char **why);

#endif
