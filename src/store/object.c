// SPDX-License-Identifier: Apache-2.0
/// Remote objects: the URL, the version of the first response, and the first bytes.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "http/http.h"
#include "object_store.h"

/// Enough for the header of a few hundred tensors, and for most index files.
#define FIRST_BYTES ((size_t)65536)
#define NAME_BYTES_MAX 1024u

struct fsti_object {
    fsti_refcount refs;
    object_store *store;
    char *given; ///< the URL as given by the caller
    char *url;   ///< http(s) URL with its query
    char *name;  ///< redacted
    http_resource resource;
    char *first; ///< first bytes, `first_bytes` of them
    size_t first_bytes;
    pthread_mutex_t lock; ///< protects `counts`
    fsti_http_counts counts;
};

fst_status fsti_object_make(const char *url, fsti_object **out, fst_error *error) {
    FST_TRY(fsti_http_check(error));
    char name[NAME_BYTES_MAX];
    fsti_url_redact(url, name, sizeof name);
    fsti_object *object = fsti_alloc_zeroed(1, sizeof *object);
    if (object == NULL) return fsti_error_memory(error, sizeof *object);
    fsti_refcount_init(&object->refs);
    pthread_mutex_init(&object->lock, NULL);
    fsti_resource_init(&object->resource);
    fst_status status = fsti_store_open(url, NULL, &object->store, error);
    if (status == FST_OK) status = fsti_store_address(object->store, url, &object->url, error);
    if (status != FST_OK) {
        fsti_object_unref(object);
        return status;
    }
    object->name = fsti_string_copy(name, strlen(name));
    object->given = fsti_string_copy(url, strlen(url));
    object->first = fsti_alloc(FIRST_BYTES);
    *out = object;
    bool has_texts = object->url != NULL && object->name != NULL && object->given != NULL;
    if (has_texts && object->first != NULL) return FST_OK;
    fsti_object_unref(object);
    return fsti_error_memory(error, FIRST_BYTES);
}

/// Keeps the first bytes that were received.
static void keep_first(fsti_object *object, size_t size) {
    object->first_bytes = size;
    char *kept = fsti_realloc(object->first, size > 0 ? size : 1);
    if (kept != NULL) object->first = kept;
}

/// Reads a version from text. False if it cannot be used in a conditional request.
static bool read_version(const char *text, resource_version *version) {
    char *fields[] = {version->etag, version->modified, version->generation};
    const size_t sizes[] = {sizeof version->etag, sizeof version->modified,
                            sizeof version->generation};
    *version = (resource_version){.is_set = true};
    for (size_t i = 0; i < 3; i++) {
        size_t size = strcspn(text, "\n");
        if (size >= sizes[i] || text[size] != '\n') return false;
        memcpy(fields[i], text, size);
        text += size + 1;
    }
    char *end;
    version->total_bytes = strtoull(text, &end, 10);
    version->has_strong_date = version->modified[0] != '\0'; // else nothing would be stored
    return end != text && *end == '\n' && version->total_bytes <= INT64_MAX;
}

bool fsti_object_has_version(const fsti_object *object) {
    return fsti_version_is_exact(&object->resource.version);
}

bool fsti_object_version_text(const fsti_object *object, char *out, size_t size) {
    const resource_version *version = &object->resource.version;
    // The last word keeps entries apart that were cached while any date counted as a version.
    bool is_dated = !fsti_version_is_strong(version) && version->generation[0] == '\0';
    int used = snprintf(out, size, "%s\n%s\n%s\n%" PRIu64 "\n%s", version->etag, version->modified,
                        version->generation, version->total_bytes, is_dated ? "dated" : "");
    return used > 0 && (size_t)used < size;
}

/// Without an ETag, a generation or a date, a replacement of equal size between two requests cannot
/// be noticed.
static void warn_of_no_version(const fsti_object *object) {
    const resource_version *version = &object->resource.version;
    if (fsti_version_is_exact(version) || version->modified[0] != '\0' ||
        version->total_bytes <= FIRST_BYTES)
        return;
    fsti_log(FST_LOG_WARNING,
             "%s: the server names no version (no strong ETag, no Last-Modified), so a replacement "
             "during the load would not be noticed",
             object->name);
}

static fst_status request_redirected(fsti_object *object, const resource_version *known,
                                     fst_error *error);

/// Requests the first bytes, unless the known version is current.
static fst_status request_first(fsti_object *object, const resource_version *known, bool may_move,
                                fst_error *error) {
    char line[RESPONSE_TEXT_BYTES + 32];
    const char *const lines[] = {line, NULL};
    if (known != NULL) snprintf(line, sizeof line, "If-None-Match: %.191s", known->etag);
    http_request request = {.url = object->url,
                            .name = object->name,
                            .authority = fsti_store_authority(object->store),
                            .resource = &object->resource,
                            .is_range = true,
                            .is_first = true,
                            .end = FIRST_BYTES,
                            .buffer = object->first,
                            .lines = known == NULL ? NULL : lines,
                            .known = known};
    fsti_request_run(&request);
    fsti_http_count(&object->counts, &request.counts);
    bool is_in_other_region = request.status != FST_OK && may_move &&
                              fsti_store_move(object->store, request.answer.region);
    if (is_in_other_region) return request_redirected(object, known, error);
    if (known != NULL && request.status == FST_OK && request.answer.status == 304) {
        object->resource.version = *known;
        keep_first(object, 0);
        return FST_OK;
    }
    // A range of an empty object is always refused, and the response has its size.
    bool is_empty =
        request.status != FST_OK && request.answer.status == 416 && request.answer.total_bytes == 0;
    if (request.status != FST_OK && !is_empty) {
        if (error != NULL) *error = request.error;
        return request.status;
    }
    fsti_version_set(&object->resource.version, &request.answer);
    warn_of_no_version(object);
    keep_first(object, is_empty ? 0 : (size_t)request.have);
    return FST_OK;
}

/// Repeats the request once in the bucket's region, as reported by the store.
static fst_status request_redirected(fsti_object *object, const resource_version *known,
                                     fst_error *error) {
    fsti_secret_text_free(object->url);
    object->url = NULL;
    FST_TRY(fsti_store_address(object->store, object->given, &object->url, error));
    return request_first(object, known, false, error);
}

fst_status fsti_object_fetch_first(fsti_object *object, const char *known, fst_error *error) {
    resource_version version;
    bool has_version = known != NULL && read_version(known, &version);
    if (has_version && fsti_http_is_offline()) {
        object->resource.version = version;
        keep_first(object, 0);
        return FST_OK;
    }
    has_version = has_version && fsti_version_is_strong(&version);
    return request_first(object, has_version ? &version : NULL, true, error);
}

fst_status fsti_object_open(const char *url, fsti_object **out, fst_error *error) {
    fsti_object *object = NULL;
    FST_TRY(fsti_object_make(url, &object, error));
    if (object == NULL) return FST_E_NO_MEMORY; // cannot happen; for static analyzers
    fst_status status = fsti_object_fetch_first(object, NULL, error);
    if (status == FST_OK)
        *out = object;
    else
        fsti_object_unref(object);
    return status;
}

const char *fsti_object_first(const fsti_object *object, size_t *size) {
    *size = object->first_bytes;
    return object->first;
}

/// The kinds of signatures in a query.
typedef struct signature_kinds {
    bool is_plain; ///< AWS, Google or CloudFront
    bool is_sas;   ///< Azure
} signature_kinds;

static signature_kinds find_signatures(const char *query) {
    static const char *const names[] = {"signature", "x-amz-signature", "x-goog-signature"};
    signature_kinds kinds = {false, false};
    for (const char *field = query; field != NULL && *field != '\0';
         field += 1 + strcspn(field + 1, "&")) {
        size_t size = strcspn(field + 1, "=&");
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            if (size == strlen(names[i]) && strncasecmp(field + 1, names[i], size) == 0)
                kinds.is_plain = true;
        if (size == 3 && strncasecmp(field + 1, "sig", 3) == 0) kinds.is_sas = true;
    }
    return kinds;
}

/// Whether a query field only signs the request, or limits its validity.
static bool is_signing(const char *field, size_t size, signature_kinds kinds) {
    static const char *const prefixes[] = {"x-amz-", "x-goog-"};
    static const char *const names[] = {"awsaccesskeyid",
                                        "googleaccessid",
                                        "signature",
                                        "expires",
                                        "policy",
                                        "key-pair-id",
                                        "sig",
                                        "sv",
                                        "se",
                                        "st",
                                        "sp",
                                        "sr",
                                        "spr",
                                        "sip",
                                        "skoid",
                                        "sktid",
                                        "skt",
                                        "ske",
                                        "sks",
                                        "skv"};
    enum { PLAIN_COUNT = 6 }; // the others belong to a SAS
    size_t name_size = fsti_min(size, strcspn(field, "=&"));
    for (size_t i = 0; kinds.is_plain && i < sizeof prefixes / sizeof *prefixes; i++)
        if (name_size >= strlen(prefixes[i]) &&
            strncasecmp(field, prefixes[i], strlen(prefixes[i])) == 0)
            return true;
    size_t first = kinds.is_plain ? 0 : PLAIN_COUNT;
    size_t last = kinds.is_sas ? sizeof names / sizeof *names : PLAIN_COUNT;
    for (size_t i = first; i < last; i++)
        if (name_size == strlen(names[i]) && strncasecmp(field, names[i], name_size) == 0)
            return true;
    return false;
}

/// The key of the disk cache: the URL without the fields that differ in each signed URL of the same
/// object. Other fields stay, because they may select other content.
bool fsti_object_address(const fsti_object *object, char *out, size_t size) {
    const char *query = strchr(object->url, '?');
    size_t used = query == NULL ? strlen(object->url) : (size_t)(query - object->url);
    if (used + 1 >= size) return false;
    memcpy(out, object->url, used);
    signature_kinds kinds = find_signatures(query);
    char before = '?';
    while (query != NULL && *query != '\0') {
        const char *field = query + 1; // after '?' or '&'
        size_t length = strcspn(field, "&");
        if (!is_signing(field, length, kinds)) {
            if (used + length + 2 >= size) return false;
            out[used++] = before;
            before = '&';
            memcpy(out + used, field, length);
            used += length;
        }
        query = field + length;
    }
    out[used] = '\0';
    return true;
}

fsti_object *fsti_object_ref(fsti_object *object) {
    fsti_refcount_ref(&object->refs);
    return object;
}

void fsti_object_unref(fsti_object *object) {
    if (object == NULL || !fsti_refcount_unref(&object->refs)) return;
    pthread_mutex_destroy(&object->lock);
    fsti_resource_clear(&object->resource);
    fsti_store_unref(object->store);
    fsti_secret_text_free(object->url);
    fsti_free(object->name);
    fsti_secret_text_free(object->given);
    fsti_free(object->first);
    fsti_free(object);
}

const char *fsti_object_name(const fsti_object *object) { return object->name; }

uint64_t fsti_object_size(const fsti_object *object) {
    return object->resource.version.total_bytes;
}

void fsti_object_counts(fsti_object *object, fsti_http_counts *out) {
    pthread_mutex_lock(&object->lock);
    *out = object->counts;
    pthread_mutex_unlock(&object->lock);
}

void fsti_object_take_retries(fsti_object *object, fsti_retries *sum) {
    fsti_resource_take_retries(&object->resource, sum);
}

const char *fsti_object_credentials(const fsti_object *object) { return object->store->source; }

// ---- ranges ----

typedef struct range_request {
    http_request request;
    fsti_range_read *read;
} range_request;

static void finish_range(http_request *request) {
    range_request *range = request->context;
    fsti_range_read *read = range->read;
    read->result = request->status == FST_OK ? (int64_t)read->size : -EIO;
    if (request->status == FST_E_CANCELLED) read->result = -ECANCELED;
    if (request->status != FST_OK) *read->error = request->error;
    read->counts = request->counts;
    fsti_free(range);
    read->done(read);
}

static http_request request_of(const fsti_range_read *read) {
    return (http_request){.url = read->object->url,
                          .name = read->object->name,
                          .authority = fsti_store_authority(read->object->store),
                          .resource = &read->object->resource,
                          .is_range = true,
                          .begin = read->offset,
                          .end = read->offset + read->size,
                          .buffer = read->buffer,
                          .edges = read->edges,
                          .stop = read->stop};
}

/// Serves a range from the first bytes, if they contain it.
static bool copy_first(const fsti_range_read *read) {
    const fsti_object *object = read->object;
    if (read->offset + read->size > object->first_bytes) return false;
    http_request request = request_of(read);
    fsti_request_put(&request, read->offset, object->first + read->offset, read->size);
    return true;
}

void fsti_range_read_begin(fsti_range_read *read) {
    read->counts = (fsti_http_counts){0};
    read->result = (int64_t)read->size;
    range_request *range = NULL;
    if (read->size > 0 && !copy_first(read)) {
        range = fsti_alloc_zeroed(1, sizeof *range);
        if (range == NULL) {
            fsti_error_memory(read->error, sizeof *range);
            read->result = -ENOMEM;
        }
    }
    if (range == NULL) {
        read->done(read);
        return;
    }
    range->read = read;
    range->request = request_of(read);
    range->request.done = finish_range;
    range->request.context = range;
    fsti_request_begin(&range->request);
}

fst_status fsti_object_read(fsti_object *object, void *target, size_t size, uint64_t offset,
                            fst_error *error) {
    fsti_range_read read = {.object = object, .offset = offset, .size = size, .buffer = target};
    if (size == 0 || copy_first(&read)) return FST_OK;
    http_request request = request_of(&read);
    fsti_request_run(&request);
    pthread_mutex_lock(&object->lock);
    fsti_http_count(&object->counts, &request.counts);
    pthread_mutex_unlock(&object->lock);
    if (request.status != FST_OK && error != NULL) *error = request.error;
    return request.status;
}
