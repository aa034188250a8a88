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
    bool must_be_new;
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
/// Whether the object that is there has these bytes.
bool fsti_upload_is_same(upload_place *place, const char *bytes, size_t size);
/// Removes the parts of an object that will not be. What fails is only logged.
void fsti_upload_abort(upload_place *place);
/// Lines for the head of a request.
typedef enum upload_step { UPLOAD_PART, UPLOAD_WHOLE, UPLOAD_JOIN } upload_step;
const char *const *fsti_upload_lines(const upload_place *place, upload_step step);
/// SHA-256 of what is sent, where the way there proves nothing of it; else NULL.
const char *fsti_upload_hash(const char *url, const char *body, size_t size, char *hex);

#endif
