// SPDX-License-Identifier: Apache-2.0
/// Single requests about an object: examine, read whole, and delete, if it is unchanged.
#include <stdio.h>
#include <string.h>

#include "upload.h"

#define NAME_BYTES_MAX 1024u
#define ANSWER_BYTES_MAX ((size_t)65536)

// ---- one request, in the bucket's region ----

typedef struct request_spec {
    const char *method, *url;
    const fsti_precondition *precondition; ///< NULL: unconditional
    const fsti_http_watch *watch;
    size_t text_bytes_max; ///< 0: ignore the response body; otherwise it is returned to the caller
} request_spec;

/// *may_retry: the response named another region, so repeating the request may help.
static fst_status try_once(object_store *store, const request_spec *spec, http_request *request,
                           bool *may_retry, fst_error *error) {
    char *address = NULL, name[NAME_BYTES_MAX], condition[sizeof(fsti_precondition) + 32];
    const char *lines[] = {condition, NULL};
    FST_TRY(fsti_store_address(store, spec->url, &address, error));
    fsti_url_redact(spec->url, name, sizeof name);
    bool has_line =
        spec->precondition != NULL &&
        fsti_precondition_header(store->kind, spec->precondition, condition, sizeof condition);
    *request = (http_request){.method = spec->method,
                              .url = address,
                              .name = name,
                              .authority = fsti_store_authority(store),
                              .lines = has_line ? lines : NULL,
                              .text_bytes_max = fsti_max(ANSWER_BYTES_MAX, spec->text_bytes_max),
                              .watch = spec->watch};
    fsti_request_run(request);
    fsti_secret_text_free(address);
    bool keeps_text = spec->text_bytes_max > 0 && request->status == FST_OK;
    if (!keeps_text) {
        fsti_free(request->text);
        request->text = NULL;
    }
    *may_retry = request->status != FST_OK && fsti_store_move(store, request->answer.region);
    if (request->status != FST_OK && error != NULL) *error = request->error;
    return request->status;
}

static fst_status run_in_region(object_store *store, const request_spec *spec,
                                http_request *request, fst_error *error) {
    bool may_retry = false;
    fst_status status = try_once(store, spec, request, &may_retry, error);
    return may_retry ? try_once(store, spec, request, &may_retry, error) : status;
}

static fst_status request_metadata(object_store *store, const char *url,
                                   const fsti_http_watch *watch, fsti_precondition *out,
                                   fst_error *error) {
    const request_spec spec = {.method = "HEAD", .url = url, .watch = watch};
    http_request request = {0};
    fst_error cause = {0};
    *out = (fsti_precondition){.kind = FSTI_PRECONDITION_NONE};
    fst_status status = run_in_region(store, &spec, &request, &cause);
    if (status == FST_OK) fsti_precondition_read(store->kind, &request.answer, out);
    if (status == FST_E_NOT_FOUND) out->kind = FSTI_PRECONDITION_ABSENT;
    out->is_forbidden = status == FST_E_PERMISSION;
    if (status == FST_OK || status == FST_E_NOT_FOUND || status == FST_E_PERMISSION) return FST_OK;
    if (error != NULL) *error = cause;
    return status;
}

/// The store that accepts objects at the URL.
static fst_status open_store(const char *url, const fsti_http_watch *watch, object_store **out,
                             fst_error *error) {
    FST_TRY(fsti_http_check(error));
    FST_TRY(fsti_store_open(url, watch, out, error));
    fst_status status = fsti_store_check_target(*out, url, error);
    if (status != FST_OK) fsti_store_unref(*out);
    return status;
}

fst_status fsti_store_stat(const char *url, const fsti_http_watch *watch, fsti_precondition *out,
                           fst_error *error) {
    object_store *store = NULL;
    FST_TRY(open_store(url, watch, &store, error));
    fst_status status = request_metadata(store, url, watch, out, error);
    fsti_store_unref(store);
    return status;
}

static fst_status fetch(object_store *store, const request_spec *spec, fsti_fetched *out,
                        fst_error *error) {
    http_request request = {0};
    fst_error cause = {0};
    fst_status status = run_in_region(store, spec, &request, &cause);
    *out = (fsti_fetched){.text = request.text, .size = request.text_bytes};
    out->is_large = status != FST_OK && request.answer.status == 200 &&
                    request.answer.length_bytes > spec->text_bytes_max;
    if (status == FST_OK) fsti_precondition_read(store->kind, &request.answer, &out->precondition);
    if (status == FST_OK || status == FST_E_NOT_FOUND || status == FST_E_PERMISSION ||
        out->is_large)
        return FST_OK;
    if (error != NULL) *error = cause;
    return status;
}

fst_status fsti_store_fetch(const char *url, const fsti_http_watch *watch, size_t size_max,
                            fsti_fetched *out, fst_error *error) {
    object_store *store = NULL;
    const request_spec spec = {.url = url, .watch = watch, .text_bytes_max = size_max};
    *out = (fsti_fetched){.text = NULL};
    FST_TRY(open_store(url, watch, &store, error));
    fst_status status = fetch(store, &spec, out, error);
    fsti_store_unref(store);
    return status;
}

// ---- deleting ----

/// Some stores lack conditional deletes or ignore the condition, so check the version first as
/// well. *is_other: the object is not the expected version, and was kept.
static fst_status remove_checked(object_store *store, const request_spec *spec, bool *is_other,
                                 fst_error *error) {
    http_request request = {0};
    fsti_precondition now;
    FST_TRY(request_metadata(store, spec->url, spec->watch, &now, error));
    *is_other = now.kind == FSTI_PRECONDITION_VERSION &&
                !fsti_precondition_equals(&now, spec->precondition);
    if (now.kind == FSTI_PRECONDITION_ABSENT || *is_other) return FST_OK;
    fst_status status = run_in_region(store, spec, &request, error);
    *is_other = request.answer.status == 412 || request.answer.status == 409;
    if (*is_other) return FST_OK;
    if (request.answer.status != STATUS_NOT_IMPLEMENTED) return status;
    const request_spec plain = {.method = spec->method, .url = spec->url, .watch = spec->watch};
    return run_in_region(store, &plain, &request, error);
}

fst_status fsti_store_remove(const char *url, const fsti_precondition *precondition,
                             const fsti_http_watch *watch, bool *is_other, fst_error *error) {
    object_store *store = NULL;
    bool changed = false;
    http_request request = {0};
    fst_error cause = {0};
    const request_spec spec = {
        .method = "DELETE", .url = url, .precondition = precondition, .watch = watch};
    bool is_conditional = precondition != NULL && precondition->kind == FSTI_PRECONDITION_VERSION;
    if (is_other != NULL) *is_other = false;
    if (precondition != NULL && precondition->kind == FSTI_PRECONDITION_ABSENT) return FST_OK;
    FST_TRY(open_store(url, watch, &store, error));
    fst_status status = is_conditional ? remove_checked(store, &spec, &changed, &cause)
                                       : run_in_region(store, &spec, &request, &cause);
    fsti_store_unref(store);
    if (is_other != NULL) *is_other = changed;
    if (status == FST_OK || status == FST_E_NOT_FOUND) return FST_OK;
    if (error != NULL) *error = cause;
    return status;
}
