// SPDX-License-Identifier: Apache-2.0
/// A store as the authority of requests: its keys, its clock, and what its rejections mean.
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "credential_cache.h"
#include "http/http.h"
#include "sign.h"
#include "object_store.h"

/// Difference of the stores' clocks to this machine's, in seconds.
static atomic_int_fast64_t clock_skew_s;

/// Adjusts the clock for signatures to a store's Date header. False if that changes nothing.
static bool learn_time(const char *date) {
    int64_t then_s = fsti_response_date(date);
    if (then_s < 0) return false;
    int64_t skew_s = then_s - (int64_t)time(NULL);
    return atomic_exchange(&clock_skew_s, skew_s) != skew_s;
}

/// Copies the current keys.
static void copy_keys(const object_store *store, const http_call *call, store_keys *keys) {
    if (store->credentials != NULL) {
        uint32_t number = fsti_credentials_copy(store->credentials, keys);
        if (call->key_number != NULL) *call->key_number = number;
        return;
    }
    *keys = (store_keys){.expires_s = 0};
    snprintf(keys->access_key, sizeof keys->access_key, "%s", store->access_key);
    snprintf(keys->secret_key, sizeof keys->secret_key, "%s", store->secret_key);
    snprintf(keys->session_token, sizeof keys->session_token, "%s", store->session_token);
    snprintf(keys->bearer_token, sizeof keys->bearer_token, "%s", store->bearer_token);
}

static bool sign(const void *context, const http_call *call, http_headers *headers) {
    const object_store *store = context;
    store_keys keys;
    http_call now = *call;
    now.now_s += atomic_load(&clock_skew_s);
    copy_keys(store, call, &keys);
    bool good = fsti_sign(store, &keys, &now, headers);
    explicit_bzero(&keys, sizeof keys);
    return good;
}

/// Error codes of stores for expired credentials.
static bool is_expired(const http_response *answer) {
    static const char *const codes[] = {"ExpiredToken", "ExpiredTokenException",
                                        "TokenRefreshRequired", "RequestExpired",
                                        "InvalidAuthenticationInfo"};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (strcmp(answer->code, codes[i]) == 0) return true;
    return answer->status == 401;
}

/// The server's time may help, or renewed credentials.
static http_remedy refused(const void *context, const http_rejection *rejection) {
    const object_store *store = context;
    const http_response *answer = rejection->answer;
    bool is_skewed = strcmp(answer->code, "RequestTimeTooSkewed") == 0;
    if (is_skewed && !(rejection->tried & HTTP_REMEDY_REPEAT)) {
        // Another request may have learned the time since this one was signed.
        bool is_other_time = learn_time(answer->date) || rejection->request_count == 1;
        return is_other_time ? HTTP_REMEDY_REPEAT : HTTP_REMEDY_NONE;
    }
    if (store->credentials == NULL || (rejection->tried & HTTP_REMEDY_RENEW) || !is_expired(answer))
        return HTTP_REMEDY_NONE;
    return fsti_credentials_rejected(store->credentials, rejection->key_number) ? HTTP_REMEDY_RENEW
                                                                                : HTTP_REMEDY_NONE;
}

static bool is_renewing(const void *context) {
    const object_store *store = context;
    return store->credentials != NULL && fsti_credentials_are_renewing(store->credentials);
}

/// Not if a store redirects to the bucket's region. The request must then be sent and signed for
/// that region, because followed redirects are not signed.
static bool may_follow(const void *context, const http_response *answer) {
    const object_store *store = context;
    return store->kind != FSTI_LOCATION_S3 || answer->region[0] == '\0' ||
           strcmp(answer->region, store->region) == 0;
}

static bool has_secret(const void *context, const char *text) {
    return fsti_store_has_secret(context, text);
}

static const char *source_of(const void *context) {
    const object_store *store = context;
    return store->source;
}

bool fsti_store_has_secret(const object_store *store, const char *text) {
    const char *const secrets[] = {store->access_key,   store->secret_key, store->session_token,
                                   store->bearer_token, store->sas_token,  store->account_key};
    for (size_t i = 0; i < sizeof secrets / sizeof *secrets; i++)
        if (fsti_text_has_secret(secrets[i], text)) return true;
    return store->credentials != NULL && fsti_credentials_have_secret(store->credentials, text);
}

http_authority fsti_store_authority(const object_store *store) {
    static const http_authority_functions functions = {.sign = sign,
                                                       .refused = refused,
                                                       .is_renewing = is_renewing,
                                                       .may_follow = may_follow,
                                                       .has_secret = has_secret,
                                                       .source = source_of};
    return (http_authority){&functions, store};
}
