// SPDX-License-Identifier: Apache-2.0
/// Saves that run while the program continues: the state of the tensors at the call is copied,
/// block by block, into staging memory, and threads of the library write it to the files.
///
///     fst_async_save *save;
///     fst_status status =
///         fst_async_save_start(path, tensors, tensor_count, NULL, &save, &error);
///     if (status != FST_OK) return 1;
///     // ... train: the tensors may change now ...
///     status = fst_async_save_wait(save, -1, &error);
///     if (status != FST_OK) fprintf(stderr, "%s\n", error.message);
///     fst_async_save_close(save);
#ifndef FASTSAFETENSORS_ASYNC_SAVE_H
#define FASTSAFETENSORS_ASYNC_SAVE_H

#include "../writer.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Staging memory that is kept between saves, in huge pages if possible. May be used from any
/// thread. After a fork(), the child can only close a pool.
///
/// Saves that share a pool, and saves that may replace or delete the same files (a model, old files
/// of its set, a manifest), are written one at a time, in the order of their calls; a later save
/// begins to copy its tensors when the earlier one has copied its own. A synchronous save
/// (fst_writer_commit()) waits for the asynchronous ones of its files that were started before. A
/// link at the path is followed when a save is started.
///
/// If a callback of a save saves itself, at once or asynchronously, that counts as older than the
/// save: it waits only for saves that are older still, and with the same files the save waits for
/// it before it puts them in place (`publish` does not). An asynchronous one uses neither the given
/// pool nor `memory_bytes`: without memory for all of its bytes, FST_E_NO_MEMORY. The tensors of a
/// save that must wait for the one that called can't be copied in the callback:
/// fst_async_save_stage() returns FST_E_TIMEOUT at once, and fst_async_save_close() cancels it.
typedef struct fst_staging_pool fst_staging_pool;

/// Opens a pool. `limit_bytes`: its largest size, up to which no save waits for the memory of
/// earlier ones; less than 32 MiB counts as 32 MiB; 0: what the largest save needs. `ready_bytes`:
/// how much of it is allocated now, so that no save waits for it; more than the limit counts as the
/// limit. FST_E_NO_MEMORY if the machine does not have that much. On success *out is a pool, to be
/// closed with fst_staging_close().
FST_API FST_NODISCARD fst_status fst_staging_open(uint64_t limit_bytes, uint64_t ready_bytes,
                                                  fst_staging_pool **out, fst_error *error);

/// Closes a pool. Its memory is freed when the last save that uses it has ended, also if handles of
/// these saves are open. NULL is allowed.
FST_API void fst_staging_close(fst_staging_pool *pool);

/// Returns the memory of a pool in bytes; 0 for NULL.
FST_API uint64_t fst_staging_bytes(const fst_staging_pool *pool);

/// When a save reads the tensors.
typedef enum fst_stage {
    FST_STAGE_COPY = 0, ///< before fst_async_save_start() returns; they may change afterwards
    /// In a thread, while the program continues. The tensors must not change until
    /// fst_async_save_stage(), which copies the rest, has returned FST_OK. A change before that
    /// fails the save with FST_E_FILE_CHANGED if it is in the samples that are taken at the call
    /// and compared with the copies: 2 KiB of each 2 MiB, the first and the last bytes of every
    /// tensor, and all bytes of tensors up to 4 KiB; on a GPU 128 bytes of each 2 MiB and the first
    /// bytes. Other changes are not noticed. If memory is freed too early, the save fails; without
    /// process_vm_readv(2) in the kernel the program crashes.
    FST_STAGE_LAZY = 1,
    /// When their bytes are written, with 32 MiB of staging memory. The tensors must not change
    /// until fst_async_save_stage() has returned FST_OK.
    FST_STAGE_NONE = 2,
} fst_stage;
#define FST_STAGE_COUNT 3

/// What a save does about unfinished earlier saves with the same pool, or of the same files with
/// any pool. Saves that have only a manifest in common are always written in order.
typedef enum fst_overlap {
    FST_OVERLAP_ORDER = 0, ///< it is written after them
    /// When it starts, it cancels them all, except those whose files are in place.
    FST_OVERLAP_SUPERSEDE = 1,
} fst_overlap;
#define FST_OVERLAP_COUNT 2

/// How to save asynchronously. All fields except struct_size may be zero.
typedef struct fst_async_options {
    size_t struct_size;           ///< sizeof(fst_async_options)
    const fst_save_options *save; ///< NULL: the defaults; `progress` is called from a thread
    fst_stage stage;
    fst_overlap overlap;
    /// Threads that copy, including the caller's while it waits; 0: up to 4 (FST_STAGE_COPY), or 1.
    uint32_t thread_count;
    uint32_t nice; ///< priority of the writing threads; 0: the caller's, 19: the lowest
    /// FST_STAGE_COPY: fst_async_save_start() returns after this time even if bytes are left to
    /// copy; a thread copies the rest, together with fst_async_save_stage(). 0: no limit.
    uint32_t start_timeout_ms;
    /// The most staging memory of this save; less than 32 MiB counts as 32 MiB; 0: the pool's
    /// limit. If the tensors are larger, the copy waits until earlier bytes are written.
    uint64_t memory_bytes;
    fst_staging_pool *pool; ///< NULL: memory for this save alone
    /// Returns whether the tensors are unchanged since the call; 0 fails the save with
    /// FST_E_FILE_CHANGED. Called once, by the thread that copies the last byte, or that finds a
    /// sample changed, unless the save has failed before. Must not use this save. May be NULL.
    int (*is_unchanged)(void *context);
    void *context;
    /// For a set of files that several processes save: called once by the writing thread instead of
    /// the commit. `paths`: the temporary paths of this process's files, which are complete, as
    /// those of fst_writer_hidden_path(); the files are deleted after the call, unless they have
    /// other names by then. A folder that was made for them stays. NULL if this process's part has
    /// failed with `status` and *error; its files are deleted then. Returns FST_OK when the files
    /// were published (fst_set_publish()), by this process or another one; otherwise it fills
    /// *error, and the save fails with it. The function may wait for other processes. It must not
    /// use this save, except fst_async_save_cancel(), which then has no effect. The save must not
    /// make a manifest. NULL: the save publishes its files.
    fst_status (*publish)(void *publish_context, fst_status status, const char *const *paths,
                          size_t path_count, fst_error *error);
    void *publish_context;
} fst_async_options;

/// A save that is running or finished. May be used from any thread; call fst_async_save_close()
/// once, when no other call on it is running. After a fork(), the child can only close it.
typedef struct fst_async_save fst_async_save;

/// The progress of a save.
typedef enum fst_async_state {
    FST_ASYNC_STAGING = 0, ///< it reads the caller's tensors
    FST_ASYNC_WRITING = 1, ///< it no longer reads them
    FST_ASYNC_DONE = 2,    ///< the new model is in place
    FST_ASYNC_FAILED = 3,  ///< failed or cancelled: the old model is in place
} fst_async_state;
#define FST_ASYNC_STATE_COUNT 4

/// What an asynchronous save did. Times in nanoseconds of the monotonic clock.
typedef struct fst_async_stats {
    size_t struct_size; ///< sizeof(fst_async_stats)
    fst_async_state state;
    fst_stage stage;
    uint64_t blocked_ns;    ///< time of callers in fst_async_save_start() and _stage()
    uint64_t staged_ns;     ///< from the call until the last read of a tensor; 0: not yet
    uint64_t done_ns;       ///< from the call until the save ended; 0: not yet
    uint64_t bytes_total;   ///< of all files, headers included, before compression
    uint64_t bytes_written; ///< part of bytes_total that was written so far
    uint64_t bytes_staged;  ///< copied from the caller's memory
    uint64_t memory_limit_bytes;
    uint64_t memory_peak_bytes; ///< the most staging memory in use
    /// How often and how long (summed over threads) a copy waited for staging memory: the limit is
    /// smaller than the tensors, or earlier saves use it.
    uint64_t memory_wait_count;
    uint64_t memory_wait_ns;
    uint32_t thread_count; ///< threads of the library that copied
} fst_async_stats;

/// Starts a save: computes the layout, copies the tensors if `stage` is FST_STAGE_COPY, and leaves
/// the rest to threads. All arguments may be freed when it returns, except the memory of the
/// tensors, see fst_stage. Invalid arguments are an error here; errors of the disk or the store are
/// reported by fst_async_save_wait(). Every tensor must have data. On success *out is a handle, to
/// be closed with fst_async_save_close().
FST_API FST_NODISCARD fst_status fst_async_save_start(const char *path,
                                                      const fst_save_tensor *tensors,
                                                      size_t tensor_count,
                                                      const fst_async_options *options,
                                                      fst_async_save **out, fst_error *error);

/// Copies the rest of the tensors, together with the save's threads, and returns when the tensors
/// may change: the barrier before an optimizer step. For FST_STAGE_NONE that is when the last byte
/// has been read to be written. FST_OK does not mean that the save has succeeded:
/// fst_async_save_wait(). `timeout_ms` < 0: no limit. FST_E_TIMEOUT if bytes are left; the error of
/// the save if it failed.
FST_API FST_NODISCARD fst_status fst_async_save_stage(fst_async_save *save, int64_t timeout_ms,
                                                      fst_error *error);

/// Waits for the end of a save and returns its result; may be called again. `timeout_ms` < 0: no
/// limit. FST_E_TIMEOUT if it is still running.
FST_API FST_NODISCARD fst_status fst_async_save_wait(fst_async_save *save, int64_t timeout_ms,
                                                     fst_error *error);

/// Cancels a save: it ends soon with FST_E_CANCELLED, unless the new model is already in place, or,
/// at a store that was sent a whole object and has not answered, may be: FST_E_IO. NULL is allowed.
FST_API void fst_async_save_cancel(fst_async_save *save);

/// Closes a handle. Waits until the tensors may change; the save continues, unless it was
/// cancelled. If fst_async_save_wait() never returned its result, an error of the save is logged.
/// NULL is allowed.
FST_API void fst_async_save_close(fst_async_save *save);

/// For a callback of a save that another thread answers while the callback waits: returns the save
/// that the thread answers for, and says that it answers for `save` (NULL: none) from now on. The
/// callback gets its save by calling this with NULL, and gives it back by a second call; the other
/// thread calls this with that save. What it saves counts as saved by the callback then. It
/// gives the save back (NULL) before the callback returns.
FST_API const fst_async_save *fst_async_save_serve(const fst_async_save *save);

/// Reads the statistics of a save, during it or after it.
FST_API FST_NODISCARD fst_status fst_async_save_stats_get(fst_async_save *save,
                                                          fst_async_stats *stats, fst_error *error);

/// Reads the writer's statistics of a save that has ended; FST_E_ARGUMENT before.
FST_API FST_NODISCARD fst_status fst_async_save_writer_stats(fst_async_save *save,
                                                             fst_save_stats *stats,
                                                             fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
