// SPDX-License-Identifier: Apache-2.0
/// The protocols of multipart uploads: S3 and Google's XML API, and blocks of Azure.
#include "upload.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "http/http.h"
#include "sha256.h"

#define ANSWER_BYTES_MAX ((size_t)65536)
/// The stall timeout of completing: stores send blanks or nothing while they assemble the parts.
#define COMPLETE_SILENCE_MS_MAX 120000u
/// Size of a part's entry in the list, without its ETag.
#define ENTRY_BYTES 80u
#define BLOCK_ID_BYTES 17u
#define PAUSE_SLICE_MS 50u

static bool is_azure(const object_store *store) { return store->kind == FSTI_LOCATION_AZURE; }

#define TYPE "Content-Type: application/octet-stream"

const char *const fsti_upload_part_lines[] = {TYPE, NULL};

void fsti_upload_write_lines(upload_target *target) {
    size_t count = 0;
    memset(target->lines, 0, sizeof target->lines);
    target->lines[count++] = TYPE;
    if (is_azure(target->store) && target->part_count == 1)
        target->lines[count++] = "x-ms-blob-type: BlockBlob";
    if (fsti_precondition_header(target->store->kind, &target->precondition, target->condition,
                                 sizeof target->condition))
        target->lines[count] = target->condition;
}

char *fsti_upload_query(const char *url, const char *query) {
    size_t size = strlen(url) + strlen(query) + 2;
    char *out = fsti_alloc(size);
    if (out != NULL)
        snprintf(out, size, "%s%c%s", url, strchr(url, '?') == NULL ? '?' : '&', query);
    return out;
}

const char *fsti_upload_hash(const char *url, const char *body, size_t size, char *hex) {
    unsigned char digest[SHA256_BYTES];
    sha256 hash;
    if (strncmp(url, "https:", 6) == 0) return NULL;
    fsti_sha256_begin(&hash);
    if (size > 0) fsti_sha256_add(&hash, body, size);
    fsti_sha256_end(&hash, digest);
    fsti_sha256_hex(digest, hex);
    return hex;
}

typedef struct small_call {
    const char *method, *query, *body;
    const char *const *lines;
    uint32_t silence_ms_max, bound_ms; ///< as in requests
    bool is_fresh;
} small_call;

/// Sends a request about an upload, and waits. The caller frees request->text.
static fst_status send_call(upload_target *target, const small_call *call, http_request *request,
                            fst_error *error) {
    char hex[SHA256_HEX_BYTES];
    char *url = fsti_upload_query(target->url, call->query);
    if (url == NULL) return fsti_error_memory(error, strlen(target->url));
    size_t size = call->body == NULL ? 0 : strlen(call->body);
    *request = (http_request){.method = call->method,
                              .url = url,
                              .name = target->name,
                              .authority = fsti_store_authority(target->store),
                              .body = call->body,
                              .body_bytes = size,
                              .body_hash = fsti_upload_hash(url, call->body, size, hex),
                              .lines = call->lines == NULL ? fsti_upload_part_lines : call->lines,
                              .silence_ms_max = call->silence_ms_max,
                              .text_bytes_max = ANSWER_BYTES_MAX,
                              .bound_ms = call->bound_ms,
                              .is_fresh = call->is_fresh,
                              .stop = target->stop,
                              .watch = call->bound_ms > 0 ? NULL : target->watch};
    fsti_request_run(request);
    if (request->status == FST_E_CANCELLED) atomic_store(&target->is_cancelled, true);
    fsti_http_count(&target->counts, &request->counts);
    fsti_secret_text_free(url);
    if (request->status != FST_OK && error != NULL) *error = request->error;
    return request->status;
}

static fst_status fail(const upload_target *target, const char *what, fst_error *error) {
    fsti_error_location where = FSTI_NO_LOCATION;
    where.file = target->name;
    return fsti_error_set(error, FST_E_IO, where, "%s", what);
}

// ---- parts ----

/// The name of a block; all names have equal length (base64 of twelve bytes). All writers of a blob
/// share one set of blocks, so half of the name is unique to this upload.
static void name_block(const upload_target *target, uint32_t part, char out[BLOCK_ID_BYTES]) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef";
    uint64_t own = target->number;
    for (size_t i = 0; i < BLOCK_ID_BYTES / 2; i++, own /= 32) out[i] = digits[own % 32];
    for (size_t i = BLOCK_ID_BYTES - 2; i >= BLOCK_ID_BYTES / 2; i--, part /= 32)
        out[i] = digits[part % 32];
    out[BLOCK_ID_BYTES - 1] = '\0';
}

char *fsti_upload_part_url(const upload_target *target, uint32_t part) {
    char query[UPLOAD_ID_BYTES + 64], block[BLOCK_ID_BYTES];
    name_block(target, part, block);
    if (is_azure(target->store))
        snprintf(query, sizeof query, "comp=block&blockid=%s", block);
    else // parameters sorted by name, as signatures need them
        snprintf(query, sizeof query, "partNumber=%" PRIu32 "&uploadId=%s", part + 1, target->id);
    return fsti_upload_query(target->url, query);
}

bool fsti_upload_keep_etag(upload_target *target, uint32_t part, const char *etag) {
    if (is_azure(target->store)) return true;
    // It is copied into XML without escaping.
    if (etag[0] == '\0' || strpbrk(etag, "<>&") != NULL) return false;
    snprintf(target->etags[part], sizeof target->etags[part], "%s", etag);
    return true;
}

// ---- completing ----

/// The list of all parts, from fsti_alloc().
static char *write_list(const upload_target *target) {
    bool azure = is_azure(target->store);
    size_t size = 128 + target->part_count * (ENTRY_BYTES + sizeof(upload_etag)), used;
    char *text = fsti_alloc(size), block[BLOCK_ID_BYTES];
    if (text == NULL) return NULL;
    used = (size_t)snprintf(text, size, "%s",
                            azure ? "<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>"
                                  : "<CompleteMultipartUpload>");
    for (uint32_t i = 0; i < target->part_count; i++) {
        name_block(target, i, block);
        int added = azure ? snprintf(text + used, size - used, "<Latest>%s</Latest>", block)
                          : snprintf(text + used, size - used,
                                     "<Part><PartNumber>%" PRIu32 "</PartNumber><ETag>%s</ETag>"
                                     "</Part>",
                                     i + 1, target->etags[i]);
        used += (size_t)added;
    }
    snprintf(text + used, size - used, "%s", azure ? "</BlockList>" : "</CompleteMultipartUpload>");
    return text;
}

/// S3 sends status 200 before it knows the result, which is in the body. *again: it failed and can
/// be repeated. *is_reported: the body has a result.
static fst_status read_result(const upload_target *target, const http_request *request, bool *again,
                              bool *is_reported, fst_error *error) {
    char code[64], text[160];
    *again = false;
    *is_reported = true;
    if (is_azure(target->store)) {
        *is_reported = request->answer.etag[0] != '\0';
        return *is_reported
                   ? FST_OK
                   : fail(target, "the store's response does not confirm the upload", error);
    }
    size_t size = request->text == NULL ? 0 : request->text_bytes;
    const char *body = size == 0 ? "" : request->text;
    bool is_error = memmem(body, size, "<Error", 6) != NULL;
    // ...Result>, or ...Response> from some stores
    if (!is_error && memmem(body, size, "</CompleteMultipartUploadRes", 28) != NULL) return FST_OK;
    *is_reported = is_error;
    if (!is_error)
        return fail(target,
                    "the store's response (status 200) does not say whether it completed "
                    "the upload",
                    error);
    http_response answer = {.status = 200};
    fsti_response_read_code(&answer, body, size);
    static const char *const temporary[] = {"InternalError", "SlowDown", "ServiceUnavailable",
                                            "RequestTimeout"};
    for (size_t i = 0; i < sizeof temporary / sizeof *temporary; i++)
        *again = *again || strcmp(answer.code, temporary[i]) == 0;
    bool has_code = answer.code[0] != '\0' && !fsti_store_has_secret(target->store, answer.code);
    snprintf(code, sizeof code, "%s", has_code ? answer.code : "no code");
    snprintf(text, sizeof text,
             "the store did not complete the upload (status 200 with the error %s)", code);
    return fail(target, text, error);
}

/// Whether the existing object is this one. If the response to completing was lost, the upload no
/// longer exists. An earlier object may have the same size, but an older date.
static bool exists(upload_target *target) {
    http_request request = {.url = target->url,
                            .name = target->name,
                            .authority = fsti_store_authority(target->store),
                            .method = "HEAD",
                            .stop = target->stop,
                            .watch = target->watch};
    fsti_request_run(&request);
    fsti_http_count(&target->counts, &request.counts);
    fsti_free(request.text);
    int64_t made_s = fsti_response_date(request.answer.modified);
    bool is_this_one = request.status == FST_OK &&
                       request.answer.length_bytes == target->size_bytes && target->begun_s >= 0 &&
                       made_s >= target->begun_s;
    if (is_this_one) fsti_precondition_read(target->store->kind, &request.answer, &target->put);
    return is_this_one;
}

int fsti_upload_is_same(upload_target *target, const char *bytes, size_t size) {
    http_request request = {.url = target->url,
                            .name = target->name,
                            .authority = fsti_store_authority(target->store),
                            .text_bytes_max = size,
                            .watch = target->watch};
    fsti_request_run(&request);
    fsti_http_count(&target->counts, &request.counts);
    bool is_same = request.status == FST_OK && request.text_bytes == size &&
                   (size == 0 || (request.text != NULL && memcmp(request.text, bytes, size) == 0));
    bool is_reported = request.status == FST_OK || request.status == FST_E_NOT_FOUND ||
                       request.answer.status == 200; // 200: it is longer
    fsti_free(request.text);
    if (is_same) fsti_precondition_read(target->store->kind, &request.answer, &target->put);
    return is_same ? 1 : is_reported ? 0 : -1;
}

/// S3 has the ETag in the body, others in a header.
static void read_etag(upload_target *target, const http_request *request) {
    http_response answer = request->answer;
    char etag[sizeof answer.etag];
    size_t size = request->text == NULL ? 0 : request->text_bytes;
    if (size > 0 && fsti_xml_find(request->text, size, "ETag", etag, sizeof etag))
        memcpy(answer.etag, etag, sizeof etag);
    fsti_precondition_read(target->store->kind, &answer, &target->put);
}

/// Waits before a retry. False if cancelled.
static bool pause_before_retry(upload_target *target, uint32_t tries) {
    const fsti_http_watch *watch = target->watch;
    http_limits limits = fsti_http_limits();
    uint64_t left_ms =
        fsti_retry_wait_ms(tries + 1, limits.retry_base_ms, limits.retry_cap_ms, -1, fsti_random());
    while (left_ms > 0) {
        uint64_t slice_ms = fsti_min(left_ms, PAUSE_SLICE_MS);
        struct timespec slice = {0, (long)slice_ms * 1000000};
        nanosleep(&slice, NULL);
        left_ms -= slice_ms;
        bool is_cancelled =
            watch != NULL && watch->ask != NULL && watch->ask(watch->context, 0, NULL) != FST_OK;
        if (is_cancelled) atomic_store(&target->is_cancelled, true);
        if (is_cancelled || (target->stop != NULL && atomic_load(target->stop))) return false;
    }
    return true;
}

/// *unknown: the store has not confirmed whether the parts are assembled.
static fst_status try_complete(upload_target *target, const small_call *call, uint32_t tries,
                               bool *again, bool *unknown, fst_error *error) {
    http_request request = {0};
    *again = false;
    fst_status status = send_call(target, call, &request, error);
    target->refusal = request.answer.status;
    if (status == FST_OK) {
        // Without a clear result, or after an earlier attempt, the parts may be assembled.
        bool is_reported = true;
        status = read_result(target, &request, again, &is_reported, error);
        *unknown = status != FST_OK && (tries > 0 || *again || !is_reported);
        read_etag(target, &request);
        fsti_free(request.text);
    } else if (request.status == FST_E_NOT_FOUND && exists(target)) {
        // The store no longer knows the upload, because the parts are already assembled. (Azure
        // reports missing blocks then, but also after another save of the same object.)
        status = FST_OK;
    } else {
        bool is_first = tries == 0 && request.counts.requests == 1;
        // Unknown unless the only attempt was refused: a response to a second attempt says nothing
        // about the first one, and without memory a response may have been lost.
        *unknown =
            request.counts.requests > 0 && !(is_first && fsti_upload_is_refusal(target->refusal));
    }
    return status;
}

fst_status fsti_upload_complete(upload_target *target, bool *unknown, fst_error *error) {
    char query[UPLOAD_ID_BYTES + 16];
    snprintf(query, sizeof query, "uploadId=%s", target->id);
    char *list = write_list(target);
    *unknown = false;
    if (list == NULL) return fsti_error_memory(error, target->part_count * sizeof(upload_etag));
    const small_call call = {.method = is_azure(target->store) ? "PUT" : "POST",
                             .query = is_azure(target->store) ? "comp=blocklist" : query,
                             .body = list,
                             .lines = target->lines,
                             .silence_ms_max = COMPLETE_SILENCE_MS_MAX,
                             .is_fresh = target->precondition.kind != FSTI_PRECONDITION_NONE};
    bool again = true;
    fst_status status = FST_OK;
    for (uint32_t i = 0; again; i++) {
        status = try_complete(target, &call, i, &again, unknown, error);
        again = again && i + 1 < fsti_http_limits().tries_max && pause_before_retry(target, i);
    }
    fsti_free(list);
    return status;
}

void fsti_upload_abort(upload_target *target) {
    char query[UPLOAD_ID_BYTES + 16];
    http_request request = {0};
    fst_error error = {0};
    if (target->id[0] == '\0') return;
    target->stop = NULL;
    snprintf(query, sizeof query, "uploadId=%s", target->id);
    const small_call call = {.method = "DELETE",
                             .query = query,
                             .bound_ms = atomic_load(&target->is_cancelled) ? UPLOAD_END_MS : 0};
    fst_status status = send_call(target, &call, &request, &error);
    if (status == FST_OK) fsti_free(request.text);
    if (status != FST_OK && status != FST_E_NOT_FOUND)
        fsti_log(FST_LOG_WARNING, "the parts of an upload could not be deleted from the store: %s",
                 error.message);
}
