// SPDX-License-Identifier: Apache-2.0
/// The state of an asynchronous save. Private to its files:
///
///   async_save.c    the calls on a handle
///   async_thread.c  the threads of a save, from its start to its end
///   async_copy.c    copies of the tensors, in the order of the saves
///   async_order.c   which saves run, and which must end before others
///   async_state.c   references, places, ownership, cancellation
#ifndef FSTI_ASYNC_STATE_H
#define FSTI_ASYNC_STATE_H

#include "save_state.h"

#define ASYNC_THREAD_COUNT_MAX 16u

/// The files that a save replaces.
typedef struct save_place {
    char *path;
    char *target; ///< `path` without links; NULL: it is too long for that
    bool is_set;  ///< several files
} save_place;

struct fst_async_save {
    fsti_refcount refs; ///< the handle, the writing thread, and the save that comes after
    pid_t owner;
    fst_async_options options; ///< `save` is NULL
    fst_staging_pool *pool;    ///< until the end
    save_place place;
    char *manifest;     ///< of the writer's options
    fst_writer *writer; ///< of the writing thread, which closes it
    fst_async_save *next_running;
    uint64_t start_ns;
    pthread_t helpers[ASYNC_THREAD_COUNT_MAX];
    uint32_t helper_count;
    atomic_bool is_cancelled;
    atomic_bool is_copied; ///< nothing of the tensors is left to copy
    atomic_uint_fast64_t blocked_ns;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    /// The save that this one comes after, if that has not ended; after a cancelled one the one
    /// before that.
    fst_async_save *previous;
    uint32_t user_count; ///< callers that use the snapshot: the writing thread waits for them
    bool is_created;     ///< the writer has its files
    bool is_ending;      ///< `status` is known; no caller may begin to use the snapshot
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
/// Finds what a save replaces. The caller clears it, also after an error.
fst_status fsti_async_find_place(const fst_writer *writer, save_place *out, fst_error *error);
/// The same for the file of a path, through its links.
fst_status fsti_async_find_file(const char *path, save_place *out, fst_error *error);
void fsti_async_clear_place(save_place *place);
/// FST_E_UNSUPPORTED in a forked child.
fst_status fsti_async_check_owner(const fst_async_save *save, fst_error *error);
/// Whether the save has failed and its result was never requested. Its lock is held.
bool fsti_async_is_unheard(const fst_async_save *save);
void fsti_async_log_unheard(const fst_async_save *save);

// ---- order ----

/// Says that this thread writes an asynchronous save.
void fsti_async_note_thread(void);
/// Whether a synchronous save of this thread may have to wait: asynchronous ones run in this
/// process, and the thread does not write one.
bool fsti_async_must_wait(void);
/// A save of a place that runs and was started before a time; referenced, or NULL.
fst_async_save *fsti_async_earlier_at(const save_place *place, uint64_t start_ns);
/// Waits until a save has ended, or for a short time.
void fsti_async_await_a_little(fst_async_save *earlier);
/// Adds a save to those that run, and finds the one that it comes after.
void fsti_async_enter(fst_async_save *save);
/// Gives the pool back, removes the save from those that run, and wakes who waits for its end.
/// Returns whether its error must be logged: its handle was closed before.
bool fsti_async_end(fst_async_save *save);
/// Waits for the end of all saves before this one, or cancels them.
fst_status fsti_async_await_turn(fst_async_save *save, fst_error *error);
/// Returns a new reference to a save whose tensors must be copied next: `save` itself, unless an
/// earlier one must precede it.
fst_async_save *fsti_async_next_to_copy(fst_async_save *save);
/// The time after which a waiting save looks again whether it was cancelled itself.
uint64_t fsti_async_next_check(void);

// ---- copies ----

/// Copies what is left of the saves before this one: they must not wait for staging memory that a
/// later one holds, because the later one is written after them. Their failures are not errors
/// here. FST_E_TIMEOUT if bytes are left.
fst_status fsti_async_copy_earlier(fst_async_save *save, uint64_t deadline_ns);
/// Copies those, and then this save's tensors.
fst_status fsti_async_copy(fst_async_save *save, uint64_t deadline_ns, fst_error *error);

// ---- threads ----

/// Starts the threads of a save that is planned. On failure the save has ended.
fst_status fsti_async_start_threads(fst_async_save *save, fst_error *error);

#endif
