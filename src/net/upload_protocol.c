// SPDX-License-Identifier: Apache-2.0
/// Objects in parts, as stores take them: multipart uploads of S3 and Google's XML interface,
/// blocks of Azure.
#include "upload.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "retry.h"
#include "sha256.h"

#define ANSWER_BYTES_MAX ((size_t)65536)
/// Large objects are put together while blanks come, or nothing at all.
#define JOIN_PATIENCE_MS 120000u
/// A part's entry in the list of all of them, without its mark.
#define ENTRY_BYTES 80u
#define BLOCK_ID_BYTES 17u
#define PAUSE_SLICE_MS 50u

static bool is_azure(const net_store *store) { return store->kind == NET_STORE_AZURE; }

#define TYPE "Content-Type: application/octet-stream"

const char *const fsti_upload_part_lines[] = {TYPE, NULL};

void fsti_upload_write_lines(upload_place *place) {
    size_t count = 0;
    memset(place->lines, 0, sizeof place->lines);
    place->lines[count++] = TYPE;
    if (is_azure(place->store) && place->part_count == 1)
        place->lines[count++] = "x-ms-blob-type: BlockBlob";
    if (fsti_seen_line(place->store->kind, &place->seen, place->condition, sizeof place->condition))
        place->lines[count] = place->condition;
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
    uint32_t patience_ms, bound_ms; ///< as of requests
    bool is_fresh;
} small_call;

/// A request about an upload, waited for. request->text is the caller's.
static fst_status ask(upload_place *place, const small_call *call, net_request *request,
                      fst_error *error) {
    char hex[SHA256_HEX_BYTES];
    char *url = fsti_upload_query(place->url, call->query);
    if (url == NULL) return fsti_error_memory(error, strlen(place->url));
    size_t size = call->body == NULL ? 0 : strlen(call->body);
    *request = (net_request){.method = call->method,
                             .url = url,
                             .name = place->name,
                             .store = place->store,
                             .body = call->body,
                             .body_bytes = size,
                             .body_hash = fsti_upload_hash(url, call->body, size, hex),
                             .lines = call->lines == NULL ? fsti_upload_part_lines : call->lines,
                             .patience_ms = call->patience_ms,
                             .text_bytes_max = ANSWER_BYTES_MAX,
                             .bound_ms = call->bound_ms,
                             .is_fresh = call->is_fresh,
                             .stop = place->stop,
                             .watch = call->bound_ms > 0 ? NULL : place->watch};
    fsti_request_run(request);
    if (request->status == FST_E_CANCELLED) atomic_store(&place->is_cancelled, true);
    fsti_net_count(&place->counts, &request->counts);
    fsti_secret_text_free(url);
    if (request->status != FST_OK && error != NULL) *error = request->error;
    return request->status;
}

static fst_status fail(const upload_place *place, const char *what, fst_error *error) {
    fsti_error_place where = FSTI_NOWHERE;
    where.file = place->name;
    return fsti_error_set(error, FST_E_IO, where, "%s", what);
}

// ---- parts ----

/// A block's name, of the same size for all of them: BASE64 of twelve bytes. All who save to a blob
/// put their blocks in one place: half of the name is this upload's own.
static void name_block(const upload_place *place, uint32_t part, char out[BLOCK_ID_BYTES]) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef";
    uint64_t own = place->number;
    for (size_t i = 0; i < BLOCK_ID_BYTES / 2; i++, own /= 32) out[i] = digits[own % 32];
    for (size_t i = BLOCK_ID_BYTES - 2; i >= BLOCK_ID_BYTES / 2; i--, part /= 32)
        out[i] = digits[part % 32];
    out[BLOCK_ID_BYTES - 1] = '\0';
}

char *fsti_upload_part_url(const upload_place *place, uint32_t part) {
    char query[UPLOAD_ID_BYTES + 64], block[BLOCK_ID_BYTES];
    name_block(place, part, block);
    if (is_azure(place->store))
        snprintf(query, sizeof query, "comp=block&blockid=%s", block);
    else // names in order, as signatures want them
        snprintf(query, sizeof query, "partNumber=%" PRIu32 "&uploadId=%s", part + 1, place->id);
    return fsti_upload_query(place->url, query);
}

bool fsti_upload_keep_mark(upload_place *place, uint32_t part, const char *etag) {
    if (is_azure(place->store)) return true;
    // It goes into XML as it is.
    if (etag[0] == '\0' || strpbrk(etag, "<>&") != NULL) return false;
    snprintf(place->marks[part], sizeof place->marks[part], "%s", etag);
    return true;
}

// ---- the end ----

/// The list of all parts, from fsti_alloc.
static char *write_list(const upload_place *place) {
    bool azure = is_azure(place->store);
    size_t size = 128 + place->part_count * (ENTRY_BYTES + sizeof(upload_mark)), used;
    char *text = fsti_alloc(size), block[BLOCK_ID_BYTES];
    if (text == NULL) return NULL;
    used = (size_t)snprintf(text, size, "%s",
                            azure ? "<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>"
                                  : "<CompleteMultipartUpload>");
    for (uint32_t i = 0; i < place->part_count; i++) {
        name_block(place, i, block);
        int added = azure ? snprintf(text + used, size - used, "<Latest>%s</Latest>", block)
                          : snprintf(text + used, size - used,
                                     "<Part><PartNumber>%" PRIu32 "</PartNumber><ETag>%s</ETag>"
                                     "</Part>",
                                     i + 1, place->marks[i]);
        used += (size_t)added;
    }
    snprintf(text + used, size - used, "%s", azure ? "</BlockList>" : "</CompleteMultipartUpload>");
    return text;
}

/// S3 begins to answer 200 before it knows: what came of it says the body. *again: it has not been
/// able to, and may be later; *is_told: there is a result in it.
static fst_status read_result(const upload_place *place, const net_request *request, bool *again,
                              bool *is_told, fst_error *error) {
    char code[64], text[160];
    *again = false;
    *is_told = true;
    if (is_azure(place->store)) {
        *is_told = request->answer.etag[0] != '\0';
        return *is_told
                   ? FST_OK
                   : fail(place, "the store's answer does not say that it joined the parts", error);
    }
    size_t size = request->text == NULL ? 0 : request->text_bytes;
    const char *body = size == 0 ? "" : request->text;
    bool is_error = memmem(body, size, "<Error", 6) != NULL;
    // ...Result>; of some stores ...Response>
    if (!is_error && memmem(body, size, "</CompleteMultipartUploadRes", 28) != NULL) return FST_OK;
    *is_told = is_error;
    if (!is_error)
        return fail(place,
                    "the store's answer (status 200) does not say whether it has joined "
                    "the parts",
                    error);
    net_answer answer = {.status = 200};
    fsti_answer_read_code(&answer, body, size);
    static const char *const passing[] = {"InternalError", "SlowDown", "ServiceUnavailable",
                                          "RequestTimeout"};
    for (size_t i = 0; i < sizeof passing / sizeof *passing; i++)
        *again = *again || strcmp(answer.code, passing[i]) == 0;
    bool has_code = answer.code[0] != '\0' && !fsti_store_knows(place->store, answer.code);
    snprintf(code, sizeof code, "%s", has_code ? answer.code : "no code");
    snprintf(text, sizeof text, "the store did not join the parts (status 200 with the error %s)",
             code);
    return fail(place, text, error);
}

/// Whether the object that is there now is this one: a joining whose answer was lost leaves no
/// upload to be joined again. One that was there before may be as large, and is older.
static bool is_there(upload_place *place) {
    net_request request = {.url = place->url,
                           .name = place->name,
                           .store = place->store,
                           .method = "HEAD",
                           .stop = place->stop,
                           .watch = place->watch};
    fsti_request_run(&request);
    fsti_net_count(&place->counts, &request.counts);
    fsti_free(request.text);
    int64_t made_s = fsti_answer_date(request.answer.modified);
    bool is_it = request.status == FST_OK && request.answer.length_bytes == place->size_bytes &&
                 place->begun_s >= 0 && made_s >= place->begun_s;
    if (is_it) fsti_seen_read(place->store->kind, &request.answer, &place->put);
    return is_it;
}

int fsti_upload_is_same(upload_place *place, const char *bytes, size_t size) {
    net_request request = {.url = place->url,
                           .name = place->name,
                           .store = place->store,
                           .text_bytes_max = size,
                           .watch = place->watch};
    fsti_request_run(&request);
    fsti_net_count(&place->counts, &request.counts);
    bool is_same = request.status == FST_OK && request.text_bytes == size &&
                   (size == 0 || (request.text != NULL && memcmp(request.text, bytes, size) == 0));
    bool is_told = request.status == FST_OK || request.status == FST_E_NOT_FOUND ||
                   request.answer.status == 200; // and longer
    fsti_free(request.text);
    if (is_same) fsti_seen_read(place->store->kind, &request.answer, &place->put);
    return is_same ? 1 : is_told ? 0 : -1;
}

/// Of S3 in the body, of others in the head.
static void read_mark(upload_place *place, const net_request *request) {
    net_answer answer = request->answer;
    char etag[sizeof answer.etag];
    size_t size = request->text == NULL ? 0 : request->text_bytes;
    if (size > 0 && fsti_xml_find(request->text, size, "ETag", etag, sizeof etag))
        memcpy(answer.etag, etag, sizeof etag);
    fsti_seen_read(place->store->kind, &answer, &place->put);
}

/// False where nobody wants to wait.
static bool pause_join(upload_place *place, uint32_t tries) {
    const fsti_net_watch *watch = place->watch;
    net_limits limits = fsti_net_limits();
    uint64_t left_ms =
        fsti_retry_wait_ms(tries, limits.retry_base_ms, limits.retry_cap_ms, -1, fsti_net_random());
    while (left_ms > 0) {
        uint64_t slice_ms = fsti_min(left_ms, PAUSE_SLICE_MS);
        struct timespec slice = {0, (long)slice_ms * 1000000};
        nanosleep(&slice, NULL);
        left_ms -= slice_ms;
        bool is_over =
            watch != NULL && watch->ask != NULL && watch->ask(watch->context, 0, NULL) != FST_OK;
        if (is_over) atomic_store(&place->is_cancelled, true);
        if (is_over || (place->stop != NULL && atomic_load(place->stop))) return false;
    }
    return true;
}

/// Whether a refusal may be that of parts that are joined already: S3's of an upload that is over,
/// Azure's (InvalidBlockList) of blocks that are no longer apart, when it is asked again.
static bool may_be_joined(const upload_place *place, const net_request *request, uint32_t tries) {
    bool is_again = tries > 0 || request->counts.requests > 1;
    return request->status == FST_E_NOT_FOUND ||
           (is_azure(place->store) && is_again && request->answer.status == 400);
}

/// *unknown: whether the parts are joined the store has not said.
static fst_status try_join(upload_place *place, const small_call *call, uint32_t tries, bool *again,
                           bool *unknown, fst_error *error) {
    net_request request = {0};
    *again = false;
    fst_status status = ask(place, call, &request, error);
    place->refusal = request.answer.status;
    if (status == FST_OK) {
        // What it does not say, or fails in, may have been done.
        bool is_told = true;
        status = read_result(place, &request, again, &is_told, error);
        *unknown = status != FST_OK && (tries > 0 || *again || !is_told);
        read_mark(place, &request);
        fsti_free(request.text);
    } else if (may_be_joined(place, &request, tries) && is_there(place)) {
        status = FST_OK;
    } else {
        bool is_first = tries == 0 && request.counts.requests == 1;
        // Also of an answer that there was no memory for; of a second try says nothing of the
        // first.
        *unknown =
            request.counts.requests > 0 && !(is_first && fsti_upload_is_refusal(place->refusal));
    }
    return status;
}

fst_status fsti_upload_join(upload_place *place, bool *unknown, fst_error *error) {
    char query[UPLOAD_ID_BYTES + 16];
    snprintf(query, sizeof query, "uploadId=%s", place->id);
    char *list = write_list(place);
    *unknown = false;
    if (list == NULL) return fsti_error_memory(error, place->part_count * sizeof(upload_mark));
    const small_call call = {.method = is_azure(place->store) ? "PUT" : "POST",
                             .query = is_azure(place->store) ? "comp=blocklist" : query,
                             .body = list,
                             .lines = place->lines,
                             .patience_ms = JOIN_PATIENCE_MS,
                             .is_fresh = place->seen.kind != FSTI_SEEN_ANY};
    bool again = true;
    fst_status status = FST_OK;
    for (uint32_t i = 0; again; i++) {
        status = try_join(place, &call, i, &again, unknown, error);
        again = again && i + 1 < fsti_net_limits().tries_max && pause_join(place, i);
    }
    fsti_free(list);
    return status;
}

void fsti_upload_abort(upload_place *place) {
    char query[UPLOAD_ID_BYTES + 16];
    net_request request = {0};
    fst_error error = {0};
    if (place->id[0] == '\0') return;
    place->stop = NULL;
    snprintf(query, sizeof query, "uploadId=%s", place->id);
    const small_call call = {.method = "DELETE",
                             .query = query,
                             .bound_ms = atomic_load(&place->is_cancelled) ? UPLOAD_END_MS : 0};
    fst_status status = ask(place, &call, &request, &error);
    if (status == FST_OK) fsti_free(request.text);
    if (status != FST_OK && status != FST_E_NOT_FOUND)
        fsti_log(FST_LOG_WARNING, "parts of an upload stay at the store: %s", error.message);
}
