// SPDX-License-Identifier: Apache-2.0
/// Signs requests to stores.
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "sign.h"

#include "shared_key.h"
#include "sigv4.h"
#include "object_store.h"
#include "token_text.h"

/// The Host header, without the scheme's default port.
static bool write_host(const url_parts *address, char *host, size_t size) {
    bool is_https = fsti_url_part_is(address->scheme, "https");
    bool has_port = address->port != 0 && address->port != (is_https ? 443u : 80u);
    const char *open = address->has_brackets ? "[" : "", *close = address->has_brackets ? "]" : "";
    int used =
        snprintf(host, size, "%s%.*s%s", open, (int)address->host.size, address->host.at, close);
    if (has_port && used > 0 && (size_t)used < size)
        used += snprintf(host + used, size - (size_t)used, ":%u", address->port);
    return used > 0 && (size_t)used < size;
}

/// The query in canonical form: a name without a value gets an empty one.
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

static bool sign_s3(const object_store *store, const store_keys *keys, const http_call *call,
                    const url_parts *address, http_headers *headers) {
    char host[300], path[4096], query[URL_BYTES_MAX], date[SIGV4_DATE_BYTES];
    char line[SIGV4_LINE_BYTES];
    if (address->path.size >= sizeof path || !write_host(address, host, sizeof host) ||
        !write_query(address->query, query, sizeof query))
        return false;
    snprintf(path, sizeof path, "%.*s", (int)address->path.size, address->path.at);
    fsti_sigv4_date(call->now_s, date);
    sigv4_request request = {.method = call->method,
                             .host = host,
                             .path = path[0] == '\0' ? "/" : path,
                             .query = query,
                             .payload_hash =
                                 call->body_hash == NULL ? SIGV4_UNSIGNED : call->body_hash,
                             .token = keys->session_token[0] != '\0' ? keys->session_token : NULL,
                             .date = date,
                             .region = store->region,
                             .service = store->service == NULL ? "s3" : store->service,
                             .access_key = keys->access_key,
                             .secret_key = keys->secret_key};
    return fsti_sigv4_sign(&request, line, sizeof line) &&
           fsti_headers_add(headers, "Host", host) &&
           fsti_headers_add(headers, "Authorization", line) &&
           fsti_headers_add(headers, "x-amz-date", date) &&
           fsti_headers_add(headers, "x-amz-content-sha256", request.payload_hash) &&
           (request.token == NULL ||
            fsti_headers_add(headers, "x-amz-security-token", request.token));
}

static bool sign_by_token(const char *token, http_headers *headers) {
    char value[sizeof((store_keys *)NULL)->bearer_token + 16];
    snprintf(value, sizeof value, "Bearer %s", token);
    bool good = fsti_headers_add(headers, "Authorization", value);
    explicit_bzero(value, sizeof value);
    return good;
}

/// The value of the header that starts with a text; "" if it is missing.
static const char *value_of(const char *const *lines, const char *name) {
    size_t size = strlen(name);
    for (; lines != NULL && *lines != NULL; lines++)
        if (strncmp(*lines, name, size) == 0) return *lines + size;
    return "";
}

#define AZURE_VERSION "x-ms-version: 2021-08-06"

static bool sign_azure(const object_store *store, const http_call *call, const url_parts *address,
                       http_headers *headers) {
    char date[64], line[SHARED_KEY_LINE_BYTES];
    unsigned char key[sizeof store->account_key];
    time_t now = (time_t)(call->now_s);
    struct tm parts;
    gmtime_r(&now, &parts);
    strftime(date, sizeof date, "x-ms-date: %a, %d %b %Y %H:%M:%S GMT", &parts);
    // All x-ms- lines of the request, in alphabetical order. No caller adds another one.
    const char *lines[3];
    size_t count = 0;
    const char *type = value_of(call->lines, "x-ms-blob-type: ");
    if (type[0] != '\0') lines[count++] = "x-ms-blob-type: BlockBlob";
    lines[count++] = date;
    lines[count++] = AZURE_VERSION;
    int64_t key_size = fsti_base64_read(store->account_key, key, sizeof key);
    shared_key_request request = {.method = call->method,
                                  .account = store->account,
                                  .path = address->path,
                                  .query = address->query,
                                  .lines = lines,
                                  .line_count = count,
                                  .type = value_of(call->lines, "Content-Type: "),
                                  .range = call->range == NULL ? "" : call->range,
                                  .match = call->match == NULL ? value_of(call->lines, "If-Match: ")
                                                               : call->match,
                                  .none_match = value_of(call->lines, "If-None-Match: "),
                                  .body_bytes = call->body_bytes,
                                  .key = key,
                                  .key_size = key_size < 0 ? 0 : (size_t)key_size};
    bool good = key_size > 0 && fsti_shared_key_sign(&request, line, sizeof line);
    explicit_bzero(key, sizeof key);
    return good && fsti_headers_add(headers, "x-ms-date", date + strlen("x-ms-date: ")) &&
           fsti_headers_add(headers, "Authorization", line);
}

bool fsti_sign(const object_store *store, const store_keys *keys, const http_call *call,
               http_headers *headers) {
    url_parts parsed;
    if (fsti_url_parse(call->url, &parsed) != NULL) return false;
    bool is_azure = store->kind == FSTI_LOCATION_AZURE, good = true;
    if (is_azure && !fsti_headers_add(headers, "x-ms-version", strchr(AZURE_VERSION, ' ') + 1))
        return false;
    bool takes_keys = store->kind == FSTI_LOCATION_S3 || store->kind == FSTI_LOCATION_GCS;
    if (store->kind != FSTI_LOCATION_S3 && keys->bearer_token[0] != '\0')
        good = sign_by_token(keys->bearer_token, headers);
    else if (takes_keys && keys->access_key[0] != '\0')
        good = sign_s3(store, keys, call, &parsed, headers);
    else if (is_azure && store->account_key[0] != '\0')
        good = sign_azure(store, call, &parsed, headers);
    return good;
}
