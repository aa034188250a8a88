// SPDX-License-Identifier: Apache-2.0
/// A save's middle: bytes into files, by the caller's calls or, of a set, by threads.
#include "writer.h"

#include <string.h>

/// Through the page cache, pieces from here on are written at once, without a lock; cut to this
/// many bytes, so that progress is told in between.
/// What is brought from a device at a time.
#define FAR_BLOCK_BYTES ((uint64_t)8 << 20)
#define PLAIN_WRITE_BYTES_MIN ((uint64_t)256 << 10)
#define PLAIN_WRITE_BYTES_MAX ((uint64_t)8 << 20)
#define THREAD_COUNT_MAX 16u

static fst_status refuse(const save_tensor *tensor, fst_error *error, const char *why) {
    fsti_error_place place = FSTI_NOWHERE;
    place.tensor = tensor->name;
    place.tensor_size = tensor->name_size;
    return fsti_error_set(error, FST_E_ARGUMENT, place, "%s", why);
}

static fst_status check_open(const fst_writer *writer, fst_error *error) {
    if (!writer->is_broken && !writer->is_finished) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NOWHERE, "the save %s",
                          writer->is_broken ? "has failed" : "is finished");
}

/// Counts bytes and asks the caller whether to go on, one call at a time.
static fst_status report_bytes(void *context, uint64_t size_bytes, fst_error *error) {
    fst_writer *writer = context;
    const fst_save_options *options = &writer->options;
    int stop = 0;
    pthread_mutex_lock(&writer->lock);
    writer->bytes_done += size_bytes;
    if (options->progress != NULL)
        stop = options->progress(options->progress_context, writer->bytes_done, writer->bytes_total,
                                 writer->tensors_done, writer->tensor_count);
    pthread_mutex_unlock(&writer->lock);
    if (stop == 0) return FST_OK;
    return fsti_error_set(error, FST_E_CANCELLED, FSTI_NOWHERE, "cancelled");
}

static void count_bytes(fst_writer *writer, save_tensor *tensor, uint64_t size_bytes) {
    uint64_t before = atomic_fetch_add(&tensor->bytes_put, size_bytes);
    if (before + size_bytes != tensor->size_bytes) return;
    pthread_mutex_lock(&writer->lock);
    writer->tensors_done++;
    pthread_mutex_unlock(&writer->lock);
}

/// The stage of a file, which begins with the header.
static fst_status open_stage(fst_writer *writer, save_file *file, fst_error *error) {
    stage_options options = {.promise = writer->options.promise,
                             .engine = writer->options.engine,
                             .file_bytes = file->layout.file_bytes,
                             .report = report_bytes,
                             .report_context = writer};
    if (file->stage == NULL) FST_TRY(fsti_stage_open(file->output, &options, &file->stage, error));
    if (file->header_put) return FST_OK;
    file->header_put = true;
    return fsti_stage_put(file->stage, 0, file->layout.header, file->layout.header_bytes, true,
                          error);
}

static fst_status close_stage(fst_writer *writer, save_file *file, fst_error *error) {
    if (file->stage == NULL) return FST_OK;
    fst_status status = fsti_stage_drain(file->stage, error);
    pthread_mutex_lock(&writer->lock);
    fsti_stage_close(file->stage, &writer->counts);
    pthread_mutex_unlock(&writer->lock);
    file->stage = NULL;
    return status;
}

fst_status fsti_save_sync(fst_writer *writer, fsti_output *output, fst_error *error) {
    uint64_t start = fsti_now_ns();
    fst_status status = fsti_output_sync(output, error);
    pthread_mutex_lock(&writer->lock);
    writer->sync_count++;
    writer->sync_ns += fsti_now_ns() - start;
    pthread_mutex_unlock(&writer->lock);
    return status;
}

// ---- streaming ----

static bool goes_through_cache(const fst_writer *writer) {
    fst_save_engine engine = writer->options.engine;
    return engine == FST_SAVE_ENGINE_BUFFERED ||
           (engine == FST_SAVE_ENGINE_AUTO && writer->options.promise == FST_SAVE_QUICK);
}

static fst_status write_plainly(fst_writer *writer, save_file *file, uint64_t offset,
                                const char *data, uint64_t size, fst_error *error) {
    uint64_t count = 0;
    for (uint64_t done = 0; done < size; count++) {
        uint64_t piece = fsti_min(size - done, PLAIN_WRITE_BYTES_MAX);
        FST_TRY(fsti_output_write(file->output, data + done, piece, offset + done, error));
        FST_TRY(report_bytes(writer, piece, error));
        done += piece;
    }
    pthread_mutex_lock(&writer->lock);
    writer->counts.bytes_written += size;
    writer->counts.write_count += count;
    pthread_mutex_unlock(&writer->lock);
    return FST_OK;
}

/// One stage at a time: a caller that jumps between files would else hold slots for each.
static fst_status write_staged(fst_writer *writer, save_file *file, uint64_t offset,
                               const char *data, uint64_t size, fst_error *error) {
    pthread_mutex_lock(&writer->stream_lock);
    fst_status status = FST_OK;
    if (writer->stream_file != NULL && writer->stream_file != file)
        status = close_stage(writer, writer->stream_file, error);
    writer->stream_file = file;
    if (status == FST_OK) status = open_stage(writer, file, error);
    if (status == FST_OK) status = fsti_stage_put(file->stage, offset, data, size, false, error);
    if (status != FST_OK) writer->is_broken = true;
    pthread_mutex_unlock(&writer->stream_lock);
    return status;
}

fst_status fsti_writer_write(fst_writer *writer, size_t tensor_index, uint64_t offset,
                             const void *data, size_t size_bytes, fst_error *error) {
    save_tensor *tensor = &writer->tensors[tensor_index];
    save_file *file = &writer->files[tensor->file];
    FST_TRY(check_open(writer, error));
    if (tensor->data != NULL) return refuse(tensor, error, "the tensor came with its data");
    if (offset > tensor->size_bytes || size_bytes > tensor->size_bytes - offset)
        return refuse(tensor, error, "more bytes than the tensor has");
    uint64_t place = tensor->offset + offset;
    if (goes_through_cache(writer) && size_bytes >= PLAIN_WRITE_BYTES_MIN)
        FST_TRY(write_plainly(writer, file, place, data, size_bytes, error));
    else
        FST_TRY(write_staged(writer, file, place, data, size_bytes, error));
    count_bytes(writer, tensor, size_bytes);
    return FST_OK;
}

fst_status fsti_writer_map(fst_writer *writer, size_t tensor_index, void **out, fst_error *error) {
    save_tensor *tensor = &writer->tensors[tensor_index];
    char *mapping;
    FST_TRY(check_open(writer, error));
    if (tensor->data != NULL) return refuse(tensor, error, "the tensor came with its data");
    FST_TRY(fsti_output_map(writer->files[tensor->file].output, &mapping, error));
    atomic_store(&tensor->is_mapped, true);
    *out = mapping + tensor->offset;
    return FST_OK;
}

// ---- finishing ----

/// Zeros between aligned tensors, so that the bytes stay in order for the stage.
static fst_status put_filling(save_file *file, const fsti_header_entry *entry, fst_error *error) {
    static const char zeros[4096];
    for (uint64_t at = entry->begin; at < entry->end;) {
        uint64_t size = fsti_min(entry->end - at, sizeof zeros);
        FST_TRY(
            fsti_stage_put(file->stage, file->layout.header_bytes + at, zeros, size, true, error));
        at += size;
    }
    return FST_OK;
}

/// Bytes of a device, block by block: never a whole tensor in the processors' memory.
static fst_status put_far(save_file *file, const save_tensor *tensor, fst_error *error) {
    fsti_device *device;
    fsti_buffer *block;
    FST_TRY(fsti_device_get(tensor->device, &device, error));
    FST_TRY(fsti_buffer_arena(FAR_BLOCK_BYTES, &block, error));
    fst_status status = FST_OK;
    for (uint64_t done = 0; done < tensor->size_bytes && status == FST_OK;) {
        uint64_t size = fsti_min(tensor->size_bytes - done, FAR_BLOCK_BYTES);
        status = fsti_device_copy_out(device, block->data, tensor->data + done, size, error);
        if (status == FST_OK)
            status =
                fsti_stage_put(file->stage, tensor->offset + done, block->data, size, false, error);
        done += size;
    }
    fsti_buffer_unref(block);
    return status;
}

static bool is_far(const save_tensor *tensor) {
    return tensor->device.kind == FST_DEVICE_CUDA || tensor->device.kind == FST_DEVICE_HIP;
}

static fst_status put_tensors(fst_writer *writer, uint32_t file_index, fst_error *error) {
    save_file *file = &writer->files[file_index];
    const uint32_t *members = writer->members + writer->member_begin[file_index];
    for (size_t i = 0; i < file->layout.entry_count; i++) {
        uint32_t entry = file->layout.order[i];
        if (entry >= file->layout.tensor_count) {
            FST_TRY(put_filling(file, &file->layout.entries[entry], error));
            continue;
        }
        save_tensor *tensor = &writer->tensors[members[entry]];
        if (tensor->data == NULL || tensor->size_bytes == 0) continue;
        FST_TRY(is_far(tensor) ? put_far(file, tensor, error)
                               : fsti_stage_put(file->stage, tensor->offset, tensor->data,
                                                tensor->size_bytes, true, error));
        count_bytes(writer, tensor, tensor->size_bytes);
    }
    return FST_OK;
}

static fst_status finish_file(fst_writer *writer, uint32_t file_index, fst_error *error) {
    save_file *file = &writer->files[file_index];
    fst_status status = open_stage(writer, file, error);
    if (status == FST_OK) status = put_tensors(writer, file_index, error);
    fst_status closed = close_stage(writer, file, status == FST_OK ? error : NULL);
    fsti_output_unmap(file->output);
    if (status == FST_OK) status = closed;
    if (status != FST_OK || writer->options.promise != FST_SAVE_DURABLE) return status;
    return fsti_save_sync(writer, file->output, error);
}

/// What threads that finish files share.
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
    // This thread works too; one that can't be made is not missed.
    while (count + 1 < wanted && pthread_create(&threads[count], NULL, finish_files, &job) == 0)
        count++;
    finish_files(&job);
    for (uint32_t i = 0; i < count; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&job.lock);
    if (job.status != FST_OK && error != NULL) *error = job.error;
    return job.status;
}

static fst_status check_complete(const fst_writer *writer, fst_error *error) {
    for (size_t i = 0; i < writer->tensor_count; i++) {
        const save_tensor *tensor = &writer->tensors[i];
        if (tensor->data != NULL || atomic_load(&tensor->is_mapped)) continue;
        if (atomic_load(&tensor->bytes_put) != tensor->size_bytes)
            return refuse(tensor, error, "not all bytes of the tensor were written");
    }
    return FST_OK;
}

fst_status fsti_writer_finish(fst_writer *writer, fst_error *error) {
    FST_TRY(check_open(writer, error));
    fst_status status = check_complete(writer, error);
    if (status == FST_OK && writer->stream_file != NULL)
        status = close_stage(writer, writer->stream_file, error);
    if (status == FST_OK) status = finish_all(writer, error);
    writer->is_broken = status != FST_OK;
    writer->is_finished = status == FST_OK;
    return status;
}
