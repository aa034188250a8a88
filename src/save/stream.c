// SPDX-License-Identifier: Apache-2.0
/// Tensor bytes written by the caller piece by piece, from any thread.
#include "save_state.h"

/// Through the page cache, pieces of at least this size are written at once without a lock, and cut
/// to this size for progress reports.
#define PLAIN_WRITE_BYTES_MIN ((uint64_t)256 << 10)
#define PLAIN_WRITE_BYTES_MAX ((uint64_t)8 << 20)

/// Whether a piece is written at once, through the page cache.
static bool writes_buffered(const fst_writer *writer, uint64_t size_bytes) {
    fst_save_engine engine = writer->options.engine;
    bool is_cached = engine == FST_SAVE_ENGINE_BUFFERED ||
                     (engine == FST_SAVE_ENGINE_AUTO && writer->options.promise == FST_SAVE_QUICK);
    // Neighbouring blocks may belong to other writers.
    return writer->publication.role == ROLE_JOINED ||
           (is_cached && size_bytes >= PLAIN_WRITE_BYTES_MIN);
}

static fst_status write_unstaged(fst_writer *writer, save_file *file, uint64_t offset,
                                 const char *data, uint64_t size, fst_error *error) {
    uint64_t count = 0;
    chunk_digests *digests = file->digests.passing;
    for (uint64_t done = 0; done < size; count++) {
        uint64_t piece = fsti_min(size - done, PLAIN_WRITE_BYTES_MAX);
        FST_TRY(fsti_output_write(file->output, data + done, piece, offset + done, error));
        if (digests != NULL)
            FST_TRY(fsti_chunk_digests_put(digests, offset + done, data + done, piece, error));
        FST_TRY(fsti_progress_report(&writer->progress, piece, error));
        done += piece;
    }
    pthread_mutex_lock(&writer->progress.lock);
    writer->progress.counts.bytes_written += size;
    writer->progress.counts.write_count += count;
    pthread_mutex_unlock(&writer->progress.lock);
    return FST_OK;
}

/// Writes through one stage at a time; a caller that alternates between files would otherwise hold
/// slots for each.
static fst_status write_staged(fst_writer *writer, save_file *file, uint64_t offset,
                               const char *data, uint64_t size, fst_error *error) {
    pthread_mutex_lock(&writer->stream.lock);
    fst_status status = FST_OK;
    if (writer->stream.file != NULL && writer->stream.file != file)
        status = fsti_writer_close_stage(writer, writer->stream.file, error);
    writer->stream.file = file;
    if (status == FST_OK) status = fsti_writer_open_stage(writer, file, error);
    if (status == FST_OK) status = fsti_stage_put(file->stage, offset, data, size, false, error);
    pthread_mutex_unlock(&writer->stream.lock);
    return status;
}

/// Records that bytes of a tensor arrive; each byte only once. It is called before they are
/// written: of two threads that write the same bytes, the second is refused and writes nothing.
static fst_status claim(fst_writer *writer, size_t tensor_index, byte_range range,
                        fst_error *error) {
    const save_tensor *tensor = &writer->contents.tensors[tensor_index];
    byte_coverage *claimed = &writer->stream.coverage[tensor_index].claimed;
    byte_range twice;
    if (writer->publication.role == ROLE_JOINED)
        return FST_OK; // other processes write too, so coverage is unknown
    pthread_mutex_lock(&writer->progress.lock);
    fst_status status = fsti_coverage_claim(claimed, range, &twice);
    pthread_mutex_unlock(&writer->progress.lock);
    if (status == FST_OK) return FST_OK;
    if (status == FST_E_NO_MEMORY) return fsti_error_memory(error, sizeof range);
    return fsti_tensor_refuse_range(tensor, twice, "were already written", error);
}

fst_status fsti_writer_write(fst_writer *writer, size_t tensor_index, uint64_t offset,
                             const void *data, size_t size_bytes, fst_error *error) {
    const save_tensor *tensor = &writer->contents.tensors[tensor_index];
    tensor_coverage *coverage = &writer->stream.coverage[tensor_index];
    save_file *file = &writer->contents.files[tensor->file];
    FST_TRY(fsti_writer_check_open(writer, error));
    if (tensor->data != NULL)
        return fsti_tensor_refuse(tensor, "the tensor's data was given when the save was opened",
                                  error);
    if (offset > tensor->size_bytes || size_bytes > tensor->size_bytes - offset)
        return fsti_tensor_refuse(tensor, "more bytes than the tensor's size", error);
    if (size_bytes == 0) return FST_OK;
    FST_TRY(claim(writer, tensor_index, (byte_range){offset, offset + size_bytes}, error));
    uint64_t file_offset = tensor->offset + offset;
    fst_status status = writes_buffered(writer, size_bytes)
                            ? write_unstaged(writer, file, file_offset, data, size_bytes, error)
                            : write_staged(writer, file, file_offset, data, size_bytes, error);
    if (status != FST_OK) {
        atomic_store(&writer->state, WRITER_FAILED); // unknown which bytes are in the file
        return status;
    }
    pthread_mutex_lock(&writer->progress.lock);
    coverage->bytes_put += size_bytes;
    writer->progress.tensors_done += coverage->bytes_put == tensor->size_bytes;
    pthread_mutex_unlock(&writer->progress.lock);
    return FST_OK;
}

/// Claims a tensor that will be written through the mapping, and allocates its space.
static fst_status claim_mapped(fst_writer *writer, size_t tensor_index, fst_error *error) {
    const save_tensor *tensor = &writer->contents.tensors[tensor_index];
    FST_TRY(claim(writer, tensor_index, (byte_range){0, tensor->size_bytes}, error));
    if (writer->options.others_write != 0) return FST_OK; // allocated when the file was created
    fst_status status =
        fsti_output_allocate(writer->contents.files[tensor->file].output, tensor->offset,
                             tensor->offset + tensor->size_bytes, error);
    if (status != FST_OK) atomic_store(&writer->state, WRITER_FAILED);
    return status;
}

fst_status fsti_writer_map(fst_writer *writer, size_t tensor_index, void **out, fst_error *error) {
    const save_tensor *tensor = &writer->contents.tensors[tensor_index];
    tensor_coverage *coverage = &writer->stream.coverage[tensor_index];
    char *mapping;
    FST_TRY(fsti_writer_check_open(writer, error));
    if (tensor->data != NULL)
        return fsti_tensor_refuse(tensor, "the tensor's data was given when the save was opened",
                                  error);
    FST_TRY(fsti_output_map(writer->contents.files[tensor->file].output, &mapping, error));
    // The tensor is claimed after the mapping succeeded. Calls of this function are not concurrent
    // with each other (writer.h); concurrent writes check the claim.
    if (!coverage->is_mapped) FST_TRY(claim_mapped(writer, tensor_index, error));
    coverage->is_mapped = true;
    *out = mapping + tensor->offset;
    return FST_OK;
}

void fsti_writer_cancel(fst_writer *writer) {
    atomic_store(&writer->progress.cancel_requested, true);
    if (writer->target.kind->stop != NULL) writer->target.kind->stop(writer);
}
