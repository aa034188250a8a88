// SPDX-License-Identifier: Apache-2.0
/// Interface of the net module: remote objects, read by ranges. Knows URLs, HTTP and credentials,
/// not tensors.
#ifndef FSTI_NET_H
#define FSTI_NET_H

#include "base/primitives.h"
#include "fastsafetensors/remote.h"

/// Whether a path is a URL that this module reads.
bool fsti_net_is_url(const char *path);
/// The URL of `name` in the folder of `base`, with the query of `base`. Bytes not allowed in such a
/// URL are escaped. From fsti_alloc(); NULL: no memory.
char *fsti_url_sibling(const char *base, const char *name);

/// The path of a URL relative to `folder` (redacted, with a final slash), without query and
/// unescaped. If it is not below `folder`, or that is NULL, its last part. False if it is too long.
bool fsti_url_relative(const char *url, const char *folder, char *out, size_t size);

/// Implements fst_remote_configure() with checked options.
fst_status fsti_net_configure(const fst_remote_options *options, fst_error *error);
/// Whether requests are forbidden, by fst_remote_configure() or by the environment as last read.
bool fsti_net_is_offline(void);
/// Reads from the environment whether requests are forbidden and which certificates to trust.
/// Called by the thread that opens something, because the program may change the environment while
/// an event loop runs.
void fsti_net_read_environment(void);
/// An environment variable that is not empty; NULL in a setuid program or if unset.
const char *fsti_net_environment(const char *name);
/// Whether libcurl is available, and the reason if not.
bool fsti_net_usable(char *reason, size_t reason_size);

/// A cancellation callback. The thread that waits for a server calls `ask` with 0 ten times a
/// second; any result except FST_OK ends the wait at once.
typedef struct fsti_net_watch {
    fst_status (*ask)(void *context, uint64_t zero, fst_error *error); ///< may be NULL
    void *context;
    uint32_t bound_ms; ///< if above 0, the timeout of each request
} fsti_net_watch;
/// A watch for cleanup after a cancelled wait: it cancels nothing, but limits each request to two
/// seconds. `watch` may be NULL.
fsti_net_watch fsti_net_cleanup_watch(const fsti_net_watch *watch);

/// Lists the names with that ending in a folder (URL with a final slash), unsorted. `visit` returns
/// any status except FST_OK to stop. FST_E_UNSUPPORTED if the server has no listings. `watch` may
/// be NULL.
typedef fst_status (*fsti_key_visitor)(void *context, const char *name, fst_error *error);
fst_status fsti_net_list(const char *url, const fsti_net_watch *watch, fsti_key_visitor visit,
                         void *context, fst_error *error);
/// Replaces a mutable revision in a URL by its commit (a branch of the Hub), with one request. *out
/// is from fsti_alloc(); NULL: the URL has no mutable revision.
fst_status fsti_net_pin_revision(const char *url, char **out, fst_error *error);
/// Whether existing objects must not be replaced.
bool fsti_net_forbids_overwrite(void);

/// Costs of requests.
typedef struct fsti_net_counts {
    uint64_t requests; ///< all that were sent
    uint64_t retries;  ///< repeated requests among them
    uint64_t hedges;   ///< hedged requests among them, sent because another one was late
    uint64_t connections;
    uint64_t bytes;         ///< in response bodies
    uint64_t kept_bytes;    ///< read from the disk cache instead
    uint64_t written_bytes; ///< written to the disk cache
    uint64_t retry_wait_ns; ///< sum over requests: waiting before retries
    uint64_t first_byte_ns; ///< sum over requests: from sending to the first byte of the response
} fsti_net_counts;
void fsti_net_count(fsti_net_counts *sum, const fsti_net_counts *more);

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
/// Whether more than its size identifies a version.
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
void fsti_object_counts(fsti_object *object, fsti_net_counts *out);

/// Why a request was repeated.
typedef enum fsti_retry_cause {
    FSTI_RETRY_REFUSED, ///< no connection: refused, or unknown host
    FSTI_RETRY_SILENT,  ///< no response in time, or a stalled one
    FSTI_RETRY_BROKEN,  ///< the connection ended before the response
    FSTI_RETRY_CUT,     ///< the response ended early
    FSTI_RETRY_STATUS,  ///< the server reported an error or throttling
    FSTI_RETRY_CAUSE_COUNT
} fsti_retry_cause;
/// Retries of an object's requests.
typedef struct fsti_retries {
    uint64_t counts[FSTI_RETRY_CAUSE_COUNT];
    uint64_t wait_ns; ///< sum over requests: waiting before retries
    uint32_t status;  ///< the last status for FSTI_RETRY_STATUS
} fsti_retries;
/// Adds the retries since the last call to *sum, so that each is reported once. Thread-safe.
void fsti_object_take_retries(fsti_object *object, fsti_retries *sum);

/// Where to put bytes of a range outside [begin, end): those before go to `head`, those after to
/// `tail`. The buffer starts at `begin`.
typedef struct fsti_range_edges {
    uint64_t begin, end;
    char *head, *tail;
} fsti_range_edges;

/// A read of [offset, offset + size), which must lie in the object. The caller keeps it until
/// `done`.
typedef struct fsti_range_read {
    fsti_object *object;
    uint64_t offset;
    size_t size;
    char *buffer;                  ///< contents undefined until `done`
    const fsti_range_edges *edges; ///< NULL: all bytes go to the buffer
    const atomic_bool *stop;       ///< NULL, or a flag that ends the read soon with -ECANCELED
    /// Called once on a thread of this module, after the last write to `buffer`.
    void (*done)(struct fsti_range_read *read);
    void *context;
    int64_t result;   ///< `size`, or -errno
    fst_error *error; ///< receives the reason; not NULL
    fsti_net_counts counts;
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
fst_status fsti_net_stat(const char *url, const fsti_net_watch *watch, fsti_precondition *out,
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
fst_status fsti_upload_open(const char *url, uint64_t size_bytes, const fsti_net_watch *watch,
                            const fsti_precondition *precondition, fsti_upload **out,
                            fst_error *error);
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
/// Makes the object visible, atomically.
fst_status fsti_upload_commit(fsti_upload *upload, fst_error *error);
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
fst_status fsti_net_fetch(const char *url, const fsti_net_watch *watch, size_t size_max,
                          fsti_fetched *out, fst_error *error);
/// Deletes an object; a missing one is not an error. `expected` (NULL: no condition): an object
/// that has replaced it is kept, which is no error either and sets *is_other (may be NULL). If
/// `expected` says that there was no object, nothing is deleted. `watch` may be NULL.
fst_status fsti_net_remove(const char *url, const fsti_precondition *precondition,
                           const fsti_net_watch *watch, bool *is_other, fst_error *error);

#endif
