// SPDX-License-Identifier: Apache-2.0
/// The door of the net room: objects of web servers and stores, by ranges. Knows addresses, HTTP
/// and credentials, never tensors.
#ifndef FSTI_NET_H
#define FSTI_NET_H

#include "base/base.h"
#include "fastsafetensors/remote.h"

/// Whether a path is an address that this room reads.
bool fsti_net_is_url(const char *path);
/// The address of `name` in the folder of `base`, with the query of `base`; bytes of the name that
/// an address of its kind can't have are escaped. From fsti_alloc; NULL: no memory.
char *fsti_url_beside(const char *base, const char *name);

/// What an address is called below `folder` (one with a slash at its end, as it may be told), or
/// where it does not lie there, or that is NULL, its last part; without query, and with its escapes
/// resolved. False where it does not fit.
bool fsti_url_below(const char *url, const char *folder, char *out, size_t size);

/// fst_remote_configure(); the options are checked.
fst_status fsti_net_configure(const fst_remote_options *options, fst_error *error);
/// Whether nobody is asked: cache_offline.
bool fsti_net_is_offline(void);
/// An environment variable that is set and not empty, of a program that runs with the rights of who
/// has started it; else NULL.
const char *fsti_net_environment(const char *name);
/// Whether there is a library to read addresses with, and why not.
bool fsti_net_usable(char *reason, size_t reason_size);

/// Asked ten times a second by who waits for a server, with 0; anything but FST_OK ends the wait at
/// once, whether the server has answered or not.
typedef struct fsti_net_watch {
    fst_status (*ask)(void *context, uint64_t zero, fst_error *error); ///< or NULL
    void *context;
    uint32_t bound_ms; ///< above 0: what each request may take in all
} fsti_net_watch;
/// For what has to be done also where the wait was ended: what ends no wait any more then, but
/// gives requests two seconds. `watch`: or NULL.
fsti_net_watch fsti_net_last_watch(const fsti_net_watch *watch);

/// The keys of a folder (an address with a slash at its end) that end so, as names within it,
/// sorted by nobody. `visit` returns anything but FST_OK to end it. FST_E_UNSUPPORTED where there
/// is no listing. `watch`: or NULL.
typedef fst_status (*fsti_key_visitor)(void *context, const char *name, fst_error *error);
fst_status fsti_net_list(const char *url, const fsti_net_watch *watch, fsti_key_visitor visit,
                         void *context, fst_error *error);
/// The address with what may move under it held still: of the Hub a branch by its commit, which
/// takes one request. *out is from fsti_alloc; NULL: nothing of it moves.
fst_status fsti_net_settle(const char *url, char **out, fst_error *error);
/// A number by chance.
uint64_t fsti_net_random(void);
/// Whether nothing that is there may be replaced.
bool fsti_net_must_be_new(void);

/// What requests have cost.
typedef struct fsti_net_counts {
    uint64_t requests; ///< all that were sent
    uint64_t retries;  ///< of them, those that were sent again
    uint64_t hedges;   ///< of them, those beside one that was late
    uint64_t connections;
    uint64_t bytes;         ///< of bodies
    uint64_t kept_bytes;    ///< that came from the cache on disk instead
    uint64_t written_bytes; ///< that went to it
} fsti_net_counts;
void fsti_net_count(fsti_net_counts *sum, const fsti_net_counts *more);

/// An object of one version: what its first answer said is demanded of all others. Shared by
/// reference count; from any thread, and after a fork.
typedef struct fsti_object fsti_object;
/// Asks for its first bytes, which are kept: FST_E_NOT_FOUND, FST_E_PERMISSION, FST_E_IO; without
/// libcurl FST_E_UNSUPPORTED.
fst_status fsti_object_open(const char *url, fsti_object **out, fst_error *error);
/// The same in two steps: who asks for what, and the first request. `known`: what
/// fsti_object_version_text() has said of it before, or NULL; where it is that still, the answer
/// has no bytes. When nobody may be asked (cache_offline) it is believed to be that.
fst_status fsti_object_make(const char *url, fsti_object **out, fst_error *error);
fst_status fsti_object_ask(fsti_object *object, const char *known, fst_error *error);
/// Its address to tell it from others: of the web, without what signs requests. It may have other
/// secrets: for a digest, not to be written or told. False where it does not fit.
bool fsti_object_address(const fsti_object *object, char *out, size_t size);
/// Whether anything but its size tells one version from another.
bool fsti_object_has_version(const fsti_object *object);
/// Its version in lines; false where it does not fit.
#define FSTI_VERSION_TEXT_BYTES ((size_t)512)
bool fsti_object_version_text(const fsti_object *object, char *out, size_t size);
/// Its first bytes, as far as they came with the first answer.
const char *fsti_object_first(const fsti_object *object, size_t *size);
fsti_object *fsti_object_ref(fsti_object *object);
void fsti_object_unref(fsti_object *object);
/// Its address as it may be told.
const char *fsti_object_name(const fsti_object *object);
uint64_t fsti_object_size(const fsti_object *object);
/// Where its credentials are from, in words.
const char *fsti_object_credentials(const fsti_object *object);
/// What opening it, and blocking reads of it, have cost.
void fsti_object_counts(fsti_object *object, fsti_net_counts *out);

/// Where bytes of a range go that are not asked for by themselves: those below `begin` to `head`,
/// those from `end` on to `tail`, the others to the buffer, which begins with `begin`.
typedef struct fsti_range_edges {
    uint64_t begin, end;
    char *head, *tail;
} fsti_range_edges;

/// A read of [offset, offset + size), which lies in the object; to be kept until `done`.
typedef struct fsti_range_read {
    fsti_object *object;
    uint64_t offset;
    size_t size;
    char *buffer;                  ///< holds nothing that counts until `done`
    const fsti_range_edges *edges; ///< NULL: all of it goes to the buffer
    const atomic_bool *stop; ///< NULL, or: when it is true the read ends soon, with -ECANCELED
    /// Called once, by a thread of the room's; nothing writes to `buffer` any more.
    void (*done)(struct fsti_range_read *read);
    void *context;
    int64_t result;   ///< `size`, or -errno
    fst_error *error; ///< where it says why; not NULL
    fsti_net_counts counts;
} fsti_range_read;
void fsti_range_read_begin(fsti_range_read *read);

/// The same, waited for.
fst_status fsti_object_read(fsti_object *object, void *target, size_t size, uint64_t offset,
                            fst_error *error);

/// What an address had when it was looked at: so it is replaced, or removed, by who has looked.
typedef enum fsti_seen_kind {
    FSTI_SEEN_ANY,     ///< nobody has looked, or could: whatever is there is replaced
    FSTI_SEEN_NOTHING, ///< nothing was there
    FSTI_SEEN_THIS     ///< an object with this mark: its ETag, or with Google its generation
} fsti_seen_kind;
typedef struct fsti_seen {
    fsti_seen_kind kind;
    bool is_hidden; ///< FSTI_SEEN_ANY since who saves may not look; else the store gives no marks
    char mark[192];
} fsti_seen;
/// Looks what is there. `watch`: or NULL.
fst_status fsti_net_look(const char *url, const fsti_net_watch *watch, fsti_seen *out,
                         fst_error *error);
/// Whether both are of one version.
bool fsti_seen_is_same(const fsti_seen *one, const fsti_seen *other);

/// An object being made. It is sent in parts, some of them at a time; nothing is seen at its
/// address before fsti_upload_commit(). In a fork it can only be closed, which leaves it to the
/// parent.
typedef struct fsti_upload fsti_upload;
/// FST_E_UNSUPPORTED where a server takes no objects, FST_E_ARGUMENT for a folder. Objects of
/// several parts are begun at the store here. Memory: parts of 8 MiB or more as they come, 64 MiB.
/// `watch` (copied, or NULL) is asked in all waits of it, by who waits; not when it is closed.
/// `seen` (copied; NULL: any): it replaces nothing but that, else its commit is FST_E_FILE_CHANGED.
/// Stores that know no conditions are not asked for them.
fst_status fsti_upload_open(const char *url, uint64_t size_bytes, const fsti_net_watch *watch,
                            const fsti_seen *seen, fsti_upload **out, fst_error *error);
/// Is given every byte of the object once, part by part (a part begins at a multiple of 1 MiB), in
/// no order, from threads that write. An error is that write's.
typedef fst_status (*fsti_part_taker)(void *context, uint64_t offset, const void *data,
                                      uint64_t size_bytes, fst_error *error);
/// Before the first write.
void fsti_upload_give_parts(fsti_upload *upload, fsti_part_taker taker, void *context);
/// Brings bytes [offset, offset + size) of it, each once, from any thread: in their order, or all
/// over a few parts at a time. Waits while the parts that are under way take all memory.
fst_status fsti_upload_write(fsti_upload *upload, const void *data, size_t size, uint64_t offset,
                             fst_error *error);
/// All bytes have come: waits until the store has those of several parts.
fst_status fsti_upload_drain(fsti_upload *upload, fst_error *error);
/// Puts the object in place, in one step.
fst_status fsti_upload_commit(fsti_upload *upload, fst_error *error);
/// Has everything that is under way end soon, with FST_E_CANCELLED. From any thread.
void fsti_upload_stop(fsti_upload *upload);
/// Whether the object is in place: 1, 0, or -1 where the store has not said so.
int fsti_upload_is_committed(const fsti_upload *upload);
/// What the store has given it, once it is committed.
const fsti_seen *fsti_upload_mark(const fsti_upload *upload);
/// "12 parts of 8 MiB, 14 requests (1 again), credentials: the environment".
void fsti_upload_describe(fsti_upload *upload, char *text, size_t size);
/// Ends it. One that was not committed is taken back, for which the store has two seconds where
/// the upload was cancelled. NULL is allowed.
void fsti_upload_close(fsti_upload *upload);

/// A small object.
typedef struct fsti_fetched {
    char *text; ///< from fsti_alloc, ended by a NUL; NULL: none, or not to be read, or too large
    size_t size;
    bool is_large; ///< of more than `most` bytes
    fsti_seen seen;
} fsti_fetched;
/// All of an object of at most `most` bytes.
fst_status fsti_net_fetch(const char *url, const fsti_net_watch *watch, size_t most,
                          fsti_fetched *out, fst_error *error);
/// Removes an object; one that is not there is fine. `seen` (NULL: any): what has come instead of
/// that stays, which is fine, too, and told in *is_other (or NULL). Where nothing was seen nothing
/// is removed.
/// `watch`: or NULL.
fst_status fsti_net_remove(const char *url, const fsti_seen *seen, const fsti_net_watch *watch,
                           bool *is_other, fst_error *error);

#endif
