// SPDX-License-Identifier: Apache-2.0
/// Compresses a file: tensors are encoded in the order of the original after space reserved for
/// header and directory, which are written last. Incompressible tensors follow unchanged.
#include "pack_job.h"

#include <inttypes.h>
#include <string.h>

/// Compression must save this many bytes, and 1/33 (3 %).
#define SAVING_BYTES_MIN 4096u
#define SAVING_PART 33u
/// After this many chunks without savings a tensor is stored uncompressed.
#define TRIAL_CHUNKS 64u
#define COPY_BYTES ((uint64_t)1 << 20)
/// Disk space is reserved ahead in steps of this, or a sixteenth of the file.
#define RESERVE_STEP_BYTES ((uint64_t)1 << 20)
#define RESERVE_STEP_PART 16u

static bool is_candidate(const pack_job *job, const fsti_tensor *tensor) {
    bool is_selected =
        job->request->compress == FST_COMPRESS_ALL || fsti_codec_is_float((fst_dtype)tensor->dtype);
    return is_selected && size_of(tensor) > SAVING_BYTES_MIN;
}

static fst_status check_names(const pack_job *job) {
    const fsti_header *header = job->request->header;
    size_t size = strlen(FSTI_PACKED_NAME);
    for (size_t i = 0; i < header->tensor_count; i++) {
        const fsti_tensor *tensor = &header->tensors[i];
        const char *name = fsti_header_name(header, tensor);
        if (tensor->name_size < size || memcmp(name, FSTI_PACKED_NAME, size) != 0) continue;
        fsti_error_location location = {.file = fsti_file_path(job->request->file),
                                        .tensor = name,
                                        .tensor_size = tensor->name_size,
                                        .byte_offset = FST_NO_OFFSET};
        return fsti_error_set(
            job->error, FST_E_ARGUMENT, location,
            "names that begin with " FSTI_PACKED_NAME
            " are reserved for compressed tensors. This file can't be compressed");
    }
    return FST_OK;
}

/// Chooses the tensors to try, and allocates their results.
static fst_status choose_items(pack_job *job) {
    const fsti_header *header = job->request->header;
    size_t count = header->tensor_count;
    job->items = fsti_alloc_zeroed(count + 1, sizeof *job->items);
    job->tensors = fsti_alloc_zeroed(count + 1, sizeof *job->tensors);
    job->packed = fsti_alloc_zeroed(count + 1, sizeof *job->packed);
    job->packed_tensors = fsti_alloc_zeroed(count + 1, sizeof *job->packed_tensors);
    job->packed_bytes = fsti_alloc_zeroed(count + 1, sizeof *job->packed_bytes);
    job->is_packed = fsti_alloc_zeroed(count + 1, sizeof *job->is_packed);
    if (job->items == NULL || job->tensors == NULL || job->packed == NULL ||
        job->packed_tensors == NULL || job->packed_bytes == NULL || job->is_packed == NULL)
        return fsti_error_memory(job->error, count * sizeof *job->items);
    for (uint32_t i = 0; i < count; i++) {
        const fsti_tensor *tensor = &header->tensors[i];
        if (!is_candidate(job, tensor)) continue;
        encode_item *item = &job->items[job->item_count];
        item->dtype = (fst_dtype)tensor->dtype;
        item->begin = header->data_begin + tensor->begin;
        item->size_bytes = size_of(tensor);
        item->chunk_first = job->chunk_count;
        job->chunk_count += encode_chunks_of(item->size_bytes);
        job->tensors[job->item_count++] = i;
    }
    job->marks = fsti_alloc((size_t)(job->chunk_count + 1) * sizeof *job->marks);
    if (job->marks == NULL)
        return fsti_error_memory(job->error, job->chunk_count * sizeof *job->marks);
    return FST_OK;
}

static fst_status read_original(pack_job *job) {
    size_t got;
    job->true_bytes = fsti_file_size(job->request->file);
    job->original_bytes = job->request->header->data_begin;
    job->original = fsti_alloc((size_t)job->original_bytes);
    if (job->original == NULL) return fsti_error_memory(job->error, job->original_bytes);
    FST_TRY(fsti_file_read(job->request->file, job->original, (size_t)job->original_bytes, 0, &got,
                           job->error));
    fsti_error_location location = {.file = fsti_file_path(job->request->file), .byte_offset = got};
    if (got == job->original_bytes) return FST_OK;
    return fsti_error_set(job->error, FST_E_SHORT_READ, location,
                          "the file ended inside its header");
}

/// Reserves space for the longest possible header and directory.
static fst_status reserve_front(pack_job *job) {
    char *draft = NULL;
    size_t draft_bytes = 0;
    size_t count = job->request->header->tensor_count;
    job->entry_bytes = fsti_packed_bytes(job->item_count, job->chunk_count, job->original_bytes);
    FST_TRY(fsti_pack_header(job, true, &draft, &draft_bytes));
    fsti_free(draft);
    // The size of a compressed tensor may have more digits than its original shape.
    job->header_bytes = fsti_align_up(draft_bytes + 24 * count, FSTI_PACKED_ALIGNMENT);
    job->at = job->header_bytes + job->entry_bytes;
    return FST_OK;
}

/// FST_E_NO_SPACE with the progress made, because the final size is unknown.
static fst_status report_no_space(const pack_job *job, uint64_t end, const fst_error *cause) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = fsti_output_path(job->output);
    location.os_errno = cause->os_errno;
    return fsti_error_set(job->error, FST_E_NO_SPACE, location,
                          "the compressed file needs %" PRIu64 " bytes or more, with %" PRIu64
                          " of %" PRIu64 " bytes compressed: %s",
                          end, job->bytes_done, job->true_bytes, cause->message);
}

/// Reserves space for the output up to `end`, and some more, so that the system is called rarely.
/// If that fails, only up to `end`.
static fst_status grow_output(pack_job *job, uint64_t end) {
    if (end <= job->reserved_bytes) return FST_OK;
    fst_error cause;
    uint64_t wanted_bytes = end + fsti_max(end / RESERVE_STEP_PART, RESERVE_STEP_BYTES);
    fst_status status = fsti_output_reserve(job->output, wanted_bytes, &cause);
    job->reserved_bytes = wanted_bytes;
    if (status == FST_E_NO_SPACE) {
        status = fsti_output_reserve(job->output, end, &cause);
        job->reserved_bytes = end;
    }
    if (status == FST_E_NO_SPACE) return report_no_space(job, end, &cause);
    if (status != FST_OK && job->error != NULL) *job->error = cause;
    return status;
}

static fst_status write_bytes(pack_job *job, const void *data, size_t size, uint64_t offset) {
    fst_error cause;
    FST_TRY(grow_output(job, offset + size));
    fst_status status = fsti_output_write(job->output, data, size, offset, &cause);
    if (status == FST_E_NO_SPACE) return report_no_space(job, offset + size, &cause);
    if (status != FST_OK && job->error != NULL) *job->error = cause;
    return status;
}

/// Writes an item's chunks. *stored: their size.
static fst_status write_chunks(pack_job *job, encode_ring *ring, encode_item *item,
                               uint64_t *stored) {
    uint64_t count = encode_chunks_of(item->size_bytes), done = 0;
    *stored = 0;
    for (uint64_t i = 0; i < count; i++) {
        const fsti_chunk *chunk;
        FST_TRY(fsti_encode_next(ring, &chunk, job->error));
        FST_TRY(job->request->report(job->request->context, chunk->true_bytes, job->error));
        if (atomic_load(&item->is_refused)) continue;
        FST_TRY(write_bytes(job, chunk->stored, chunk->stored_bytes, job->at + *stored));
        job->bytes_done += chunk->true_bytes;
        job->marks[job->mark_count + i] = (fsti_packed_mark){
            (uint32_t)chunk->stored_bytes | (chunk->is_raw ? FSTI_PACKED_RAW : 0), chunk->crc};
        *stored += chunk->stored_bytes;
        done += chunk->true_bytes;
        if (i + 1 == TRIAL_CHUNKS && done - *stored < done / SAVING_PART / 2)
            atomic_store(&item->is_refused, true);
    }
    uint64_t saved = item->size_bytes - fsti_min(*stored, item->size_bytes);
    if (saved < SAVING_BYTES_MIN || saved < item->size_bytes / SAVING_PART)
        atomic_store(&item->is_refused, true);
    return FST_OK;
}

static fst_status fill_entry(pack_job *job, uint64_t size_bytes) {
    static const char zeros[FSTI_PACKED_ALIGNMENT];
    uint64_t end = fsti_align_up(size_bytes, FSTI_PACKED_ALIGNMENT);
    FST_TRY(write_bytes(job, zeros, (size_t)(end - size_bytes), job->at + size_bytes));
    job->packed_bytes[job->packed_count] = end;
    job->at += end;
    return FST_OK;
}

static fst_status write_packed(pack_job *job, encode_ring *ring) {
    for (size_t i = 0; i < job->item_count; i++) {
        encode_item *item = &job->items[i];
        uint64_t stored;
        FST_TRY(write_chunks(job, ring, item, &stored));
        if (atomic_load(&item->is_refused)) continue; // its space is used by the next one
        FST_TRY(fill_entry(job, stored));
        job->packed[job->packed_count] =
            (fsti_packed_draft_tensor){.dtype = item->dtype,
                                       .chunk_log = FSTI_CHUNK_LOG_DEFAULT,
                                       .true_bytes = item->size_bytes,
                                       .chunk_first = job->mark_count};
        job->mark_count += encode_chunks_of(item->size_bytes);
        job->packed_tensors[job->packed_count++] = job->tensors[i];
        job->is_packed[job->tensors[i]] = true;
    }
    return FST_OK;
}

/// Copies bytes of the original to the end of the output.
static fst_status copy_bytes(pack_job *job, uint64_t begin, uint64_t end, char *block) {
    while (begin < end) {
        size_t got, wanted = (size_t)fsti_min(end - begin, COPY_BYTES);
        FST_TRY(fsti_file_read(job->request->file, block, wanted, begin, &got, job->error));
        fsti_error_location location = {.file = fsti_file_path(job->request->file),
                                        .byte_offset = begin + got};
        if (got < wanted)
            return fsti_error_set(job->error, FST_E_SHORT_READ, location,
                                  "the file ended before its data");
        FST_TRY(write_bytes(job, block, got, job->at));
        job->at += got;
        begin += got;
    }
    return FST_OK;
}

static fst_status write_plain(pack_job *job, char *block) {
    const fsti_header *header = job->request->header;
    for (uint32_t i = 0; i < header->tensor_count; i++) {
        const fsti_tensor *tensor = &header->tensors[i];
        uint64_t begin = header->data_begin + tensor->begin;
        if (job->is_packed[i]) continue;
        FST_TRY(copy_bytes(job, begin, begin + size_of(tensor), block));
        if (!is_candidate(job, tensor)) // other tensors were reported when they were tried
            FST_TRY(job->request->report(job->request->context, size_of(tensor), job->error));
    }
    return FST_OK;
}

static fst_status write_directory(pack_job *job) {
    char *header = NULL;
    size_t header_bytes = 0;
    fsti_packed_draft draft = {.tensors = job->packed,
                               .tensor_count = job->packed_count,
                               .marks = job->marks,
                               .mark_count = job->mark_count,
                               .original = job->original,
                               .original_bytes = job->original_bytes,
                               .true_bytes = job->true_bytes,
                               .entry_bytes = job->entry_bytes};
    unsigned char *directory = fsti_alloc((size_t)job->entry_bytes);
    if (directory == NULL) return fsti_error_memory(job->error, job->entry_bytes);
    fsti_packed_put(&draft, directory);
    fst_status status = write_bytes(job, directory, (size_t)job->entry_bytes, job->header_bytes);
    fsti_free(directory);
    FST_TRY(status);
    FST_TRY(fsti_pack_header(job, false, &header, &header_bytes));
    status = write_bytes(job, header, header_bytes, 0);
    fsti_free(header);
    return status;
}

/// Whether the result counts as compressed: smaller than the original, but not by so much that
/// readers would refuse it.
static bool is_smaller(const pack_job *job) {
    return job->packed_count > 0 && job->at < job->true_bytes &&
           job->true_bytes <= job->at * FSTI_PACKED_FACTOR_MAX + FSTI_PACKED_SLACK;
}

static fst_status write_all(pack_job *job, char *block) {
    encode_ring *ring;
    encode_job encoding = {.file = job->request->file,
                           .items = job->items,
                           .item_count = job->item_count,
                           .chunk_count = job->chunk_count,
                           .thread_count = job->request->thread_count};
    FST_TRY(fsti_encode_open(&encoding, &ring, job->error));
    fst_status status = write_packed(job, ring);
    fsti_encode_close(ring);
    FST_TRY(status);
    FST_TRY(write_plain(job, block));
    if (is_smaller(job)) return write_directory(job);
    job->at = 0;
    return copy_bytes(job, 0, job->true_bytes, block);
}

static void clear_job(pack_job *job) {
    fsti_free(job->original);
    fsti_free(job->items);
    fsti_free(job->tensors);
    fsti_free(job->marks);
    fsti_free(job->packed);
    fsti_free(job->packed_tensors);
    fsti_free(job->packed_bytes);
    fsti_free(job->is_packed);
}

fst_status fsti_pack(const pack_request *request, fsti_output *output, uint64_t *size_bytes,
                     fst_error *error) {
    pack_job job = {.request = request, .output = output, .error = error};
    char *block = fsti_alloc((size_t)COPY_BYTES);
    if (block == NULL) return fsti_error_memory(error, COPY_BYTES);
    fst_status status = check_names(&job);
    if (status == FST_OK) status = read_original(&job);
    if (status == FST_OK) status = choose_items(&job);
    if (status == FST_OK) status = reserve_front(&job);
    if (status == FST_OK) status = write_all(&job, block);
    if (status == FST_OK) status = fsti_file_check(request->file, error);
    if (status == FST_OK) status = fsti_output_trim(output, job.at, error);
    *size_bytes = job.at;
    clear_job(&job);
    fsti_free(block);
    return status;
}
