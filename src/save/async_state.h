// SPDX-License-Identifier: Apache-2.0
/// The state of an asynchronous save. Private to its files:
///
///   async_save.c    the calls on a handle
///   async_thread.c  the threads of a save, from its start to its end
///   async_copy.c    copies of the tensors, in the order of the saves
///   async_order.c   which saves run, and which must end before others
///   async_place.c   the files that a save may replace
///   async_state.c   references, ownership, cancellation
#ifndef FSTI_ASYNC_STATE_H
#define FSTI_ASYNC_STATE_H

#include "save_state.h"

#define ASYNC_THREAD_COUNT_MAX 16u

/// A path, the target of its link, their usual manifest, and a manifest with its link; or a set.
#define PLACE_NAME_COUNT_MAX 5

/// A name of a file, or several names in a folder.
typedef struct place_name {
    char *folder; ///< without links, with a slash at its end; or a URL
    char *path;   ///< in the folder; NULL: several names
    char *stem;   ///< of a set whose files and index are meant; NULL: all names
    dev_t device; ///< of the folder; with `inode` 0: it does not exist, or is a URL
    ino_t inode;
    bool is_manifest;
    bool is_removed; ///< the save makes no such file
} place_name;

/// The files that a save may replace or delete.
typedef struct save_place {
    char *path;       ///< for messages
    const char *link; ///< what `path` is a link to, if that is followed; one of the names
    place_name names[PLACE_NAME_COUNT_MAX];
    size_t count;
    bool is_link; ///< the name is a link's, which saves that follow it do not replace
} save_place;

struct fst_async_save {
    fsti_refcount refs; ///< the handle, the writing thread, and those that wait
    pid_t owner;
    fst_async_options options; ///< `save` is NULL
    fst_staging_pool *pool;    ///< until the end
    bool has_own_memory;       ///< for all of it: its copy waits for no other save
    save_place place;
    char *manifest;     ///< of the writer's options
    fst_writer *writer; ///< of the writing thread, which closes it
    fst_async_save *next_running;
    uint64_t start_ns;
    uint64_t order_ns;   ///< lower for earlier saves; about the time when it was started
    bool must_end_first; ///< under the lock of those that run
    bool is_publishing;  ///< the program publishes its files
    pthread_t helpers[ASYNC_THREAD_COUNT_MAX];
    uint32_t helper_count;
    atomic_bool is_cancelled;
    atomic_bool is_copied; ///< nothing of the tensors is left to copy
    atomic_uint_fast64_t blocked_ns;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t snapshot_users; ///< callers that use the snapshot: the writing thread waits for them
    bool is_created;         ///< the writer has its files
    bool is_ending;          ///< `status` is known; no caller may begin to use the snapshot
    bool is_ended, is_told, is_closed;
    fst_status status;
    fst_error error;
    uint64_t done_ns, bytes_total, bytes_written;
    fsti_snapshot_stats snapshot_stats; ///< final
    fst_save_stats writer_stats;        ///< final
};

// ---- references ----

/// A save without pool and writer; NULL without memory.
fst_async_save *fsti_async_make(const fsti_async_request *request);
void fsti_async_unref(fst_async_save *save);
/// FST_E_UNSUPPORTED in a forked child.
fst_status fsti_async_check_owner(const fst_async_save *save, fst_error *error);
/// Whether the save has failed and its result was never requested. Its lock is held.
bool fsti_async_is_unheard(const fst_async_save *save);
void fsti_async_log_unheard(const fst_async_save *save);

// ---- places ----

/// Finds what a save replaces. The caller clears it, also after an error.
fst_status fsti_async_find_place(const fst_writer *writer, save_place *out, fst_error *error);
/// The same for the model at a path.
fst_status fsti_async_find_file(const char *path, save_place *out, fst_error *error);
/// The link at the only path of a save that follows it; without a name if that is no link.
fst_status fsti_async_find_link(const fst_writer *writer, save_place *out, fst_error *error);
/// Whether the first place's save may replace a file of the other.
bool fsti_async_are_same_place(const save_place *one, const save_place *other);
/// The same without files that are manifests of both.
bool fsti_async_are_same_model(const save_place *one, const save_place *other);
/// Removes the name of a link, which the save does not replace.
void fsti_async_forget_link(save_place *place);
void fsti_async_clear_place(save_place *place);

// ---- order ----

/// Whether this thread calls the program for a save, which may wait for what the thread does.
bool fsti_async_in_callback(void);
/// Whether it does, and that save was cancelled.
bool fsti_async_in_cancelled_callback(void);
/// Whether it does, and this save must wait for that one, or is that one.
bool fsti_async_is_blocked(fst_async_save *save);
/// The time that decides which asynchronous saves are earlier than a synchronous save of this
/// thread: now, or the start of the save that the thread calls the program for, because that and
/// later ones may wait for the thread. 0: none runs in this process.
uint64_t fsti_async_order_ns(void);
/// A save of a place that runs and was started before a time; referenced, or NULL. `publishes`: nor
/// one that waits until its files are published, perhaps by the caller, nor a later one.
fst_async_save *fsti_async_earlier_at(const save_place *place, uint64_t order_ns, bool publishes);
/// Waits until a save has ended, or for a short time.
void fsti_async_await_a_little(fst_async_save *earlier);
/// Adds a save to those that run: as the latest one, or in a callback of a save as the latest one
/// before it.
void fsti_async_enter(fst_async_save *save);
/// Cancels the saves that it supersedes.
void fsti_async_cancel_earlier(fst_async_save *save);
/// Notes whether the program publishes the files of a save.
void fsti_async_note_publishing(fst_async_save *save, bool is_publishing);
/// Gives the pool back, removes the save from those that run, and wakes who waits for its end.
/// Returns whether its error must be logged: its handle was closed before.
bool fsti_async_end(fst_async_save *save);
/// Waits for the end of all saves before this one.
fst_status fsti_async_await_turn(fst_async_save *save, fst_error *error);
/// Returns a new reference to a save whose tensors must be copied next: `save` itself, unless an
/// earlier one must precede it.
fst_async_save *fsti_async_next_to_copy(fst_async_save *save);
/// The time after which a waiting save looks again whether it was cancelled itself.
uint64_t fsti_async_next_check(void);

// ---- copies ----

/// Copies what is left of the saves before this one: they must not wait for staging memory that a
/// later one holds, because the later one is written after them. Their failures are not errors
/// here. FST_E_TIMEOUT if bytes are left. Ends when this save is cancelled.
fst_status fsti_async_copy_earlier(fst_async_save *save, uint64_t deadline_ns);
/// Copies those, and then this save's tensors.
fst_status fsti_async_copy(fst_async_save *save, uint64_t deadline_ns, fst_error *error);
/// Waits until the tensors may change. In a callback of an earlier save, cancels the save for that.
void fsti_async_end_reading(fst_async_save *save);

// ---- threads ----

/// Starts the threads of a save that is planned. On failure the save has ended.
fst_status fsti_async_start_threads(fst_async_save *save, fst_error *error);

#endif
