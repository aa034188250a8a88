// SPDX-License-Identifier: Apache-2.0
/// Starts a multipart upload. Before the response arrives the upload's ID is unknown, so a
/// cancelled caller cannot abort it. The request then continues on its own and aborts what it has
/// started.
#include <stdio.h>
#include <string.h>

#include "sha256.h"
#include "upload.h"

#define ANSWER_BYTES_MAX ((size_t)65536)

typedef struct beginning {
    http_request request; ///< starts the upload; if it was abandoned, then aborts it
    object_store *store;
    char *url, *name, *request_url; ///< of the object; request_url: with the request's query
    char hash[SHA256_HEX_BYTES];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_done, is_left; ///< is_left: the caller is gone, and the request frees itself
} beginning;

static void free_beginning(beginning *begun) {
    if (begun == NULL) return;
    fsti_free(begun->request.text);
    fsti_store_unref(begun->store);
    fsti_secret_text_free(begun->url);
    fsti_free(begun->name);
    fsti_secret_text_free(begun->request_url);
    pthread_mutex_destroy(&begun->lock);
    pthread_cond_destroy(&begun->changed);
    fsti_free(begun);
}

/// The upload's ID from a response, escaped. False if it is missing.
static bool read_upload_id(const http_request *request, char *out, size_t size) {
    char id[UPLOAD_ID_BYTES / 3];
    return request->status == FST_OK && request->text != NULL &&
           fsti_xml_find(request->text, request->text_bytes, "UploadId", id, sizeof id) &&
           id[0] != '\0' && fsti_url_escape((url_part){id, strlen(id)}, false, out, size);
}

static void end_abandoned(http_request *request) { free_beginning(request->context); }

/// Runs on a thread of the http module: aborts an abandoned upload.
static void take_back(beginning *begun) {
    char id[UPLOAD_ID_BYTES], query[UPLOAD_ID_BYTES + 16];
    http_request *request = &begun->request;
    bool is_begun = read_upload_id(request, id, sizeof id);
    fsti_secret_text_free(begun->request_url);
    begun->request_url = NULL;
    snprintf(query, sizeof query, "uploadId=%s", is_begun ? id : "");
    if (is_begun) begun->request_url = fsti_upload_query(begun->url, query);
    if (begun->request_url == NULL) {
        free_beginning(begun);
        return;
    }
    fsti_free(request->text);
    *request =
        (http_request){.method = "DELETE",
                       .url = begun->request_url,
                       .name = begun->name,
                       .authority = fsti_store_authority(begun->store),
                       .body_hash = fsti_upload_hash(begun->request_url, NULL, 0, begun->hash),
                       .text_bytes_max = ANSWER_BYTES_MAX,
                       .done = end_abandoned,
                       .context = begun};
    fsti_request_begin(request);
}

static void finish_beginning(http_request *request) {
    beginning *begun = request->context;
    pthread_mutex_lock(&begun->lock);
    begun->is_done = true;
    bool is_left = begun->is_left;
    pthread_cond_signal(&begun->changed);
    pthread_mutex_unlock(&begun->lock);
    if (is_left) take_back(begun);
}

static beginning *make_beginning(const upload_target *target) {
    beginning *begun = fsti_alloc_zeroed(1, sizeof *begun);
    if (begun == NULL) return NULL;
    pthread_mutex_init(&begun->lock, NULL);
    pthread_cond_init(&begun->changed, NULL);
    begun->store = fsti_store_ref((object_store *)target->store);
    begun->url = fsti_string_copy(target->url, strlen(target->url));
    begun->name = fsti_string_copy(target->name, strlen(target->name));
    begun->request_url = fsti_upload_query(target->url, "uploads");
    if (begun->url == NULL || begun->name == NULL || begun->request_url == NULL) {
        free_beginning(begun);
        return NULL;
    }
    begun->request =
        (http_request){.method = "POST",
                       .url = begun->request_url,
                       .name = begun->name,
                       .authority = fsti_store_authority(begun->store),
                       .body = "",
                       .body_hash = fsti_upload_hash(begun->request_url, "", 0, begun->hash),
                       .lines = fsti_upload_part_lines,
                       .text_bytes_max = ANSWER_BYTES_MAX,
                       .done = finish_beginning,
                       .context = begun};
    return begun;
}

/// Waits for the response. *is_left: cancelled, and the request frees itself.
static fst_status wait_for_answer(upload_target *target, beginning *begun, bool *is_left,
                                  fst_error *error) {
    fst_status status = FST_OK;
    pthread_mutex_lock(&begun->lock);
    while (!begun->is_done && status == FST_OK) {
        if (fsti_http_wait(&begun->changed, &begun->lock) || target->watch->ask == NULL) continue;
        pthread_mutex_unlock(&begun->lock);
        status = target->watch->ask(target->watch->context, 0, error);
        pthread_mutex_lock(&begun->lock);
    }
    // If the response arrived at the moment of cancellation, the upload is aborted as usual.
    *is_left = begun->is_left = !begun->is_done;
    pthread_mutex_unlock(&begun->lock);
    if (status != FST_OK) atomic_store(&target->is_cancelled, true);
    return status;
}

fst_status fsti_upload_begin(upload_target *target, char *region, size_t region_size,
                             fst_error *error) {
    target->number = fsti_random();
    target->begun_s = -1;
    if (target->store->kind == FSTI_LOCATION_AZURE) return FST_OK; // blocks need no upload ID
    beginning *begun = make_beginning(target);
    if (begun == NULL) return fsti_error_memory(error, sizeof *begun);
    http_request *request = &begun->request;
    fsti_request_begin(request);
    bool is_left;
    fst_status status = wait_for_answer(target, begun, &is_left, error);
    if (is_left) return status;
    fsti_http_count(&target->counts, &request->counts);
    snprintf(region, region_size, "%s", request->answer.region);
    target->begun_s = fsti_response_date(request->answer.date);
    bool has_id = read_upload_id(request, target->id, sizeof target->id);
    fsti_error_location where = {.file = target->name, .byte_offset = FST_NO_OFFSET};
    if (status == FST_OK && request->status != FST_OK) {
        status = request->status;
        if (error != NULL) *error = request->error;
    } else if (status == FST_OK && !has_id) {
        status = fsti_error_set(error, FST_E_IO, where,
                                "the store did not begin the upload and gave no reason");
    }
    free_beginning(begun);
    return status;
}
