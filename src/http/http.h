// SPDX-License-Identifier: Apache-2.0
/// Interface of the http module: requests through libcurl, with checked responses, retries and
/// hedged requests. A request names its authority, which knows objects, stores and credentials;
/// this module only reads the response headers in which stores name errors and versions
/// (response.c).
///
/// Knows: hosts, requests, responses, retries.
/// Does not know: stores, objects, credentials.
/// Main types: http_request, http_authority, http_response.
#ifndef FSTI_HTTP_H
#define FSTI_HTTP_H

#include "authority.h"
#include "base/primitives.h"
#include "fastsafetensors/remote.h"
#include "http_settings.h"
#include "resource.h"
#include "response.h"
#include "retry.h"
#include "secret_text.h"

/// A cancellation callback. The thread that waits for a server calls `ask` with 0 ten times a
/// second; any result except FST_OK ends the wait at once.
typedef struct fsti_http_watch {
    fst_status (*ask)(void *context, uint64_t zero, fst_error *error); ///< may be NULL
    void *context;
    uint32_t bound_ms; ///< if above 0, the timeout of each request
} fsti_http_watch;
/// A watch for cleanup after a cancelled wait: it cancels nothing, but limits each request to two
/// seconds. `watch` may be NULL.
fsti_http_watch fsti_http_cleanup_watch(const fsti_http_watch *watch);

/// Costs of requests.
typedef struct fsti_http_counts {
    uint64_t requests; ///< all that were sent
    uint64_t retries;  ///< repeated requests among them
    uint64_t hedges;   ///< hedged requests among them, sent because another one was late
    uint64_t connections;
    uint64_t bytes;         ///< in response bodies
    uint64_t kept_bytes;    ///< read from the disk cache instead
    uint64_t written_bytes; ///< written to the disk cache
    uint64_t retry_wait_ns; ///< sum over requests: waiting before retries
    uint64_t first_byte_ns; ///< sum over requests: from sending to the first byte of the response
} fsti_http_counts;
void fsti_http_count(fsti_http_counts *sum, const fsti_http_counts *more);

/// Where to put bytes of a range outside [begin, end): those before go to `head`, those after to
/// `tail`. The buffer starts at `begin`.
typedef struct fsti_range_edges {
    uint64_t begin, end;
    char *head, *tail;
} fsti_range_edges;

enum { ATTEMPT_COUNT = 2 };

typedef struct http_request http_request;

/// A request. The caller sets the first part and keeps it.
struct http_request {
    const char *method;       ///< NULL: GET
    const char *body;         ///< NULL: no body
    size_t body_bytes;        ///< size of `body`
    const char *body_hash;    ///< signed SHA-256 in hexadecimal digits; NULL: not signed
    const char *const *lines; ///< more headers, NULL-terminated; or NULL
    bool is_link_local;       ///< link-local service: no proxy, one attempt of a second
    bool stays;               ///< redirects are errors
    bool is_fresh; ///< uses a new connection, because libcurl silently resends on kept ones
    uint32_t silence_ms_max;  ///< stall timeout of the host; 0: the default
    const char *url;          ///< as given by the caller
    const char *name;         ///< redacted, for messages
    http_authority authority; ///< signs the request
    http_resource *resource;  ///< provides version and redirects; or NULL
    bool is_range, is_first;  ///< of a resource; is_first: its size is unknown
    uint64_t begin, end;
    char *buffer;                  ///< for [begin, end)
    const fsti_range_edges *edges; ///< NULL, or where to put bytes outside the buffer
    const resource_version *known; ///< NULL, or a version that needs no body (304)
    size_t text_bytes_max;         ///< for responses that are not ranges
    const atomic_bool *stop;
    const fsti_http_watch *watch; ///< called by fsti_request_run() while waiting; or NULL
    uint32_t bound_ms;            ///< timeout of all attempts together; 0: none
    void (*done)(http_request *request);
    void *context;

    // The result:
    fst_status status;
    fst_error error;
    http_response answer; ///< of the last attempt
    char *text; ///< of a response that is not a range: NUL-terminated, from fsti_alloc(), owned by
                ///< the caller
    size_t text_bytes;
    uint64_t have; ///< the buffer is filled up to here
    fsti_http_counts counts;

    // Private to the event loop:
    struct http_attempt *attempts[ATTEMPT_COUNT];
    struct http_host *host;
    char *target; ///< target of redirects, or NULL
    uint32_t tries, redirects;
    bool has_forgotten; ///< it dropped the stored redirect of its resource, which had failed
    bool was_sent;
    uint32_t remedies;  ///< that were tried; see http_remedy
    uint64_t silent_ns; ///< since when the host has sent nothing; 0: it has sent something
    resource_version first_version; ///< of the first valid response, if the resource has none
    uint64_t wake_ns;               ///< not sent before this time
    uint64_t retry_since_ns;        ///< start of the wait before a retry; 0: not waiting
    uint64_t begun_ns;
    http_request *next;
};

/// Passes the request to an event loop. `done` is called there, or here if there is no loop.
void fsti_request_begin(http_request *request);
/// The same, and waits until the request ends or `watch` cancels it.
void fsti_request_run(http_request *request);
/// Copies `size` bytes of the resource at `at` to the request's buffers.
void fsti_request_put(const http_request *request, uint64_t at, const char *bytes, size_t size);
/// Waits at most a tenth of a second. False: not signalled. The lock must be held.
bool fsti_http_wait(pthread_cond_t *changed, pthread_mutex_t *lock);

#endif
