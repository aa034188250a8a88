// SPDX-License-Identifier: Apache-2.0
/// Reactors: threads that keep requests under way, each with a multi handle of libcurl's, and all
/// that waits for its turn or its time.
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "lease.h"
#include "request.h"
#include "store.h"

#define REACTOR_COUNT_MAX 4u
#define TICK_MS 50
#define IDLE_MS 60000
/// Whose turn comes so much later than planned has not listened meanwhile.
#define STILL_NS ((uint64_t)500000000)
/// A request is late at so many times the median, and no earlier than this.
#define LATE_FACTOR 3u
#define LATE_NS_MIN ((uint64_t)300000000)
/// Below this, over twice the time that silence is allowed, a connection is as good as dead.
#define RATE_MIN_BYTES_S 1024u

/// What is under way at one host.
typedef struct net_host {
    char *authority; ///< scheme, host and port
    net_window window;
    net_times times;
    net_request *waiting, **waiting_end;
    uint32_t active;
    struct net_host *next;
} net_host;

struct net_reactor {
    const curl_library *curl;
    curl_multi *multi;
    pthread_t thread;
    pthread_mutex_t lock; ///< for `arrived`
    net_request *arrived, **arrived_end;
    // The thread's own:
    net_host *hosts;
    net_request *running; ///< those that have been sent, or wait for another try
};

/// The process's reactors. After a fork the child has none of their threads: it makes its own, and
/// the parent's connections are never touched.
static struct {
    pid_t owner;
    uint32_t count, next;
    net_reactor *reactors[REACTOR_COUNT_MAX];
} all;
static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint_fast64_t random_state;

uint64_t fsti_net_random(void) {
    uint64_t state = atomic_fetch_add(&random_state, 1) ^ fsti_now_ns();
    return fsti_hash(&state, sizeof state, fsti_hash_key());
}

// ---- hosts ----

/// How many reactors are used: none without a connection of its own to a host.
static uint32_t used_count(void) {
    return (uint32_t)fsti_min(all.count, fsti_net_limits().connections_max);
}

static uint32_t connections_share(void) { return fsti_net_limits().connections_max / used_count(); }

static net_host *find_host(net_reactor *reactor, const char *url) {
    net_url parsed;
    if (fsti_url_parse(url, &parsed) != NULL) return NULL;
    size_t size = (size_t)(parsed.authority.at + parsed.authority.size - url);
    for (net_host *host = reactor->hosts; host != NULL; host = host->next)
        if (strlen(host->authority) == size && memcmp(host->authority, url, size) == 0) return host;
    net_host *host = fsti_alloc_zeroed(1, sizeof *host);
    char *authority = fsti_string_copy(url, size);
    if (host == NULL || authority == NULL) {
        fsti_free(host);
        fsti_free(authority);
        return NULL;
    }
    host->authority = authority;
    host->waiting_end = &host->waiting;
    fsti_window_begin(&host->window, connections_share(), fsti_now_ns());
    host->next = reactor->hosts;
    reactor->hosts = host;
    return host;
}

// ---- requests ----

static void unlink_running(net_reactor *reactor, const net_request *request) {
    net_request **at = &reactor->running;
    while (*at != NULL && *at != request) at = &(*at)->next;
    if (*at != NULL) *at = request->next;
}

static void drop_attempt(net_reactor *reactor, net_attempt *attempt) {
    net_request *request = attempt->request;
    for (int i = 0; i < ATTEMPT_COUNT; i++)
        if (request->attempts[i] == attempt) request->attempts[i] = NULL;
    long connects = 0;
    reactor->curl->curl_easy_getinfo(attempt->easy, CURL_INFO_CONNECTS, &connects);
    request->counts.connections += (uint64_t)connects;
    reactor->curl->curl_multi_remove_handle(reactor->multi, attempt->easy);
    fsti_attempt_free(attempt);
    request->host->active--;
}

/// Ends a request: nothing of it is under way any more when its owner hears of it.
static void end_request(net_reactor *reactor, net_request *request) {
    for (int i = 0; i < ATTEMPT_COUNT; i++)
        if (request->attempts[i] != NULL) drop_attempt(reactor, request->attempts[i]);
    unlink_running(reactor, request);
    fsti_secret_text_free(request->target);
    request->target = NULL;
    request->done(request);
}

static void fail_memory(net_reactor *reactor, net_request *request) {
    request->status = fsti_error_memory(&request->error, sizeof(net_attempt));
    end_request(reactor, request);
}

/// Sends a request, or once more. False: there was no memory, and the request is gone.
static bool send_request(net_reactor *reactor, net_request *request, bool is_hedge) {
    net_attempt *attempt = fsti_attempt_make(request, is_hedge, fsti_now_ns());
    if (attempt == NULL ||
        reactor->curl->curl_multi_add_handle(reactor->multi, attempt->easy) != 0) {
        fsti_attempt_free(attempt);
        if (!is_hedge) fail_memory(reactor, request);
        return is_hedge;
    }
    request->attempts[is_hedge ? 1 : 0] = attempt;
    request->host->active++;
    request->counts.requests++;
    if (is_hedge)
        request->counts.hedges++;
    else if (request->was_sent)
        request->counts.retries++;
    request->was_sent = true;
    return true;
}

static void start_waiting(net_reactor *reactor, net_host *host) {
    host->window.size_max = connections_share(); // as it is allowed now
    host->window.size = (uint32_t)fsti_min(host->window.size, host->window.size_max);
    while (host->waiting != NULL && host->active < host->window.size) {
        net_request *request = host->waiting;
        host->waiting = request->next;
        if (host->waiting == NULL) host->waiting_end = &host->waiting;
        request->next = reactor->running;
        reactor->running = request;
        send_request(reactor, request, false);
    }
}

static void take_arrived(net_reactor *reactor) {
    pthread_mutex_lock(&reactor->lock);
    net_request *request = reactor->arrived;
    reactor->arrived = NULL;
    reactor->arrived_end = &reactor->arrived;
    pthread_mutex_unlock(&reactor->lock);
    while (request != NULL) {
        net_request *next = request->next;
        request->next = NULL;
        request->host = find_host(reactor, request->url);
        if (request->host == NULL) {
            fail_memory(reactor, request);
        } else {
            *request->host->waiting_end = request;
            request->host->waiting_end = &request->next;
        }
        request = next;
    }
}

/// A try is over: what was asked for is there, or will not come, or is asked for again.
static void finish_attempt(net_reactor *reactor, net_attempt *attempt, int result) {
    net_request *request = attempt->request;
    net_host *host = request->host;
    uint64_t now_ns = fsti_now_ns(), took_ns = now_ns - attempt->started_ns;
    uint64_t bytes = attempt->at - attempt->begin;
    bool slower, is_alone = request->attempts[0] == NULL || request->attempts[1] == NULL;
    bool is_good = attempt->is_judged && attempt->verdict == NET_GOOD && result == CURL_OK;
    if (!is_alone && !is_good && !attempt->is_too_long) {
        drop_attempt(reactor, attempt); // the other one goes on
        return;
    }
    request_step step = fsti_request_finish(request, attempt, result, &slower);
    if (slower) fsti_window_halve(&host->window, now_ns);
    if (step == REQUEST_DONE && request->status == FST_OK) {
        fsti_times_add(&host->times, took_ns);
        fsti_window_grow(&host->window, bytes, now_ns);
    }
    if (step == REQUEST_DONE)
        end_request(reactor, request);
    else
        drop_attempt(reactor, attempt);
}

static void take_finished(net_reactor *reactor) {
    int left;
    const curl_message *message;
    while ((message = reactor->curl->curl_multi_info_read(reactor->multi, &left)) != NULL) {
        net_attempt *attempt = NULL;
        int result = message->data.result;
        reactor->curl->curl_easy_getinfo(message->easy, CURL_INFO_PRIVATE, &attempt);
        finish_attempt(reactor, attempt, result);
    }
}

// ---- time ----

/// What goes out is as good as an answer.
static void note_sent(const net_reactor *reactor, net_attempt *attempt, uint64_t now_ns) {
    int64_t sent_bytes = 0;
    if (attempt == NULL || attempt->request->body_bytes == 0) return;
    reactor->curl->curl_easy_getinfo(attempt->easy, CURL_INFO_SENT, &sent_bytes);
    if (sent_bytes > attempt->sent_bytes) attempt->heard_ns = now_ns;
    attempt->sent_bytes = sent_bytes;
}

/// Whether a try has been silent for too long.
static bool is_dead(const net_attempt *attempt, uint64_t now_ns) {
    net_limits limits = fsti_net_limits();
    uint32_t patience_ms = attempt->request->patience_ms;
    uint64_t silent_ms = (now_ns - attempt->heard_ns) / 1000000;
    uint64_t age_ms = (now_ns - attempt->started_ns) / 1000000;
    if (attempt->request->is_near) return age_ms >= NEAR_MS;
    if (attempt->answer.status == 0) // with the connection, which libcurl gives less time
        return silent_ms >=
               fsti_max(patience_ms, fsti_max(limits.connect_ms, limits.first_byte_ms));
    if (silent_ms >= fsti_max(limits.stall_ms, patience_ms)) return true;
    if (patience_ms > 0) return false; // blanks come until it is done
    uint64_t bytes = attempt->at - attempt->begin + attempt->text_bytes;
    return age_ms >= 2 * (uint64_t)limits.stall_ms && bytes < age_ms * RATE_MIN_BYTES_S / 1000;
}

static bool is_late(const net_request *request, uint64_t now_ns) {
    const net_host *host = request->host;
    if (!request->is_range || host->waiting != NULL || request->attempts[1] != NULL ||
        host->active >= host->window.size_max)
        return false;
    uint64_t median_ns = fsti_times_median(&host->times);
    uint64_t age_ns = now_ns - request->attempts[0]->started_ns;
    return median_ns > 0 && age_ns > fsti_max(LATE_FACTOR * median_ns, LATE_NS_MIN);
}

/// Whether a request that was refused waits for keys that are renewed.
static bool waits_for_keys(const net_request *request) {
    const net_store *store =
        request->object == NULL ? request->store : fsti_object_store(request->object);
    return request->has_renewed && store != NULL && store->lease != NULL &&
           fsti_lease_is_renewing(store->lease);
}

/// Whether a request is to end now, and is given its status.
static bool is_given_up(net_request *request, uint64_t now_ns) {
    bool is_stopped = request->stop != NULL && atomic_load(request->stop);
    bool is_over =
        request->bound_ms > 0 && now_ns - request->begun_ns > request->bound_ms * (uint64_t)1000000;
    if (!is_stopped && !is_over) return false;
    fsti_error_place place = {.file = request->name, .byte_offset = FST_NO_OFFSET};
    request->status = is_stopped
                          ? fsti_error_set(&request->error, FST_E_CANCELLED, FSTI_NOWHERE,
                                           "the read was cancelled")
                          : fsti_error_set(&request->error, FST_E_IO, place,
                                           "no answer within %u ms, which is all that it was given",
                                           request->bound_ms);
    return true;
}

static void tick_request(net_reactor *reactor, net_request *request, uint64_t now_ns) {
    if (is_given_up(request, now_ns)) {
        end_request(reactor, request);
        return;
    }
    for (int i = 0; i < ATTEMPT_COUNT; i++) {
        net_attempt *attempt = request->attempts[i];
        note_sent(reactor, attempt, now_ns);
        if (attempt == NULL || !is_dead(attempt, now_ns)) continue;
        attempt->is_late = true;
        finish_attempt(reactor, attempt, CURL_TIMED_OUT);
        return; // it may be gone
    }
    bool is_under_way = request->attempts[0] != NULL || request->attempts[1] != NULL;
    if (!is_under_way && waits_for_keys(request))
        request->wake_ns = now_ns + TICK_MS * (uint64_t)1000000;
    else if (!is_under_way && now_ns >= request->wake_ns)
        send_request(reactor, request, false);
    else if (request->attempts[0] != NULL && is_late(request, now_ns))
        send_request(reactor, request, true);
}

/// Ends requests that wait for their turn and that nobody wants any more.
static void tick_waiting(net_host *host, uint64_t now_ns) {
    for (net_request **at = &host->waiting; *at != NULL;) {
        net_request *request = *at;
        if (!is_given_up(request, now_ns)) {
            at = &request->next;
            continue;
        }
        *at = request->next;
        request->done(request);
    }
    host->waiting_end = &host->waiting;
    while (*host->waiting_end != NULL) host->waiting_end = &(*host->waiting_end)->next;
}

/// Looks at all requests; returns how long nothing has to be looked at.
static int tick(net_reactor *reactor) {
    uint64_t now_ns = fsti_now_ns();
    int wait_ms = IDLE_MS;
    for (net_request *request = reactor->running, *next; request != NULL; request = next) {
        next = request->next;
        tick_request(reactor, request, now_ns);
        wait_ms = TICK_MS;
    }
    for (net_request *request = reactor->running; request != NULL; request = request->next)
        if (request->attempts[0] == NULL && request->attempts[1] == NULL) {
            uint64_t left_ms =
                request->wake_ns > now_ns ? (request->wake_ns - now_ns) / 1000000 + 1 : 0;
            if (left_ms < (uint64_t)wait_ms) wait_ms = (int)left_ms;
        }
    for (net_host *host = reactor->hosts; host != NULL; host = host->next) {
        tick_waiting(host, now_ns);
        start_waiting(reactor, host);
        if (host->active > 0) wait_ms = wait_ms > TICK_MS ? TICK_MS : wait_ms;
    }
    return wait_ms;
}

/// This thread stood still for `lost_ns`: it, the process or the machine. Nobody listened, so that
/// was nobody's silence; what has come meanwhile is heard now.
static void hear_late(net_reactor *reactor, uint64_t lost_ns, uint64_t now_ns) {
    int running = 0;
    for (net_request *request = reactor->running; request != NULL; request = request->next) {
        if (request->silent_ns != 0)
            request->silent_ns = fsti_min(request->silent_ns + lost_ns, now_ns);
        for (int i = 0; i < ATTEMPT_COUNT; i++) {
            net_attempt *attempt = request->attempts[i];
            if (attempt == NULL) continue;
            attempt->started_ns = fsti_min(attempt->started_ns + lost_ns, now_ns);
            attempt->heard_ns = fsti_min(attempt->heard_ns + lost_ns, now_ns);
        }
    }
    reactor->curl->curl_multi_perform(reactor->multi, &running);
    take_finished(reactor);
}

static void *run_reactor(void *context) {
    net_reactor *reactor = context;
    uint64_t due_ns = UINT64_MAX;
    for (;;) {
        int running = 0;
        uint64_t now_ns = fsti_now_ns();
        if (now_ns > due_ns && now_ns - due_ns > STILL_NS)
            hear_late(reactor, now_ns - due_ns, now_ns);
        take_arrived(reactor);
        int wait_ms = tick(reactor);
        reactor->curl->curl_multi_perform(reactor->multi, &running);
        take_finished(reactor);
        for (net_host *host = reactor->hosts; host != NULL; host = host->next)
            if (host->waiting != NULL && host->active < host->window.size) wait_ms = 0;
        for (net_request *request = reactor->running; request != NULL; request = request->next)
            if (request->attempts[0] == NULL && request->attempts[1] == NULL &&
                request->wake_ns == 0)
                wait_ms = 0;
        due_ns = now_ns + (uint64_t)wait_ms * 1000000;
        reactor->curl->curl_multi_poll(reactor->multi, NULL, 0, wait_ms, NULL);
    }
    return NULL;
}

// ---- the process's ----

static net_reactor *make_reactor(const curl_library *curl) {
    net_reactor *reactor = fsti_alloc_zeroed(1, sizeof *reactor);
    if (reactor == NULL) return NULL;
    reactor->curl = curl;
    reactor->arrived_end = &reactor->arrived;
    pthread_mutex_init(&reactor->lock, NULL);
    reactor->multi = fsti_alloc_fails() ? NULL : curl->curl_multi_init();
    if (reactor->multi != NULL) {
        curl->curl_multi_setopt(reactor->multi, CURL_MULTI_CONNECTIONS_KEPT,
                                (long)fsti_net_limits().connections_max);
        if (fsti_thread_start(&reactor->thread, run_reactor, reactor) == 0) {
            pthread_detach(reactor->thread);
            return reactor;
        }
        curl->curl_multi_cleanup(reactor->multi);
    }
    pthread_mutex_destroy(&reactor->lock);
    fsti_free(reactor);
    return NULL;
}

/// The next reactor in turn. NULL: none can be made.
static net_reactor *choose_reactor(const curl_library *curl) {
    fsti_fork_lock(&all_lock);
    pthread_mutex_lock(&all_lock);
    if (all.owner != getpid()) { // the first use, or after a fork
        memset(&all, 0, sizeof all);
        all.owner = getpid();
        uint64_t wanted = fsti_max(fsti_cpu_count() / 2, 2);
        all.count = (uint32_t)fsti_min(wanted, REACTOR_COUNT_MAX);
    }
    net_reactor **place = &all.reactors[all.next++ % used_count()];
    if (*place == NULL) *place = make_reactor(curl);
    net_reactor *reactor = *place;
    pthread_mutex_unlock(&all_lock);
    return reactor;
}

/// Says that nobody is asked; of what is read, that it is not there.
static void refuse_offline(net_request *request) {
    bool is_read = request->object != NULL || request->method == NULL;
    fsti_error_place place = {.file = request->name, .byte_offset = FST_NO_OFFSET};
    request->status = fsti_error_set(&request->error, is_read ? FST_E_NOT_FOUND : FST_E_IO, place,
                                     "%sno server is asked (cache_offline)",
                                     is_read ? "it is not in the cache on disk, and " : "");
    request->error.os_errno = is_read ? ENOENT : ENETUNREACH;
    request->done(request);
}

void fsti_request_begin(net_request *request) {
    const curl_library *curl;
    if (fsti_net_is_offline()) {
        refuse_offline(request);
        return;
    }
    request->status = fsti_curl_open(&curl, &request->error);
    net_reactor *reactor = request->status == FST_OK ? choose_reactor(curl) : NULL;
    if (reactor == NULL) {
        if (request->status == FST_OK)
            request->status = fsti_error_memory(&request->error, sizeof *reactor);
        request->done(request);
        return;
    }
    request->have = request->begin;
    request->next = NULL;
    request->begun_ns = fsti_now_ns();
    pthread_mutex_lock(&reactor->lock);
    *reactor->arrived_end = request;
    reactor->arrived_end = &request->next;
    pthread_mutex_unlock(&reactor->lock);
    curl->curl_multi_wakeup(reactor->multi);
}
