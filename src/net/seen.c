// SPDX-License-Identifier: Apache-2.0
/// What an address has, and that it is replaced or removed as long as it is that.
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "upload.h"

#define NAME_BYTES_MAX 1024u
#define ANSWER_BYTES_MAX ((size_t)65536)

void fsti_seen_read(net_store_kind kind, const net_answer *answer, fsti_seen *out) {
    const char *mark = kind == NET_STORE_GCS ? answer->generation : answer->etag;
    *out = (fsti_seen){.kind = FSTI_SEEN_ANY};
    // A weak ETag is no condition.
    bool is_good = kind == NET_STORE_GCS ? strspn(mark, "0123456789") == strlen(mark)
                                         : strncmp(mark, "W/", 2) != 0;
    if (mark[0] == '\0' || !is_good) return;
    out->kind = FSTI_SEEN_THIS;
    snprintf(out->mark, sizeof out->mark, "%s", mark);
}

bool fsti_seen_is_same(const fsti_seen *one, const fsti_seen *other) {
    return one->kind == other->kind && strcmp(one->mark, other->mark) == 0;
}

bool fsti_seen_line(net_store_kind kind, const fsti_seen *seen, char *out, size_t size) {
    bool is_google = kind == NET_STORE_GCS, is_nothing = seen->kind == FSTI_SEEN_NOTHING;
    if (seen->kind == FSTI_SEEN_ANY) return false;
    if (is_google)
        snprintf(out, size, "x-goog-if-generation-match: %s", is_nothing ? "0" : seen->mark);
    else if (is_nothing)
        snprintf(out, size, "If-None-Match: *");
    else
        snprintf(out, size, "If-Match: %s", seen->mark);
    return true;
}

// ---- one request, in the region where the bucket is ----

typedef struct small_request {
    const char *method, *url;
    const fsti_seen *seen; ///< NULL: any
    const fsti_net_watch *watch;
    size_t text_bytes_max; ///< 0: the answer's text is not wanted, else it is the caller's
} small_request;

/// *again: it is worth another one.
static fst_status try_once(net_store *store, const small_request *small, net_request *request,
                           bool *again, fst_error *error) {
    char *address = NULL, name[NAME_BYTES_MAX], condition[sizeof(fsti_seen) + 32];
    const char *lines[] = {condition, NULL};
    FST_TRY(fsti_store_address(store, small->url, &address, error));
    fsti_url_tell(small->url, name, sizeof name);
    bool has_line = small->seen != NULL &&
                    fsti_seen_line(store->kind, small->seen, condition, sizeof condition);
    *request = (net_request){.method = small->method,
                             .url = address,
                             .name = name,
                             .store = store,
                             .lines = has_line ? lines : NULL,
                             .text_bytes_max = fsti_max(ANSWER_BYTES_MAX, small->text_bytes_max),
                             .watch = small->watch};
    fsti_request_run(request);
    fsti_secret_text_free(address);
    bool is_wanted = small->text_bytes_max > 0 && request->status == FST_OK;
    if (!is_wanted) {
        fsti_free(request->text);
        request->text = NULL;
    }
    *again = request->status != FST_OK && fsti_store_move(store, request->answer.region);
    if (request->status != FST_OK && error != NULL) *error = request->error;
    return request->status;
}

static fst_status run_small(net_store *store, const small_request *small, net_request *request,
                            fst_error *error) {
    bool again = false;
    fst_status status = try_once(store, small, request, &again, error);
    return again ? try_once(store, small, request, &again, error) : status;
}

static fst_status look(net_store *store, const char *url, const fsti_net_watch *watch,
                       fsti_seen *out, fst_error *error) {
    const small_request small = {.method = "HEAD", .url = url, .watch = watch};
    net_request request = {0};
    fst_error cause = {0};
    *out = (fsti_seen){.kind = FSTI_SEEN_ANY};
    fst_status status = run_small(store, &small, &request, &cause);
    if (status == FST_OK) fsti_seen_read(store->kind, &request.answer, out);
    if (status == FST_E_NOT_FOUND) out->kind = FSTI_SEEN_NOTHING;
    out->is_hidden = status == FST_E_PERMISSION;
    if (status == FST_OK || status == FST_E_NOT_FOUND || status == FST_E_PERMISSION) return FST_OK;
    if (error != NULL) *error = cause;
    return status;
}

/// The store that takes objects at the address.
static fst_status open_store(const char *url, const fsti_net_watch *watch, net_store **out,
                             fst_error *error) {
    const curl_library *curl;
    FST_TRY(fsti_curl_open(&curl, error));
    FST_TRY(fsti_store_open(url, watch, out, error));
    fst_status status = fsti_upload_check_place(*out, url, error);
    if (status != FST_OK) fsti_store_unref(*out);
    return status;
}

fst_status fsti_net_look(const char *url, const fsti_net_watch *watch, fsti_seen *out,
                         fst_error *error) {
    net_store *store = NULL;
    FST_TRY(open_store(url, watch, &store, error));
    fst_status status = look(store, url, watch, out, error);
    fsti_store_unref(store);
    return status;
}

static fst_status fetch(net_store *store, const small_request *small, fsti_fetched *out,
                        fst_error *error) {
    net_request request = {0};
    fst_error cause = {0};
    fst_status status = run_small(store, small, &request, &cause);
    *out = (fsti_fetched){.text = request.text, .size = request.text_bytes};
    out->is_large = status != FST_OK && request.answer.status == 200 &&
                    request.answer.length_bytes > small->text_bytes_max;
    if (status == FST_OK) fsti_seen_read(store->kind, &request.answer, &out->seen);
    if (status == FST_OK || status == FST_E_NOT_FOUND || status == FST_E_PERMISSION ||
        out->is_large)
        return FST_OK;
    if (error != NULL) *error = cause;
    return status;
}

fst_status fsti_net_fetch(const char *url, const fsti_net_watch *watch, size_t most,
                          fsti_fetched *out, fst_error *error) {
    net_store *store = NULL;
    const small_request small = {.url = url, .watch = watch, .text_bytes_max = most};
    *out = (fsti_fetched){.text = NULL};
    FST_TRY(open_store(url, watch, &store, error));
    fst_status status = fetch(store, &small, out, error);
    fsti_store_unref(store);
    return status;
}

// ---- removal ----

/// Some stores don't know the condition, or pass over it: so it is looked at first as well.
/// *is_other: what has come instead is another's, and stays.
static fst_status remove_seen(net_store *store, const small_request *small, bool *is_other,
                              fst_error *error) {
    net_request request = {0};
    fsti_seen now;
    FST_TRY(look(store, small->url, small->watch, &now, error));
    *is_other = now.kind == FSTI_SEEN_THIS && !fsti_seen_is_same(&now, small->seen);
    if (now.kind == FSTI_SEEN_NOTHING || *is_other) return FST_OK;
    fst_status status = run_small(store, small, &request, error);
    *is_other = request.answer.status == 412 || request.answer.status == 409;
    if (*is_other) return FST_OK;
    if (request.answer.status != STATUS_NOT_IMPLEMENTED) return status;
    const small_request plain = {.method = small->method, .url = small->url, .watch = small->watch};
    return run_small(store, &plain, &request, error);
}

fst_status fsti_net_remove(const char *url, const fsti_seen *seen, const fsti_net_watch *watch,
                           bool *is_other, fst_error *error) {
    net_store *store = NULL;
    bool changed = false;
    net_request request = {0};
    fst_error cause = {0};
    const small_request small = {.method = "DELETE", .url = url, .seen = seen, .watch = watch};
    bool is_seen = seen != NULL && seen->kind == FSTI_SEEN_THIS;
    if (is_other != NULL) *is_other = false;
    if (seen != NULL && seen->kind == FSTI_SEEN_NOTHING) return FST_OK;
    FST_TRY(open_store(url, watch, &store, error));
    fst_status status = is_seen ? remove_seen(store, &small, &changed, &cause)
                                : run_small(store, &small, &request, &cause);
    fsti_store_unref(store);
    if (is_other != NULL) *is_other = changed;
    if (status == FST_OK || status == FST_E_NOT_FOUND) return FST_OK;
    if (error != NULL) *error = cause;
    return status;
}
