// SPDX-License-Identifier: Apache-2.0
/// The middle of a save: checks that every byte was written, fills the files from the source, with
/// several threads for sharded models, and syncs if durable.
#include "save_state.h"

#define THREAD_COUNT_MAX 16u

static fst_status finish_file(fst_writer *writer, uint32_t file_index, fst_error *error) {
    save_file *file = &writer->contents.files[file_index];
    fst_status status = writer->source.kind->fill(writer, file_index, error);
    // Files written by several processes are digested when complete, before they are published.
    if (status == FST_OK && writer->publication.manifest.kind != NULL &&
        writer->options.others_write == 0)
        status = fsti_save_manifest_end(writer, file, error);
    FST_TRY(status);
    return writer->target.kind->settle(writer, file->output, error);
}

/// Shared by the threads that finish files.
typedef struct finish_job {
    fst_writer *writer;
    const fst_async_save *callback_save; ///< the calling thread is in its callback; NULL: in none
    atomic_uint next_file;
    pthread_mutex_t lock;
    fst_status status;
    fst_error error;
} finish_job;

static void *finish_files(void *context) {
    finish_job *job = context;
    (void)fsti_async_set_callback_save(job->callback_save);
    for (;;) {
        uint32_t file = atomic_fetch_add(&job->next_file, 1);
        pthread_mutex_lock(&job->lock);
        bool stop = file >= job->writer->contents.file_count || job->status != FST_OK;
        pthread_mutex_unlock(&job->lock);
        if (stop) return NULL;
        fst_error error;
        fst_status status = finish_file(job->writer, file, &error);
        pthread_mutex_lock(&job->lock);
        if (status != FST_OK && job->status == FST_OK) {
            job->status = status;
            job->error = error;
        }
        pthread_mutex_unlock(&job->lock);
    }
}

static fst_status finish_all(fst_writer *writer, fst_error *error) {
    finish_job job = {
        .writer = writer, .callback_save = fsti_async_set_callback_save(NULL), .status = FST_OK};
    pthread_t threads[THREAD_COUNT_MAX];
    uint32_t wanted = writer->options.thread_count, count = 0;
    if (wanted == 0) wanted = fsti_cpu_count();
    wanted = (uint32_t)fsti_min(fsti_min(wanted, writer->contents.file_count), THREAD_COUNT_MAX);
    pthread_mutex_init(&job.lock, NULL);
    // This thread works as well, so a failed start is no error.
    while (count + 1 < wanted && fsti_thread_start(&threads[count], finish_files, &job) == 0)
        count++;
    finish_files(&job);
    for (uint32_t i = 0; i < count; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&job.lock);
    if (job.status != FST_OK && error != NULL) *error = job.error;
    return job.status;
}

fst_status fsti_writer_finish(fst_writer *writer, fst_error *error) {
    FST_TRY(fsti_writer_check_open(writer, error));
    const fsti_source_kind *source = writer->source.kind;
    if (source->ready != NULL)
        FST_TRY(source->ready(writer, error)); // missing bytes may still be written
    fst_status status = FST_OK;
    if (writer->stream.file != NULL)
        status = fsti_writer_close_stage(writer, writer->stream.file, error);
    if (status == FST_OK) status = finish_all(writer, error);
    atomic_store(&writer->state, status == FST_OK ? WRITER_FINISHED : WRITER_FAILED);
    return status;
}

fst_status fsti_writer_make_finished(fst_writer *writer, fst_error *error) {
    if (atomic_load(&writer->state) == WRITER_OPEN) FST_TRY(fsti_writer_finish(writer, error));
    int state = atomic_load(&writer->state);
    if (state == WRITER_FINISHED) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "the save %s",
                          state == WRITER_FAILED ? "has failed" : "is committed");
}
