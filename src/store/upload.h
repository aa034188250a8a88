// SPDX-License-Identifier: Apache-2.0
/// Multipart uploads of stores. Private to the store module.
#ifndef FSTI_UPLOAD_H
#define FSTI_UPLOAD_H

#include "listing.h"
#include "http/http.h"
#include "object_store.h"

/// Including escapes.
#define UPLOAD_ID_BYTES 3073u
/// Timeout for aborting a cancelled upload.
#define UPLOAD_END_MS 2000u
/// The ETag of a part; Azure has none.
typedef char upload_etag[RESPONSE_TEXT_BYTES];

/// The state of an upload at the store.
typedef struct upload_target {
    const object_store *store;
    const char *url;  ///< http(s) URL
    const char *name; ///< redacted, for messages
    uint64_t size_bytes;
    uint32_t part_count;
    char id[UPLOAD_ID_BYTES]; ///< escaped; "": no ID
    uint64_t number;          ///< random, unique to this upload
    int64_t begun_s;          ///< by the store's clock; -1: unknown
    upload_etag *etags;       ///< of the parts
    uint32_t refusal;         ///< HTTP status of completing the upload
    bool forbids_overwrite;
    fsti_precondition precondition, put; ///< what it may replace, and its version afterwards
    char condition[sizeof(fsti_precondition) + 32];
    const char *lines[4];         ///< headers of the request that makes it visible
    const atomic_bool *stop;      ///< ends requests
    const fsti_http_watch *watch; ///< called in waits
    atomic_bool is_cancelled;     ///< by the user: limits the time for cleanup
    fsti_http_counts counts;      ///< of the requests below
} upload_target;

/// Starts a multipart upload. region: set to the bucket's region if the store reports it.
fst_status fsti_upload_begin(upload_target *target, char *region, size_t region_size,
                             fst_error *error);
/// `url` with more query parameters, from fsti_alloc().
char *fsti_upload_query(const char *url, const char *query);
/// The URL of a part, numbered from 0, from fsti_alloc(); NULL: no memory, or too long.
char *fsti_upload_part_url(const upload_target *target, uint32_t part);
/// Stores the ETag of an accepted part. False if it is missing or unusable.
bool fsti_upload_keep_etag(upload_target *target, uint32_t part, const char *etag);
/// Completes the multipart upload. *unknown: it failed, but the object may exist.
fst_status fsti_upload_complete(upload_target *target, bool *unknown, fst_error *error);
/// Whether the existing object has these bytes: 1, 0, or -1 if unknown.
int fsti_upload_is_same(upload_target *target, const char *bytes, size_t size);
/// Aborts the upload at the store. Failures are only logged.
void fsti_upload_abort(upload_target *target);
/// Headers of a request for a part. Static.
extern const char *const fsti_upload_part_lines[];
/// Writes the headers of the request that makes the object visible, with the condition, to
/// target->lines.
void fsti_upload_write_lines(upload_target *target);
/// Writes the header for a condition. False: unconditional.
bool fsti_precondition_header(fsti_location_kind kind, const fsti_precondition *precondition,
                              char *out, size_t size);
/// Reads the object's version from a response.
void fsti_precondition_read(fsti_location_kind kind, const http_response *answer,
                            fsti_precondition *out);
/// Whether the status means that the store did not execute the request.
static inline bool fsti_upload_is_refusal(uint32_t status) { return status >= 400 && status < 500; }
/// The status of stores without conditional writes.
#define STATUS_NOT_IMPLEMENTED 501u
/// SHA-256 of the body, if the connection does not protect it; else NULL.
const char *fsti_upload_hash(const char *url, const char *body, size_t size, char *hex);

#endif
