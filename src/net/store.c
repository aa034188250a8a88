// SPDX-License-Identifier: Apache-2.0
/// Stores: from names to addresses of the web, and signatures.
#include "store.h"

#include <stdio.h>
#include <string.h>

#include "settings.h"
#include "sigv4.h"

#define HUB "https://huggingface.co"
#define GCS "https://storage.googleapis.com"

static const struct {
    const char *scheme;
    net_store_kind kind;
} schemes[] = {{"http", NET_STORE_WEB}, {"https", NET_STORE_WEB}, {"s3", NET_STORE_S3},
               {"gs", NET_STORE_GCS},   {"az", NET_STORE_AZURE},  {"hf", NET_STORE_HUB}};

static fst_status refuse(const char *url, const char *why, fst_error *error) {
    char name[512];
    fsti_url_tell(url, name, sizeof name);
    fsti_error_place place = FSTI_NOWHERE;
    place.file = name;
    return fsti_error_set(error, FST_E_ARGUMENT, place, "not an address that can be read: %s", why);
}

net_store *fsti_store_ref(net_store *store) {
    fsti_refcount_ref(&store->refs);
    return store;
}

void fsti_store_unref(net_store *store) {
    if (store == NULL || !fsti_refcount_unref(&store->refs)) return;
    explicit_bzero(store, sizeof *store);
    fsti_free(store);
}

/// A setting that nobody gave as an argument, from the first variable that is set.
static void fill(char *field, size_t size, const char *const *variables) {
    if (field[0] != '\0') return;
    for (; *variables != NULL; variables++) {
        const char *value = fsti_net_environment(*variables);
        if (value == NULL || strlen(value) >= size || strpbrk(value, "\r\n") != NULL) continue;
        memcpy(field, value, strlen(value) + 1);
        return;
    }
}

#define FILL(field, ...) fill(field, sizeof field, (const char *const[]){__VA_ARGS__, NULL})

static fst_status find_settings(net_store *store, const char *name, bool anonymous,
                                fst_error *error) {
    store->source = anonymous ? "none, as asked" : "none";
    switch (store->kind) {
    case NET_STORE_S3:
        FILL(store->endpoint, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL");
        FILL(store->region, "AWS_REGION", "AWS_DEFAULT_REGION");
        if (!anonymous) FST_TRY(fsti_store_find_keys(store, name, error));
        if (store->region[0] == '\0') memcpy(store->region, "us-east-1", 10);
        break;
    case NET_STORE_GCS:
        FILL(store->endpoint, "STORAGE_EMULATOR_HOST");
        if (!anonymous) FILL(store->bearer_token, "GOOGLE_OAUTH_ACCESS_TOKEN");
        memcpy(store->region, "auto", 5);
        break;
    case NET_STORE_AZURE:
        FILL(store->account, "AZURE_STORAGE_ACCOUNT_NAME");
        if (!anonymous) FILL(store->sas_token, "AZURE_STORAGE_SAS_TOKEN");
        break;
    case NET_STORE_HUB:
        FILL(store->endpoint, "HF_ENDPOINT");
        if (!anonymous) FILL(store->bearer_token, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN");
        break;
    case NET_STORE_WEB: break;
    }
    if (store->bearer_token[0] != '\0') store->source = "a token";
    if (store->sas_token[0] != '\0') store->source = "a SAS";
    size_t size = strlen(store->endpoint);
    while (size > 0 && store->endpoint[size - 1] == '/') store->endpoint[--size] = '\0';
    return FST_OK;
}

fst_status fsti_store_open(const char *url, net_store **out, fst_error *error) {
    net_url parsed;
    char name[512];
    const char *why = fsti_url_parse(url, &parsed);
    if (why != NULL) return refuse(url, why, error);
    net_options *options = fsti_alloc(sizeof *options);
    net_store *store = fsti_alloc(sizeof *store);
    if (options == NULL || store == NULL) {
        fsti_free(options);
        fsti_free(store);
        return fsti_error_memory(error, sizeof *options);
    }
    fsti_net_options(options);
    *store = options->store;
    fsti_refcount_init(&store->refs);
    for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++)
        if (fsti_url_part_is(parsed.scheme, schemes[i].scheme)) store->kind = schemes[i].kind;
    fsti_url_tell(url, name, sizeof name);
    fst_status status = find_settings(store, name, options->anonymous, error);
    explicit_bzero(options, sizeof *options);
    fsti_free(options);
    if (status == FST_OK)
        *out = store;
    else
        fsti_store_unref(store);
    return status;
}

// ---- addresses ----

static bool is_in_path(const net_store *store, url_part bucket) {
    if (store->style != FST_BUCKET_STYLE_AUTO) return store->style == FST_BUCKET_STYLE_PATH;
    return store->endpoint[0] != '\0' || memchr(bucket.at, '.', bucket.size) != NULL;
}

/// The address of a bucket or container, with a slash at its end; false where it does not fit.
static bool write_bucket(const net_store *store, url_part bucket, char *out, size_t size) {
    const char *endpoint = store->endpoint;
    char own[160];
    int used, bucket_size = (int)bucket.size;
    if (store->kind == NET_STORE_AZURE) {
        used = endpoint[0] != '\0' ? snprintf(out, size, "%s/%s/%.*s/", endpoint, store->account,
                                              bucket_size, bucket.at)
                                   : snprintf(out, size, "https://%s.blob.core.windows.net/%.*s/",
                                              store->account, bucket_size, bucket.at);
        return used > 0 && (size_t)used < size;
    }
    if (endpoint[0] == '\0') {
        snprintf(own, sizeof own, "https://s3.%s.amazonaws.com", store->region);
        endpoint = store->kind == NET_STORE_GCS ? GCS : own;
    }
    const char *host = strstr(endpoint, "://");
    if (store->kind == NET_STORE_GCS || is_in_path(store, bucket) || host == NULL) {
        // An emulator may be named without its scheme.
        used = snprintf(out, size, "%s%s/%.*s/", host == NULL ? "http://" : "", endpoint,
                        bucket_size, bucket.at);
    } else {
        used = snprintf(out, size, "%.*s://%.*s.%s/", (int)(host - endpoint), endpoint, bucket_size,
                        bucket.at, host + 3);
    }
    return used > 0 && (size_t)used < size;
}

/// hf://ORGANISATION/REPOSITORY[@REVISION]/PATH
static fst_status write_hub(const net_store *store, const net_url *url, char *out, size_t size,
                            fst_error *error) {
    const char *at = url->path.at, *end = at + url->path.size;
    if (at < end) at++;
    const char *slash = memchr(at, '/', (size_t)(end - at));
    const char *repository_end = slash == NULL ? end : slash;
    const char *mark = memchr(at, '@', (size_t)(repository_end - at));
    url_part revision = {"main", 4};
    if (mark != NULL) revision = (url_part){mark + 1, (size_t)(repository_end - mark) - 1};
    url_part repository = {at, (size_t)((mark == NULL ? repository_end : mark) - at)};
    char escaped[192];
    if (repository.size == 0 || revision.size == 0 || slash == NULL ||
        !fsti_url_escape(revision, false, escaped, sizeof escaped))
        return refuse(url->scheme.at, "of the Hub it is hf://OWNER/NAME[@REVISION]/FILE", error);
    char path[3 * 1024];
    if (!fsti_url_escape((url_part){slash, (size_t)(end - slash)}, true, path, sizeof path))
        return refuse(url->scheme.at, "it is too long", error);
    int used = snprintf(out, size, "%s/%.*s/%.*s/resolve/%s%s",
                        store->endpoint[0] != '\0' ? store->endpoint : HUB, (int)url->host.size,
                        url->host.at, (int)repository.size, repository.at, escaped, path);
    return used > 0 && (size_t)used < size ? FST_OK
                                           : refuse(url->scheme.at, "it is too long", error);
}

static fst_status write_object(const net_store *store, const net_url *url, char *out, size_t size,
                               fst_error *error) {
    if (store->kind == NET_STORE_HUB) return write_hub(store, url, out, size, error);
    if (store->kind == NET_STORE_AZURE && store->account[0] == '\0')
        return refuse(url->scheme.at, "no account: set AZURE_STORAGE_ACCOUNT_NAME", error);
    if (!write_bucket(store, url->host, out, size))
        return refuse(url->scheme.at, "it is too long", error);
    size_t used = strlen(out), skip = url->path.size > 0;
    url_part key = {url->path.at + skip, url->path.size - skip};
    bool has_sas = store->sas_token[0] != '\0';
    if (!fsti_url_escape(key, true, out + used, size - used))
        return refuse(url->scheme.at, "it is too long", error);
    used = strlen(out);
    if (has_sas && used + strlen(store->sas_token) + 2 > size)
        return refuse(url->scheme.at, "it is too long", error);
    if (has_sas)
        snprintf(out + used, size - used, "?%s", store->sas_token + (store->sas_token[0] == '?'));
    return FST_OK;
}

fst_status fsti_store_address(const net_store *store, const char *url, char **out,
                              fst_error *error) {
    char text[URL_BYTES_MAX];
    net_url parsed;
    const char *why = fsti_url_parse(url, &parsed);
    if (why != NULL) return refuse(url, why, error);
    if (store->kind == NET_STORE_WEB)
        snprintf(text, sizeof text, "%s", url);
    else
        FST_TRY(write_object(store, &parsed, text, sizeof text, error));
    *out = fsti_string_copy(text, strlen(text));
    return *out == NULL ? fsti_error_memory(error, strlen(text)) : FST_OK;
}

fst_status fsti_store_listing(const net_store *store, const char *url, const char *mark, char **out,
                              fst_error *error) {
    char bucket[1024], prefix[3 * 1024], escaped_mark[3 * 2048], text[URL_BYTES_MAX];
    net_url parsed;
    const char *why = fsti_url_parse(url, &parsed);
    if (why != NULL) return refuse(url, why, error);
    size_t skip = parsed.path.size > 0;
    url_part key = {parsed.path.at + skip, parsed.path.size - skip};
    if (!write_bucket(store, parsed.host, bucket, sizeof bucket) ||
        !fsti_url_escape(key, false, prefix, sizeof prefix) ||
        !fsti_url_escape((url_part){mark, strlen(mark)}, false, escaped_mark, sizeof escaped_mark))
        return refuse(url, "it is too long", error);
    int used;
    if (store->kind == NET_STORE_AZURE) {
        used = snprintf(text, sizeof text,
                        "%s?restype=container&comp=list&delimiter=%%2F%s%s&prefix=%s%s%s", bucket,
                        mark[0] != '\0' ? "&marker=" : "", escaped_mark, prefix,
                        store->sas_token[0] != '\0' ? "&" : "",
                        store->sas_token + (store->sas_token[0] == '?'));
    } else { // names in order, as signatures want them
        used = snprintf(text, sizeof text, "%s?%s%s%sdelimiter=%%2F&list-type=2&prefix=%s", bucket,
                        mark[0] != '\0' ? "continuation-token=" : "", escaped_mark,
                        mark[0] != '\0' ? "&" : "", prefix);
    }
    if (used < 0 || (size_t)used >= sizeof text) return refuse(url, "it is too long", error);
    *out = fsti_string_copy(text, strlen(text));
    return *out == NULL ? fsti_error_memory(error, strlen(text)) : FST_OK;
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

static bool sign_s3(const net_store *store, const net_url *address, int64_t now_s,
                    curl_list **list) {
    char host[300], path[4096], query[URL_BYTES_MAX], date[SIGV4_DATE_BYTES];
    char line[SIGV4_LINE_BYTES];
    if (address->authority.size >= sizeof host || address->path.size >= sizeof path) return false;
    snprintf(host, sizeof host, "%.*s", (int)address->authority.size, address->authority.at);
    snprintf(path, sizeof path, "%.*s", (int)address->path.size, address->path.at);
    snprintf(query, sizeof query, "%.*s", (int)address->query.size, address->query.at);
    fsti_sigv4_date(now_s, date);
    sigv4_request request = {.method = "GET",
                             .host = host,
                             .path = path,
                             .query = query,
                             .payload_hash = SIGV4_UNSIGNED,
                             .token = store->session_token[0] != '\0' ? store->session_token : NULL,
                             .date = date,
                             .region = store->region,
                             .service = "s3",
                             .access_key = store->access_key,
                             .secret_key = store->secret_key};
    return fsti_sigv4_sign(&request, line, sizeof line) && add_line(list, "Authorization", line) &&
           add_line(list, "x-amz-date", date) &&
           add_line(list, "x-amz-content-sha256", SIGV4_UNSIGNED) &&
           (request.token == NULL || add_line(list, "x-amz-security-token", request.token));
}

bool fsti_store_sign(const net_store *store, const char *address, int64_t now_s, curl_list **list) {
    net_url parsed;
    if (fsti_url_parse(address, &parsed) != NULL) return false;
    if (store->kind == NET_STORE_AZURE && !add_line(list, "x-ms-version", "2021-08-06"))
        return false;
    bool takes_keys = store->kind == NET_STORE_S3 || store->kind == NET_STORE_GCS;
    bool takes_token = store->kind == NET_STORE_HUB || store->kind == NET_STORE_GCS;
    if (takes_token && store->bearer_token[0] != '\0') {
        char value[sizeof store->bearer_token + 16];
        snprintf(value, sizeof value, "Bearer %s", store->bearer_token);
        bool good = add_line(list, "Authorization", value);
        explicit_bzero(value, sizeof value);
        return good;
    }
    return !takes_keys || store->access_key[0] == '\0' || sign_s3(store, &parsed, now_s, list);
}
