// SPDX-License-Identifier: Apache-2.0
/// What becomes of a request when a try of it has ended.
#include "request.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "lease.h"
#include "store.h"

/// So much of a range is progress: the tries begin anew.
#define PROGRESS_BYTES ((uint64_t)65536)
/// A host that can't be had at all is not worth as many tries as one that is busy.
#define CONNECT_TRIES_MAX 4u
/// Nor is one that says nothing: a try that would end later is not made.
#define SILENCE_NS_MAX ((uint64_t)30000000000)

void fsti_net_count(fsti_net_counts *sum, const fsti_net_counts *more) {
    sum->requests += more->requests;
    sum->retries += more->retries;
    sum->hedges += more->hedges;
    sum->connections += more->connections;
    sum->bytes += more->bytes;
    sum->kept_bytes += more->kept_bytes;
    sum->written_bytes += more->written_bytes;
}

static const net_store *store_of(const net_request *request) {
    return request->object == NULL ? request->store : fsti_object_store(request->object);
}

/// Whether a server has sent back what it was told in confidence.
static bool is_echo(const net_request *request, const char *text) {
    const net_store *store = store_of(request);
    bool redirected;
    char *target =
        request->object == NULL ? NULL : fsti_object_target(request->object, &redirected);
    bool knows = fsti_url_knows(request->url, text) ||
                 (request->target != NULL && fsti_url_knows(request->target, text)) ||
                 (target != NULL && fsti_url_knows(target, text)) ||
                 (store != NULL && fsti_store_knows(store, text));
    fsti_secret_text_free(target);
    return knows;
}

/// "(status 503 SlowDown, request 4711, 8 tries)": what there is to be told of an answer.
static void describe(const net_request *request, const net_answer *answer, char *text,
                     size_t size) {
    int used = snprintf(text, size, "status %u", answer->status);
    const char *const parts[] = {" ", answer->code, ", request ", answer->request_id};
    for (int i = 0; i < 4; i += 2)
        if (parts[i + 1][0] != '\0' && !is_echo(request, parts[i + 1]) && used > 0 &&
            (size_t)used < size)
            used += snprintf(text + used, size - (size_t)used, "%s%s", parts[i], parts[i + 1]);
    if (request->tries > 0 && used > 0 && (size_t)used < size)
        used += snprintf(text + used, size - (size_t)used, ", %u tries", request->tries + 1);
    const net_store *store = store_of(request);
    bool is_refused = answer->status == 401 || answer->status == 403;
    if (is_refused && store != NULL && used > 0 && (size_t)used < size)
        snprintf(text + used, size - (size_t)used, ", credentials: %s", store->source);
}

/// The end of a request by its answer.
static request_step fail_answer(net_request *request, const net_attempt *attempt, fst_status status,
                                const char *what) {
    char text[240];
    fsti_error_place place = FSTI_NOWHERE;
    place.file = request->name;
    request->answer = attempt->answer;
    describe(request, &attempt->answer, text, sizeof text);
    request->status = fsti_error_set(&request->error, status, place, "%s (%s)", what, text);
    request->error.os_errno = status == FST_E_PERMISSION  ? EACCES
                              : status == FST_E_NOT_FOUND ? ENOENT
                                                          : EIO;
    return REQUEST_DONE;
}

/// The end without an answer.
static request_step fail_transfer(net_request *request, int result) {
    const curl_library *curl;
    fsti_error_place place = FSTI_NOWHERE;
    place.file = request->name;
    const char *what = "the connection broke";
    if (result == CURL_NO_HOST) what = "its host is not known";
    if (result == CURL_NO_CONNECTION) what = "its host takes no connection";
    if (result == CURL_TIMED_OUT) what = "its host does not answer";
    if (result == CURL_CERTIFICATE) what = "its host's certificate is not to be trusted";
    if (result == CURL_TLS_FAILED) what = "no TLS connection can be made";
    if (result == CURL_CA_FILE_BAD) what = "the file of trusted certificates can't be read";
    bool has_words = result != CURL_OK && fsti_curl_open(&curl, NULL) == FST_OK;
    request->status = fsti_error_set(&request->error, FST_E_IO, place, "%s (%s%s%u tries)", what,
                                     has_words ? curl->curl_easy_strerror(result) : "",
                                     has_words ? "; " : "", request->tries + 1);
    request->error.os_errno = result == CURL_TIMED_OUT ? ETIMEDOUT : EIO;
    return REQUEST_DONE;
}

static void wait_before_retry(net_request *request, int64_t retry_after_ms) {
    net_limits limits = fsti_net_limits();
    uint64_t wait_ms = fsti_retry_wait_ms(request->tries, limits.retry_base_ms, limits.retry_cap_ms,
                                          retry_after_ms, fsti_net_random());
    request->wake_ns = fsti_now_ns() + wait_ms * 1000000;
}

/// Whether another try with a host that says nothing would take too long.
static bool is_silent_host(net_request *request, const net_attempt *attempt) {
    // One that says a byte now and then says nothing.
    bool is_slow = attempt->is_late && attempt->at - attempt->begin < PROGRESS_BYTES;
    if (attempt->answer.status != 0 && !is_slow) {
        request->silent_ns = 0;
        return false;
    }
    net_limits limits = fsti_net_limits();
    uint64_t try_ms = fsti_max(limits.connect_ms, limits.first_byte_ms);
    uint64_t try_ns = fsti_max(try_ms, request->patience_ms) * 1000000;
    if (request->silent_ns == 0) request->silent_ns = attempt->started_ns;
    return fsti_now_ns() - request->silent_ns + try_ns > SILENCE_NS_MAX;
}

/// One more try, if there are any left.
static request_step try_again(net_request *request, const net_attempt *attempt, int result) {
    uint32_t tries_max = fsti_net_limits().tries_max;
    bool is_deaf = result == CURL_NO_HOST || result == CURL_NO_CONNECTION;
    if (is_deaf) tries_max = (uint32_t)fsti_min(tries_max, CONNECT_TRIES_MAX);
    if (attempt->at - attempt->begin >= PROGRESS_BYTES) request->tries = 0;
    bool has_status = attempt->is_judged && attempt->verdict != NET_GOOD;
    if (request->is_near || is_silent_host(request, attempt) || request->tries + 1 >= tries_max)
        return has_status
                   ? fail_answer(request, attempt, FST_E_IO, "the server did not answer well")
                   : fail_transfer(request, attempt->is_late ? CURL_TIMED_OUT : result);
    request->tries++;
    wait_before_retry(request, has_status ? attempt->answer.retry_after_ms : -1);
    return REQUEST_AGAIN;
}

// ---- redirects ----

static const char *check_redirect(const char *from, const char *to, net_url *target) {
    net_url source;
    if (to == NULL) return "the server sends elsewhere, and does not say where";
    const char *fault = fsti_url_parse(to, target);
    bool is_https = fsti_url_part_is(target->scheme, "https");
    if (!is_https && !fsti_url_part_is(target->scheme, "http"))
        return "the server sends to an address that is not of the web";
    if (fault != NULL) return "the server sends elsewhere, to an address that is none";
    if (!is_https && fsti_url_parse(from, &source) == NULL &&
        fsti_url_part_is(source.scheme, "https"))
        return "the server sends from https to http";
    return NULL;
}

/// Whether a request changes something at its server.
static bool is_change(const net_request *request) {
    return request->method != NULL && strcmp(request->method, "HEAD") != 0;
}

static request_step follow_redirect(net_request *request, net_attempt *attempt) {
    const curl_library *curl;
    const char *to = NULL;
    char *from = NULL;
    bool was_redirected;
    net_url target;
    if (fsti_curl_open(&curl, NULL) != FST_OK) return REQUEST_DONE;
    curl->curl_easy_getinfo(attempt->easy, CURL_INFO_REDIRECT, &to);
    from = request->target;
    if (from == NULL && request->object != NULL)
        from = fsti_object_target(request->object, &was_redirected);
    const char *why = check_redirect(from == NULL ? request->url : from, to, &target);
    if (from != request->target) fsti_secret_text_free(from);
    if (why == NULL && request->stays) why = "the server sends elsewhere, which it may not";
    // Another host would get the model, and no signature with it.
    if (why == NULL && is_change(request) && !fsti_url_host_is(request->url, to))
        why = "the server sends what is saved or removed to another host, which is not followed";
    if (why == NULL && ++request->redirects > REDIRECT_COUNT_MAX)
        why = "the server sends elsewhere again and again";
    if (why != NULL) return fail_answer(request, attempt, FST_E_IO, why);
    char *copy = fsti_string_copy(to, strlen(to));
    if (copy == NULL) {
        request->status = fsti_error_memory(&request->error, strlen(to));
        return REQUEST_DONE;
    }
    fsti_secret_text_free(request->target);
    request->target = copy;
    request->wake_ns = 0;
    return REQUEST_AGAIN;
}

/// Where a redirect led yesterday may be closed by now: from the beginning, once.
static bool forget_redirect(net_request *request, const net_attempt *attempt) {
    if (!attempt->is_redirected || request->redirects > 0 || request->object == NULL) return false;
    fsti_object_redirect(request->object, NULL);
    request->redirects = 1;
    request->wake_ns = 0;
    return true;
}

// ---- the end of a try ----

static request_step succeed(net_request *request) {
    if (request->object != NULL && request->target != NULL)
        fsti_object_redirect(request->object, request->target);
    request->status = FST_OK;
    return REQUEST_DONE;
}

static request_step finish_good(net_request *request, net_attempt *attempt, int result) {
    uint64_t end = request->end;
    if (request->is_range && request->is_first) {
        bool is_whole = attempt->answer.status != 206;
        if (is_whole && attempt->answer.length_bytes == ANSWER_UNKNOWN) {
            if (result != CURL_OK) return try_again(request, attempt, result);
            attempt->answer.length_bytes = attempt->at;
        }
        if (is_whole) attempt->answer.total_bytes = attempt->answer.length_bytes;
        end = fsti_min(end, attempt->answer.total_bytes);
    }
    if (request->is_range ? request->have < end : result != CURL_OK)
        return try_again(request, attempt, result == CURL_OK ? CURL_PARTIAL : result);
    request->answer = attempt->answer;
    request->text = attempt->text;
    request->text_bytes = attempt->text_bytes;
    attempt->text = NULL;
    return succeed(request);
}

/// There is nothing to come.
static request_step finish_unchanged(net_request *request, const net_attempt *attempt) {
    request->answer = attempt->answer;
    return succeed(request);
}

/// A request for a change that the server does not make.
static request_step refuse_change(net_request *request, const net_attempt *attempt) {
    bool is_there = attempt->answer.status == 412 || attempt->answer.status == 409;
    if (attempt->verdict == NET_MISSING)
        return fail_answer(request, attempt, FST_E_NOT_FOUND, "there is no such bucket, or upload");
    if (attempt->verdict == NET_FORBIDDEN)
        return fail_answer(request, attempt, FST_E_PERMISSION, "the server refuses to take it");
    fail_answer(request, attempt, FST_E_IO,
                is_there ? "there is an object already, or somebody else is saving one"
                         : "the server does not take it");
    if (is_there) request->error.os_errno = EEXIST;
    return REQUEST_DONE;
}

static request_step finish_refused(net_request *request, net_attempt *attempt) {
    request->answer = attempt->answer;
    if (is_change(request)) return refuse_change(request, attempt);
    switch (attempt->verdict) {
    case NET_CHANGED: return fail_answer(request, attempt, FST_E_FILE_CHANGED, attempt->why);
    case NET_MISSING:
        if (forget_redirect(request, attempt)) return REQUEST_AGAIN;
        return fail_answer(request, attempt, FST_E_NOT_FOUND, "there is no such object");
    case NET_FORBIDDEN:
        if (forget_redirect(request, attempt)) return REQUEST_AGAIN;
        return fail_answer(request, attempt, FST_E_PERMISSION, "the server refuses it");
    case NET_WRONG:
        return fail_answer(request, attempt, FST_E_IO,
                           attempt->why == NULL ? "the answer makes no sense" : attempt->why);
    default: return fail_answer(request, attempt, FST_E_IO, "the server does not give it");
    }
}

/// Whether a store has put a change off for another one at the same object, and takes it, or says
/// what has come of the other, when it is asked again. After the last try it is refused.
static bool is_conflict(const net_request *request, const net_attempt *attempt) {
    return is_change(request) && attempt->answer.status == 409 &&
           strcmp(attempt->answer.code, "ConditionalRequestConflict") == 0 &&
           request->tries + 1 < fsti_net_limits().tries_max;
}

/// Codes of stores for keys that have ended.
static bool is_expired(const net_answer *answer) {
    static const char *const codes[] = {"ExpiredToken", "ExpiredTokenException",
                                        "TokenRefreshRequired", "RequestExpired",
                                        "InvalidAuthenticationInfo"};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (strcmp(answer->code, codes[i]) == 0) return true;
    return answer->status == 401;
}

/// What a store refuses may be taken with keys that are renewed, or the time that it has. Once
/// each.
static bool can_be_mended(net_request *request, const net_attempt *attempt) {
    const net_store *store = store_of(request);
    const net_answer *answer = &attempt->answer;
    if (store == NULL || attempt->is_redirected) return false;
    bool is_skewed = strcmp(answer->code, "RequestTimeTooSkewed") == 0;
    if (is_skewed && !request->has_asked_time) {
        request->has_asked_time = true;
        request->wake_ns = 0;
        return fsti_store_learn_time(answer->date) || request->counts.requests == 1;
    }
    if (store->lease == NULL || request->has_renewed || !is_expired(answer)) return false;
    request->has_renewed = true;
    request->wake_ns = 0; // the reactor waits until they are there
    return fsti_lease_refused(store->lease, attempt->keys_number);
}

/// What a proxy that makes no connection says; NULL: nothing that is final.
static const char *proxy_refusal(net_attempt *attempt) {
    const curl_library *curl;
    long status = 0;
    if (attempt->is_judged || fsti_curl_open(&curl, NULL) != FST_OK) return NULL;
    curl->curl_easy_getinfo(attempt->easy, CURL_INFO_PROXY_STATUS, &status);
    if (status < 400 || status >= 500) return NULL;
    attempt->answer.status = (uint32_t)status;
    return status == 407 ? "the proxy wants a name and a password" : "the proxy refuses it";
}

/// Whether a try has ended for reasons that no further one can change.
static bool fail_for_good(net_request *request, net_attempt *attempt, int result) {
    if (request->stop != NULL && atomic_load(request->stop)) {
        request->status = fsti_error_set(&request->error, FST_E_CANCELLED, FSTI_NOWHERE,
                                         "the read was cancelled");
        return true;
    }
    if (attempt->is_out_of_memory) {
        request->status = fsti_error_memory(&request->error, attempt->text_bytes);
        return true;
    }
    const char *refusal = result == CURL_OK ? NULL : proxy_refusal(attempt);
    if (refusal != NULL) {
        fail_answer(request, attempt, FST_E_PERMISSION, refusal);
        return true;
    }
    if (attempt->is_too_long) {
        fail_answer(request, attempt, FST_E_IO, "more bytes came than were asked for");
        return true;
    }
    bool is_final =
        result == CURL_CERTIFICATE || result == CURL_CA_FILE_BAD || result == CURL_BAD_URL;
    if (is_final) fail_transfer(request, result);
    return is_final;
}

/// Whether a store sends to where its bucket is: who asks goes there himself, and signs for that
/// region. (A redirect that is followed is not signed.)
static bool is_other_region(const net_request *request, const net_attempt *attempt) {
    const net_store *store = store_of(request);
    const char *region = attempt->answer.region;
    return store != NULL && store->kind == NET_STORE_S3 && !attempt->is_redirected &&
           region[0] != '\0' && strcmp(region, store->region) != 0;
}

request_step fsti_request_finish(net_request *request, net_attempt *attempt, int result,
                                 bool *slower) {
    *slower = false;
    if (fail_for_good(request, attempt, result)) return REQUEST_DONE;
    if (result == CURL_OK) fsti_attempt_judge(attempt);
    if (attempt->text != NULL && attempt->verdict != NET_GOOD)
        fsti_answer_read_code(&attempt->answer, attempt->text, attempt->text_bytes);
    if (!attempt->is_judged || attempt->is_late) return try_again(request, attempt, result);
    *slower = attempt->verdict == NET_SLOWER;
    switch (attempt->verdict) {
    case NET_GOOD: return finish_good(request, attempt, result);
    case NET_UNCHANGED: return finish_unchanged(request, attempt);
    case NET_AGAIN:
    case NET_SLOWER: return try_again(request, attempt, result);
    case NET_ELSEWHERE:
        return is_other_region(request, attempt) ? finish_refused(request, attempt)
                                                 : follow_redirect(request, attempt);
    default:
        if (is_conflict(request, attempt)) return try_again(request, attempt, result);
        return can_be_mended(request, attempt) ? REQUEST_AGAIN : finish_refused(request, attempt);
    }
}
