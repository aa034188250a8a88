// SPDX-License-Identifier: Apache-2.0
/// Objects being made: parts are gathered in memory, sent while others are gathered, and joined at
/// the end. An object of one part is sent at the end, by one request.
#include "upload.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "sha256.h"

/// Stores take 10,000 parts, which are at least 5 MiB but for the last one.
#define PART_COUNT_MAX ((uint64_t)10000)
#define PART_BYTES_MIN ((uint64_t)8 << 20)
#define PART_BYTES_STEP ((uint64_t)1 << 20)
/// Of parts that are gathered or under way.
#define MEMORY_BYTES ((uint64_t)64 << 20)
#define SLOT_COUNT_MAX 8u
#define NAME_BYTES_MAX 1024u
#define ANSWER_BYTES_MAX ((size_t)65536)
/// Of a store's answer in a message.
#define TOLD_BYTES_MAX 240u

typedef enum slot_state { SLOT_FREE, SLOT_FILLING, SLOT_SENDING } slot_state;

/// A part in memory.
typedef struct upload_slot {
    net_request request; ///< while it is sent
    struct fsti_upload *upload;
    slot_state state;
    uint32_t part;
    uint64_t come; ///< bytes of it that are there
    char *memory;
    char *url;
    char hash[SHA256_HEX_BYTES];
} upload_slot;

struct fsti_upload {
    pid_t owner;
    net_store *store;
    char *url, *name, *given; ///< given: the address as it was given
    uint64_t size_bytes, part_bytes;
    upload_place place;
    atomic_bool stop;
    fsti_net_watch watch;
    fsti_part_taker taker; ///< or NULL
    void *taker_context;
    pthread_mutex_t lock; ///< for what follows
    pthread_cond_t changed;
    upload_slot slots[SLOT_COUNT_MAX];
    uint32_t slot_count, sent_count; ///< sent_count: parts that the store has
    uint64_t come_bytes;
    fsti_net_counts counts;
    int is_committed;     ///< -1: not known
    bool is_first_answer; ///< to the only request that was sent for the whole object
    bool is_unclear;      ///< what came for the whole object says 200, and not that it is there
    fst_status status;    ///< of the first part that failed, and why
    fst_error error;
    uint32_t refusal; ///< the store's, of that part
    char region[40];  ///< where the bucket is, if the store has said that when it failed
};

static fst_status fail(const fsti_upload *upload, fst_status status, const char *what,
                       fst_error *error) {
    fsti_error_place place = FSTI_NOWHERE;
    place.file = upload->name;
    return fsti_error_set(error, status, place, "%s", what);
}

static uint64_t part_size(const fsti_upload *upload, uint32_t part) {
    return fsti_min(upload->part_bytes, upload->size_bytes - part * upload->part_bytes);
}

// ---- beginning ----

fst_status fsti_upload_check_place(const net_store *store, const char *url, fst_error *error) {
    fsti_error_place place = FSTI_NOWHERE;
    char name[NAME_BYTES_MAX];
    size_t size = strlen(url);
    fsti_url_tell(url, name, sizeof name);
    place.file = name;
    if (store->kind == NET_STORE_WEB || store->kind == NET_STORE_HUB)
        return fsti_error_set(error, FST_E_UNSUPPORTED, place,
                              "web servers and the Hub take no files here: save to s3://, gs:// or "
                              "az://, or to a file");
    net_url parsed;
    if (strchr(url, '?') != NULL)
        return fsti_error_set(error, FST_E_ARGUMENT, place,
                              "a version that is there can't be saved to");
    if (url[size - 1] == '/' || fsti_url_parse(url, &parsed) != NULL || parsed.path.size < 2)
        return fsti_error_set(error, FST_E_ARGUMENT, place,
                              "the address of a folder: a file needs a name");
    return FST_OK;
}

static void choose_sizes(fsti_upload *upload) {
    uint64_t least = (upload->size_bytes + PART_COUNT_MAX - 1) / PART_COUNT_MAX;
    upload->part_bytes = fsti_max(PART_BYTES_MIN, fsti_align_up(least, PART_BYTES_STEP));
    uint64_t count = (upload->size_bytes + upload->part_bytes - 1) / upload->part_bytes;
    upload->place.part_count = (uint32_t)fsti_max(count, 1);
    upload->slot_count =
        (uint32_t)fsti_min(fsti_max(fsti_min(MEMORY_BYTES / upload->part_bytes, SLOT_COUNT_MAX), 2),
                           upload->place.part_count);
}

static fst_status make_upload(const char *url, uint64_t size_bytes, const fsti_net_watch *watch,
                              fsti_upload **out, fst_error *error) {
    char name[NAME_BYTES_MAX];
    fsti_upload *upload = fsti_alloc_zeroed(1, sizeof *upload);
    if (upload == NULL) return fsti_error_memory(error, sizeof *upload);
    upload->owner = getpid();
    upload->size_bytes = size_bytes;
    pthread_mutex_init(&upload->lock, NULL);
    pthread_cond_init(&upload->changed, NULL);
    fsti_url_tell(url, name, sizeof name);
    choose_sizes(upload);
    *out = upload;
    upload->name = fsti_string_copy(name, strlen(name));
    upload->given = fsti_string_copy(url, strlen(url));
    upload->place.marks = fsti_alloc_zeroed(upload->place.part_count, sizeof(upload_mark));
    if (upload->name == NULL || upload->given == NULL || upload->place.marks == NULL)
        return fsti_error_memory(error, upload->place.part_count * sizeof(upload_mark));
    FST_TRY(fsti_store_open(url, watch, &upload->store, error));
    FST_TRY(fsti_upload_check_place(upload->store, url, error));
    return fsti_store_address(upload->store, url, &upload->url, error);
}

/// Goes to where the bucket is.
static fst_status move_upload(fsti_upload *upload, fst_error *error) {
    fsti_secret_text_free(upload->url);
    upload->url = NULL;
    FST_TRY(fsti_store_address(upload->store, upload->given, &upload->url, error));
    upload->place.url = upload->url;
    return FST_OK;
}

/// Begins; of a bucket that is in another region, once more there.
static fst_status begin_parts(fsti_upload *upload, fst_error *error) {
    char region[sizeof upload->store->region] = "";
    fst_status status = fsti_upload_begin(&upload->place, region, sizeof region, error);
    if (status == FST_OK || !fsti_store_move(upload->store, region)) return status;
    FST_TRY(move_upload(upload, error));
    return fsti_upload_begin(&upload->place, region, sizeof region, error);
}

static void make_place(fsti_upload *upload, const fsti_seen *seen) {
    upload_place *place = &upload->place;
    place->watch = &upload->watch;
    place->store = upload->store;
    place->url = upload->url;
    place->name = upload->name;
    place->size_bytes = upload->size_bytes;
    place->stop = &upload->stop;
    place->must_be_new = fsti_net_must_be_new();
    if (seen != NULL) place->seen = *seen;
    if (place->must_be_new) place->seen = (fsti_seen){.kind = FSTI_SEEN_NOTHING};
    fsti_upload_write_lines(place);
}

fst_status fsti_upload_open(const char *url, uint64_t size_bytes, const fsti_net_watch *watch,
                            const fsti_seen *seen, fsti_upload **out, fst_error *error) {
    const curl_library *curl;
    fsti_upload *upload = NULL;
    FST_TRY(fsti_curl_open(&curl, error));
    fst_status status = make_upload(url, size_bytes, watch, &upload, error);
    if (upload == NULL) return status;
    if (status == FST_OK) {
        if (watch != NULL) upload->watch = *watch;
        make_place(upload, seen);
    }
    if (status == FST_OK && upload->place.part_count > 1) status = begin_parts(upload, error);
    if (status != FST_OK) {
        fsti_upload_close(upload);
        return status;
    }
    *out = upload;
    return FST_OK;
}

// ---- parts ----

/// Whether a store that answered 200 says that it has the object: by a mark, and no error behind
/// it.
static bool is_taken(const net_request *request) {
    size_t size = request->text == NULL ? 0 : request->text_bytes;
    return request->answer.etag[0] != '\0' &&
           (size == 0 || memmem(request->text, size, "<Error", 6) == NULL);
}

/// Whether a request for a whole object has put it in place: -1 where the store has not said that
/// it has not. What it says of a second try says nothing of the first; nor what it says of a
/// condition, as who stands between may have tried twice by himself.
static int has_committed(const net_request *request) {
    uint32_t code = request->answer.status;
    if (request->status == FST_OK) return is_taken(request) ? 1 : -1;
    bool is_first = request->counts.requests == 1;
    bool is_refused = is_first && fsti_upload_is_refusal(code) && code != 412 && code != 409;
    return request->counts.requests == 0 || is_refused ? 0 : -1;
}

/// From a thread of the room's.
static void finish_part(net_request *request) {
    upload_slot *slot = request->context;
    fsti_upload *upload = slot->upload;
    pthread_mutex_lock(&upload->lock);
    fsti_secret_text_free(slot->url);
    slot->url = NULL;
    fsti_net_count(&upload->counts, &request->counts);
    fst_error error = request->error;
    fst_status status = request->status;
    if (status == FST_OK && upload->place.part_count > 1 &&
        !fsti_upload_keep_mark(&upload->place, slot->part, request->answer.etag))
        status = fail(upload, FST_E_IO, "the store took a part, and gave no ETag for it", &error);
    if (upload->place.part_count == 1) {
        upload->is_committed = has_committed(request);
        upload->is_unclear = status == FST_OK && upload->is_committed < 0;
        upload->is_first_answer = request->counts.requests == 1;
        fsti_seen_read(upload->store->kind, &request->answer, &upload->place.put);
    }
    fsti_free(request->text);
    if (upload->is_unclear)
        status =
            fail(upload, FST_E_IO,
                 "the store's answer (status 200) does not say that it took the object", &error);
    if (status == FST_OK) {
        upload->sent_count++;
    } else if (upload->status == FST_OK) {
        upload->status = status;
        upload->error = error;
        upload->refusal = request->answer.status;
        memcpy(upload->region, request->answer.region, sizeof upload->region);
        atomic_store(&upload->stop, true); // the others need not go on
    }
    slot->state = SLOT_FREE;
    pthread_cond_broadcast(&upload->changed);
    pthread_mutex_unlock(&upload->lock);
}

/// A part that can't even be sent.
static fst_status give_up(fsti_upload *upload, upload_slot *slot, fst_error *error) {
    pthread_mutex_lock(&upload->lock);
    slot->state = SLOT_FREE;
    upload->status = fsti_error_memory(&upload->error, strlen(upload->url));
    pthread_cond_broadcast(&upload->changed);
    pthread_mutex_unlock(&upload->lock);
    return fsti_error_memory(error, strlen(upload->url));
}

/// Sends a part whose bytes are all there. `is_whole`: it is the object.
static fst_status send_part(fsti_upload *upload, upload_slot *slot, bool is_whole,
                            fst_error *error) {
    size_t size = (size_t)part_size(upload, slot->part);
    slot->url = is_whole ? fsti_string_copy(upload->url, strlen(upload->url))
                         : fsti_upload_part_url(&upload->place, slot->part);
    if (slot->url == NULL) return give_up(upload, slot, error);
    slot->request =
        (net_request){.method = "PUT",
                      .url = slot->url,
                      .name = upload->name,
                      .store = upload->store,
                      .body = slot->memory,
                      .body_bytes = size,
                      .body_hash = fsti_upload_hash(slot->url, slot->memory, size, slot->hash),
                      .lines = is_whole ? upload->place.lines : fsti_upload_part_lines,
                      .text_bytes_max = ANSWER_BYTES_MAX,
                      .is_fresh = is_whole && upload->place.seen.kind != FSTI_SEEN_ANY,
                      .stop = &upload->stop,
                      .bound_ms = upload->watch.bound_ms,
                      .done = finish_part,
                      .context = slot};
    fsti_request_begin(&slot->request);
    return FST_OK;
}

/// The slot that gathers a part, or a free one; NULL: there is none now. The lock is held.
static upload_slot *look_for_slot(fsti_upload *upload, uint32_t part, bool *is_any_sent) {
    upload_slot *free = NULL;
    *is_any_sent = false;
    for (uint32_t i = 0; i < upload->slot_count; i++) {
        upload_slot *slot = &upload->slots[i];
        if (slot->state == SLOT_FILLING && slot->part == part) return slot;
        if (slot->state == SLOT_FREE && (free == NULL || slot->memory != NULL)) free = slot;
        *is_any_sent = *is_any_sent || slot->state == SLOT_SENDING;
    }
    return free;
}

static fst_status use_slot(fsti_upload *upload, upload_slot *slot, uint32_t part,
                           fst_error *error) {
    if (slot->state == SLOT_FILLING) return FST_OK;
    uint64_t room = fsti_min(upload->part_bytes, upload->size_bytes);
    if (slot->memory == NULL) slot->memory = fsti_alloc((size_t)room);
    if (slot->memory == NULL) return fsti_error_memory(error, room);
    slot->upload = upload;
    slot->state = SLOT_FILLING;
    slot->part = part;
    slot->come = 0;
    return FST_OK;
}

/// Waits until a part is sent, for a moment. The lock is held, and let go of meanwhile.
static fst_status wait_a_moment(fsti_upload *upload, fst_error *error) {
    const fsti_net_watch *watch = &upload->watch;
    if (fsti_net_wait(&upload->changed, &upload->lock) || watch->ask == NULL) return FST_OK;
    pthread_mutex_unlock(&upload->lock);
    fst_status status = watch->ask(watch->context, 0, error);
    if (status != FST_OK) fsti_upload_stop(upload);
    pthread_mutex_lock(&upload->lock);
    return status;
}

/// The lock is held; it is let go of while there is nothing to be had.
static fst_status take_slot(fsti_upload *upload, uint32_t part, upload_slot **out,
                            fst_error *error) {
    for (;;) {
        bool is_any_sent;
        if (upload->status != FST_OK) {
            if (error != NULL) *error = upload->error;
            return upload->status;
        }
        if (atomic_load(&upload->stop)) return fail(upload, FST_E_CANCELLED, "cancelled", error);
        *out = look_for_slot(upload, part, &is_any_sent);
        if (*out != NULL) return use_slot(upload, *out, part, error);
        if (!is_any_sent)
            return fail(upload, FST_E_UNSUPPORTED,
                        "an object is sent as it comes: bytes of so many places at once are more "
                        "than is kept (write tensors one after the other)",
                        error);
        FST_TRY(wait_a_moment(upload, error));
    }
}

/// All bytes of a part are there. One that is the object is sent at the end.
static fst_status end_part(fsti_upload *upload, upload_slot *slot, fst_error *error) {
    if (upload->taker != NULL)
        FST_TRY(upload->taker(upload->taker_context, slot->part * upload->part_bytes, slot->memory,
                              part_size(upload, slot->part), error));
    if (upload->place.part_count == 1) return FST_OK;
    pthread_mutex_lock(&upload->lock);
    slot->state = SLOT_SENDING;
    pthread_mutex_unlock(&upload->lock);
    return send_part(upload, slot, false, error);
}

/// Bytes that lie in one part.
static fst_status put_piece(fsti_upload *upload, uint64_t offset, const char *data, size_t size,
                            fst_error *error) {
    uint32_t part = (uint32_t)(offset / upload->part_bytes);
    upload_slot *slot = NULL;
    pthread_mutex_lock(&upload->lock);
    fst_status status = take_slot(upload, part, &slot, error);
    pthread_mutex_unlock(&upload->lock);
    if (status != FST_OK || slot == NULL) return status;
    // It stays what it is until all of its bytes have come: also these.
    memcpy(slot->memory + offset % upload->part_bytes, data, size);
    pthread_mutex_lock(&upload->lock);
    slot->come += size;
    upload->come_bytes += size;
    bool is_all = slot->come == part_size(upload, part);
    pthread_mutex_unlock(&upload->lock);
    return is_all ? end_part(upload, slot, error) : FST_OK;
}

void fsti_upload_give_parts(fsti_upload *upload, fsti_part_taker taker, void *context) {
    upload->taker = taker;
    upload->taker_context = context;
}

fst_status fsti_upload_write(fsti_upload *upload, const void *data, size_t size, uint64_t offset,
                             fst_error *error) {
    const char *from = data;
    while (size > 0) {
        uint64_t left = upload->part_bytes - offset % upload->part_bytes;
        size_t piece = (size_t)fsti_min(size, left);
        FST_TRY(put_piece(upload, offset, from, piece, error));
        from += piece;
        offset += piece;
        size -= piece;
    }
    return FST_OK;
}

/// Waits until nothing is under way. The lock is held.
static fst_status wait_for_parts(fsti_upload *upload, fst_error *error) {
    for (uint32_t i = 0; i < upload->slot_count; i++)
        while (upload->slots[i].state == SLOT_SENDING) FST_TRY(wait_a_moment(upload, error));
    return FST_OK;
}

fst_status fsti_upload_drain(fsti_upload *upload, fst_error *error) {
    pthread_mutex_lock(&upload->lock);
    fst_status status = wait_for_parts(upload, error);
    if (status == FST_OK && upload->status != FST_OK) {
        status = upload->status;
        if (error != NULL) *error = upload->error;
    }
    bool is_whole = upload->come_bytes == upload->size_bytes;
    pthread_mutex_unlock(&upload->lock);
    if (status == FST_OK && !is_whole)
        status = fail(upload, FST_E_IO, "not all bytes of the object have come", error);
    return status;
}

// ---- the end ----

/// Has what is under way end, and waits for that.
static void end_parts(fsti_upload *upload) {
    fsti_net_watch watch = upload->watch;
    atomic_store(&upload->stop, true);
    pthread_mutex_lock(&upload->lock);
    upload->watch.ask = NULL;
    (void)!wait_for_parts(upload, NULL);
    upload->watch = watch;
    pthread_mutex_unlock(&upload->lock);
}

/// Whether a store that knows no conditions is to be asked without.
static bool drop_condition(upload_place *place, uint32_t status) {
    bool has_one = place->seen.kind != FSTI_SEEN_ANY && !place->must_be_new;
    if (!has_one || status != STATUS_NOT_IMPLEMENTED) return false;
    place->seen.kind = FSTI_SEEN_ANY;
    fsti_upload_write_lines(place);
    return true;
}

/// Of a store's refusal: what is there is not what was seen.
static fst_status tell_change(const fsti_upload *upload, fst_status status, fst_error *error) {
    const upload_place *place = &upload->place;
    if (place->must_be_new || place->seen.kind == FSTI_SEEN_ANY) return status;
    bool is_gone =
        place->seen.kind == FSTI_SEEN_THIS && status == FST_E_NOT_FOUND && place->part_count == 1;
    if (error->os_errno != EEXIST && !is_gone) return status;
    char answer[TOLD_BYTES_MAX];
    const char *told = strrchr(error->message, '(');
    snprintf(answer, sizeof answer, "%s", told == NULL ? "" : told);
    error->os_errno = 0;
    fsti_error_place where = FSTI_NOWHERE;
    where.file = upload->name;
    return fsti_error_set(error, FST_E_FILE_CHANGED, where,
                          "another save has put something there since this one began %s", answer);
}

/// One request for all of it. *again: it is worth another one, in another region, without a
/// condition, or as the store has not done what it was asked for.
static fst_status try_whole(fsti_upload *upload, bool *again, fst_error *error) {
    upload_slot *slot = &upload->slots[0];
    pthread_mutex_lock(&upload->lock);
    fst_status status = use_slot(upload, slot, 0, error); // of an object of no bytes there is none
    if (status == FST_OK) slot->state = SLOT_SENDING;
    pthread_mutex_unlock(&upload->lock);
    if (status == FST_OK) status = send_part(upload, slot, true, error);
    if (status != FST_OK) return status;
    fst_error cause = {0};
    status = fsti_upload_drain(upload, &cause);
    if (status != FST_OK) end_parts(upload); // then it is known what has come of it
    *again = status != FST_OK && (fsti_store_move(upload->store, upload->region) ||
                                  drop_condition(&upload->place, upload->refusal));
    // What is there already may be this one, by a try whose answer was lost, or said nothing.
    bool may_be_it =
        upload->is_committed < 0 && (upload->is_unclear || fsti_upload_is_refusal(upload->refusal));
    if (may_be_it)
        upload->is_committed =
            fsti_upload_is_same(&upload->place, slot->memory, (size_t)upload->size_bytes);
    // Where nothing may be there, the same bytes may have been there before.
    bool is_doubtful = may_be_it && !upload->is_unclear && upload->place.must_be_new;
    if (upload->is_committed == 1 && is_doubtful && upload->is_first_answer)
        upload->is_committed = -1;
    if (upload->is_committed == 1) return FST_OK;
    *again = *again || (upload->is_unclear && upload->is_committed == 0);
    if (status != FST_OK) status = tell_change(upload, status, &cause);
    if (status != FST_OK && error != NULL) *error = cause;
    return status;
}

/// Once for each: another region, no condition, and nothing done.
#define WHOLE_TRIES_MAX 4

static fst_status send_whole(fsti_upload *upload, fst_error *error) {
    for (int i = 1;; i++) {
        bool again = false;
        fst_status status = try_whole(upload, &again, error);
        if (!again || i == WHOLE_TRIES_MAX) return status;
        pthread_mutex_lock(&upload->lock);
        upload->status = FST_OK;
        atomic_store(&upload->stop, false);
        pthread_mutex_unlock(&upload->lock);
        FST_TRY(move_upload(upload, error));
    }
}

fst_status fsti_upload_commit(fsti_upload *upload, fst_error *error) {
    bool is_unknown = false;
    fst_status status;
    FST_TRY(fsti_upload_drain(upload, error));
    if (upload->place.part_count == 1) {
        status = send_whole(upload, error);
    } else {
        fst_error cause = {0};
        status = fsti_upload_join(&upload->place, &is_unknown, &cause);
        if (status != FST_OK && drop_condition(&upload->place, upload->place.refusal))
            status = fsti_upload_join(&upload->place, &is_unknown, &cause);
        if (status != FST_OK) status = tell_change(upload, status, &cause);
        if (status != FST_OK && error != NULL) *error = cause;
        upload->is_committed = status == FST_OK ? 1 : is_unknown ? -1 : 0;
    }
    if (status != FST_OK && upload->is_committed < 0 && error != NULL) {
        size_t used = strlen(error->message);
        snprintf(error->message + used, sizeof error->message - used,
                 "; whether the object is there is not known");
    }
    return status;
}

int fsti_upload_is_committed(const fsti_upload *upload) { return upload->is_committed; }

const fsti_seen *fsti_upload_mark(const fsti_upload *upload) { return &upload->place.put; }

void fsti_upload_stop(fsti_upload *upload) {
    atomic_store(&upload->place.is_cancelled, true);
    atomic_store(&upload->stop, true);
}

void fsti_upload_describe(fsti_upload *upload, char *text, size_t size) {
    pthread_mutex_lock(&upload->lock);
    fsti_net_counts counts = upload->counts;
    pthread_mutex_unlock(&upload->lock);
    fsti_net_count(&counts, &upload->place.counts);
    snprintf(text, size,
             "%" PRIu32 " parts of %" PRIu64 " MiB, %" PRIu64 " requests (%" PRIu64
             " again), credentials: %s",
             upload->place.part_count, upload->part_bytes >> 20, counts.requests, counts.retries,
             upload->store->source);
}

/// Ends what is under way, and removes what the store has.
static void take_back(fsti_upload *upload) {
    end_parts(upload);
    if (upload->is_committed != 1 && upload->url != NULL) fsti_upload_abort(&upload->place);
}

void fsti_upload_close(fsti_upload *upload) {
    if (upload == NULL) return;
    bool is_own = upload->owner == getpid();
    if (is_own) {
        take_back(upload);
        pthread_mutex_destroy(&upload->lock);
        pthread_cond_destroy(&upload->changed);
    }
    for (uint32_t i = 0; i < SLOT_COUNT_MAX; i++) {
        fsti_free(upload->slots[i].memory);
        fsti_secret_text_free(upload->slots[i].url);
    }
    fsti_store_unref(upload->store);
    fsti_free(upload->place.marks);
    fsti_secret_text_free(upload->url);
    fsti_free(upload->name);
    fsti_secret_text_free(upload->given);
    fsti_free(upload);
}
