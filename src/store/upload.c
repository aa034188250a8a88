// SPDX-License-Identifier: Apache-2.0
/// Uploads: parts are collected in memory, sent while later ones are collected, and completed at
/// the end. An object of one part is sent by one request at the end.
///
/// The lock protects slots and counters and is released during requests. The states of a slot:
///
///   SLOT_FREE     -> SLOT_FILLING  a byte of a part without a slot arrives (use_slot)
///   SLOT_FILLING  -> SLOT_SENDING  the last byte of its part has arrived (end_part), or commit
///                                  sends the whole object (try_single)
///   SLOT_SENDING  -> SLOT_FREE     the request has ended (finish_part) or cannot be sent
///                                  (fail_unsent)
///
/// The memory of a slot must not change in SLOT_SENDING. That of a whole object keeps its bytes
/// afterwards, for a repeated request and for a comparison with the stored object. After the first
/// failure no further part is sent.
#include "upload.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "sha256.h"

/// Stores accept 10,000 parts of at least 5 MiB, except the last one.
#define PART_COUNT_MAX ((uint64_t)10000)
#define PART_BYTES_MIN ((uint64_t)8 << 20)
#define PART_BYTES_STEP ((uint64_t)1 << 20)
/// For parts that are being collected or sent.
#define MEMORY_BYTES ((uint64_t)64 << 20)
#define SLOT_COUNT_MAX 8u
#define NAME_BYTES_MAX 1024u
#define ANSWER_BYTES_MAX ((size_t)65536)
/// Maximum of a store's response that is quoted in a message.
#define REPORTED_BYTES_MAX 240u

typedef enum slot_state { SLOT_FREE, SLOT_FILLING, SLOT_SENDING } slot_state;

/// A part in memory.
typedef struct upload_slot {
    http_request request; ///< while it is being sent
    struct fsti_upload *upload;
    slot_state state;
    uint32_t part;
    uint64_t received_bytes; ///< bytes received from the writer
    char *memory;
    char *url;
    char hash[SHA256_HEX_BYTES];
} upload_slot;

struct fsti_upload {
    pid_t owner;
    object_store *store;
    char *url, *name, *given; ///< given: the URL as given by the caller
    uint64_t size_bytes, part_bytes;
    upload_target target;
    atomic_bool stop; ///< ends all requests: cancelled, a part has failed, or the upload is closed
    fsti_http_watch watch;
    fsti_part_observer observer; ///< may be NULL
    void *observer_context;
    pthread_mutex_t lock; ///< protects the fields below
    pthread_cond_t changed;
    upload_slot slots[SLOT_COUNT_MAX];
    uint32_t slot_count, sent_count; ///< sent_count: parts that the store has accepted
    uint64_t received_bytes;
    fsti_http_counts counts;
    int is_committed;      ///< -1: unknown
    bool has_same_content; ///< with create_only: the existing object has the same content
    bool is_first_answer;  ///< the request for the whole object was sent only once
    bool is_unclear;   ///< the response for the whole object says 200, but not that it was stored
    fst_status status; ///< of the first part that failed, with its error
    fst_error error;
    uint32_t refusal; ///< HTTP status of that part
    char region[40];  ///< the bucket's region, if the store reported it with the failure
};

static fst_status fail(const fsti_upload *upload, fst_status status, const char *what,
                       fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    if (status != FST_E_CANCELLED) location.file = upload->name;
    return fsti_error_set(error, status, location, "%s", what);
}

static uint64_t part_size(const fsti_upload *upload, uint32_t part) {
    return fsti_min(upload->part_bytes, upload->size_bytes - part * upload->part_bytes);
}

// ---- starting ----

static void choose_sizes(fsti_upload *upload) {
    uint64_t needed = (upload->size_bytes + PART_COUNT_MAX - 1) / PART_COUNT_MAX;
    upload->part_bytes = fsti_max(PART_BYTES_MIN, fsti_align_up(needed, PART_BYTES_STEP));
    uint64_t count = (upload->size_bytes + upload->part_bytes - 1) / upload->part_bytes;
    upload->target.part_count = (uint32_t)fsti_max(count, 1);
    upload->slot_count =
        (uint32_t)fsti_min(fsti_max(fsti_min(MEMORY_BYTES / upload->part_bytes, SLOT_COUNT_MAX), 2),
                           upload->target.part_count);
}

static fst_status make_upload(const char *url, uint64_t size_bytes, const fsti_http_watch *watch,
                              fsti_upload **out, fst_error *error) {
    char name[NAME_BYTES_MAX];
    fsti_upload *upload = fsti_alloc_zeroed(1, sizeof *upload);
    if (upload == NULL) return fsti_error_memory(error, sizeof *upload);
    upload->owner = getpid();
    upload->size_bytes = size_bytes;
    pthread_mutex_init(&upload->lock, NULL);
    pthread_cond_init(&upload->changed, NULL);
    fsti_url_redact(url, name, sizeof name);
    choose_sizes(upload);
    *out = upload;
    upload->name = fsti_string_copy(name, strlen(name));
    upload->given = fsti_string_copy(url, strlen(url));
    upload->target.etags = fsti_alloc_zeroed(upload->target.part_count, sizeof(upload_etag));
    if (upload->name == NULL || upload->given == NULL || upload->target.etags == NULL)
        return fsti_error_memory(error, upload->target.part_count * sizeof(upload_etag));
    FST_TRY(fsti_store_open(url, watch, &upload->store, error));
    FST_TRY(fsti_store_check_target(upload->store, url, error));
    return fsti_store_address(upload->store, url, &upload->url, error);
}

/// Rebuilds the URL after the store was asked to use another region or form.
static fst_status move_upload(fsti_upload *upload, fst_error *error) {
    fsti_secret_text_free(upload->url);
    upload->url = NULL;
    FST_TRY(fsti_store_address(upload->store, upload->given, &upload->url, error));
    upload->target.url = upload->url;
    return FST_OK;
}

/// Starts the upload; repeats it once in the bucket's region.
static fst_status begin_parts(fsti_upload *upload, fst_error *error) {
    char region[sizeof upload->store->region] = "";
    fst_status status = fsti_upload_begin(&upload->target, region, sizeof region, error);
    if (status == FST_OK || !fsti_store_move(upload->store, region)) return status;
    FST_TRY(move_upload(upload, error));
    return fsti_upload_begin(&upload->target, region, sizeof region, error);
}

static void fill_target(fsti_upload *upload, const fsti_precondition *precondition) {
    upload_target *target = &upload->target;
    target->watch = &upload->watch;
    target->store = upload->store;
    target->url = upload->url;
    target->name = upload->name;
    target->size_bytes = upload->size_bytes;
    target->stop = &upload->stop;
    target->forbids_overwrite = fsti_store_forbids_overwrite();
    if (precondition != NULL) target->precondition = *precondition;
    if (target->forbids_overwrite)
        target->precondition = (fsti_precondition){.kind = FSTI_PRECONDITION_ABSENT};
    fsti_upload_write_lines(target);
}

fst_status fsti_upload_open(const char *url, uint64_t size_bytes, const fsti_http_watch *watch,
                            const fsti_precondition *precondition, fsti_upload **out,
                            fst_error *error) {
    fsti_upload *upload = NULL;
    FST_TRY(fsti_http_check(error));
    fst_status status = make_upload(url, size_bytes, watch, &upload, error);
    if (upload == NULL) return status;
    if (status == FST_OK) {
        if (watch != NULL) upload->watch = *watch;
        fill_target(upload, precondition);
    }
    if (status == FST_OK && upload->target.part_count > 1) status = begin_parts(upload, error);
    if (status != FST_OK) {
        fsti_upload_close(upload);
        return status;
    }
    *out = upload;
    return FST_OK;
}

// ---- parts ----

/// Whether a 200 response confirms the object: it has an ETag, and no error in its body.
static bool confirms_object(const http_request *request) {
    size_t size = request->text == NULL ? 0 : request->text_bytes;
    return request->answer.etag[0] != '\0' &&
           (size == 0 || memmem(request->text, size, "<Error", 6) == NULL);
}

/// Whether a request for a whole object stored it; -1 if that is unknown. A later attempt's
/// response says nothing about the first one, nor does a failed condition, because a proxy may have
/// retried the request.
static int has_committed(const http_request *request) {
    uint32_t code = request->answer.status;
    if (request->status == FST_OK) return confirms_object(request) ? 1 : -1;
    bool is_first = request->counts.requests == 1;
    bool is_refused = is_first && fsti_upload_is_refusal(code) && code != 412 && code != 409;
    return request->counts.requests == 0 || is_refused ? 0 : -1;
}

/// Runs on a thread of the http module.
static void finish_part(http_request *request) {
    upload_slot *slot = request->context;
    fsti_upload *upload = slot->upload;
    pthread_mutex_lock(&upload->lock);
    fsti_secret_text_free(slot->url);
    slot->url = NULL;
    fsti_http_count(&upload->counts, &request->counts);
    fst_error error = request->error;
    fst_status status = request->status;
    if (status == FST_OK && upload->target.part_count > 1 &&
        !fsti_upload_keep_etag(&upload->target, slot->part, request->answer.etag))
        status =
            fail(upload, FST_E_IO, "the store accepted a part without returning its ETag", &error);
    if (upload->target.part_count == 1) {
        upload->is_committed = has_committed(request);
        upload->is_unclear = status == FST_OK && upload->is_committed < 0;
        upload->is_first_answer = request->counts.requests == 1;
        fsti_precondition_read(upload->store->kind, &request->answer, &upload->target.put);
    }
    fsti_free(request->text);
    if (upload->is_unclear)
        status = fail(upload, FST_E_IO,
                      "the store's response (status 200) does not confirm the object", &error);
    if (status == FST_OK) {
        upload->sent_count++;
    } else if (upload->status == FST_OK) {
        upload->status = status;
        upload->error = error;
        upload->refusal = request->answer.status;
        memcpy(upload->region, request->answer.region, sizeof upload->region);
        atomic_store(&upload->stop, true); // stop the other parts
    }
    slot->state = SLOT_FREE;
    pthread_cond_broadcast(&upload->changed);
    pthread_mutex_unlock(&upload->lock);
}

/// Fails the upload because there is no memory to send a part.
static fst_status fail_unsent(fsti_upload *upload, upload_slot *slot, fst_error *error) {
    pthread_mutex_lock(&upload->lock);
    slot->state = SLOT_FREE;
    if (upload->status == FST_OK)
        upload->status = fsti_error_memory(&upload->error, strlen(upload->url));
    pthread_cond_broadcast(&upload->changed);
    pthread_mutex_unlock(&upload->lock);
    return fsti_error_memory(error, strlen(upload->url));
}

/// Sends a complete part. `is_whole`: it is the whole object.
static fst_status send_part(fsti_upload *upload, upload_slot *slot, bool is_whole,
                            fst_error *error) {
    size_t size = (size_t)part_size(upload, slot->part);
    slot->url = is_whole ? fsti_string_copy(upload->url, strlen(upload->url))
                         : fsti_upload_part_url(&upload->target, slot->part);
    if (slot->url == NULL) return fail_unsent(upload, slot, error);
    slot->request = (http_request){
        .method = "PUT",
        .url = slot->url,
        .name = upload->name,
        .authority = fsti_store_authority(upload->store),
        .body = slot->memory,
        .body_bytes = size,
        .body_hash = fsti_upload_hash(slot->url, slot->memory, size, slot->hash),
        .lines = is_whole ? upload->target.lines : fsti_upload_part_lines,
        .text_bytes_max = ANSWER_BYTES_MAX,
        .is_fresh = is_whole && upload->target.precondition.kind != FSTI_PRECONDITION_NONE,
        .stop = &upload->stop,
        .bound_ms = upload->watch.bound_ms,
        .done = finish_part,
        .context = slot};
    fsti_request_begin(&slot->request);
    return FST_OK;
}

/// The slot that collects a part, or a free one, preferably one that has memory already. NULL: no
/// slot is free. The lock must be held.
static upload_slot *find_slot(fsti_upload *upload, uint32_t part, bool *is_any_sent) {
    upload_slot *idle = NULL;
    *is_any_sent = false;
    for (uint32_t i = 0; i < upload->slot_count; i++) {
        upload_slot *slot = &upload->slots[i];
        if (slot->state == SLOT_FILLING && slot->part == part) return slot;
        if (slot->state == SLOT_FREE && (idle == NULL || slot->memory != NULL)) idle = slot;
        *is_any_sent = *is_any_sent || slot->state == SLOT_SENDING;
    }
    return idle;
}

static fst_status use_slot(fsti_upload *upload, upload_slot *slot, uint32_t part,
                           fst_error *error) {
    if (slot->state == SLOT_FILLING) return FST_OK;
    uint64_t slot_bytes = fsti_min(upload->part_bytes, upload->size_bytes);
    if (slot->memory == NULL) slot->memory = fsti_alloc((size_t)slot_bytes);
    if (slot->memory == NULL) return fsti_error_memory(error, slot_bytes);
    slot->upload = upload;
    slot->state = SLOT_FILLING;
    slot->part = part;
    slot->received_bytes = 0;
    return FST_OK;
}

/// Waits briefly for a part to be sent. The lock must be held; it is released meanwhile.
static fst_status wait_briefly(fsti_upload *upload, fst_error *error) {
    const fsti_http_watch *watch = &upload->watch;
    if (fsti_http_wait(&upload->changed, &upload->lock) || watch->ask == NULL) return FST_OK;
    pthread_mutex_unlock(&upload->lock);
    fst_status status = watch->ask(watch->context, 0, error);
    if (status != FST_OK) fsti_upload_stop(upload);
    pthread_mutex_lock(&upload->lock);
    return status;
}

/// Takes a slot, waiting if necessary. The lock must be held; it is released meanwhile.
static fst_status take_slot(fsti_upload *upload, uint32_t part, upload_slot **out,
                            fst_error *error) {
    for (;;) {
        bool is_any_sent;
        if (upload->status != FST_OK) {
            if (error != NULL) *error = upload->error;
            return upload->status;
        }
        if (atomic_load(&upload->stop)) return fail(upload, FST_E_CANCELLED, "cancelled", error);
        *out = find_slot(upload, part, &is_any_sent);
        if (*out != NULL) return use_slot(upload, *out, part, error);
        if (!is_any_sent)
            return fail(upload, FST_E_UNSUPPORTED,
                        "an object is sent sequentially, and writes at so many offsets exceed "
                        "the buffer. Write tensors one after the other",
                        error);
        FST_TRY(wait_briefly(upload, error));
    }
}

/// All bytes of a part have arrived. If it is the whole object, it is sent by commit.
static fst_status end_part(fsti_upload *upload, upload_slot *slot, fst_error *error) {
    if (upload->observer != NULL)
        FST_TRY(upload->observer(upload->observer_context, slot->part * upload->part_bytes,
                                 slot->memory, part_size(upload, slot->part), error));
    if (upload->target.part_count == 1) return FST_OK;
    pthread_mutex_lock(&upload->lock);
    slot->state = SLOT_SENDING;
    pthread_mutex_unlock(&upload->lock);
    return send_part(upload, slot, false, error);
}

/// Writes bytes within one part.
static fst_status write_piece(fsti_upload *upload, uint64_t offset, const char *data, size_t size,
                              fst_error *error) {
    uint32_t part = (uint32_t)(offset / upload->part_bytes);
    upload_slot *slot = NULL;
    pthread_mutex_lock(&upload->lock);
    fst_status status = take_slot(upload, part, &slot, error);
    pthread_mutex_unlock(&upload->lock);
    if (status != FST_OK || slot == NULL) return status;
    // The slot belongs to the part until all its bytes have arrived, including these.
    memcpy(slot->memory + offset % upload->part_bytes, data, size);
    pthread_mutex_lock(&upload->lock);
    slot->received_bytes += size;
    upload->received_bytes += size;
    bool is_all = slot->received_bytes == part_size(upload, part);
    pthread_mutex_unlock(&upload->lock);
    return is_all ? end_part(upload, slot, error) : FST_OK;
}

void fsti_upload_observe_parts(fsti_upload *upload, fsti_part_observer observer, void *context) {
    upload->observer = observer;
    upload->observer_context = context;
}

fst_status fsti_upload_write(fsti_upload *upload, const void *data, size_t size, uint64_t offset,
                             fst_error *error) {
    const char *from = data;
    while (size > 0) {
        uint64_t left = upload->part_bytes - offset % upload->part_bytes;
        size_t piece = (size_t)fsti_min(size, left);
        FST_TRY(write_piece(upload, offset, from, piece, error));
        from += piece;
        offset += piece;
        size -= piece;
    }
    return FST_OK;
}

/// Waits until all requests have ended. The lock must be held; it is released meanwhile. A slot
/// that was found idle stays idle, because the caller no longer writes.
static fst_status wait_for_parts(fsti_upload *upload, fst_error *error) {
    for (uint32_t i = 0; i < upload->slot_count; i++)
        while (upload->slots[i].state == SLOT_SENDING) FST_TRY(wait_briefly(upload, error));
    return FST_OK;
}

fst_status fsti_upload_drain(fsti_upload *upload, fst_error *error) {
    pthread_mutex_lock(&upload->lock);
    fst_status status = wait_for_parts(upload, error);
    if (status == FST_OK && upload->status != FST_OK) {
        status = upload->status;
        if (error != NULL) *error = upload->error;
    }
    bool is_whole = upload->received_bytes == upload->size_bytes;
    pthread_mutex_unlock(&upload->lock);
    if (status == FST_OK && !is_whole)
        status = fail(upload, FST_E_IO, "some bytes of the object are missing", error);
    return status;
}

// ---- completing ----

/// Cancels running requests and waits for them.
static void end_parts(fsti_upload *upload) {
    fsti_http_watch watch = upload->watch;
    atomic_store(&upload->stop, true);
    pthread_mutex_lock(&upload->lock);
    upload->watch.ask = NULL; // the callback could end the wait
    (void)!wait_for_parts(upload, NULL);
    upload->watch = watch;
    pthread_mutex_unlock(&upload->lock);
}

/// Whether to repeat the request without a condition, because the store has no conditional writes.
static bool drop_condition(upload_target *target, uint32_t status) {
    bool has_one =
        target->precondition.kind != FSTI_PRECONDITION_NONE && !target->forbids_overwrite;
    if (!has_one || status != STATUS_NOT_IMPLEMENTED) return false;
    target->precondition.kind = FSTI_PRECONDITION_NONE;
    fsti_upload_write_lines(target);
    return true;
}

/// Explains a refusal: the existing object is not the one that was examined.
static fst_status report_change(const fsti_upload *upload, fst_status status, fst_error *error) {
    const upload_target *target = &upload->target;
    if (target->forbids_overwrite || target->precondition.kind == FSTI_PRECONDITION_NONE)
        return status;
    bool is_absent = target->precondition.kind == FSTI_PRECONDITION_VERSION &&
                     status == FST_E_NOT_FOUND && target->part_count == 1;
    if (error->os_errno != EEXIST && !is_absent) return status;
    char answer[REPORTED_BYTES_MAX];
    const char *redacted = strrchr(fsti_error_text(error), '(');
    snprintf(answer, sizeof answer, "%s", redacted == NULL ? "" : redacted);
    error->os_errno = 0;
    fsti_error_location where = FSTI_NO_LOCATION;
    where.file = upload->name;
    return fsti_error_set(error, FST_E_FILE_CHANGED, where,
                          "another save wrote the object since this save began %s", answer);
}

/// One request for the whole object. *again: repeat it, in another region, without a condition, or
/// because the store did not store it.
static fst_status try_single(fsti_upload *upload, bool *again, fst_error *error) {
    upload_slot *slot = &upload->slots[0];
    pthread_mutex_lock(&upload->lock);
    fst_status status = use_slot(upload, slot, 0, error); // an empty object has no slot
    if (status == FST_OK) slot->state = SLOT_SENDING;
    pthread_mutex_unlock(&upload->lock);
    if (status == FST_OK) status = send_part(upload, slot, true, error);
    if (status != FST_OK) return status;
    fst_error cause = {0};
    status = fsti_upload_drain(upload, &cause);
    if (status != FST_OK) end_parts(upload); // wait, so that the result is known
    *again = status != FST_OK && (fsti_store_move(upload->store, upload->region) ||
                                  drop_condition(&upload->target, upload->refusal));
    // The existing object may be this one, stored by an attempt whose response was lost or unclear.
    bool may_be_ours =
        upload->is_committed < 0 && (upload->is_unclear || fsti_upload_is_refusal(upload->refusal));
    if (may_be_ours)
        upload->is_committed =
            fsti_upload_is_same(&upload->target, slot->memory, (size_t)upload->size_bytes);
    // With create_only, the same bytes may have been there before.
    bool is_uncertain = may_be_ours && !upload->is_unclear && upload->target.forbids_overwrite;
    if (upload->is_committed == 1 && is_uncertain && upload->is_first_answer) {
        upload->is_committed = -1;
        upload->has_same_content = true;
    }
    if (upload->is_committed == 1) return FST_OK;
    *again = *again || (upload->is_unclear && upload->is_committed == 0);
    if (status != FST_OK) status = report_change(upload, status, &cause);
    if (status != FST_OK && error != NULL) *error = cause;
    return status;
}

/// The first attempt, and one for each reason to repeat it: another region, no condition, not
/// stored.
#define SINGLE_TRIES_MAX 4

static fst_status send_single(fsti_upload *upload, fst_error *error) {
    for (int i = 1;; i++) {
        bool again = false;
        fst_status status = try_single(upload, &again, error);
        if (!again || i == SINGLE_TRIES_MAX) return status;
        pthread_mutex_lock(&upload->lock);
        upload->status = FST_OK;
        atomic_store(&upload->stop, false);
        pthread_mutex_unlock(&upload->lock);
        FST_TRY(move_upload(upload, error));
    }
}

/// Adds to an error that the object may be stored nevertheless. Then it isn't a cancellation, which
/// leaves the old object.
static fst_status report_unknown(fst_status status, fst_error *error) {
    if (status == FST_E_CANCELLED) status = FST_E_IO;
    if (error == NULL) return status;
    error->status = status;
    size_t used = strlen(error->message);
    snprintf(error->message + used, sizeof error->message - used,
             "; it is unknown whether the object was stored");
    return status;
}

fst_status fsti_upload_commit(fsti_upload *upload, bool is_unique, fst_error *error) {
    bool is_unknown = false;
    fst_status status;
    FST_TRY(fsti_upload_drain(upload, error));
    if (upload->target.part_count == 1) {
        status = send_single(upload, error);
    } else {
        fst_error cause = {0};
        status = fsti_upload_complete(&upload->target, &is_unknown, &cause);
        if (status != FST_OK && drop_condition(&upload->target, upload->target.refusal))
            status = fsti_upload_complete(&upload->target, &is_unknown, &cause);
        if (status != FST_OK) status = report_change(upload, status, &cause);
        if (status != FST_OK && error != NULL) *error = cause;
        upload->is_committed = status == FST_OK ? 1 : is_unknown ? -1 : 0;
    }
    if (status != FST_OK && upload->has_same_content) {
        fsti_error_location where = {
            .file = upload->name, .os_errno = EEXIST, .byte_offset = FST_NO_OFFSET};
        return fsti_error_set(error, FST_E_IO, where,
                              "the object exists already and create_only is set. It has the "
                              "same content as this save");
    }
    bool matters = status != FST_OK && upload->is_committed < 0 && !is_unique;
    return matters ? report_unknown(status, error) : status;
}

int fsti_upload_is_committed(const fsti_upload *upload) { return upload->is_committed; }

const fsti_precondition *fsti_upload_version(const fsti_upload *upload) {
    return &upload->target.put;
}

void fsti_upload_stop(fsti_upload *upload) {
    atomic_store(&upload->target.is_cancelled, true);
    atomic_store(&upload->stop, true);
}

void fsti_upload_describe(fsti_upload *upload, char *text, size_t size) {
    pthread_mutex_lock(&upload->lock);
    fsti_http_counts counts = upload->counts;
    pthread_mutex_unlock(&upload->lock);
    fsti_http_count(&counts, &upload->target.counts);
    snprintf(text, size,
             "%" PRIu32 " parts of %" PRIu64 " MiB, %" PRIu64 " requests (%" PRIu64
             " retries), credentials: %s",
             upload->target.part_count, upload->part_bytes >> 20, counts.requests, counts.retries,
             upload->store->source);
}

/// Cancels running requests and aborts the upload at the store.
static void abort_upload(fsti_upload *upload) {
    end_parts(upload);
    if (upload->is_committed != 1 && upload->url != NULL) fsti_upload_abort(&upload->target);
}

void fsti_upload_close(fsti_upload *upload) {
    if (upload == NULL) return;
    // In a forked child, the requests belong to threads of the parent. Waiting for them would never
    // end, and aborting the upload would destroy the parent's.
    bool is_own = upload->owner == getpid();
    if (is_own) {
        abort_upload(upload);
        pthread_mutex_destroy(&upload->lock);
        pthread_cond_destroy(&upload->changed);
    }
    for (uint32_t i = 0; i < SLOT_COUNT_MAX; i++) {
        fsti_free(upload->slots[i].memory);
        fsti_secret_text_free(upload->slots[i].url);
    }
    fsti_store_unref(upload->store);
    fsti_free(upload->target.etags);
    fsti_secret_text_free(upload->url);
    fsti_free(upload->name);
    fsti_secret_text_free(upload->given);
    fsti_free(upload);
}
