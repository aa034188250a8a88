// SPDX-License-Identifier: Apache-2.0
/// A request until its end, through as many tries as that takes: private to the net room.
#ifndef FSTI_REQUEST_H
#define FSTI_REQUEST_H

#include "answer.h"
#include "curl_library.h"
#include "net.h"
#include "retry.h"
#include "settings.h"
#include "url.h"

/// Bodies of errors are read this far.
#define ERROR_BODY_BYTES_MAX ((size_t)16384)
#define REDIRECT_COUNT_MAX 5u

typedef struct net_request net_request;
typedef struct net_reactor net_reactor;
struct store_call;

/// One request that was sent, and its answer as far as it has come.
typedef struct net_attempt {
    net_request *request;
    curl_easy *easy;
    curl_list *headers;
    net_answer answer;
    net_verdict verdict;
    const char *why;
    bool is_judged, is_hedge, is_late;
    bool is_too_long;   ///< more came than was asked for
    bool is_redirected; ///< it went to where a redirect leads
    uint64_t begin, at; ///< of the object: the next byte
    uint64_t started_ns, heard_ns;
    uint32_t keys_number; ///< of the lease's keys that it was signed with
    int64_t sent_bytes;   ///< of a request's own body, when that was looked at last
    char *text;           ///< what is no part of the object: an error's body, or all of a text
    size_t text_bytes, text_capacity;
    bool is_out_of_memory;
} net_attempt;

enum { ATTEMPT_COUNT = 2 };

/// What is asked for. All but the last part is set by who asks and stays his.
struct net_request {
    const char *method;       ///< NULL: GET
    const char *body;         ///< what is sent; NULL: nothing
    size_t body_bytes;        ///< of it
    const char *body_hash;    ///< SHA-256 in hexadecimal digits that is signed; NULL: unsigned
    const char *const *lines; ///< more of the head, ended by NULL; or NULL
    bool is_near;             ///< at the machine itself: no proxy, one try of a second
    bool stays;               ///< redirects are wrong
    bool is_fresh;        ///< not on a connection that was kept: there libcurl sends again unasked
    uint32_t patience_ms; ///< its host may be silent for so long; 0: as all of them
    const char *url;      ///< as it was given
    const char *name;     ///< as it may be told
    const struct net_store *store; ///< who asks, where there is no object; or NULL
    fsti_object *object;     ///< whose version is demanded, and which knows redirects; or NULL
    bool is_range, is_first; ///< of an object; with its size not known yet
    uint64_t begin, end;
    char *buffer;                  ///< for [begin, end)
    const fsti_range_edges *edges; ///< NULL, or what of that goes elsewhere
    const net_pin *known;          ///< NULL, or the version of which nothing is wanted (304)
    size_t text_bytes_max;         ///< of what is no range
    const atomic_bool *stop;
    const fsti_net_watch *watch; ///< of fsti_request_run(): asked while it waits; or NULL
    uint32_t bound_ms;           ///< all tries together may take so long; 0: for ever
    void (*done)(net_request *request);
    void *context;

    // What came of it:
    fst_status status;
    fst_error error;
    net_answer answer; ///< the last one
    char *text;        ///< of what is no range: ended by a NUL; the caller's, from fsti_alloc
    size_t text_bytes;
    uint64_t have; ///< all bytes before it are in the buffer
    fsti_net_counts counts;

    // The reactor's:
    net_attempt *attempts[ATTEMPT_COUNT];
    struct net_host *host;
    char *target; ///< where redirects have led, or NULL
    uint32_t tries, redirects;
    bool was_sent;
    bool has_renewed, has_asked_time; ///< keys, and the server's time: each once
    uint64_t silent_ns;               ///< since when its host has said nothing at all; 0: it has
    net_pin pin;      ///< of the first good head of a request whose object has none yet
    uint64_t wake_ns; ///< not before
    uint64_t begun_ns;
    net_request *next;
};

/// A machine's own servers answer at once, or are not there.
#define NEAR_MS 1000u

/// Gives the request to a thread. `done` is called from there, or at once where there is none.
void fsti_request_begin(net_request *request);
/// The same, and waits: until it is over, or what `watch` says is its end.
void fsti_request_run(net_request *request);
/// Waits for a tenth of a second at most; false: nobody has signalled. The lock is held.
bool fsti_net_wait(pthread_cond_t *changed, pthread_mutex_t *lock);

/// Makes a handle of the next try. NULL: no memory.
net_attempt *fsti_attempt_make(net_request *request, bool is_hedge, uint64_t now_ns);
void fsti_attempt_free(net_attempt *attempt);
/// Copies `size` bytes at `at` of the object to where the request wants them.
void fsti_request_put(const net_request *request, uint64_t at, const char *bytes, size_t size);
/// At the first byte of the body, or the end: what the head means.
void fsti_attempt_judge(net_attempt *attempt);

/// What a request does next, with an attempt at its end (`result`: libcurl's).
typedef enum request_step { REQUEST_DONE, REQUEST_AGAIN, REQUEST_GOES_ON } request_step;
/// *slower: the host asks for less at a time.
request_step fsti_request_finish(net_request *request, net_attempt *attempt, int result,
                                 bool *slower);

// ---- what an object knows (object.c) ----

/// The address to ask, from fsti_alloc; *redirected: not the object's own.
char *fsti_object_target(fsti_object *object, bool *redirected);
/// Where its address leads to; NULL: nowhere any more.
void fsti_object_redirect(fsti_object *object, const char *url);
/// Whether its own address has ever led elsewhere.
bool fsti_object_redirects(const fsti_object *object);
const net_pin *fsti_object_pin(const fsti_object *object);
/// What its requests are signed with, added to *list; false without memory.
bool fsti_object_sign(fsti_object *object, const struct store_call *call, bool redirected,
                      curl_list **list);

/// Who asks for it.
const struct net_store *fsti_object_store(const fsti_object *object);

#endif
