// SPDX-License-Identifier: Apache-2.0
/// The threads of an asynchronous save: those that copy, and the one that writes and ends the save.
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "async_state.h"

#define COPY_THREADS_DEFAULT 4u

static void *help_copying(void *context) {
    fst_async_save *save = context;
    (void)!fsti_async_copy_earlier(save, UINT64_MAX);
    fsti_snapshot_help(save->writer->source.snapshot);
    return NULL;
}

static fst_status run_save(fst_async_save *save, fst_error *error) {
    fst_writer *writer = save->writer;
    // While the caller is blocked, every processor and the memory's bandwidth are for the copy.
    if (save->options.stage == FST_STAGE_COPY && fsti_snapshot_fits(writer->source.snapshot))
        FST_TRY(fsti_snapshot_await_staged(writer->source.snapshot, error));
    FST_TRY(fsti_async_await_turn(save, error));
    FST_TRY(fsti_writer_create(writer, NULL, error));
    pthread_mutex_lock(&save->lock);
    save->is_created = true; // from here on cancelling reaches what waits for a store
    pthread_mutex_unlock(&save->lock);
    FST_TRY(fsti_writer_finish(writer, error));
    // Whether the tensors were changed meanwhile must be known before anything is put in place.
    FST_TRY(fsti_snapshot_await_staged(writer->source.snapshot, error));
    return save->options.publish == NULL ? fsti_writer_commit(writer, error)
                                         : fsti_writer_hand_over(writer, error);
}

/// Deletes the files of a failed save, before another process deletes the folder.
static void delete_hidden(const fst_writer *writer) {
    for (uint32_t f = 0; f < writer->contents.file_count; f++) {
        const fsti_output *output = writer->contents.files[f].output;
        if (output != NULL) unlink(fsti_output_hidden_path(output));
    }
}

/// Lets the program publish the files together with those of other processes, or learn of the
/// failure. No thread waits for the tensors meanwhile, because the call may take long.
static fst_status publish_with_others(fst_async_save *save, fst_status status, fst_error *error) {
    fst_writer *writer = save->writer;
    size_t count = writer->contents.file_count;
    const char **paths = status == FST_OK ? fsti_alloc_zeroed(count, sizeof *paths) : NULL;
    if (status == FST_OK && paths == NULL)
        status = fsti_error_memory(error, count * sizeof *paths);
    else if (status == FST_OK && atomic_load(&save->is_cancelled))
        status = fsti_error_set(error, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled");
    if (status != FST_OK) {
        fsti_snapshot_stop(writer->source.snapshot, status, error);
        delete_hidden(writer);
    }
    fsti_folder_keep(&writer->target.folder_use); // other processes may use it
    for (size_t f = 0; status == FST_OK && f < count; f++)
        paths[f] = fsti_writer_hidden_path(writer, (uint32_t)f);
    fsti_async_note_publishing(save, true);
    status =
        save->options.publish(save->options.publish_context, status,
                              status == FST_OK ? paths : NULL, status == FST_OK ? count : 0, error);
    fsti_free(paths);
    return status;
}

/// Names the file in the error of a change, which the snapshot does not know.
static void name_file(const fst_async_save *save, fst_status status, fst_error *error) {
    fst_error own = *error;
    fsti_error_location location = {.file = save->place.path, .byte_offset = FST_NO_OFFSET};
    if (status != FST_E_FILE_CHANGED || own.file[0] != '\0') return;
    (void)!fsti_error_set(error, status, location, "%s", own.message);
}

/// Waits until no caller uses the snapshot, and closes the writer: a failed one leaves
/// nothing behind.
static void close_writer(fst_async_save *save, fst_status status, const fst_error *error) {
    fst_writer *writer = save->writer;
    if (status != FST_OK) fsti_snapshot_stop(writer->source.snapshot, status, error);
    pthread_mutex_lock(&save->lock);
    save->is_ending = true;
    save->status = status;
    if (status != FST_OK) save->error = *error;
    if (status != FST_OK) atomic_store(&save->is_cancelled, true); // its helpers need not wait
    while (save->snapshot_users > 0) pthread_cond_wait(&save->changed, &save->lock);
    pthread_mutex_unlock(&save->lock);
    for (uint32_t i = 0; i < save->helper_count; i++) pthread_join(save->helpers[i], NULL);
    fst_save_stats stats = {.struct_size = sizeof stats};
    (void)!fsti_writer_stats(writer, &stats, NULL);
    fsti_snapshot_stats copied;
    fsti_snapshot_stats_get(writer->source.snapshot, &copied);
    pthread_mutex_lock(&save->lock);
    while (save->snapshot_users > 0) // those that wait for the helpers to end
        pthread_cond_wait(&save->changed, &save->lock);
    save->writer_stats = stats;
    save->snapshot_stats = copied;
    save->bytes_written = fsti_progress_bytes(&writer->progress);
    save->writer = NULL;
    pthread_cond_broadcast(&save->changed);
    pthread_mutex_unlock(&save->lock);
    fsti_writer_close(writer);
}

static void *write_files(void *context) {
    fst_async_save *save = context;
    fst_error error;
    pid_t thread = (pid_t)syscall(SYS_gettid);
    fsti_async_set_callback_save(save); // `progress` and `publish` are called by this thread
    // On Linux each thread has its own priority. A refusal is ignored.
    if (save->options.nice > 0)
        (void)setpriority(PRIO_PROCESS, (id_t)thread, (int)save->options.nice);
    fst_status status = run_save(save, &error);
    if (status != FST_OK) name_file(save, status, &error);
    if (save->options.publish != NULL) status = publish_with_others(save, status, &error);
    close_writer(save, status, &error);
    if (fsti_async_end(save)) fsti_async_log_unheard(save);
    fsti_async_unref(save);
    return NULL;
}

static uint32_t helper_count_of(const fst_async_options *options) {
    bool copies = options->stage == FST_STAGE_COPY;
    uint32_t count = options->thread_count;
    if (count == 0) count = copies ? (uint32_t)fsti_min(fsti_cpu_count(), COPY_THREADS_DEFAULT) : 1;
    if (count > ASYNC_THREAD_COUNT_MAX) count = ASYNC_THREAD_COUNT_MAX;
    // The caller is one of them, unless it does not wait for the end.
    return copies && (count > 1 || options->start_timeout_ms == 0) ? count - 1 : count;
}

/// Threads that can't be started are not missed where the caller copies.
static void start_helpers(fst_async_save *save) {
    uint32_t wanted = helper_count_of(&save->options);
    while (save->helper_count < wanted &&
           fsti_thread_start(&save->helpers[save->helper_count], help_copying, save) == 0)
        save->helper_count++;
}

/// The writing thread is last, because it ends the save.
fst_status fsti_async_start_threads(fst_async_save *save, fst_error *error) {
    pthread_t writing;
    fsti_async_enter(save);
    start_helpers(save);
    fsti_refcount_ref(&save->refs);
    int failure = fsti_thread_start(&writing, write_files, save);
    if (failure == 0) {
        (void)pthread_detach(writing);
        return FST_OK;
    }
    fst_error own;
    fst_status status = fsti_error_thread(&own, failure, save->place.path);
    close_writer(save, status, &own);
    (void)fsti_async_end(save); // a save that was started meanwhile may wait for this one
    if (error != NULL) *error = own;
    fsti_async_unref(save); // the reference that the thread would have had
    return status;
}
