// SPDX-License-Identifier: Apache-2.0
/// A request with all its attempts. Private to the net module.
#ifndef FSTI_REQUEST_H
#define FSTI_REQUEST_H

#include "response.h"
#include "curl_library.h"
#include "authority.h"
#include "net.h"
#include "resource.h"
#include "retry.h"
#include "settings.h"
#include "url.h"

/// Maximum size of error bodies that are read.
#define ERROR_BODY_BYTES_MAX ((size_t)16384)
#define REDIRECT_COUNT_MAX 5u

typedef struct net_request net_request;
typedef struct net_event_loop net_event_loop;

/// One attempt: a request that was sent, and the response received so far.
typedef struct net_attempt {
    net_request *request;
    curl_easy *easy;
    http_headers headers;
    net_response answer;
    net_verdict verdict;
    const char *why;
    bool is_evaluated, is_hedge, is_late;
    bool is_too_long;    ///< received more than requested
    bool is_redirected;  ///< sent to the target of a redirect
    bool has_first_byte; ///< of the response headers
    uint64_t host_key;   ///< see fsti_host_key()
    uint64_t begin, at;  ///< in the object; at: the next byte
    uint64_t started_ns, last_data_ns;
    uint32_t key_number; ///< of the keys that signed it
    int64_t sent_bytes;  ///< body bytes sent, when last examined
    char *text;          ///< text outside the object: an error's body, or a complete text
    size_t text_bytes, text_capacity;
    bool is_out_of_memory;
    bool has_refused_address; ///< refused a redirect to a private address
    char refused_address[48]; ///< the refused address
} net_attempt;

enum { ATTEMPT_COUNT = 2 };

/// A request. The caller sets the first part and keeps it.
struct net_request {
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
    const net_pin *known;          ///< NULL, or a version that needs no body (304)
    size_t text_bytes_max;         ///< for responses that are not ranges
    const atomic_bool *stop;
    const fsti_net_watch *watch; ///< called by fsti_request_run() while waiting; or NULL
    uint32_t bound_ms;           ///< timeout of all attempts together; 0: none
    void (*done)(net_request *request);
    void *context;

    // The result:
    fst_status status;
    fst_error error;
    net_response answer; ///< of the last attempt
    char *text; ///< of a response that is not a range: NUL-terminated, from fsti_alloc(), owned by
                ///< the caller
    size_t text_bytes;
    uint64_t have; ///< the buffer is filled up to here
    fsti_net_counts counts;

    // Private to the event loop:
    net_attempt *attempts[ATTEMPT_COUNT];
    struct net_host *host;
    char *target; ///< target of redirects, or NULL
    uint32_t tries, redirects;
    bool was_sent;
    uint32_t remedies;       ///< that were tried; see http_remedy
    uint64_t silent_ns;      ///< since when the host has sent nothing; 0: it has sent something
    net_pin pin;             ///< version of the first valid response, if the resource has none
    uint64_t wake_ns;        ///< not sent before this time
    uint64_t retry_since_ns; ///< start of the wait before a retry; 0: not waiting
    uint64_t begun_ns;
    net_request *next;
};

/// Link-local services respond at once or do not exist.
#define LINK_LOCAL_MS 1000u

/// Passes the request to an event loop. `done` is called there, or here if there is no loop.
void fsti_request_begin(net_request *request);
/// The same, and waits until the request ends or `watch` cancels it.
void fsti_request_run(net_request *request);
/// Waits at most a tenth of a second. False: not signalled. The lock must be held.
bool fsti_net_wait(pthread_cond_t *changed, pthread_mutex_t *lock);

/// Prepares a handle for the next attempt. NULL: no memory.
net_attempt *fsti_attempt_make(net_request *request, bool is_hedge, uint64_t now_ns);
void fsti_attempt_free(net_attempt *attempt);
/// Copies `size` bytes of the resource at `at` to the request's buffers.
void fsti_request_put(const net_request *request, uint64_t at, const char *bytes, size_t size);
/// Called at the first byte of the body, or at the end: evaluates the response headers.
void fsti_attempt_evaluate(net_attempt *attempt);

/// The next step of a request after an attempt ended with `result` (CURLcode).
typedef enum request_step { REQUEST_DONE, REQUEST_RETRY, REQUEST_CONTINUES } request_step;
/// *slower: the host asks for fewer parallel requests.
request_step fsti_request_finish(net_request *request, net_attempt *attempt, int result,
                                 bool *slower);

// ---- redirects to private addresses (redirect_guard.c) ----

/// Whether a redirect to that URL is refused because of its host name: private, and not the
/// request's own host.
bool fsti_redirect_is_refused(const net_request *request, const char *to);
/// Makes libcurl refuse private addresses for a redirected attempt to another host, however the
/// name is spelled and whatever it resolves to.
void fsti_redirect_guard(const curl_library *curl, net_attempt *attempt, const char *url);

#endif
