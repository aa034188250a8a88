// SPDX-License-Identifier: Apache-2.0
/// Object stores: http(s) URLs of objects, and settings for signing.
#include "object_store.h"

#include <stdio.h>
#include <string.h>

#include "hub.h"
#include "provider.h"
#include "http/http.h"
#include "token_text.h"

#define NAME_BYTES_MAX 1024u
#define GCS "https://storage.googleapis.com"

static fst_status refuse(const char *url, const char *why, fst_error *error) {
    char name[512];
    fsti_url_redact(url, name, sizeof name);
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = name;
    return fsti_error_set(error, FST_E_ARGUMENT, location, "invalid URL: %s", why);
}

object_store *fsti_store_ref(object_store *store) {
    fsti_refcount_ref(&store->refs);
    return store;
}

void fsti_store_unref(object_store *store) {
    if (store == NULL || !fsti_refcount_unref(&store->refs)) return;
    fsti_credentials_unref(store->credentials);
    fsti_secret_free(store, sizeof *store);
}

/// Takes a setting that no argument gave from the first variable that is set.
static fst_status fill(char *field, size_t size, const char *const *variables, fst_error *error) {
    if (field[0] != '\0') return FST_OK;
    for (; *variables != NULL; variables++) {
        const char *value = fsti_http_environment(*variables);
        if (value == NULL) continue;
        if (fsti_http_setting(field, size, value)) return FST_OK;
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "%s is too long or contains a line break or control character",
                              *variables);
    }
    return FST_OK;
}

#define FILL(field, ...)                                                                           \
    FST_TRY(fill(field, sizeof field, (const char *const[]){__VA_ARGS__, NULL}, error))

static bool begins_with(const char *text, const char *start) {
    return strncmp(text, start, strlen(start)) == 0;
}

/// Drops credentials that the caller configured for other stores.
static void drop_foreign_credentials(object_store *store, bool anonymous) {
    bool is_s3 = store->kind == FSTI_LOCATION_S3, is_gcs = store->kind == FSTI_LOCATION_GCS;
    bool is_google_key = begins_with(store->access_key, "GOOG");
    // Google Cloud Storage can also be used through its S3-compatible API, if the endpoint names
    // it.
    bool takes_key = is_google_key ? is_gcs || (is_s3 && store->endpoint[0] != '\0') : is_s3;
    bool takes_token =
        begins_with(store->bearer_token, "hf_") ? store->kind == FSTI_LOCATION_HUB : is_gcs;
    if (anonymous || !takes_key) {
        explicit_bzero(store->access_key, sizeof store->access_key);
        explicit_bzero(store->secret_key, sizeof store->secret_key);
        explicit_bzero(store->session_token, sizeof store->session_token);
    }
    if (anonymous || !takes_token) explicit_bzero(store->bearer_token, sizeof store->bearer_token);
    if (anonymous || store->kind != FSTI_LOCATION_AZURE) {
        explicit_bzero(store->sas_token, sizeof store->sas_token);
        explicit_bzero(store->account_key, sizeof store->account_key);
    }
}

static fst_status find_settings(object_store *store, const char *name, bool anonymous,
                                fst_error *error) {
    store->source = anonymous ? "none (anonymous)" : "none";
    drop_foreign_credentials(store, anonymous);
    switch (store->kind) {
    case FSTI_LOCATION_S3:
        FILL(store->endpoint, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL");
        FILL(store->region, "AWS_REGION", "AWS_DEFAULT_REGION");
        fsti_store_find_endpoint(store);
        if (!anonymous) FST_TRY(fsti_store_find_keys(store, name, error));
        if (store->region[0] == '\0') memcpy(store->region, "us-east-1", 10);
        break;
    case FSTI_LOCATION_GCS:
        FILL(store->endpoint, "STORAGE_EMULATOR_HOST");
        if (!anonymous && store->access_key[0] == '\0')
            FILL(store->bearer_token, "GOOGLE_OAUTH_ACCESS_TOKEN");
        if (store->access_key[0] != '\0') store->source = "an argument";
        memcpy(store->region, "auto", 5);
        if (!anonymous && store->access_key[0] == '\0' && store->bearer_token[0] == '\0')
            FST_TRY(fsti_store_find_google(store, name, error));
        break;
    case FSTI_LOCATION_AZURE:
        FILL(store->account, "AZURE_STORAGE_ACCOUNT_NAME");
        if (!anonymous) FST_TRY(fsti_store_find_azure(store, name, error));
        break;
    case FSTI_LOCATION_HUB:
        FILL(store->endpoint, "HF_ENDPOINT");
        if (!anonymous) FILL(store->bearer_token, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN");
        break;
    case FSTI_LOCATION_WEB:
    case FSTI_LOCATION_FILE: break;
    }
    if (store->bearer_token[0] != '\0') store->source = "a token";
    if (store->sas_token[0] != '\0') store->source = "a SAS";
    if (store->account_key[0] != '\0') store->source = "the account's key";
    FST_TRY(fsti_store_check(store, error));
    size_t size = strlen(store->endpoint);
    while (size > 0 && store->endpoint[size - 1] == '/') store->endpoint[--size] = '\0';
    size = strlen(store->account_endpoint);
    while (size > 0 && store->account_endpoint[size - 1] == '/')
        store->account_endpoint[--size] = '\0';
    return FST_OK;
}

/// The only query that a store's URL may have: an object version.
static bool is_version(const url_parts *url, fsti_location_kind kind) {
    const char *name = kind == FSTI_LOCATION_S3 ? "versionId=" : "generation=";
    size_t size = strlen(name);
    if (kind != FSTI_LOCATION_S3 && kind != FSTI_LOCATION_GCS) return false;
    bool is_folder = url->path.size < 2 || url->path.at[url->path.size - 1] == '/';
    if (is_folder || url->query.size <= size || memcmp(url->query.at, name, size) != 0)
        return false;
    for (size_t i = size; i < url->query.size; i++) {
        char byte[] = {url->query.at[i], '\0'};
        if (!fsti_store_is_plain_name(byte) && byte[0] != '.') return false;
    }
    return true;
}

/// Refuses parts of a store's URL that would otherwise be ignored.
static const char *check_name(const url_parts *url, fsti_location_kind kind) {
    if (url->has_query && !is_version(url, kind))
        return "queries are not supported: write a ? in a key as %3F, a revision of the Hub as "
               "hf://OWNER/NAME@REVISION/FILE, a version as ?versionId=... or, for gs://, "
               "?generation=...";
    return url->port != 0 || url->has_brackets ? "a bucket URL can't have a port" : NULL;
}

bool fsti_store_move(object_store *store, const char *region) {
    bool is_new = store->kind == FSTI_LOCATION_S3 && region[0] != '\0' &&
                  strcmp(region, store->region) != 0 && strlen(region) < sizeof store->region &&
                  fsti_store_is_plain_name(region);
    if (is_new) snprintf(store->region, sizeof store->region, "%s", region);
    return is_new;
}

fst_status fsti_store_open(const char *url, const fsti_http_watch *watch, object_store **out,
                           fst_error *error) {
    url_parts parsed;
    char name[512];
    fsti_location_kind kind = fsti_location_kind_of(url);
    if (kind == FSTI_LOCATION_FILE) kind = FSTI_LOCATION_WEB; // libcurl refuses other protocols
    const char *why = fsti_url_parse(url, &parsed);
    if (why == NULL && kind != FSTI_LOCATION_WEB) why = check_name(&parsed, kind);
    if (why != NULL) return refuse(url, why, error);
    store_options *options = fsti_secret_alloc(sizeof *options);
    object_store *store = fsti_secret_alloc(sizeof *store);
    if (options == NULL || store == NULL) {
        fsti_secret_free(options, sizeof *options);
        fsti_secret_free(store, sizeof *store);
        return fsti_error_memory(error, sizeof *options);
    }
    fsti_http_read_environment();
    fsti_store_options(options);
    *store = options->store;
    fsti_refcount_init(&store->refs);
    store->kind = kind;
    fsti_url_redact(url, name, sizeof name);
    fsti_provider_watch(watch);
    fst_status status = find_settings(store, name, options->anonymous, error);
    fsti_provider_watch(NULL);
    fsti_secret_free(options, sizeof *options);
    if (status == FST_OK)
        *out = store;
    else
        fsti_store_unref(store);
    return status;
}

// ---- URLs ----

static bool is_in_path(const object_store *store, url_part bucket) {
    if (store->style != FST_BUCKET_STYLE_AUTO) return store->style == FST_BUCKET_STYLE_PATH;
    return store->endpoint[0] != '\0' || memchr(bucket.at, '.', bucket.size) != NULL;
}

/// Writes the URL of a bucket or container with a final slash. False if it is too long.
static bool write_bucket(const object_store *store, url_part bucket, char *out, size_t size) {
    const char *endpoint = store->endpoint;
    char own[160];
    int used, bucket_size = (int)bucket.size;
    if (store->kind == FSTI_LOCATION_AZURE) {
        used =
            endpoint[0] != '\0' ? snprintf(out, size, "%s/%s/%.*s/", endpoint, store->account,
                                           bucket_size, bucket.at)
            : store->account_endpoint[0] != '\0'
                ? snprintf(out, size, "%s/%.*s/", store->account_endpoint, bucket_size, bucket.at)
                : snprintf(out, size, "https://%s.blob.core.windows.net/%.*s/", store->account,
                           bucket_size, bucket.at);
        return used > 0 && (size_t)used < size;
    }
    if (endpoint[0] == '\0') {
        snprintf(own, sizeof own, "https://s3.%s.amazonaws.com", store->region);
        endpoint = store->kind == FSTI_LOCATION_GCS ? GCS : own;
    }
    const char *host = strstr(endpoint, "://");
    if (store->kind == FSTI_LOCATION_GCS || is_in_path(store, bucket) || host == NULL) {
        // The endpoint of an emulator may have no scheme.
        used = snprintf(out, size, "%s%s/%.*s/", host == NULL ? "http://" : "", endpoint,
                        bucket_size, bucket.at);
    } else {
        used = snprintf(out, size, "%.*s://%.*s.%s/", (int)(host - endpoint), endpoint, bucket_size,
                        bucket.at, host + 3);
    }
    return used > 0 && (size_t)used < size;
}

static fst_status write_object(const object_store *store, const url_parts *url, char *out,
                               size_t size, fst_error *error) {
    if (store->kind == FSTI_LOCATION_HUB) {
        const char *why = fsti_hub_address(store, url, out, size);
        return why == NULL ? FST_OK : refuse(url->scheme.at, why, error);
    }
    if (store->kind == FSTI_LOCATION_AZURE && store->account[0] == '\0')
        return refuse(url->scheme.at, "no account is configured. Set AZURE_STORAGE_ACCOUNT_NAME",
                      error);
    if (!write_bucket(store, url->host, out, size))
        return refuse(url->scheme.at, "it is too long", error);
    char key[URL_BYTES_MAX];
    size_t used = strlen(out);
    bool has_sas = store->sas_token[0] != '\0';
    if (!fsti_url_key(url, key, sizeof key) ||
        !fsti_url_escape((url_part){key, strlen(key)}, true, out + used, size - used))
        return refuse(url->scheme.at, "it is too long", error);
    used = strlen(out);
    if (has_sas && used + strlen(store->sas_token) + 2 > size)
        return refuse(url->scheme.at, "it is too long", error);
    if (has_sas)
        snprintf(out + used, size - used, "?%s", store->sas_token + (store->sas_token[0] == '?'));
    if (url->has_query && snprintf(out + used, size - used, "?%.*s", (int)url->query.size,
                                   url->query.at) >= (int)(size - used))
        return refuse(url->scheme.at, "it is too long", error);
    return FST_OK;
}

fst_status fsti_store_address(const object_store *store, const char *url, char **out,
                              fst_error *error) {
    char text[URL_BYTES_MAX];
    url_parts parsed;
    const char *why = fsti_url_parse(url, &parsed);
    if (why != NULL) return refuse(url, why, error);
    if (store->kind == FSTI_LOCATION_WEB)
        snprintf(text, sizeof text, "%s", url);
    else
        FST_TRY(write_object(store, &parsed, text, sizeof text, error));
    *out = fsti_string_copy(text, strlen(text));
    return *out == NULL ? fsti_error_memory(error, strlen(text)) : FST_OK;
}

fst_status fsti_store_check_target(const object_store *store, const char *url, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    char name[NAME_BYTES_MAX];
    size_t size = strlen(url);
    fsti_url_redact(url, name, sizeof name);
    location.file = name;
    if (store->kind == FSTI_LOCATION_WEB || store->kind == FSTI_LOCATION_HUB)
        return fsti_error_set(
            error, FST_E_UNSUPPORTED, location,
            "files can't be saved to web servers or the Hub. Save to s3://, gs:// or "
            "az://, or to a local file");
    url_parts parsed;
    if (strchr(url, '?') != NULL)
        return fsti_error_set(error, FST_E_ARGUMENT, location,
                              "an object version can't be overwritten");
    if (url[size - 1] == '/' || fsti_url_parse(url, &parsed) != NULL || parsed.path.size < 2)
        return fsti_error_set(error, FST_E_ARGUMENT, location,
                              "the URL ends in a slash: a file name is missing");
    return FST_OK;
}

fst_status fsti_store_listing(const object_store *store, const char *url, const char *mark,
                              char **out, fst_error *error) {
    char bucket[1024], prefix[3 * 1024], escaped_mark[3 * 2048], text[URL_BYTES_MAX];
    url_parts parsed;
    const char *why = fsti_url_parse(url, &parsed);
    if (why != NULL) return refuse(url, why, error);
    char key[URL_BYTES_MAX];
    if (!fsti_url_key(&parsed, key, sizeof key) ||
        !write_bucket(store, parsed.host, bucket, sizeof bucket) ||
        !fsti_url_escape((url_part){key, strlen(key)}, false, prefix, sizeof prefix) ||
        !fsti_url_escape((url_part){mark, strlen(mark)}, false, escaped_mark, sizeof escaped_mark))
        return refuse(url, "it is too long", error);
    int used;
    if (store->kind == FSTI_LOCATION_AZURE) {
        used = snprintf(text, sizeof text,
                        "%s?restype=container&comp=list&delimiter=%%2F%s%s&prefix=%s%s%s", bucket,
                        mark[0] != '\0' ? "&marker=" : "", escaped_mark, prefix,
                        store->sas_token[0] != '\0' ? "&" : "",
                        store->sas_token + (store->sas_token[0] == '?'));
    } else { // parameters sorted by name, as signatures need them
        used = snprintf(text, sizeof text, "%s?%s%s%sdelimiter=%%2F&list-type=2&prefix=%s", bucket,
                        mark[0] != '\0' ? "continuation-token=" : "", escaped_mark,
                        mark[0] != '\0' ? "&" : "", prefix);
    }
    if (used < 0 || (size_t)used >= sizeof text) return refuse(url, "it is too long", error);
    *out = fsti_string_copy(text, strlen(text));
    return *out == NULL ? fsti_error_memory(error, strlen(text)) : FST_OK;
}
