// SPDX-License-Identifier: Apache-2.0
/// Decides what to do after an attempt has ended.
#include "attempt.h"
#include "location/location.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "answered_hosts.h"
#include "secret_text.h"

/// After this much progress of a range, the count of attempts restarts.
#define PROGRESS_BYTES ((uint64_t)65536)
/// A host that accepts no connection and has never responded gets fewer attempts than a busy one,
/// because its name or port is probably wrong.
#define CONNECT_TRIES_MAX 4u
/// The limit for a silent host: no attempt is made that would end later.
#define SILENCE_NS_MAX ((uint64_t)30000000000)

void fsti_http_count(fsti_http_counts *sum, const fsti_http_counts *more) {
    sum->requests += more->requests;
    sum->retries += more->retries;
    sum->hedges += more->hedges;
    sum->connections += more->connections;
    sum->bytes += more->bytes;
    sum->kept_bytes += more->kept_bytes;
    sum->written_bytes += more->written_bytes;
    sum->retry_wait_ns += more->retry_wait_ns;
    sum->first_byte_ns += more->first_byte_ns;
}

/// Whether the server has sent back a secret.
static bool contains_secret(const http_request *request, const char *text) {
    const http_authority *authority = &request->authority;
    bool redirected;
    char *target = request->resource == NULL
                       ? NULL
                       : fsti_resource_target(request->resource, request->url, &redirected);
    bool is_found = fsti_url_has_secret(request->url, text) ||
                    (request->target != NULL && fsti_url_has_secret(request->target, text)) ||
                    (target != NULL && fsti_url_has_secret(target, text)) ||
                    (authority->functions != NULL &&
                     authority->functions->has_secret(authority->context, text));
    fsti_secret_text_free(target);
    return is_found;
}

/// Writes "(status 503 SlowDown, request 4711, 8 tries)".
static void describe(const http_request *request, const http_response *answer, char *text,
                     size_t size) {
    int used = snprintf(text, size, "status %u", answer->status);
    const char *const parts[] = {" ", answer->code, ", request ", answer->request_id};
    for (int i = 0; i < 4; i += 2)
        if (parts[i + 1][0] != '\0' && !contains_secret(request, parts[i + 1]) && used > 0 &&
            (size_t)used < size)
            used += snprintf(text + used, size - (size_t)used, "%s%s", parts[i], parts[i + 1]);
    if (request->tries > 0 && used > 0 && (size_t)used < size)
        used += snprintf(text + used, size - (size_t)used, ", %u tries", request->tries + 1);
    const http_authority *authority = &request->authority;
    bool is_refused = answer->status == 401 || answer->status == 403;
    if (is_refused && authority->functions != NULL && used > 0 && (size_t)used < size)
        snprintf(text + used, size - (size_t)used, ", credentials: %s",
                 authority->functions->source(authority->context));
}

/// Ends a request because of its response.
static request_step fail_answer(http_request *request, const http_attempt *attempt,
                                fst_status status, const char *what) {
    char text[240];
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = request->name;
    request->answer = attempt->answer;
    describe(request, &attempt->answer, text, sizeof text);
    request->status = fsti_error_set(&request->error, status, location, "%s (%s)", what, text);
    request->error.os_errno = status == FST_E_PERMISSION  ? EACCES
                              : status == FST_E_NOT_FOUND ? ENOENT
                                                          : EIO;
    return REQUEST_DONE;
}

/// Whether a transfer failed because no connection was made.
static bool is_no_connection(int result) {
    return result == CURL_HOST_NOT_FOUND || result == CURL_NO_CONNECTION ||
           result == CURL_PROXY_NOT_FOUND;
}

/// Describes a failure through a proxy. False: no proxy was used.
static bool describe_proxy_failure(const http_request *request, int result, char *text,
                                   size_t size) {
    char proxy[320];
    bool may_be_proxy = is_no_connection(result) || result == CURL_TIMED_OUT;
    const char *url = request->target != NULL ? request->target : request->url;
    if (!may_be_proxy || request->is_link_local || !fsti_http_proxy_of(url, proxy, sizeof proxy))
        return false;
    const char *what = result == CURL_PROXY_NOT_FOUND ? "the proxy's host name was not found"
                       : result == CURL_TIMED_OUT     ? "no response through the proxy"
                                                      : "the proxy refused the connection";
    snprintf(text, size, "%s (%s). Check that variable, or list the host in no_proxy", what, proxy);
    return true;
}

/// Describes a failed transfer.
static void describe_failure(const http_request *request, int result, char *text, size_t size) {
    char path[512];
    const char *what = "the connection was lost";
    if (describe_proxy_failure(request, result, text, size)) return;
    if (result == CURL_HOST_NOT_FOUND) what = "unknown host";
    if (result == CURL_NO_CONNECTION) what = "the host refused the connection";
    if (result == CURL_TIMED_OUT) what = "the host does not respond";
    if (result == CURL_CERTIFICATE) what = "the host's certificate is not trusted";
    if (result == CURL_TLS_FAILED) what = "the TLS connection failed";
    snprintf(text, size, "%s", what);
    if (result != CURL_CA_FILE_BAD) return;
    if (!fsti_http_ca_file(path, sizeof path)) snprintf(path, sizeof path, "libcurl's default");
    snprintf(text, size, "the certificate file can't be read: %.200s, from %s", path,
             fsti_http_ca_source());
}

/// Ends a request that got no response.
static request_step fail_transfer(http_request *request, int result) {
    const curl_library *curl;
    char what[448];
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = request->name;
    describe_failure(request, result, what, sizeof what);
    bool has_text = result != CURL_OK && fsti_curl_open(&curl, NULL) == FST_OK;
    request->status =
        fsti_error_set(&request->error, FST_E_IO, location, "%s (%s%s%u %s)", what,
                       has_text ? curl->curl_easy_strerror(result) : "", has_text ? "; " : "",
                       request->tries + 1, request->tries == 0 ? "try" : "tries");
    request->error.os_errno = result == CURL_TIMED_OUT ? ETIMEDOUT : EIO;
    return REQUEST_DONE;
}

/// The cause of a retry, for statistics.
static fsti_retry_cause cause_of(const http_attempt *attempt, int result, bool has_status) {
    if (has_status) return FSTI_RETRY_STATUS;
    if (is_no_connection(result)) return FSTI_RETRY_REFUSED;
    if (attempt->has_stalled || result == CURL_TIMED_OUT) return FSTI_RETRY_SILENT;
    return attempt->answer.status != 0 ? FSTI_RETRY_CUT : FSTI_RETRY_BROKEN;
}

static void wait_before_retry(http_request *request, fsti_retry_cause cause,
                              const http_response *answer) {
    http_limits limits = fsti_http_limits();
    bool has_status = cause == FSTI_RETRY_STATUS;
    int64_t retry_after_ms = has_status ? answer->retry_after_ms : -1;
    uint64_t wait_ms = cause == FSTI_RETRY_REFUSED
                           ? fsti_retry_restart_wait_ms(request->tries, limits.retry_base_ms,
                                                        limits.retry_cap_ms, fsti_random())
                           : fsti_retry_wait_ms(request->tries, limits.retry_base_ms,
                                                limits.retry_cap_ms, retry_after_ms, fsti_random());
    request->retry_since_ns = fsti_now_ns();
    request->wake_ns = request->retry_since_ns + wait_ms * 1000000;
    if (request->resource != NULL)
        fsti_resource_note_retry(request->resource, cause, has_status ? answer->status : 0);
}

/// Notes whether the host was silent. True: another attempt with it would take too long.
static bool note_silence(http_request *request, const http_attempt *attempt) {
    // A host that sends a byte now and then counts as silent.
    bool is_slow = attempt->has_stalled && attempt->at - attempt->begin < PROGRESS_BYTES;
    if (attempt->answer.status != 0 && !is_slow) {
        request->silent_ns = 0;
        return false;
    }
    http_limits limits = fsti_http_limits();
    uint64_t try_ms = fsti_max(limits.connect_ms, limits.first_byte_ms);
    uint64_t try_ns = fsti_max(try_ms, request->silence_ms_max) * 1000000;
    if (request->silent_ns == 0) request->silent_ns = attempt->started_ns;
    return fsti_now_ns() - request->silent_ns + try_ns > SILENCE_NS_MAX;
}

/// Starts another attempt, if any is left.
static request_step try_again(http_request *request, const http_attempt *attempt, int result) {
    uint32_t tries_max = fsti_http_limits().tries_max;
    bool is_refused = is_no_connection(result),
         is_restarting = is_refused && fsti_host_has_answered(attempt->host_key);
    if (is_refused && !is_restarting) tries_max = (uint32_t)fsti_min(tries_max, CONNECT_TRIES_MAX);
    if (attempt->at - attempt->begin >= PROGRESS_BYTES) request->tries = 0;
    bool has_status = attempt->is_evaluated && attempt->verdict != HTTP_OK;
    // A refused connection fails at once, so it is not silence; tries_max limits the wait for a
    // restart.
    bool is_silent = !is_restarting && note_silence(request, attempt);
    if (request->is_link_local || is_silent || request->tries + 1 >= tries_max)
        return has_status ? fail_answer(request, attempt, FST_E_IO, "the server failed")
                          : fail_transfer(request, attempt->has_stalled ? CURL_TIMED_OUT : result);
    request->tries++;
    wait_before_retry(request, cause_of(attempt, result, has_status), &attempt->answer);
    return REQUEST_RETRY;
}

// ---- redirects ----

static const char private_redirect[] =
    "the server redirects to a private address. If you trust it, set the option "
    "private_redirects or FASTSAFETENSORS_PRIVATE_REDIRECTS=1";

static const char *check_redirect(const char *from, const char *to, url_parts *target) {
    url_parts source;
    if (to == NULL) return "the server redirects without a location";
    const char *fault = fsti_url_parse(to, target);
    bool is_https = fsti_url_part_is(target->scheme, "https");
    if (!is_https && !fsti_url_part_is(target->scheme, "http"))
        return "the server redirects to a URL that is not http or https";
    if (fault != NULL) return "the server redirects to an invalid URL";
    if (!is_https && fsti_url_parse(from, &source) == NULL &&
        fsti_url_part_is(source.scheme, "https"))
        return "the server redirects from https to http";
    return NULL;
}

/// Whether a request changes something on the server.
static bool is_change(const http_request *request) {
    return request->method != NULL && strcmp(request->method, "HEAD") != 0;
}

static request_step follow_redirect(http_request *request, http_attempt *attempt) {
    const curl_library *curl;
    const char *to = NULL;
    char *from = NULL;
    bool was_redirected;
    url_parts target;
    request->status = fsti_curl_open(&curl, &request->error);
    if (request->status != FST_OK) return REQUEST_DONE;
    curl->curl_easy_getinfo(attempt->easy, CURL_INFO_REDIRECT, &to);
    from = request->target;
    if (from == NULL && request->resource != NULL)
        from = fsti_resource_target(request->resource, request->url, &was_redirected);
    const char *why = check_redirect(from == NULL ? request->url : from, to, &target);
    if (from != request->target) fsti_secret_text_free(from);
    if (why == NULL && fsti_redirect_is_refused(request, to)) why = private_redirect;
    if (why == NULL && request->stays) why = "the server redirects, which is not allowed here";
    // Another host would receive the model's bytes, in a request that is not signed for it.
    if (why == NULL && is_change(request) && !fsti_url_host_is(request->url, to))
        why = "the server redirects a write to another host, which is not allowed";
    if (why == NULL && ++request->redirects > REDIRECT_COUNT_MAX) why = "too many redirects";
    if (why != NULL) return fail_answer(request, attempt, FST_E_IO, why);
    char *copy = fsti_string_copy(to, strlen(to));
    if (copy == NULL) {
        request->status = fsti_error_memory(&request->error, strlen(to));
        return REQUEST_DONE;
    }
    fsti_secret_text_free(request->target);
    request->target = copy;
    request->wake_ns = 0;
    return REQUEST_RETRY;
}

/// A stored redirect may have expired: start again from the resource's URL, once.
static bool forget_redirect(http_request *request, const http_attempt *attempt) {
    if (!attempt->is_redirected || request->redirects > 0 || request->has_forgotten ||
        request->resource == NULL)
        return false;
    fsti_resource_redirect(request->resource, NULL);
    request->has_forgotten = true;
    request->wake_ns = 0;
    return true;
}

// ---- the end of an attempt ----

static request_step succeed(http_request *request) {
    if (request->resource != NULL && request->target != NULL)
        fsti_resource_redirect(request->resource, request->target);
    request->status = FST_OK;
    return REQUEST_DONE;
}

static request_step finish_success(http_request *request, http_attempt *attempt, int result) {
    uint64_t end = request->end;
    if (request->is_range && request->is_first) {
        bool has_full_body = attempt->answer.status != 206;
        if (has_full_body && attempt->answer.length_bytes == RESPONSE_UNKNOWN) {
            if (result != CURL_OK) return try_again(request, attempt, result);
            attempt->answer.length_bytes = attempt->at;
        }
        if (has_full_body) attempt->answer.total_bytes = attempt->answer.length_bytes;
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

/// The known version is current, so there is no body.
static request_step finish_unchanged(http_request *request, const http_attempt *attempt) {
    request->answer = attempt->answer;
    return succeed(request);
}

/// The server refused a change.
static request_step refuse_change(http_request *request, const http_attempt *attempt) {
    bool exists = attempt->answer.status == 412 || attempt->answer.status == 409;
    if (attempt->verdict == HTTP_NOT_FOUND)
        return fail_answer(request, attempt, FST_E_NOT_FOUND,
                           "the bucket or upload does not exist");
    if (attempt->verdict == HTTP_FORBIDDEN)
        return fail_answer(request, attempt, FST_E_PERMISSION, "the server denied the write");
    fail_answer(request, attempt, FST_E_IO,
                exists ? "the object exists already, or another process is saving it"
                       : "the server rejected the write");
    if (exists) request->error.os_errno = EEXIST;
    return REQUEST_DONE;
}

static request_step finish_refused(http_request *request, http_attempt *attempt) {
    request->answer = attempt->answer;
    if (is_change(request)) return refuse_change(request, attempt);
    switch (attempt->verdict) {
    case HTTP_CHANGED: return fail_answer(request, attempt, FST_E_FILE_CHANGED, attempt->why);
    case HTTP_NOT_FOUND:
        if (forget_redirect(request, attempt)) return REQUEST_RETRY;
        return fail_answer(request, attempt, FST_E_NOT_FOUND, "the object does not exist");
    case HTTP_FORBIDDEN:
        if (forget_redirect(request, attempt)) return REQUEST_RETRY;
        return fail_answer(request, attempt, FST_E_PERMISSION, "the server denied access");
    case HTTP_WRONG:
        return fail_answer(request, attempt, FST_E_IO,
                           attempt->why == NULL ? "the response is invalid" : attempt->why);
    default: return fail_answer(request, attempt, FST_E_IO, "the server rejected the request");
    }
}

/// Whether a store rejected a change because of a concurrent change of the same object. It may
/// accept a retry, or report the other's result. After the last attempt the change is refused.
static bool is_conflict(const http_request *request, const http_attempt *attempt) {
    return is_change(request) && attempt->answer.status == 409 &&
           strcmp(attempt->answer.code, "ConditionalRequestConflict") == 0 &&
           request->tries + 1 < fsti_http_limits().tries_max;
}

/// Has the authority do what may make a rejected request succeed, such as renewing its keys. False:
/// it knows nothing.
static bool start_remedy(http_request *request, const http_attempt *attempt) {
    const http_authority *authority = &request->authority;
    if (authority->functions == NULL || attempt->is_redirected) return false;
    const http_rejection rejection = {.answer = &attempt->answer,
                                      .key_number = attempt->key_number,
                                      .tried = request->remedies,
                                      .request_count = request->counts.requests};
    http_remedy remedy = authority->functions->refused(authority->context, &rejection);
    request->remedies |= remedy;
    request->wake_ns = 0; // the event loop waits while keys are renewed
    return remedy != HTTP_REMEDY_NONE;
}

/// The error of a proxy that refuses to connect; NULL: it may be temporary.
static const char *proxy_refusal(http_attempt *attempt) {
    const curl_library *curl;
    long status = 0;
    if (attempt->is_evaluated || fsti_curl_open(&curl, NULL) != FST_OK) return NULL;
    curl->curl_easy_getinfo(attempt->easy, CURL_INFO_PROXY_STATUS, &status);
    if (status < 400 || status >= 500) return NULL;
    attempt->answer.status = (uint32_t)status;
    return status == 407 ? "the proxy requires a name and a password" : "the proxy denied access";
}

/// A redirect's host resolved to a private address, so no connection was made.
static void fail_private(http_request *request, const http_attempt *attempt) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = request->name;
    request->status = fsti_error_set(&request->error, FST_E_IO, location, "%s (it is %s)",
                                     private_redirect, attempt->refused_address);
    request->error.os_errno = EACCES;
}

/// Sets the error of a request whose attempt failed for a reason that no retry can change. False: a
/// retry may help.
static bool fail_if_final(http_request *request, http_attempt *attempt, int result) {
    if (request->stop != NULL && atomic_load(request->stop)) {
        request->status =
            fsti_error_set(&request->error, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled");
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
    if (attempt->has_refused_address && result != CURL_OK && attempt->answer.status == 0) {
        fail_private(request, attempt);
        return true;
    }
    if (attempt->is_too_long) {
        fail_answer(request, attempt, FST_E_IO, "more bytes were received than requested");
        return true;
    }
    bool is_final =
        result == CURL_CERTIFICATE || result == CURL_CA_FILE_BAD || result == CURL_BAD_URL;
    if (is_final) fail_transfer(request, result);
    return is_final;
}

/// Whether the authority lets a redirect be followed.
static bool may_follow(const http_request *request, const http_attempt *attempt) {
    const http_authority *authority = &request->authority;
    return authority->functions == NULL || attempt->is_redirected ||
           authority->functions->may_follow(authority->context, &attempt->answer);
}

request_step fsti_request_finish(http_request *request, http_attempt *attempt, int result,
                                 bool *is_throttled) {
    *is_throttled = false;
    if (attempt->answer.status != 0) fsti_host_note_response(attempt->host_key);
    if (fail_if_final(request, attempt, result)) return REQUEST_DONE;
    if (result == CURL_OK) fsti_attempt_evaluate(attempt);
    if (attempt->text != NULL && attempt->verdict != HTTP_OK)
        fsti_response_read_code(&attempt->answer, attempt->text, attempt->text_bytes);
    if (!attempt->is_evaluated || attempt->has_stalled) return try_again(request, attempt, result);
    *is_throttled = attempt->verdict == HTTP_SLOWER;
    switch (attempt->verdict) {
    case HTTP_OK: return finish_success(request, attempt, result);
    case HTTP_UNCHANGED: return finish_unchanged(request, attempt);
    case HTTP_RETRY:
    case HTTP_SLOWER: return try_again(request, attempt, result);
    case HTTP_REDIRECT:
        return may_follow(request, attempt) ? follow_redirect(request, attempt)
                                            : finish_refused(request, attempt);
    default:
        if (is_conflict(request, attempt)) return try_again(request, attempt, result);
        return start_remedy(request, attempt) ? REQUEST_RETRY : finish_refused(request, attempt);
    }
}
