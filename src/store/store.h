// SPDX-License-Identifier: Apache-2.0
/// Interface of the store module: remote objects, read by ranges, listed, replaced and uploaded.
/// Knows addresses, signatures and credentials of stores; not tensors.
///
/// Knows: addresses, signatures, versions of objects, uploads.
/// Does not know: tensors, headers of models.
/// Main types: fsti_object, fsti_upload, fsti_precondition.
#ifndef FSTI_STORE_H
#define FSTI_STORE_H

#include "base/primitives.h"
#include "http/http.h"
#include "location/location.h"
#include "fastsafetensors/remote.h"

/// Implements fst_remote_configure() with checked options.
fst_status fsti_store_configure(const fst_remote_options *options, fst_error *error);
/// Lists the names with that ending in a folder (URL with a final slash), unsorted. `visit` returns
/// any status except FST_OK to stop. FST_E_UNSUPPORTED if the server has no listings. `watch` may
/// be NULL.
typedef fst_status (*fsti_key_visitor)(void *context, const char *name, fst_error *error);
fst_status fsti_store_list(const char *url, const fsti_http_watch *watch, fsti_key_visitor visit,
                           void *context, fst_error *error);
/// Replaces a mutable revision in a URL by its commit (a branch of the Hub), with one request. *out
/// is from fsti_alloc(); NULL: the URL has no mutable revision.
fst_status fsti_store_pin_revision(const char *url, char **out, fst_error *error);
/// Whether existing objects must not be replaced.
bool fsti_store_forbids_overwrite(void);

/// A remote object of one version: the version of the first response is required of all others.
/// Reference-counted, thread-safe, and usable after a fork.
typedef struct fsti_object fsti_object;
/// Opens an object by requesting its first bytes, which are kept. FST_E_NOT_FOUND,
/// FST_E_PERMISSION, FST_E_IO; FST_E_UNSUPPORTED without libcurl.
fst_status fsti_object_open(const char *url, fsti_object **out, fst_error *error);
/// The same in two steps: resolving URL and credentials, and the first request. `known`: an earlier
/// fsti_object_version_text(), or NULL. If it is still current, the response has no body. Offline
/// it is assumed to be current.
fst_status fsti_object_make(const char *url, fsti_object **out, fst_error *error);
fst_status fsti_object_fetch_first(fsti_object *object, const char *known, fst_error *error);
/// A URL that identifies the object, without signatures in its query. It may still contain secrets,
/// so only a digest of it may be stored. False if it is too long.
bool fsti_object_address(const fsti_object *object, char *out, size_t size);
/// Whether the response identifies a version: by a strong ETag, a generation, or an old date.
bool fsti_object_has_version(const fsti_object *object);
/// The object's version as text. False if it is too long.
#define FSTI_VERSION_TEXT_BYTES ((size_t)512)
bool fsti_object_version_text(const fsti_object *object, char *out, size_t size);
/// The bytes that came with the first response.
const char *fsti_object_first(const fsti_object *object, size_t *size);
fsti_object *fsti_object_ref(fsti_object *object);
void fsti_object_unref(fsti_object *object);
/// The object's URL for messages, redacted.
const char *fsti_object_name(const fsti_object *object);
uint64_t fsti_object_size(const fsti_object *object);
/// The source of its credentials, as text.
const char *fsti_object_credentials(const fsti_object *object);
/// Costs of opening it and of blocking reads.
void fsti_object_counts(fsti_object *object, fsti_http_counts *out);

/// Adds the retries since the last call to *sum, so that each is reported once. Thread-safe.
void fsti_object_take_retries(fsti_object *object, fsti_retries *sum);

/// A read of [offset, offset + size), which must lie in the object. The caller keeps it until
/// `done`.
typedef struct fsti_range_read {
    fsti_object *object;
    uint64_t offset;
    size_t size;
    char *buffer;                  ///< contents undefined until `done`
    const fsti_range_edges *edges; ///< NULL: all bytes go to the buffer
    const atomic_bool *stop;       ///< NULL, or a flag that ends the read soon with -ECANCELED
    /// Called once on a thread of the http module, after the last write to `buffer`.
    void (*done)(struct fsti_range_read *read);
    void *context;
    int64_t result;   ///< `size`, or -errno
    fst_error *error; ///< receives the reason; not NULL
    fsti_http_counts counts;
} fsti_range_read;
void fsti_range_read_begin(fsti_range_read *read);

/// Reads and waits.
fst_status fsti_object_read(fsti_object *object, void *target, size_t size, uint64_t offset,
                            fst_error *error);

/// A condition for replacing or deleting an object: only if it has not changed since it was
/// examined.
typedef enum fsti_precondition_kind {
    FSTI_PRECONDITION_NONE, ///< no condition: replace any object (it was or could not be examined)
    FSTI_PRECONDITION_ABSENT, ///< there was no object
    FSTI_PRECONDITION_VERSION ///< an object with this ETag, or generation at Google
} fsti_precondition_kind;
typedef struct fsti_precondition {
    fsti_precondition_kind kind;
    bool is_forbidden; ///< FSTI_PRECONDITION_NONE because read permission is missing; otherwise the
                       ///< store has no ETags
    char mark[192];
} fsti_precondition;
/// Examines the object at a URL. `watch` may be NULL.
fst_status fsti_store_stat(const char *url, const fsti_http_watch *watch, fsti_precondition *out,
                           fst_error *error);
/// Whether both name the same version.
bool fsti_precondition_equals(const fsti_precondition *one, const fsti_precondition *other);

/// An upload. Its parts are sent in parallel, and the object becomes visible only with
/// fsti_upload_commit(). In a forked child it can only be closed, which leaves it to the parent.
typedef struct fsti_upload fsti_upload;
/// Opens an upload, and starts a multipart upload if it needs several parts. FST_E_UNSUPPORTED if
/// the server accepts no objects, FST_E_ARGUMENT for a folder. Memory: 64 MiB for parts of 8 MiB or
/// more. `watch` (copied, or NULL) is called in all waits, except in close. `expected` (copied;
/// NULL: no condition) limits what may be replaced; otherwise commit returns FST_E_FILE_CHANGED.
/// Stores without conditional writes get none.
fst_status fsti_upload_open(const char *url, uint64_t size_bytes, const fsti_http_watch *watch,
                            const fsti_precondition *expected, fsti_upload **out, fst_error *error);
/// Receives every byte of the object once, part by part (parts start at multiples of 1 MiB) in any
/// order, on the writing threads. Its error becomes the write's.
typedef fst_status (*fsti_part_observer)(void *context, uint64_t offset, const void *data,
                                         uint64_t size_bytes, fst_error *error);
/// Sets the observer, before the first write.
void fsti_upload_observe_parts(fsti_upload *upload, fsti_part_observer observer, void *context);
/// Writes bytes [offset, offset + size), each once, from any thread, in order or within a few parts
/// at a time. Waits while unsent parts use all memory.
fst_status fsti_upload_write(fsti_upload *upload, const void *data, size_t size, uint64_t offset,
                             fst_error *error);
/// After the last write: waits until the store has all parts of a multipart upload.
fst_status fsti_upload_drain(fsti_upload *upload, fst_error *error);
/// Makes the object visible, atomically. `is_unique`: no other save uses its name, so the caller
/// removes it after an error. Otherwise the error says if the object may be visible nevertheless.
fst_status fsti_upload_commit(fsti_upload *upload, bool is_unique, fst_error *error);
/// Cancels all requests; they end soon with FST_E_CANCELLED. Thread-safe.
void fsti_upload_stop(fsti_upload *upload);
/// Whether the object is visible: 1, 0, or -1 if the response was lost.
int fsti_upload_is_committed(const fsti_upload *upload);
/// The version that the store assigned, after the commit.
const fsti_precondition *fsti_upload_version(const fsti_upload *upload);
/// Writes "12 parts of 8 MiB, 14 requests (1 again), credentials: the environment".
void fsti_upload_describe(fsti_upload *upload, char *text, size_t size);
/// Frees the upload. One that was not committed is aborted; after a cancellation the store has two
/// seconds for that. NULL is allowed.
void fsti_upload_close(fsti_upload *upload);

/// The contents of a small object.
typedef struct fsti_fetched {
    char *text; ///< from fsti_alloc(), NUL-terminated; NULL: missing, unreadable or too large
    size_t size;
    bool is_large; ///< has more than `size_max` bytes
    fsti_precondition precondition;
} fsti_fetched;
/// Reads an object of at most `size_max` bytes.
fst_status fsti_store_fetch(const char *url, const fsti_http_watch *watch, size_t size_max,
                            fsti_fetched *out, fst_error *error);
/// Deletes an object; a missing one is not an error. `expected` (NULL: no condition): an object
/// that has replaced it is kept, which is no error either and sets *is_other (may be NULL). If
/// `expected` says that there was no object, nothing is deleted. `watch` may be NULL.
fst_status fsti_store_remove(const char *url, const fsti_precondition *expected,
                             const fsti_http_watch *watch, bool *is_other, fst_error *error);

#endif
