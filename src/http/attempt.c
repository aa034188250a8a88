// SPDX-License-Identifier: Apache-2.0
/// One attempt at a request: sending it with libcurl, and receiving its response.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "fastsafetensors/version.h"
#include "answered_hosts.h"
#include "attempt.h"
#include "location/location.h"

/// libcurl's receive buffer. Below 64 KiB it is slower; larger ones gain nothing.
#define BUFFER_BYTES 262144L

/// The required version: the resource's, or that of this request's first valid response.
static const resource_version *required_version(const http_request *request) {
    if (request->resource == NULL) return NULL;
    const resource_version *version = &request->resource->version;
    return version->is_set ? version : &request->first_version;
}

static response_expectation expectation_of(const http_attempt *attempt) {
    const http_request *request = attempt->request;
    return (response_expectation){.is_range = request->is_range,
                                  .is_first = request->is_first,
                                  .begin = attempt->begin,
                                  .end = request->end,
                                  .required = required_version(request),
                                  .known = request->known};
}

void fsti_attempt_evaluate(http_attempt *attempt) {
    if (attempt->is_evaluated) return;
    attempt->is_evaluated = true;
    response_expectation expected = expectation_of(attempt);
    http_response *answer = &attempt->answer;
    if (expected.is_first && answer->status == 200) answer->total_bytes = answer->length_bytes;
    attempt->verdict = fsti_response_evaluate(answer, &expected, &attempt->why);
    // A retry or a hedged attempt must continue with the same version.
    resource_version *version = &attempt->request->first_version;
    if (expected.is_first && attempt->verdict == HTTP_OK && !version->is_set)
        fsti_version_set(version, answer);
}

static size_t receive_header(char *line, size_t unit, size_t count, void *context) {
    http_attempt *attempt = context;
    size_t size = unit * count;
    attempt->last_data_ns = fsti_now_ns();
    if (!attempt->has_first_byte)
        attempt->request->counts.first_byte_ns += attempt->last_data_ns - attempt->started_ns;
    attempt->has_first_byte = true;
    if (fsti_response_line(&attempt->answer, line, size, (int64_t)time(NULL))) return size;
    attempt->is_evaluated = true;
    attempt->verdict = HTTP_WRONG;
    attempt->why = "the response headers are too large";
    return 0;
}

/// Appends to a text of at most `size_max` bytes. False if it would be longer, or without memory.
static bool keep_text(http_attempt *attempt, const char *bytes, size_t size, size_t size_max) {
    if (size > size_max - attempt->text_bytes) return false;
    size_t wanted = attempt->text_bytes + size + 1;
    if (wanted > attempt->text_capacity) {
        size_t capacity = wanted * 2;
        char *grown = fsti_realloc(attempt->text, capacity);
        attempt->is_out_of_memory = grown == NULL;
        if (grown == NULL) return false;
        attempt->text = grown;
        attempt->text_capacity = capacity;
    }
    memcpy(attempt->text + attempt->text_bytes, bytes, size);
    attempt->text_bytes += size;
    attempt->text[attempt->text_bytes] = '\0';
    return true;
}

void fsti_request_put(const http_request *request, uint64_t at, const char *bytes, size_t size) {
    const fsti_range_edges *edges = request->edges;
    if (edges == NULL) {
        memcpy(request->buffer + (at - request->begin), bytes, size);
        return;
    }
    while (size > 0) {
        char *target;
        uint64_t end;
        if (at < edges->begin) {
            target = edges->head + (at - request->begin);
            end = edges->begin;
        } else if (at < edges->end) {
            target = request->buffer + (at - edges->begin);
            end = edges->end;
        } else { // without bytes behind the middle, `tail` may be NULL
            target = edges->tail + (at - edges->end);
            end = UINT64_MAX;
        }
        size_t part = (size_t)fsti_min(size, end - at);
        memcpy(target, bytes, part);
        at += part;
        bytes += part;
        size -= part;
    }
}

/// Stores body bytes at their position in the caller's buffer. A hedged request has two attempts,
/// which may store the same bytes: each response's version is checked first, and both run on the
/// event loop's thread.
static size_t store_range(http_attempt *attempt, const char *bytes, size_t size) {
    http_request *request = attempt->request;
    uint64_t end = request->end;
    if (request->is_first) end = fsti_min(end, attempt->answer.total_bytes);
    attempt->is_too_long = size > end - attempt->at;
    if (attempt->is_too_long) return 0;
    fsti_request_put(request, attempt->at, bytes, size);
    attempt->at += size;
    request->have = fsti_max(request->have, attempt->at);
    return size;
}

static size_t receive_body(char *bytes, size_t unit, size_t count, void *context) {
    http_attempt *attempt = context;
    http_request *request = attempt->request;
    size_t size = unit * count;
    attempt->last_data_ns = fsti_now_ns();
    fsti_attempt_evaluate(attempt);
    request->counts.bytes += size;
    if (attempt->verdict == HTTP_WRONG || attempt->verdict == HTTP_CHANGED) return 0;
    if (attempt->verdict != HTTP_OK) {
        // An error text is read to its end, which keeps the connection usable. A longer one ends
        // the transfer.
        size_t size_max =
            ERROR_BODY_BYTES_MAX - fsti_min(ERROR_BODY_BYTES_MAX, attempt->text_bytes);
        if (size > size_max) return 0;
        return keep_text(attempt, bytes, size, ERROR_BODY_BYTES_MAX) ? size : 0;
    }
    if (request->is_range) return store_range(attempt, bytes, size);
    attempt->is_too_long = size > request->text_bytes_max - attempt->text_bytes;
    return keep_text(attempt, bytes, size, request->text_bytes_max) ? size : 0;
}

/// The required version as an If-Match value, if the host can know it.
static const char *match_of(const http_attempt *attempt) {
    const http_request *request = attempt->request;
    const resource_version *version = required_version(request);
    // A version reported by a redirect's target is unknown to the redirecting host.
    bool host_knows_version =
        version != NULL && version->is_set && fsti_version_is_strong(version) &&
        (attempt->is_redirected || !atomic_load(&request->resource->has_redirected));
    return host_knows_version ? version->etag : NULL;
}

/// Adds all headers except the signature.
static bool add_lines(const http_request *request, http_headers *headers) {
    // No content encoding, and no waiting for "100 Continue".
    bool succeeded = fsti_headers_add_line(headers, "Accept-Encoding: identity");
    if (succeeded && request->body != NULL) succeeded = fsti_headers_add_line(headers, "Expect:");
    for (const char *const *line = request->lines; succeeded && line != NULL && *line != NULL;
         line++)
        succeeded = fsti_headers_add_line(headers, *line);
    return succeeded;
}

static bool make_headers(http_attempt *attempt, const char *url) {
    const http_request *request = attempt->request;
    const http_authority *authority = &request->authority;
    http_headers *headers = &attempt->headers;
    char range[64];
    snprintf(range, sizeof range, "bytes=%" PRIu64 "-%" PRIu64, attempt->begin, request->end - 1);
    http_call call = {.method = request->method == NULL ? "GET" : request->method,
                      .url = url,
                      .lines = request->lines,
                      .range = request->is_range ? range : NULL,
                      .match = match_of(attempt),
                      .body_hash = request->body_hash,
                      .body_bytes = request->body_bytes,
                      .now_s = (int64_t)time(NULL),
                      .key_number = &attempt->key_number};
    if (!add_lines(request, headers)) return false;
    if (call.range != NULL && !fsti_headers_add(headers, "Range", call.range)) return false;
    if (call.match != NULL && !fsti_headers_add(headers, "If-Match", call.match)) return false;
    // Send credentials only to the host that they belong to.
    return authority->functions == NULL || !fsti_url_host_is(request->url, url) ||
           authority->functions->sign(authority->context, &call, headers);
}

/// Sets method and body. The body is read from the caller's memory.
static void set_body(const curl_library *curl, http_attempt *attempt) {
    const http_request *request = attempt->request;
    if (request->body != NULL) {
        curl->curl_easy_setopt(attempt->easy, CURL_POST_BYTES, (int64_t)request->body_bytes);
        curl->curl_easy_setopt(attempt->easy, CURL_POST_BODY, request->body);
    }
    if (request->method == NULL) return;
    if (strcmp(request->method, "HEAD") == 0)
        curl->curl_easy_setopt(attempt->easy, CURL_NO_BODY, 1L);
    else
        curl->curl_easy_setopt(attempt->easy, CURL_METHOD, request->method);
}

static void set_options(const curl_library *curl, http_attempt *attempt, const char *url) {
    curl_easy *easy = attempt->easy;
    http_limits limits = fsti_http_limits();
    char ca_file[512];
    bool has_ca_file = fsti_http_ca_file(ca_file, sizeof ca_file);
    char agent[48];
    snprintf(agent, sizeof agent, "fastsafetensors/%d.%d.%d", FST_VERSION_MAJOR, FST_VERSION_MINOR,
             FST_VERSION_PATCH);
    curl->curl_easy_setopt(easy, CURL_URL, url);
    curl->curl_easy_setopt(easy, CURL_PRIVATE, (void *)attempt);
    curl->curl_easy_setopt(easy, CURL_NO_SIGNALS, 1L);
    curl->curl_easy_setopt(easy, CURL_NO_DELAY, 1L);
    curl->curl_easy_setopt(easy, CURL_PROTOCOLS, (long)(CURL_PROTOCOL_HTTP | CURL_PROTOCOL_HTTPS));
    curl->curl_easy_setopt(easy, CURL_FOLLOW, 0L); // redirects are followed by this module's rules
    curl->curl_easy_setopt(easy, CURL_PATH_AS_IS, 1L);
    curl->curl_easy_setopt(easy, CURL_HTTP_VERSION, (long)CURL_HTTP_1_1);
    curl->curl_easy_setopt(easy, CURL_DECODES_CONTENT, 0L);
    curl->curl_easy_setopt(easy, CURL_HIDE_PROXY_HEAD, 1L);
    curl->curl_easy_setopt(easy, CURL_BUFFER_BYTES, BUFFER_BYTES);
    bool is_link_local = attempt->request->is_link_local;
    curl->curl_easy_setopt(easy, CURL_CONNECT_MS,
                           is_link_local ? (long)LINK_LOCAL_MS : (long)limits.connect_ms);
    if (is_link_local) curl->curl_easy_setopt(easy, CURL_PROXY_EXCEPTIONS, "*");
    curl->curl_easy_setopt(easy, CURL_VERIFY_PEER, 1L);
    curl->curl_easy_setopt(easy, CURL_VERIFY_HOST, 2L);
    if (has_ca_file) curl->curl_easy_setopt(easy, CURL_CA_FILE, ca_file);
    curl->curl_easy_setopt(easy, CURL_USER_AGENT, agent);
    curl->curl_easy_setopt(easy, CURL_HEADERS, attempt->headers.list);
    curl->curl_easy_setopt(easy, CURL_HEADER_CALL, receive_header);
    curl->curl_easy_setopt(easy, CURL_HEADER_CONTEXT, (void *)attempt);
    curl->curl_easy_setopt(easy, CURL_WRITE_CALL, receive_body);
    curl->curl_easy_setopt(easy, CURL_WRITE_CONTEXT, (void *)attempt);
    // A late response may be caused by its connection, so a hedged attempt uses a new one.
    if (attempt->is_hedge || attempt->request->is_fresh)
        curl->curl_easy_setopt(easy, CURL_FRESH_CONNECTION, 1L);
}

/// The URL of this attempt.
static char *choose_url(http_attempt *attempt) {
    const http_request *request = attempt->request;
    attempt->is_redirected = request->target != NULL;
    if (request->target != NULL) return fsti_string_copy(request->target, strlen(request->target));
    if (request->resource != NULL)
        return fsti_resource_target(request->resource, request->url, &attempt->is_redirected);
    return fsti_string_copy(request->url, strlen(request->url));
}

http_attempt *fsti_attempt_make(http_request *request, bool is_hedge, uint64_t now_ns) {
    const curl_library *curl;
    if (fsti_curl_open(&curl, NULL) != FST_OK) return NULL;
    http_attempt *attempt = fsti_alloc_zeroed(1, sizeof *attempt);
    if (attempt == NULL) return NULL;
    attempt->request = request;
    attempt->is_hedge = is_hedge;
    attempt->begin = attempt->at = request->have;
    attempt->started_ns = attempt->last_data_ns = now_ns;
    fsti_response_begin(&attempt->answer);
    char *url = choose_url(attempt);
    if (url != NULL) attempt->host_key = fsti_host_key(url);
    if (url != NULL && !fsti_alloc_fails()) attempt->easy = curl->curl_easy_init();
    if (attempt->easy != NULL && make_headers(attempt, url)) {
        set_options(curl, attempt, url);
        set_body(curl, attempt);
        fsti_redirect_guard(curl, attempt, url);
        fsti_secret_text_free(url);
        return attempt;
    }
    fsti_secret_text_free(url);
    fsti_attempt_free(attempt);
    return NULL;
}

void fsti_attempt_free(http_attempt *attempt) {
    const curl_library *curl = NULL;
    if (attempt == NULL) return;
    if (attempt->easy != NULL && fsti_curl_open(&curl, NULL) == FST_OK)
        curl->curl_easy_cleanup(attempt->easy);
    fsti_headers_clear(&attempt->headers);
    fsti_free(attempt->text);
    fsti_free(attempt);
}
