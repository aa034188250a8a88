// SPDX-License-Identifier: Apache-2.0
/// Checks that the files still have the bytes that the journal of a killed process describes. It
/// reads the files that the process has written to; of the others the times are compared. Nothing
/// is written, so bytes that another program stored meanwhile stay.
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "apply_job.h"

/// What the journal says about a tensor, with the state of its slot.
typedef struct tensor_progress {
    uint64_t undone, changed;
    uint64_t dirty;            ///< the block that was being written, or UINT64_MAX
    const unsigned char *slot; ///< the old and the new bytes of that block
} tensor_progress;

/// One thread's memory.
typedef struct check_worker {
    apply_job *job;
    delta_fold *fold;
    unsigned char *current; ///< a block of the file
    unsigned char *updated; ///< its new bytes
    uint64_t overwritten;   ///< bytes that an overwrite delta has replaced in the current block
    bool is_foreign;        ///< the tensor's bytes are not what the journal describes
    bool is_ahead;          ///< a block has its new bytes, and the work has not come to it
    bool is_behind;         ///< a block that an overwrite delta changes does not have them
} check_worker;

/// Of a file, in a roll-back: tensors that the work had to come to.
typedef struct file_check {
    atomic_size_t ahead;  ///< those that have their new checksum already
    atomic_size_t behind; ///< other ones
} file_check;

/// The two checksums of a tensor: of its bytes in the file, and of those that it will have.
typedef struct check_sums {
    const fsti_digest_kind *kind;
    void *current, *updated;
    bool is_folded; ///< false after a damaged frame: `updated` has no meaning
} check_sums;

static tensor_progress find_progress(const apply_job *job, size_t number) {
    const apply_journal *journal = &job->journal;
    const journal_record *record = &journal->records[number];
    tensor_progress progress = {record->undone, record->changed, UINT64_MAX, NULL};
    bool is_backward = atomic_load(&journal->head->is_backward) != 0;
    for (uint32_t i = 0; i < journal->head->slot_count; i++) {
        uint64_t word = atomic_load(&journal->words[i * JOURNAL_WORD_STRIDE]);
        if (word == 0 || journal_word_tensor(word) != number) continue;
        if (is_backward)
            progress.undone = journal_word_block(word);
        else if (!record->is_done)
            progress.changed = journal_word_block(word);
        if ((word & 1) == 0) continue;
        progress.dirty = journal_word_block(word);
        progress.slot = journal->blocks + i * JOURNAL_SLOT_BYTES;
    }
    return progress;
}

/// Whether each byte is the old or the new one. A write that a kill ended may have stored any part.
static bool is_mix(const unsigned char *current, const unsigned char *slot, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (current[i] != slot[i] && current[i] != slot[DELTA_BLOCK_BYTES + i]) return false;
    return true;
}

static fst_status count_overwritten(void *context, const void *values, size_t size, uint64_t at,
                                    fst_error *error) {
    check_worker *worker = context;
    (void)values, (void)at, (void)error;
    worker->overwritten += size;
    return FST_OK;
}

/// Adds a block to the checksum of the new bytes. Damaged data of the delta is not an error here:
/// the update finds it again, and rolls back.
static fst_status fold_block(check_worker *worker, check_sums *sums, size_t size, bool is_new,
                             fst_error *error) {
    if (!sums->is_folded) return FST_OK;
    fst_status status = is_new ? fsti_fold_skip(worker->fold, size, error)
                               : fsti_fold_apply(worker->fold, worker->updated, size, error);
    sums->is_folded = status == FST_OK;
    if (status != FST_OK) return status == FST_E_NO_MEMORY ? status : FST_OK;
    bool has_new = memcmp(worker->updated, worker->current, size) == 0;
    worker->is_ahead |= worker->overwritten > 0 && has_new;
    worker->is_behind |= worker->overwritten > 0 && !has_new;
    return sums->kind->update(sums->updated, worker->updated, size)
               ? FST_OK
               : fsti_error_memory(error, size);
}

static fst_status check_block(check_worker *worker, size_t number, uint64_t block, check_sums *sums,
                              fst_error *error) {
    apply_job *job = worker->job;
    const bound_tensor *tensor = &job->tensors[number];
    tensor_progress progress = find_progress(job, number);
    size_t size = apply_block_bytes(tensor, block);
    FST_TRY(fsti_apply_read(job, tensor, block, worker->current, error));
    if (!sums->kind->update(sums->current, worker->current, size))
        return fsti_error_memory(error, size);
    bool is_dirty = progress.slot != NULL && block == progress.dirty;
    if (is_dirty)
        worker->is_foreign |= !is_mix(worker->current, progress.slot, size);
    else if (block < progress.changed)
        worker->is_foreign |= fsti_journal_hash(worker->current, size) !=
                              job->journal.hashes[tensor->first_block + block];
    bool was_ahead = worker->is_ahead;
    worker->overwritten = 0;
    memcpy(worker->updated, is_dirty ? progress.slot : worker->current, size);
    fst_status status =
        fold_block(worker, sums, size, block >= progress.undone && block < progress.changed, error);
    if (is_dirty) worker->is_ahead = was_ahead; // the killed process may have written it
    return status;
}

/// A tensor that has its new checksum in the file, but not if the work were continued, was replaced
/// by the new version.
static fst_status compare_sums(check_worker *worker, size_t number, check_sums *sums,
                               fst_error *error) {
    unsigned char current[FSTI_DIGEST_BYTES_MAX], updated[FSTI_DIGEST_BYTES_MAX];
    unsigned char expected[FSTI_DIGEST_BYTES_MAX];
    const apply_job *job = worker->job;
    delta_frames frames = fsti_delta_frames(job->delta, job->tensors[number].tensor, job->span);
    size_t size = sums->kind->digest_bytes;
    (void)fsti_delta_digest(job->delta, &frames, expected);
    bool is_good = sums->kind->end(sums->current, current);
    is_good = sums->kind->end(sums->updated, updated) && is_good;
    if (!is_good) return fsti_error_memory(error, 64);
    bool is_new = memcmp(current, expected, size) == 0;
    worker->is_foreign |= is_new && (!sums->is_folded || memcmp(updated, expected, size) != 0);
    if (worker->is_ahead && is_new)
        atomic_fetch_add(&job->file_checks[job->tensors[number].file].ahead, 1);
    else if (worker->is_behind)
        atomic_fetch_add(&job->file_checks[job->tensors[number].file].behind, 1);
    return FST_OK;
}

static fst_status check_tensor(check_worker *worker, size_t number, fst_error *error) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    apply_job *job = worker->job;
    const bound_tensor *tensor = &job->tensors[number];
    if (atomic_load(&job->journal.files[tensor->file].is_written_to) == 0) return FST_OK;
    delta_frames frames = fsti_delta_frames(job->delta, tensor->tensor, job->span);
    check_sums sums = {.kind = fsti_delta_digest(job->delta, &frames, digest)};
    fold_undo undo = {.save = count_overwritten, .context = worker};
    fst_status status = fsti_fold_begin(worker->fold, &frames, tensor->size_bytes, &undo, error);
    if (status == FST_E_NO_MEMORY) return status;
    sums.is_folded = status == FST_OK;
    sums.current = sums.kind->begin();
    sums.updated = sums.kind->begin();
    status = sums.current == NULL || sums.updated == NULL ? fsti_error_memory(error, 64) : FST_OK;
    worker->is_foreign = worker->is_ahead = worker->is_behind = false;
    uint64_t count = apply_count_blocks(tensor);
    for (uint64_t block = 0; block < count && status == FST_OK && !worker->is_foreign; block++)
        status = check_block(worker, number, block, &sums, error);
    if (status == FST_OK) return compare_sums(worker, number, &sums, error);
    if (sums.current != NULL) (void)sums.kind->end(sums.current, digest);
    if (sums.updated != NULL) (void)sums.kind->end(sums.updated, digest);
    return status;
}

static fst_status run_check(delta_pool *pool, uint32_t thread, fst_error *error) {
    apply_job *job = pool->context;
    unsigned char *memory = fsti_alloc(2 * DELTA_BLOCK_BYTES);
    check_worker worker = {.job = job, .current = memory};
    size_t task;
    (void)thread;
    fst_status status = memory == NULL ? fsti_error_memory(error, 2 * DELTA_BLOCK_BYTES)
                                       : fsti_fold_open(&worker.fold, error);
    worker.updated = memory == NULL ? NULL : memory + DELTA_BLOCK_BYTES;
    while (status == FST_OK && fsti_pool_take(pool, &task)) {
        status = check_tensor(&worker, task, error);
        const model_file *file = &job->base->files[job->tensors[task].file];
        if (status == FST_OK && worker.is_foreign)
            status = fsti_journal_refuse_file(&job->journal, fsti_file_path(file->file), error);
    }
    fsti_fold_close(worker.fold);
    fsti_free(memory);
    return status;
}

/// Whether the numbers of a tensor's record lie within the tensor and the undo file.
static bool record_fits(const apply_job *job, size_t number) {
    const journal_record *record = &job->journal.records[number];
    const bound_tensor *tensor = &job->tensors[number];
    uint64_t count = apply_count_blocks(tensor), end = atomic_load(&job->journal.head->undo_end);
    bool is_done = record->is_done != 0;
    return record->undone <= record->changed && record->changed <= count &&
           (!is_done || record->changed == count) && record->undo_at <= end + 1;
}

/// Whether a slot's word is intact and names a block of a tensor.
static bool word_fits(const apply_job *job, uint64_t word) {
    uint64_t number = journal_word_tensor(word), block = journal_word_block(word);
    if (word == 0) return true;
    if (!journal_word_is_valid(word) || number >= job->tensor_count) return false;
    uint64_t limit = apply_count_blocks(&job->tensors[number]);
    if (atomic_load(&job->journal.head->is_backward) != 0)
        limit = job->journal.records[number].changed;
    return block + (word & 1) <= limit;
}

static bool numbers_fit(const apply_job *job) {
    const journal_head *head = job->journal.head;
    uint64_t undo_max = 0;
    for (size_t i = 0; i < job->tensor_count; i++) {
        if (!record_fits(job, i)) return false;
        undo_max += DELTA_FOLD_MAX * job->tensors[i].size_bytes;
    }
    for (uint32_t i = 0; i < head->slot_count; i++)
        if (!word_fits(job, atomic_load(&job->journal.words[i * JOURNAL_WORD_STRIDE])))
            return false;
    return atomic_load(&head->undo_end) <= undo_max;
}

/// In a roll-back, which would leave their new bytes: refuses files in which all tensors that the
/// work had to come to are new. A chain may give a tensor its old value back, so one is not enough.
static fst_status check_ahead(const apply_job *job, fst_error *error) {
    for (size_t i = 0; i < job->base->file_count; i++) {
        const file_check *check = &job->file_checks[i];
        if (atomic_load(&check->ahead) == 0 || atomic_load(&check->behind) > 0) continue;
        return fsti_journal_refuse_file(&job->journal, fsti_file_path(job->base->files[i].file),
                                        error);
    }
    return FST_OK;
}

fst_status fsti_apply_check(apply_job *job, fst_error *error) {
    delta_pool pool = {.task_count = job->tensor_count,
                       .thread_count = job->thread_count,
                       .context = job,
                       .run = run_check};
    if (!numbers_fit(job)) {
        fsti_error_location location = {.file = job->sync->journal_path,
                                        .byte_offset = FST_NO_OFFSET};
        return fsti_error_set(error, FST_E_CORRUPT, location,
                              "the journal is damaged. Copy the checkpoint again and delete "
                              ".weight_sync");
    }
    job->file_checks = fsti_alloc_zeroed(job->base->file_count + 1, sizeof *job->file_checks);
    if (job->file_checks == NULL) return fsti_error_memory(error, job->base->file_count);
    fst_status status = fsti_pool_run(&pool, error);
    if (status == FST_OK && job->rolls_back) status = check_ahead(job, error);
    fsti_free(job->file_checks);
    job->file_checks = NULL;
    return status;
}

fst_status fsti_apply_check_names(const apply_job *job, fst_error *error) {
    for (size_t i = 0; i < job->base->file_count; i++) {
        const fsti_file *file = job->base->files[i].file;
        int fd = job->descriptors[i] >= 0 ? job->descriptors[i] : fsti_file_identity(file);
        struct stat named, opened;
        if (fstat(fd, &opened) == 0 && stat(fsti_file_path(file), &named) == 0 &&
            opened.st_dev == named.st_dev && opened.st_ino == named.st_ino)
            continue;
        fsti_error_location location = {.file = fsti_file_path(file), .byte_offset = FST_NO_OFFSET};
        return fsti_error_set(error, FST_E_FILE_CHANGED, location,
                              "the file was replaced while a delta was applied. Apply the delta "
                              "again if the new file is the version that it is based on");
    }
    return FST_OK;
}
