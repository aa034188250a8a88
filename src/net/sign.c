// SPDX-License-Identifier: Apache-2.0
/// What requests to stores are signed with, and what of it no message may have.
#include <stdio.h>
#include <string.h>

#include "sigv4.h"
#include "store.h"

// ---- secrets ----

/// Shorter ones say nothing.
#define SECRET_BYTES_MIN 4u

static bool overlaps(url_part secret, const char *text) {
    size_t size = strlen(text);
    if (size < SECRET_BYTES_MIN || secret.size < SECRET_BYTES_MIN) return false;
    return memmem(text, size, secret.at, secret.size) != NULL ||
           memmem(secret.at, secret.size, text, size) != NULL;
}

bool fsti_url_knows(const char *url, const char *text) {
    const char *at = strchr(url, '?');
    while (at != NULL && *at != '\0') {
        at++;
        size_t size = strcspn(at, "&");
        const char *value = memchr(at, '=', size);
        if (value == NULL) value = at - 1;
        url_part secret = {value + 1, (size_t)(at + size - value) - 1};
        if (overlaps(secret, text) || overlaps((url_part){at, size}, text)) return true;
        at += size;
    }
    return false;
}

bool fsti_store_knows(const net_store *store, const char *text) {
    const char *const secrets[] = {store->access_key, store->secret_key, store->session_token,
                                   store->bearer_token, store->sas_token};
    for (size_t i = 0; i < sizeof secrets / sizeof *secrets; i++)
        if (overlaps((url_part){secrets[i], strlen(secrets[i])}, text)) return true;
    return false;
}

// ---- signatures ----

static bool add_line(curl_list **list, const char *name, const char *value) {
    const curl_library *curl;
    char line[4200];
    int used = snprintf(line, sizeof line, "%s: %s", name, value);
    if (used < 0 || (size_t)used >= sizeof line || fsti_curl_open(&curl, NULL) != FST_OK)
        return false;
    curl_list *grown = curl->curl_slist_append(*list, line);
    explicit_bzero(line, (size_t)used);
    if (grown != NULL) *list = grown;
    return grown != NULL;
}

/// The Host header, which leaves out a port that is the scheme's own.
static bool write_host(const net_url *address, char *host, size_t size) {
    bool is_https = fsti_url_part_is(address->scheme, "https");
    bool has_port = address->port != 0 && address->port != (is_https ? 443u : 80u);
    const char *open = address->has_brackets ? "[" : "", *close = address->has_brackets ? "]" : "";
    int used =
        snprintf(host, size, "%s%.*s%s", open, (int)address->host.size, address->host.at, close);
    if (has_port && used > 0 && (size_t)used < size)
        used += snprintf(host + used, size - (size_t)used, ":%u", address->port);
    return used > 0 && (size_t)used < size;
}

/// A query as it is signed: names without a value have an empty one.
static bool write_query(url_part query, char *out, size_t size) {
    size_t used = 0;
    bool has_value = query.size == 0;
    for (size_t i = 0; i <= query.size; i++) {
        bool is_end = i == query.size || query.at[i] == '&';
        if (used + 3 > size) return false;
        if (is_end && !has_value) out[used++] = '=';
        if (i == query.size) break;
        has_value = !is_end && (has_value || query.at[i] == '=');
        out[used++] = query.at[i];
    }
    out[used] = '\0';
    return true;
}

static bool sign_s3(const net_store *store, const store_call *call, const net_url *address,
                    curl_list **list) {
    char host[300], path[4096], query[URL_BYTES_MAX], date[SIGV4_DATE_BYTES];
    char line[SIGV4_LINE_BYTES];
    if (address->path.size >= sizeof path || !write_host(address, host, sizeof host) ||
        !write_query(address->query, query, sizeof query))
        return false;
    snprintf(path, sizeof path, "%.*s", (int)address->path.size, address->path.at);
    fsti_sigv4_date(call->now_s, date);
    sigv4_request request = {.method = call->method,
                             .host = host,
                             .path = path,
                             .query = query,
                             .payload_hash =
                                 call->body_hash == NULL ? SIGV4_UNSIGNED : call->body_hash,
                             .token = store->session_token[0] != '\0' ? store->session_token : NULL,
                             .date = date,
                             .region = store->region,
                             .service = "s3",
                             .access_key = store->access_key,
                             .secret_key = store->secret_key};
    return fsti_sigv4_sign(&request, line, sizeof line) && add_line(list, "Host", host) &&
           add_line(list, "Authorization", line) && add_line(list, "x-amz-date", date) &&
           add_line(list, "x-amz-content-sha256", request.payload_hash) &&
           (request.token == NULL || add_line(list, "x-amz-security-token", request.token));
}

static bool sign_by_token(const char *token, curl_list **list) {
    char value[sizeof((net_store *)NULL)->bearer_token + 16];
    snprintf(value, sizeof value, "Bearer %s", token);
    bool good = add_line(list, "Authorization", value);
    explicit_bzero(value, sizeof value);
    return good;
}

bool fsti_store_sign(const net_store *store, const store_call *call, curl_list **list) {
    net_url parsed;
    if (fsti_url_parse(call->address, &parsed) != NULL) return false;
    if (store->kind == NET_STORE_AZURE && !add_line(list, "x-ms-version", "2021-08-06"))
        return false;
    bool takes_keys = store->kind == NET_STORE_S3 || store->kind == NET_STORE_GCS;
    bool takes_token = store->kind == NET_STORE_HUB || store->kind == NET_STORE_GCS;
    if (takes_token && store->bearer_token[0] != '\0')
        return sign_by_token(store->bearer_token, list);
    return !takes_keys || store->access_key[0] == '\0' || sign_s3(store, call, &parsed, list);
}
