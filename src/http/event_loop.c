// SPDX-License-Identifier: Apache-2.0
/// Event loops: threads that each drive one libcurl multi handle, with all requests that are
/// running or waiting.
///
/// Invariants: only the loop's thread touches libcurl handles, attempts and hosts; other threads
/// pass requests through `arrived`, under its lock. A request is in exactly one entry: arrived,
/// waiting at its host, or running. `done` is called once, after the last attempt was removed from
/// libcurl, so buffers are no longer written then.
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "attempt.h"
#include "location/location.h"

#define LOOP_COUNT_MAX 4u
#define TICK_MS 50
#define IDLE_MS 60000
/// A timer that fires this much late means that the thread was not scheduled.
#define STALLED_NS ((uint64_t)500000000)
/// A request is late after this many times the median, but at least LATE_NS_MIN. It is then sent a
/// second time, and the faster response is used.
#define LATE_FACTOR 3u
#define LATE_NS_MIN ((uint64_t)300000000)
/// A connection below this rate, over twice the stall timeout, counts as dead.
#define RATE_MIN_BYTES_S 1024u

/// The requests to one host.
typedef struct http_host {
    char *authority; ///< scheme, host and port
    http_window window;
    http_times times;
    http_request *waiting, **waiting_end;
    uint32_t active;
    struct http_host *next;
} http_host;

typedef struct event_loop {
    const curl_library *curl;
    curl_multi *multi;
    pthread_t thread;
    pthread_mutex_t lock; ///< protects `arrived`
    http_request *arrived, **arrived_end;
    // Used only by the loop's thread:
    http_host *hosts;
    http_request *running; ///< being sent, or waiting for a retry
} event_loop;

/// The process's event loops. A forked child has none of their threads and creates its own; the
/// parent's connections are never touched.
static struct {
    pid_t owner;
    uint32_t count, next;
    event_loop *loops[LOOP_COUNT_MAX];
} pool;
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;

// ---- hosts ----

/// The number of loops in use: at most one per allowed connection to a host.
static uint32_t used_count(void) {
    return (uint32_t)fsti_min(pool.count, fsti_http_limits().connections_max);
}

static uint32_t connections_share(void) {
    return fsti_http_limits().connections_max / used_count();
}

static http_host *find_host(event_loop *loop, const char *url) {
    url_parts parsed;
    if (fsti_url_parse(url, &parsed) != NULL) return NULL;
    size_t size = (size_t)(parsed.authority.at + parsed.authority.size - url);
    for (http_host *host = loop->hosts; host != NULL; host = host->next)
        if (strlen(host->authority) == size && memcmp(host->authority, url, size) == 0) return host;
    http_host *host = fsti_alloc_zeroed(1, sizeof *host);
    char *authority = fsti_string_copy(url, size);
    if (host == NULL || authority == NULL) {
        fsti_free(host);
        fsti_free(authority);
        return NULL;
    }
    host->authority = authority;
    host->waiting_end = &host->waiting;
    fsti_window_begin(&host->window, connections_share(), fsti_now_ns());
    host->next = loop->hosts;
    loop->hosts = host;
    return host;
}

// ---- requests ----

static void unlink_running(event_loop *loop, const http_request *request) {
    http_request **at = &loop->running;
    while (*at != NULL && *at != request) at = &(*at)->next;
    if (*at != NULL) *at = request->next;
}

static void drop_attempt(event_loop *loop, http_attempt *attempt) {
    http_request *request = attempt->request;
    for (int i = 0; i < ATTEMPT_COUNT; i++)
        if (request->attempts[i] == attempt) request->attempts[i] = NULL;
    long connects = 0;
    loop->curl->curl_easy_getinfo(attempt->easy, CURL_INFO_CONNECTS, &connects);
    request->counts.connections += (uint64_t)connects;
    loop->curl->curl_multi_remove_handle(loop->multi, attempt->easy);
    fsti_attempt_free(attempt);
    request->host->active--;
}

/// Adds the time that a request has waited for its retry.
static void end_retry_wait(http_request *request, uint64_t now_ns) {
    if (request->retry_since_ns == 0) return;
    uint64_t wait_ns = now_ns - fsti_min(now_ns, request->retry_since_ns);
    request->retry_since_ns = 0;
    request->counts.retry_wait_ns += wait_ns;
    if (request->resource != NULL) fsti_resource_note_wait(request->resource, wait_ns);
}

/// Ends a request. None of its attempts may be in progress when its owner is called.
static void end_request(event_loop *loop, http_request *request) {
    for (int i = 0; i < ATTEMPT_COUNT; i++)
        if (request->attempts[i] != NULL) drop_attempt(loop, request->attempts[i]);
    end_retry_wait(request, fsti_now_ns());
    unlink_running(loop, request);
    fsti_secret_text_free(request->target);
    request->target = NULL;
    request->done(request);
}

static void fail_memory(event_loop *loop, http_request *request) {
    request->status = fsti_error_memory(&request->error, sizeof(http_attempt));
    end_request(loop, request);
}

/// Sends a request or a retry. False: out of memory, and the request has ended.
static bool send_request(event_loop *loop, http_request *request, bool is_hedge) {
    uint64_t now_ns = fsti_now_ns();
    http_attempt *attempt = fsti_attempt_make(request, is_hedge, now_ns);
    end_retry_wait(request, now_ns);
    if (attempt == NULL || loop->curl->curl_multi_add_handle(loop->multi, attempt->easy) != 0) {
        fsti_attempt_free(attempt);
        if (!is_hedge) fail_memory(loop, request);
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

static void start_waiting(event_loop *loop, http_host *host) {
    host->window.size_max = connections_share(); // the current limit
    host->window.size = (uint32_t)fsti_min(host->window.size, host->window.size_max);
    while (host->waiting != NULL && host->active < host->window.size) {
        http_request *request = host->waiting;
        host->waiting = request->next;
        if (host->waiting == NULL) host->waiting_end = &host->waiting;
        request->next = loop->running;
        loop->running = request;
        send_request(loop, request, false);
    }
}

static void accept_arrived(event_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    http_request *request = loop->arrived;
    loop->arrived = NULL;
    loop->arrived_end = &loop->arrived;
    pthread_mutex_unlock(&loop->lock);
    while (request != NULL) {
        http_request *next = request->next;
        request->next = NULL;
        request->host = find_host(loop, request->url);
        if (request->host == NULL) {
            fail_memory(loop, request);
        } else {
            *request->host->waiting_end = request;
            request->host->waiting_end = &request->next;
        }
        request = next;
    }
}

/// An attempt has ended: the request is complete, has failed, or is retried.
static void finish_attempt(event_loop *loop, http_attempt *attempt, int result) {
    http_request *request = attempt->request;
    http_host *host = request->host;
    uint64_t now_ns = fsti_now_ns(), took_ns = now_ns - attempt->started_ns;
    uint64_t bytes = attempt->at - attempt->begin;
    bool is_throttled, is_alone = request->attempts[0] == NULL || request->attempts[1] == NULL;
    bool succeeded = attempt->is_evaluated && attempt->verdict == HTTP_OK && result == CURL_OK;
    if (!is_alone && !succeeded && !attempt->is_too_long) {
        drop_attempt(loop, attempt); // the other attempt continues
        return;
    }
    request_step step = fsti_request_finish(request, attempt, result, &is_throttled);
    if (is_throttled) fsti_window_halve(&host->window, now_ns);
    if (step == REQUEST_DONE && request->status == FST_OK) {
        fsti_times_add(&host->times, took_ns);
        fsti_window_grow(&host->window, bytes, now_ns);
    }
    if (step == REQUEST_DONE)
        end_request(loop, request);
    else
        drop_attempt(loop, attempt);
}

static void finish_completed(event_loop *loop) {
    int left;
    const curl_message *message;
    while ((message = loop->curl->curl_multi_info_read(loop->multi, &left)) != NULL) {
        http_attempt *attempt = NULL;
        int result = message->data.result;
        loop->curl->curl_easy_getinfo(message->easy, CURL_INFO_PRIVATE, &attempt);
        finish_attempt(loop, attempt, result);
    }
}

// ---- time ----

/// Upload progress resets the stall timer.
static void note_sent(const event_loop *loop, http_attempt *attempt, uint64_t now_ns) {
    int64_t sent_bytes = 0;
    if (attempt == NULL || attempt->request->body_bytes == 0) return;
    loop->curl->curl_easy_getinfo(attempt->easy, CURL_INFO_SENT, &sent_bytes);
    if (sent_bytes > attempt->sent_bytes) attempt->last_data_ns = now_ns;
    attempt->sent_bytes = sent_bytes;
}

/// Whether an attempt has stalled.
static bool is_stalled(const http_attempt *attempt, uint64_t now_ns) {
    http_limits limits = fsti_http_limits();
    uint32_t silence_ms_max = attempt->request->silence_ms_max;
    uint64_t silent_ms = (now_ns - attempt->last_data_ns) / 1000000;
    uint64_t age_ms = (now_ns - attempt->started_ns) / 1000000;
    if (attempt->request->is_link_local) return age_ms >= LINK_LOCAL_MS;
    if (attempt->answer.status == 0) // includes connecting, for which libcurl has a shorter timeout
        return silent_ms >=
               fsti_max(silence_ms_max, fsti_max(limits.connect_ms, limits.first_byte_ms));
    if (silent_ms >= fsti_max(limits.stall_ms, silence_ms_max)) return true;
    // The server sends blanks while it works (S3's CompleteMultipartUpload), so the rate says
    // nothing.
    if (silence_ms_max > 0) return false;
    uint64_t bytes = attempt->at - attempt->begin + attempt->text_bytes;
    return age_ms >= 2 * (uint64_t)limits.stall_ms && bytes < age_ms * RATE_MIN_BYTES_S / 1000;
}

/// Whether a request takes much longer than usual, so that a second attempt is worth it.
static bool needs_hedge(const http_request *request, uint64_t now_ns) {
    const http_host *host = request->host;
    if (!request->is_range || host->waiting != NULL || request->attempts[1] != NULL ||
        host->active >= host->window.size_max)
        return false;
    uint64_t median_ns = fsti_times_median(&host->times);
    uint64_t age_ns = now_ns - request->attempts[0]->started_ns;
    return median_ns > 0 && age_ns > fsti_max(LATE_FACTOR * median_ns, LATE_NS_MIN);
}

/// Whether a rejected request waits for its authority to renew its keys.
static bool waits_for_keys(const http_request *request) {
    const http_authority *authority = &request->authority;
    return (request->remedies & HTTP_REMEDY_RENEW) != 0 &&
           authority->functions->is_renewing(authority->context);
}

/// Sets the status of a request that must end now (cancelled or timed out). False: nothing ends it.
static bool end_if_due(http_request *request, uint64_t now_ns) {
    bool is_stopped = request->stop != NULL && atomic_load(request->stop);
    bool is_expired =
        request->bound_ms > 0 && now_ns - request->begun_ns > request->bound_ms * (uint64_t)1000000;
    if (!is_stopped && !is_expired) return false;
    fsti_error_location location = {.file = request->name, .byte_offset = FST_NO_OFFSET};
    request->status =
        is_stopped ? fsti_error_set(&request->error, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled")
                   : fsti_error_set(&request->error, FST_E_IO, location,
                                    "timed out: no response within %u ms", request->bound_ms);
    return true;
}

static void tick_request(event_loop *loop, http_request *request, uint64_t now_ns) {
    if (end_if_due(request, now_ns)) {
        end_request(loop, request);
        return;
    }
    for (int i = 0; i < ATTEMPT_COUNT; i++) {
        http_attempt *attempt = request->attempts[i];
        note_sent(loop, attempt, now_ns);
        if (attempt == NULL || !is_stalled(attempt, now_ns)) continue;
        attempt->has_stalled = true;
        finish_attempt(loop, attempt, CURL_TIMED_OUT);
        return; // the request may be freed
    }
    bool is_running = request->attempts[0] != NULL || request->attempts[1] != NULL;
    if (!is_running && waits_for_keys(request))
        request->wake_ns = now_ns + TICK_MS * (uint64_t)1000000;
    else if (!is_running && now_ns >= request->wake_ns)
        send_request(loop, request, false);
    else if (request->attempts[0] != NULL && needs_hedge(request, now_ns))
        send_request(loop, request, true);
}

/// Ends queued requests that were cancelled or have timed out.
static void tick_waiting(http_host *host, uint64_t now_ns) {
    for (http_request **at = &host->waiting; *at != NULL;) {
        http_request *request = *at;
        if (!end_if_due(request, now_ns)) {
            at = &request->next;
            continue;
        }
        *at = request->next;
        request->done(request);
    }
    host->waiting_end = &host->waiting;
    while (*host->waiting_end != NULL) host->waiting_end = &(*host->waiting_end)->next;
}

/// Examines all requests. Returns the milliseconds until the next timer expires.
static int tick(event_loop *loop) {
    uint64_t now_ns = fsti_now_ns();
    int wait_ms = IDLE_MS;
    for (http_request *request = loop->running, *next; request != NULL; request = next) {
        next = request->next;
        tick_request(loop, request, now_ns);
        wait_ms = TICK_MS;
    }
    for (http_request *request = loop->running; request != NULL; request = request->next)
        if (request->attempts[0] == NULL && request->attempts[1] == NULL) {
            uint64_t left_ms =
                request->wake_ns > now_ns ? (request->wake_ns - now_ns) / 1000000 + 1 : 0;
            if (left_ms < (uint64_t)wait_ms) wait_ms = (int)left_ms;
        }
    for (http_host *host = loop->hosts; host != NULL; host = host->next) {
        tick_waiting(host, now_ns);
        start_waiting(loop, host);
        if (host->active > 0) wait_ms = wait_ms > TICK_MS ? TICK_MS : wait_ms;
    }
    return wait_ms;
}

/// The loop was not scheduled for `lost_ns` (SIGSTOP, VM pause). Shifts all stall timers, so that
/// servers are not blamed, and reads the data that arrived meanwhile.
static void drain_after_pause(event_loop *loop, uint64_t lost_ns, uint64_t now_ns) {
    int running = 0;
    for (http_request *request = loop->running; request != NULL; request = request->next) {
        if (request->silent_ns != 0)
            request->silent_ns = fsti_min(request->silent_ns + lost_ns, now_ns);
        for (int i = 0; i < ATTEMPT_COUNT; i++) {
            http_attempt *attempt = request->attempts[i];
            if (attempt == NULL) continue;
            attempt->started_ns = fsti_min(attempt->started_ns + lost_ns, now_ns);
            attempt->last_data_ns = fsti_min(attempt->last_data_ns + lost_ns, now_ns);
        }
    }
    loop->curl->curl_multi_perform(loop->multi, &running);
    finish_completed(loop);
}

/// The loop's thread: handles arrived requests, timers and transfers until the process ends.
static void *run_event_loop(void *context) {
    event_loop *loop = context;
    uint64_t due_ns = UINT64_MAX;
    for (;;) {
        int running = 0;
        uint64_t now_ns = fsti_now_ns();
        if (now_ns > due_ns && now_ns - due_ns > STALLED_NS)
            drain_after_pause(loop, now_ns - due_ns, now_ns);
        accept_arrived(loop);
        int wait_ms = tick(loop);
        loop->curl->curl_multi_perform(loop->multi, &running);
        finish_completed(loop);
        for (http_host *host = loop->hosts; host != NULL; host = host->next)
            if (host->waiting != NULL && host->active < host->window.size) wait_ms = 0;
        for (http_request *request = loop->running; request != NULL; request = request->next)
            if (request->attempts[0] == NULL && request->attempts[1] == NULL &&
                request->wake_ns == 0)
                wait_ms = 0;
        due_ns = now_ns + (uint64_t)wait_ms * 1000000;
        loop->curl->curl_multi_poll(loop->multi, NULL, 0, wait_ms, NULL);
    }
    return NULL;
}

// ---- creating event loops ----

/// *failure: ENOMEM, or the errno of a thread that could not be started.
static event_loop *make_event_loop(const curl_library *curl, int *failure) {
    event_loop *loop = fsti_alloc_zeroed(1, sizeof *loop);
    *failure = ENOMEM;
    if (loop == NULL) return NULL;
    loop->curl = curl;
    loop->arrived_end = &loop->arrived;
    pthread_mutex_init(&loop->lock, NULL);
    loop->multi = fsti_alloc_fails() ? NULL : curl->curl_multi_init();
    if (loop->multi != NULL) {
        curl->curl_multi_setopt(loop->multi, CURL_MULTI_CONNECTIONS_KEPT,
                                (long)fsti_http_limits().connections_max);
        *failure = fsti_thread_start(&loop->thread, run_event_loop, loop);
        if (*failure == 0) {
            pthread_detach(loop->thread);
            return loop;
        }
        curl->curl_multi_cleanup(loop->multi);
    }
    pthread_mutex_destroy(&loop->lock);
    fsti_free(loop);
    return NULL;
}

/// Any running loop, or NULL. The lock must be held.
static event_loop *running_event_loop(void) {
    for (uint32_t i = 0; i < pool.count; i++)
        if (pool.loops[i] != NULL) return pool.loops[i];
    return NULL;
}

/// The next loop in rotation, or a running one if it cannot be started. NULL: no loop, with the
/// reason in *failure.
static event_loop *choose_event_loop(const curl_library *curl, int *failure) {
    fsti_fork_lock(&pool_lock);
    pthread_mutex_lock(&pool_lock);
    if (pool.owner != getpid()) { // first use, or after a fork
        memset(&pool, 0, sizeof pool);
        pool.owner = getpid();
        uint64_t wanted = fsti_max(fsti_cpu_count() / 2, 2);
        pool.count = (uint32_t)fsti_min(wanted, LOOP_COUNT_MAX);
    }
    event_loop **entry = &pool.loops[pool.next++ % used_count()];
    if (*entry == NULL) *entry = make_event_loop(curl, failure);
    event_loop *loop = *entry != NULL ? *entry : running_event_loop();
    pthread_mutex_unlock(&pool_lock);
    return loop;
}

/// Fails a request because the network is forbidden.
static void refuse_offline(http_request *request) {
    bool is_read = request->method == NULL;
    fsti_error_location location = {.file = request->name, .byte_offset = FST_NO_OFFSET};
    request->status =
        fsti_error_set(&request->error, is_read ? FST_E_NOT_FOUND : FST_E_IO, location,
                       "no request was sent because of offline mode%s. Unset "
                       "FASTSAFETENSORS_OFFLINE and the option offline to connect",
                       is_read ? ", and the disk cache does not have it" : "");
    request->error.os_errno = is_read ? ENOENT : ENETUNREACH;
    request->done(request);
}

void fsti_request_begin(http_request *request) {
    const curl_library *curl;
    if (fsti_http_is_offline()) {
        refuse_offline(request);
        return;
    }
    request->status = fsti_curl_open(&curl, &request->error);
    int failure = 0;
    event_loop *loop = request->status == FST_OK ? choose_event_loop(curl, &failure) : NULL;
    if (loop == NULL) {
        if (request->status == FST_OK)
            request->status = failure == ENOMEM
                                  ? fsti_error_memory(&request->error, sizeof *loop)
                                  : fsti_error_thread(&request->error, failure, request->name);
        request->done(request);
        return;
    }
    request->have = request->begin;
    request->next = NULL;
    request->begun_ns = fsti_now_ns();
    // From here on the request belongs to the loop's thread, which may call done() at once. Loops
    // are never freed, so waking one after unlocking is safe.
    pthread_mutex_lock(&loop->lock);
    *loop->arrived_end = request;
    loop->arrived_end = &request->next;
    pthread_mutex_unlock(&loop->lock);
    curl->curl_multi_wakeup(loop->multi);
}
