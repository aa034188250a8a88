// SPDX-License-Identifier: Apache-2.0
/// How stores take objects in parts: private to the net room.
#ifndef FSTI_UPLOAD_H
#define FSTI_UPLOAD_H

#include "listing.h"
#include "request.h"
#include "store.h"

/// With its escapes.
#define UPLOAD_ID_BYTES 3073u
/// A cancelled upload waits so long for the store to take it back.
#define UPLOAD_END_MS 2000u
/// A part's mark: its ETag; Azure has none.
typedef char upload_mark[ANSWER_TEXT_BYTES];

/// What an upload has of its own at the store.
typedef struct upload_place {
    const net_store *store;
    const char *url;  ///< of the web
    const char *name; ///< as it may be told
    uint64_t size_bytes;
    uint32_t part_count;
    char id[UPLOAD_ID_BYTES]; ///< escaped; "" where there is none
    uint64_t number;          ///< by chance, of this upload
    int64_t begun_s;          ///< by the store's clock; -1: it has not said
    upload_mark *marks;       ///< of the parts
    uint32_t refusal;         ///< of the joining: the store's status
    bool must_be_new;
    fsti_seen seen, put; ///< what it replaces, and what it is when it is there
    char condition[sizeof(fsti_seen) + 32];
    const char *lines[4]; ///< of the head that puts it in place
    const atomic_bool *stop;
    const fsti_net_watch *watch; ///< asked in waits
    atomic_bool is_cancelled;    ///< by who makes it: there is no time to tidy up for long
    fsti_net_counts counts;      ///< of what follows
} upload_place;

/// Begins an object of several parts. region: where its bucket is, if the store has said that.
fst_status fsti_upload_begin(upload_place *place, char *region, size_t region_size,
                             fst_error *error);
/// `url` with more of a query, from fsti_alloc.
char *fsti_upload_query(const char *url, const char *query);
/// The address of a part, numbered from 0, from fsti_alloc; NULL: no memory, or too long.
char *fsti_upload_part_url(const upload_place *place, uint32_t part);
/// Keeps the mark of a part that was taken; false where there is none that can be given back.
bool fsti_upload_keep_mark(upload_place *place, uint32_t part, const char *etag);
/// Makes the parts one object. *unknown: it failed, and the object may be there.
fst_status fsti_upload_join(upload_place *place, bool *unknown, fst_error *error);
/// Whether the object that is there has these bytes: 1, 0, or -1 where that can't be told.
int fsti_upload_is_same(upload_place *place, const char *bytes, size_t size);
/// Removes the parts of an object that will not be. What fails is only logged.
void fsti_upload_abort(upload_place *place);
/// Lines for the head of a request for a part; they are nobody's.
extern const char *const fsti_upload_part_lines[];
/// Lines for the head that puts the object in place, with what it may replace: place->lines.
void fsti_upload_write_lines(upload_place *place);
/// The line of a head that demands what was seen; false: nothing is demanded.
bool fsti_seen_line(net_store_kind kind, const fsti_seen *seen, char *out, size_t size);
/// What an answer says of the object that it is about.
void fsti_seen_read(net_store_kind kind, const net_answer *answer, fsti_seen *out);
/// A place for objects: FST_E_UNSUPPORTED, FST_E_ARGUMENT.
fst_status fsti_upload_check_place(const net_store *store, const char *url, fst_error *error);
/// Whether a store has said by its status that it did not do what it was asked for, then.
static inline bool fsti_upload_is_refusal(uint32_t status) { return status >= 400 && status < 500; }
/// The status of stores that know no conditions.
#define STATUS_NOT_IMPLEMENTED 501u
/// SHA-256 of what is sent, where the way there proves nothing of it; else NULL.
const char *fsti_upload_hash(const char *url, const char *body, size_t size, char *hex);

#endif
