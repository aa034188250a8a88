// SPDX-License-Identifier: Apache-2.0
/// The middle of a save: writes tensors that were given with data, with several threads for sharded
/// models; then checks that every byte was written, and syncs if durable.
#include "device_reader.h"
#include "save_state.h"

#define THREAD_COUNT_MAX 16u

/// Writes the zeros of padding tensors, so that bytes reach the stage in order.
static fst_status write_padding(save_file *file, const fsti_header_entry *entry, fst_error *error) {
    static const char zeros[4096];
    for (uint64_t at = entry->begin; at < entry->end;) {
        uint64_t size = fsti_min(entry->end - at, sizeof zeros);
        FST_TRY(
            fsti_stage_put(file->stage, file->layout.header_bytes + at, zeros, size, true, error));
        at += size;
    }
    return FST_OK;
}

/// Writes a device tensor block by block, without a complete copy in CPU memory.
static fst_status write_device_tensor(save_file *file, const save_tensor *tensor,
                                      device_reader *reader, fst_error *error) {
    const char *data;
    uint64_t size;
    for (uint64_t done = 0; done < tensor->size_bytes; done += size) {
        FST_TRY(fsti_device_reader_next(reader, &data, &size, error));
        FST_TRY(fsti_stage_put(file->stage, tensor->offset + done, data, size, false, error));
    }
    return FST_OK;
}

static fst_status write_tensors(fst_writer *writer, uint32_t file_index, device_reader *reader,
                                fst_error *error) {
    save_file *file = &writer->files[file_index];
    const uint32_t *members = writer->members + writer->member_begin[file_index];
    for (size_t i = 0; i < file->layout.entry_count; i++) {
        uint32_t entry = file->layout.order[i];
        if (entry >= file->layout.tensor_count) {
            FST_TRY(write_padding(file, &file->layout.entries[entry], error));
            continue;
        }
        save_tensor *tensor = &writer->tensors[members[entry]];
        if (tensor->data == NULL || tensor->size_bytes == 0) continue;
        FST_TRY(fsti_save_is_on_device(tensor)
                    ? write_device_tensor(file, tensor, reader, error)
                    : fsti_stage_put(file->stage, tensor->offset, tensor->data, tensor->size_bytes,
                                     true, error));
        pthread_mutex_lock(&writer->lock);
        writer->tensors_done++;
        pthread_mutex_unlock(&writer->lock);
    }
    return FST_OK;
}

static fst_status put_tensors(fst_writer *writer, uint32_t file_index, fst_error *error) {
    device_reader reader = {.writer = writer, .file_index = file_index};
    fst_status status = write_tensors(writer, file_index, &reader, error);
    fsti_device_reader_close(&reader);
    return status;
}

static fst_status finish_file(fst_writer *writer, uint32_t file_index, fst_error *error) {
    save_file *file = &writer->files[file_index];
    fst_status status = FST_OK;
    if (writer->origin_header != NULL) {
        status = fsti_writer_pack(writer, file, error);
    } else if (writer->is_whole) {
        status = fsti_writer_copy_whole(writer, error);
    } else if (writer->origin != NULL) {
        status = fsti_writer_copy_origin(writer, error);
    } else if (writer->is_joined) {
        fsti_output_unmap(file->output); // mapped bytes need no further write
    } else {
        status = fsti_writer_open_stage(writer, file, error);
        if (status == FST_OK)
            status = writer->snapshot != NULL ? fsti_writer_put_snapshot(writer, file_index, error)
                                              : put_tensors(writer, file_index, error);
        fst_status closed = fsti_writer_close_stage(writer, file, status == FST_OK ? error : NULL);
        if (writer->snapshot != NULL)
            fsti_snapshot_release(writer->snapshot, file_index, UINT64_MAX);
        fsti_output_unmap(file->output);
        if (status == FST_OK) status = closed;
        if (status == FST_OK && writer->options.compress != FST_COMPRESS_NONE)
            status = fsti_writer_pack(writer, file, error);
    }
    // Files written by several processes are digested when complete, before they are published.
    if (status == FST_OK && writer->manifest.kind != NULL && writer->options.others_write == 0)
        status = fsti_save_manifest_end(writer, file, error);
    // Errors of a store must be reported before anything is published.
    if (status == FST_OK && writer->is_remote) return fsti_output_sync(file->output, error);
    if (status != FST_OK || writer->options.promise != FST_SAVE_DURABLE) return status;
    return fsti_writer_sync(writer, file->output, error);
}

/// Shared by the threads that finish files.
typedef struct finish_job {
    fst_writer *writer;
    atomic_uint next_file;
    pthread_mutex_t lock;
    fst_status status;
    fst_error error;
} finish_job;

static void *finish_files(void *context) {
    finish_job *job = context;
    for (;;) {
        uint32_t file = atomic_fetch_add(&job->next_file, 1);
        pthread_mutex_lock(&job->lock);
        bool stop = file >= job->writer->file_count || job->status != FST_OK;
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
    finish_job job = {.writer = writer, .status = FST_OK};
    pthread_t threads[THREAD_COUNT_MAX];
    uint32_t wanted = writer->options.thread_count, count = 0;
    if (wanted == 0) wanted = fsti_cpu_count();
    wanted = (uint32_t)fsti_min(fsti_min(wanted, writer->file_count), THREAD_COUNT_MAX);
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

static fst_status check_complete(const fst_writer *writer, fst_error *error) {
    if (writer->origin != NULL || writer->options.others_write != 0) return FST_OK;
    for (size_t i = 0; i < writer->tensor_count; i++) {
        const save_tensor *tensor = &writer->tensors[i];
        byte_range gap;
        if (tensor->data != NULL || !fsti_coverage_gap(&tensor->coverage, tensor->size_bytes, &gap))
            continue;
        return fsti_writer_refuse_range(tensor, gap, "were never written", error);
    }
    return FST_OK;
}

fst_status fsti_writer_finish(fst_writer *writer, fst_error *error) {
    FST_TRY(fsti_writer_check_open(writer, error));
    FST_TRY(check_complete(writer, error)); // missing bytes may still be written
    fst_status status = FST_OK;
    if (writer->stream_file != NULL)
        status = fsti_writer_close_stage(writer, writer->stream_file, error);
    if (status == FST_OK) status = finish_all(writer, error);
    atomic_store(&writer->state, status == FST_OK ? WRITER_FINISHED : WRITER_FAILED);
    return status;
}
