// SPDX-License-Identifier: Apache-2.0
/// Writes the new bytes of a checkpoint's tensors, or restores the old ones: several threads, each
/// block by block.
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "apply_job.h"

/// One thread of an update.
typedef struct apply_worker {
    apply_job *job;
    delta_fold *fold;
    unsigned char *old;          ///< the block's old bytes, in the slot or in allocated memory
    unsigned char *work;         ///< its new bytes, behind the old ones
    atomic_uint_least64_t *word; ///< NULL without a journal
    // of the current tensor
    size_t number;
    const bound_tensor *tensor;
    delta_frames frames;
    const fsti_digest_kind *kind;
    void *digest;
} apply_worker;

static fst_status fail_block(const apply_job *job, const bound_tensor *tensor, uint64_t offset,
                             int os_errno, const char *what, fst_error *error) {
    fst_status status = fsti_error_errno(error, os_errno,
                                         fsti_file_path(job->base->files[tensor->file].file), what);
    fsti_error_location location = {.tensor = tensor->tensor->name,
                                    .tensor_size = tensor->tensor->name_size,
                                    .byte_offset = offset};
    fsti_error_locate(error, &location);
    return status;
}

fst_status fsti_apply_read(apply_job *job, const bound_tensor *tensor, uint64_t block,
                           unsigned char *target, fst_error *error) {
    uint64_t offset = tensor->offset + block * DELTA_BLOCK_BYTES;
    size_t size = apply_block_bytes(tensor, block);
    for (size_t done = 0; done < size;) {
        ssize_t got = pread(job->descriptors[tensor->file], target + done, size - done,
                            (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fail_block(job, tensor, offset, errno, "reading", error);
        if (got == 0) {
            fsti_error_location location = {.file =
                                                fsti_file_path(job->base->files[tensor->file].file),
                                            .byte_offset = offset + done};
            return fsti_error_set(error, FST_E_SHORT_READ, location, "the file became shorter");
        }
        done += (size_t)got;
    }
    atomic_fetch_add_explicit(&job->bytes_read, size, memory_order_relaxed);
    return FST_OK;
}

static fst_status write_block(apply_job *job, const bound_tensor *tensor, uint64_t block,
                              const unsigned char *bytes, fst_error *error) {
    uint64_t offset = tensor->offset + block * DELTA_BLOCK_BYTES;
    size_t size = apply_block_bytes(tensor, block);
    int failure = fsti_write_at(job->descriptors[tensor->file], bytes, size, offset);
    if (failure != 0) return fail_block(job, tensor, offset, failure, "writing", error);
    atomic_fetch_add_explicit(&job->bytes_written, size, memory_order_relaxed);
    return FST_OK;
}

/// Stores which block the slot holds. The release store follows the stores of the block's old bytes
/// to the slot, and precedes the write of the block. So after a kill, the slot of a partly written
/// block has its old bytes.
static void set_word(const apply_worker *worker, uint64_t block, bool is_dirty) {
    if (worker->word != NULL)
        atomic_store_explicit(worker->word, journal_word(worker->number, block, is_dirty),
                              memory_order_release);
}

/// Announces a write of the block. Recovery compares the times of files without writes.
static void set_dirty(const apply_worker *worker, uint64_t block) {
    const apply_journal *journal = &worker->job->journal;
    if (journal->map == NULL) return;
    atomic_store(&journal->files[worker->tensor->file].is_written_to, 1);
    set_word(worker, block, true);
}

/// Records the bytes that the block has after the work on it. In the roll-back these are its old
/// bytes.
static void set_hash(const apply_worker *worker, uint64_t block, const unsigned char *bytes) {
    const apply_journal *journal = &worker->job->journal;
    if (journal->map == NULL) return;
    journal->hashes[worker->tensor->first_block + block] =
        fsti_journal_hash(bytes, apply_block_bytes(worker->tensor, block));
}

static uint64_t *old_hash(const apply_worker *worker, uint64_t block) {
    return &worker->job->journal.old_hashes[worker->tensor->first_block + block];
}

/// Writes undo values to the undo file. Those of a tensor begin at undo_at - 1.
static fst_status save_undo(void *context, const void *values, size_t size, uint64_t at,
                            fst_error *error) {
    apply_worker *worker = context;
    apply_job *job = worker->job;
    uint64_t offset = job->journal.records[worker->number].undo_at - 1 + at;
    int failure = fsti_write_at(job->journal.undo_fd, values, size, offset);
    if (failure == 0) return FST_OK;
    return fsti_error_errno(error, failure, job->journal.undo_path, "saving old values");
}

/// Reads undo values. Values after the last saved one are not needed, so an early end of the file
/// is not an error.
static fst_status load_undo(void *context, void *values, size_t size, uint64_t at,
                            fst_error *error) {
    apply_worker *worker = context;
    apply_job *job = worker->job;
    char *bytes = values;
    uint64_t offset = job->journal.records[worker->number].undo_at - 1 + at;
    while (size > 0) {
        ssize_t got = pread(job->journal.undo_fd, bytes, size, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return fsti_error_errno(error, errno, job->journal.undo_path, "reading old values");
        if (got == 0) return FST_OK;
        bytes += got;
        offset += (uint64_t)got;
        size -= (size_t)got;
    }
    return FST_OK;
}

static fst_status begin_tensor(apply_worker *worker, size_t number, fst_error *error) {
    apply_job *job = worker->job;
    fold_undo undo = {save_undo, load_undo, worker};
    worker->number = number;
    worker->tensor = &job->tensors[number];
    worker->frames = fsti_delta_frames(job->delta, worker->tensor->tensor, job->span);
    bool has_journal = job->journal.map != NULL;
    FST_TRY(fsti_fold_begin(worker->fold, &worker->frames, worker->tensor->size_bytes,
                            has_journal ? &undo : NULL, error));
    if (!has_journal) return FST_OK;
    journal_record *record = &job->journal.records[number];
    if (record->undo_at == 0)
        record->undo_at =
            1 + atomic_fetch_add(&job->journal.head->undo_end, fsti_fold_undo_bytes(worker->fold));
    return FST_OK;
}

/// Writes the new bytes of one block, if they differ.
static fst_status change_block(apply_worker *worker, uint64_t block, fst_error *error) {
    apply_job *job = worker->job;
    size_t size = apply_block_bytes(worker->tensor, block);
    set_word(worker, block, false);
    FST_TRY(fsti_apply_read(job, worker->tensor, block, worker->old, error));
    if (job->journal.map != NULL) *old_hash(worker, block) = fsti_journal_hash(worker->old, size);
    memcpy(worker->work, worker->old, size);
    FST_TRY(fsti_fold_apply(worker->fold, worker->work, size, error));
    set_hash(worker, block, worker->work);
    if (!job->is_written || memcmp(worker->work, worker->old, size) == 0) return FST_OK;
    set_dirty(worker, block);
    return write_block(job, worker->tensor, block, worker->work, error);
}

static fst_status change_blocks(apply_worker *worker, uint64_t changed, fst_error *error) {
    uint64_t count = apply_count_blocks(worker->tensor);
    for (uint64_t block = 0; block < count; block++) {
        size_t size = apply_block_bytes(worker->tensor, block);
        if (block < changed) { // a killed process has already written the new bytes
            FST_TRY(fsti_apply_read(worker->job, worker->tensor, block, worker->work, error));
            FST_TRY(fsti_fold_skip(worker->fold, size, error));
        } else {
            FST_TRY(change_block(worker, block, error));
        }
        if (!worker->kind->update(worker->digest, worker->work, size))
            return fsti_error_memory(error, size);
        atomic_fetch_add_explicit(&worker->job->bytes_hashed, size, memory_order_relaxed);
    }
    set_word(worker, count, false);
    return fsti_fold_end(worker->fold, error);
}

static fst_status change_tensor(apply_worker *worker, size_t number, fst_error *error) {
    apply_job *job = worker->job;
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    journal_record *record = job->journal.map == NULL ? NULL : &job->journal.records[number];
    if (record != NULL && record->is_done) return FST_OK;
    FST_TRY(begin_tensor(worker, number, error));
    worker->kind = fsti_delta_digest(job->delta, &worker->frames, digest);
    worker->digest = worker->kind->begin();
    if (worker->digest == NULL) return fsti_error_memory(error, 64);
    fst_status status = change_blocks(worker, record == NULL ? 0 : record->changed, error);
    bool is_good = worker->kind->end(worker->digest, digest);
    if (status == FST_OK && !is_good) status = fsti_error_memory(error, 64);
    FST_TRY(status);
    FST_TRY(fsti_delta_check_digest(job->delta, worker->tensor->tensor, &worker->frames, digest,
                                    error));
    if (record == NULL) return FST_OK;
    record->changed = apply_count_blocks(worker->tensor);
    record->is_done = 1;
    // Cleared last: after a kill before this store, fsti_apply_settle() ignores the word of a
    // tensor that is done.
    atomic_store_explicit(worker->word, 0, memory_order_release);
    return FST_OK;
}

static fst_status revert_tensor(apply_worker *worker, size_t number, fst_error *error) {
    apply_job *job = worker->job;
    journal_record *record = &job->journal.records[number];
    if (record->undone >= record->changed) return FST_OK;
    FST_TRY(begin_tensor(worker, number, error));
    FST_TRY(fsti_fold_skip(worker->fold, record->undone * DELTA_BLOCK_BYTES, error));
    for (uint64_t block = record->undone; block < record->changed; block++) {
        size_t size = apply_block_bytes(worker->tensor, block);
        set_word(worker, block, false);
        FST_TRY(fsti_apply_read(job, worker->tensor, block, worker->old, error));
        memcpy(worker->work, worker->old, size);
        FST_TRY(fsti_fold_revert(worker->fold, worker->work, size, error));
        if (fsti_journal_hash(worker->work, size) != *old_hash(worker, block))
            return fsti_error_set(error, FST_E_CORRUPT, FSTI_NO_LOCATION,
                                  "the delta has changed since the update began, so it does not "
                                  "give the old bytes back. Copy the checkpoint again");
        set_dirty(worker, block);
        FST_TRY(write_block(job, worker->tensor, block, worker->work, error));
        set_hash(worker, block, worker->work);
    }
    record->undone = record->changed;
    record->is_done = 0;
    atomic_store_explicit(worker->word, 0, memory_order_release);
    return FST_OK;
}

static fst_status run_worker(delta_pool *pool, uint32_t thread, bool is_backward,
                             fst_error *error) {
    apply_job *job = pool->context;
    bool has_journal = job->journal.map != NULL;
    apply_worker worker = {.job = job};
    unsigned char *own = has_journal ? NULL : fsti_alloc(JOURNAL_SLOT_BYTES);
    worker.old = has_journal ? job->journal.blocks + thread * JOURNAL_SLOT_BYTES : own;
    worker.work = worker.old == NULL ? NULL : worker.old + DELTA_BLOCK_BYTES;
    worker.word = has_journal ? &job->journal.words[thread * JOURNAL_WORD_STRIDE] : NULL;
    fst_status status = worker.old == NULL ? fsti_error_memory(error, JOURNAL_SLOT_BYTES)
                                           : fsti_fold_open(&worker.fold, error);
    size_t task;
    while (status == FST_OK && fsti_pool_take(pool, &task)) {
        status =
            is_backward ? revert_tensor(&worker, task, error) : change_tensor(&worker, task, error);
        if (status != FST_OK && worker.tensor != NULL)
            fsti_fold_locate(worker.fold, &worker.frames, worker.tensor->tensor, error);
    }
    fsti_fold_close(worker.fold);
    fsti_free(own);
    return status;
}

static fst_status run_forward(delta_pool *pool, uint32_t thread, fst_error *error) {
    return run_worker(pool, thread, false, error);
}

static fst_status run_backward(delta_pool *pool, uint32_t thread, fst_error *error) {
    return run_worker(pool, thread, true, error);
}

fst_status fsti_apply_forward(apply_job *job, fst_error *error) {
    delta_pool pool = {.task_count = job->tensor_count,
                       .thread_count = job->thread_count,
                       .context = job,
                       .run = run_forward};
    return fsti_pool_run(&pool, error);
}

fst_status fsti_apply_backward(apply_job *job, fst_error *error) {
    delta_pool pool = {.task_count = job->tensor_count,
                       .thread_count = job->thread_count,
                       .context = job,
                       .run = run_backward};
    return fsti_pool_run(&pool, error);
}

/// Writes the old bytes of a block, unless it has them: a write that failed before it changed
/// anything would fail again on a full disk.
static fst_status restore_block(apply_job *job, const bound_tensor *tensor, uint64_t block,
                                const unsigned char *old, fst_error *error) {
    unsigned char *there = fsti_alloc(DELTA_BLOCK_BYTES);
    if (there == NULL) return fsti_error_memory(error, DELTA_BLOCK_BYTES);
    fst_status status = fsti_apply_read(job, tensor, block, there, error);
    bool is_old = status == FST_OK && memcmp(there, old, apply_block_bytes(tensor, block)) == 0;
    fsti_free(there);
    return status != FST_OK || is_old ? status : write_block(job, tensor, block, old, error);
}

/// Undoes what a slot records, and moves its state into the record of the tensor.
static fst_status settle_slot(apply_job *job, uint32_t slot, fst_error *error) {
    atomic_uint_least64_t *word = &job->journal.words[slot * JOURNAL_WORD_STRIDE];
    const unsigned char *old = job->journal.blocks + slot * JOURNAL_SLOT_BYTES;
    uint64_t value = atomic_load(word), number = journal_word_tensor(value);
    uint64_t block = journal_word_block(value);
    bool is_dirty = (value & 1) != 0, is_backward = atomic_load(&job->journal.head->is_backward);
    if (value == 0) return FST_OK;
    if (number >= job->tensor_count || block + is_dirty > apply_count_blocks(&job->tensors[number]))
        return fsti_error_set(error, FST_E_CORRUPT, FSTI_NO_LOCATION, "the journal is damaged");
    const bound_tensor *tensor = &job->tensors[number];
    if (is_dirty) FST_TRY(restore_block(job, tensor, block, old, error));
    journal_record *record = &job->journal.records[number];
    if (is_backward && is_dirty)
        job->journal.hashes[tensor->first_block + block] =
            fsti_journal_hash(old, apply_block_bytes(tensor, block));
    if (is_backward)
        record->undone = block;
    else if (!record->is_done)
        record->changed = block;
    // Cleared last: after a kill before this store, the next call does the same again.
    atomic_store(word, 0);
    return FST_OK;
}

fst_status fsti_apply_settle(apply_job *job, fst_error *error) {
    for (uint32_t i = 0; i < job->journal.head->slot_count; i++)
        FST_TRY(settle_slot(job, i, error));
    return FST_OK;
}
