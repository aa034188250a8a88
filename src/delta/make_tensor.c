// SPDX-License-Identifier: Apache-2.0
/// Compares the old and new bytes of tensors block by block, and compresses the differences. Only
/// blocks are kept in memory.
#include <string.h>

#include "change_list.h"
#include "make_job.h"

/// Bytes of a tensor that stay mapped at most. A multiple of a block.
#define DROP_BYTES ((uint64_t)16 << 20)

/// One thread's memory.
typedef struct make_worker {
    make_job *job;
    shard_writer *shard;
    fsti_frame_writer *writer;
    delta_fold *fold;                       ///< applies the delta that is the new state
    change_list list;                       ///< the changes, for the overwrite encoding
    unsigned char *old, *made, *difference; ///< a block each
    unsigned char *positions; ///< for overwrite: of a block's changes, 4 bytes for each byte
    const make_task *task;
    delta_frames frames;
} make_worker;

static fst_status read_bytes(const fst_model *model, size_t index, uint64_t at, void *target,
                             size_t size, fst_error *error) {
    fst_tensor_info info;
    size_t got = 0;
    fsti_model_tensor_info(model, index, &info);
    fsti_file *file = model->files[info.file_index].file;
    FST_TRY(fsti_file_read(file, target, size, info.file_offset + at, &got, error));
    if (got == size) return FST_OK;
    fsti_error_location location = {.file = fsti_file_path(file),
                                    .byte_offset = info.file_offset + at};
    return fsti_error_set(error, FST_E_SHORT_READ, location, "the file became shorter");
}

/// Begins a pass over the tensor. If the new state is a delta, it is decoded from the beginning.
static fst_status begin_pass(make_worker *worker, fst_error *error) {
    const fst_delta *delta = worker->job->options->delta;
    if (worker->task->tensor == NULL) return FST_OK;
    worker->frames =
        fsti_delta_frames(delta, worker->task->tensor, (delta_span){0, delta->version_count});
    return fsti_fold_begin(worker->fold, &worker->frames, worker->task->size_bytes, NULL, error);
}

/// Reads the old and the new bytes of the block at `at`.
static fst_status read_block(make_worker *worker, uint64_t at, change_block *out,
                             fst_error *error) {
    make_job *job = worker->job;
    const make_task *task = worker->task;
    size_t size = (size_t)fsti_min(DELTA_BLOCK_BYTES, task->size_bytes - at);
    *out = (change_block){worker->old, worker->made, size, at};
    FST_TRY(read_bytes(job->old, task->old, at, worker->old, size, error));
    atomic_fetch_add_explicit(&job->bytes_read, size, memory_order_relaxed);
    if (job->made != NULL) {
        atomic_fetch_add_explicit(&job->bytes_read, size, memory_order_relaxed);
        return read_bytes(job->made, task->made, at, worker->made, size, error);
    }
    if (job->options->delta == NULL) {
        out->made = (const unsigned char *)job->options->tensors[task->made].data + at;
        return FST_OK;
    }
    memcpy(worker->made, worker->old, size);
    return task->tensor == NULL ? FST_OK : fsti_fold_apply(worker->fold, worker->made, size, error);
}

/// The mapped bytes of a tensor from `at` on; NULL if the file cannot be mapped.
static const unsigned char *find_mapped(const fst_model *model, size_t index, uint64_t at) {
    fst_tensor_info info;
    fsti_model_tensor_info(model, index, &info);
    const char *mapping = fsti_io_file_mapping(model->files[info.file_index].file);
    return mapping == NULL ? NULL : (const unsigned char *)mapping + info.file_offset + at;
}

/// Maps the block at `at` of both states, so that their bytes are not copied: copying takes longer
/// than comparing. False if a state cannot be mapped, or is made of the other.
static bool map_block(const make_worker *worker, uint64_t at, change_block *out) {
    const make_job *job = worker->job;
    const make_task *task = worker->task;
    if (job->options->delta != NULL || !fsti_io_guard_ready()) return false;
    const unsigned char *old = find_mapped(job->old, task->old, at), *made;
    if (job->made != NULL)
        made = find_mapped(job->made, task->made, at);
    else
        made = (const unsigned char *)job->options->tensors[task->made].data + at;
    *out =
        (change_block){old, made, (size_t)fsti_min(DELTA_BLOCK_BYTES, task->size_bytes - at), at};
    return old != NULL && made != NULL;
}

/// Compresses zeros for the unchanged bytes before the first block that differs. Such a block is
/// in `difference`, so that these are in another buffer.
static fst_status put_zeros(make_worker *worker, uint64_t size, fst_error *error) {
    memset(worker->old, 0, DELTA_BLOCK_BYTES);
    for (; size > 0; size -= fsti_min(size, DELTA_BLOCK_BYTES))
        FST_TRY(fsti_frame_write(worker->writer, worker->old,
                                 (size_t)fsti_min(size, DELTA_BLOCK_BYTES), error));
    return FST_OK;
}

/// Begins the frame of an xor delta at its first block that differs.
static fst_status begin_xor(make_worker *worker, uint64_t begin, fst_error *error) {
    fsti_frame_sink sink = {fsti_shard_put, worker->shard};
    FST_TRY(fsti_frame_write_begin_sparse(worker->writer, worker->task->size_bytes, &sink, error));
    return put_zeros(worker, begin, error);
}

/// Whether the blocks differ; `difference` gets old XOR new.
static bool xor_block(unsigned char *restrict difference, const unsigned char *restrict old,
                      const unsigned char *restrict made, size_t size) {
    unsigned char any = 0;
    for (size_t i = 0; i < size; i++) {
        difference[i] = old[i] ^ made[i];
        any |= difference[i];
    }
    return any != 0;
}

/// Checksums of the new tensor in progress: the one to be written, and the one that a delta as the
/// new state must match.
typedef struct make_digests {
    const fsti_digest_kind *kind, *source_kind; ///< source_kind: NULL unless there is such a delta
    void *state, *source_state;
    unsigned char digest[FSTI_DIGEST_BYTES_MAX], source_digest[FSTI_DIGEST_BYTES_MAX];
} make_digests;

static fst_status begin_digests(const make_worker *worker, make_digests *digests,
                                fst_error *error) {
    make_job *job = worker->job;
    *digests = (make_digests){.kind = job->kind, .state = job->kind->begin()};
    if (worker->task->tensor != NULL) {
        digests->source_kind =
            fsti_delta_digest(job->options->delta, &worker->frames, digests->source_digest);
        digests->source_state = digests->source_kind->begin();
    }
    if (digests->state == NULL || (digests->source_kind != NULL && digests->source_state == NULL)) {
        if (digests->state != NULL) (void)digests->kind->end(digests->state, NULL);
        if (digests->source_state != NULL)
            (void)digests->source_kind->end(digests->source_state, NULL);
        return fsti_error_memory(error, 64);
    }
    return FST_OK;
}

static bool update_digests(make_digests *digests, const change_block *block) {
    return digests->kind->update(digests->state, block->made, block->size) &&
           (digests->source_kind == NULL ||
            digests->source_kind->update(digests->source_state, block->made, block->size));
}

static bool end_digests(make_digests *digests) {
    bool is_good = digests->kind->end(digests->state, digests->digest);
    return (digests->source_kind == NULL ||
            digests->source_kind->end(digests->source_state, digests->source_digest)) &&
           is_good;
}

/// A block on which the first pass works, and what it finds.
typedef struct make_look {
    make_worker *worker;
    make_digests *digests;
    change_block block;
    bool is_hashed, differs;
} make_look;

/// Compares the block, and adds it to the checksums. Mapped memory is read here only.
static void look_at(void *context) {
    make_look *look = context;
    make_worker *worker = look->worker;
    const change_block *block = &look->block;
    if (worker->job->options->encoding == FST_DELTA_XOR)
        look->differs = xor_block(worker->difference, block->old, block->made, block->size);
    else
        fsti_change_list_add(&worker->list, block);
    look->is_hashed = update_digests(look->digests, block);
}

/// Looks at a mapped block. An error if a file became shorter or cannot be read.
static fst_status look_at_mapped(make_look *look, fst_error *error) {
    const change_block *block = &look->block;
    uintptr_t old = (uintptr_t)block->old, made = (uintptr_t)block->made;
    uintptr_t begin = old < made ? old : made, end = (old < made ? made : old) + block->size;
    if (fsti_io_guarded(look_at, look, (const void *)begin, end - begin)) return FST_OK;
    fsti_error_location location = {.tensor = look->worker->task->name.bytes,
                                    .tensor_size = look->worker->task->name.size,
                                    .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_IO, location,
                          "the checkpoint became shorter while it was read, or the disk failed");
}

static void drop_mapped(const fst_model *model, size_t index, uint64_t begin, uint64_t end) {
    fst_tensor_info info;
    fsti_model_tensor_info(model, index, &info);
    fsti_io_drop_mapped(model->files[info.file_index].file, info.file_offset + begin,
                        info.file_offset + end);
}

/// Unmaps what was read, from time to time: otherwise the process's memory would seem to grow by
/// both checkpoints.
static void drop_read(const make_look *look) {
    const make_job *job = look->worker->job;
    const make_task *task = look->worker->task;
    uint64_t end = look->block.begin + look->block.size,
             begin = (end - 1) / DROP_BYTES * DROP_BYTES;
    if (end % DROP_BYTES != 0 && end != task->size_bytes) return;
    drop_mapped(job->old, task->old, begin, end);
    if (job->made != NULL) drop_mapped(job->made, task->made, begin, end);
}

static fst_status look_at_block(make_look *look, uint64_t at, fst_error *error) {
    make_job *job = look->worker->job;
    if (map_block(look->worker, at, &look->block)) {
        uint64_t read = look->block.size * (job->made != NULL ? 2 : 1);
        atomic_fetch_add_explicit(&job->bytes_read, read, memory_order_relaxed);
        FST_TRY(look_at_mapped(look, error));
        drop_read(look);
    } else {
        FST_TRY(read_block(look->worker, at, &look->block, error));
        look_at(look);
    }
    atomic_fetch_add_explicit(&job->bytes_hashed, look->block.size, memory_order_relaxed);
    return look->is_hashed ? FST_OK : fsti_error_memory(error, look->block.size);
}

/// Adds a block to the frame of an xor delta, which begins at the first block that differs.
static fst_status put_xor(const make_look *look, bool *is_begun, fst_error *error) {
    make_worker *worker = look->worker;
    if (!*is_begun && !look->differs) return FST_OK;
    if (!*is_begun) FST_TRY(begin_xor(worker, look->block.begin, error));
    *is_begun = true;
    return fsti_frame_write(worker->writer, worker->difference, look->block.size, error);
}

/// The first pass: computes the checksums, and the frame of an xor delta or the list of changes of
/// an overwrite delta.
static fst_status first_pass(make_worker *worker, make_digests *digests, bool *is_changed,
                             fst_error *error) {
    bool is_xor = worker->job->options->encoding == FST_DELTA_XOR;
    make_look look = {.worker = worker, .digests = digests};
    worker->list.count = 0;
    worker->list.is_kept = true;
    FST_TRY(begin_pass(worker, error));
    FST_TRY(begin_digests(worker, digests, error));
    fst_status status = FST_OK;
    for (uint64_t at = 0; at < worker->task->size_bytes && status == FST_OK;
         at += DELTA_BLOCK_BYTES) {
        status = look_at_block(&look, at, error);
        if (status == FST_OK && is_xor) status = put_xor(&look, is_changed, error);
    }
    if (!end_digests(digests) && status == FST_OK) status = fsti_error_memory(error, 64);
    if (!is_xor) *is_changed = worker->list.count > 0;
    return status;
}

/// Writes a list of changes that is too long for memory: one more pass for positions, one for
/// values.
static fst_status put_long_list(make_worker *worker, fst_error *error) {
    for (int pass = 0; pass < 2; pass++) {
        FST_TRY(begin_pass(worker, error));
        for (uint64_t at = 0; at < worker->task->size_bytes; at += DELTA_BLOCK_BYTES) {
            change_block block;
            FST_TRY(read_block(worker, at, &block, error));
            size_t count = fsti_change_list_block(&block, pass == 0 ? worker->positions : NULL,
                                                  pass == 0 ? NULL : worker->difference);
            FST_TRY(pass == 0
                        ? fsti_frame_write(worker->writer, worker->positions, 4 * count, error)
                        : fsti_frame_write(worker->writer, worker->difference, count, error));
        }
    }
    return FST_OK;
}

static fst_status put_overwrite(make_worker *worker, fst_error *error) {
    const change_list *list = &worker->list;
    fsti_frame_sink sink = {fsti_shard_put, worker->shard};
    unsigned char count[4];
    (void)fsti_number_store(count, list->count, sizeof count);
    FST_TRY(fsti_frame_write_begin(worker->writer, 4 + 5 * list->count, &sink, error));
    FST_TRY(fsti_frame_write(worker->writer, count, sizeof count, error));
    if (!list->is_kept) return put_long_list(worker, error);
    FST_TRY(fsti_frame_write(worker->writer, list->positions, (size_t)(4 * list->count), error));
    return fsti_frame_write(worker->writer, list->values, (size_t)list->count, error);
}

static fst_status make_tensor(make_worker *worker, fst_error *error) {
    make_job *job = worker->job;
    make_digests digests;
    char checksum[2 * FSTI_DIGEST_BYTES_MAX + 1];
    uint64_t begin = worker->shard->data_bytes;
    bool is_changed = false;
    FST_TRY(first_pass(worker, &digests, &is_changed, error));
    if (worker->task->tensor != NULL) {
        FST_TRY(fsti_fold_end(worker->fold, error));
        FST_TRY(fsti_delta_check_digest(job->options->delta, worker->task->tensor, &worker->frames,
                                        digests.source_digest, error));
    }
    if (!is_changed) return FST_OK;
    if (job->options->encoding == FST_DELTA_OVERWRITE) FST_TRY(put_overwrite(worker, error));
    FST_TRY(fsti_frame_write_end(worker->writer, error));
    atomic_fetch_add_explicit(&job->tensor_bytes, worker->task->size_bytes, memory_order_relaxed);
    fsti_digest_print(digests.digest, job->kind->digest_bytes, checksum);
    return fsti_shard_add(worker->shard, worker->task->name, begin, checksum, error);
}

static fst_status open_worker(make_worker *worker, fst_error *error) {
    const fst_delta_make_options *options = worker->job->options;
    bool is_overwrite = options->encoding == FST_DELTA_OVERWRITE;
    worker->old = fsti_alloc(DELTA_BLOCK_BYTES);
    worker->made = fsti_alloc(DELTA_BLOCK_BYTES);
    worker->difference = fsti_alloc(DELTA_BLOCK_BYTES);
    worker->positions = is_overwrite ? fsti_alloc(4 * DELTA_BLOCK_BYTES) : NULL;
    if (worker->old == NULL || worker->made == NULL || worker->difference == NULL ||
        (is_overwrite && worker->positions == NULL))
        return fsti_error_memory(error, DELTA_BLOCK_BYTES);
    if (is_overwrite) FST_TRY(fsti_change_list_open(&worker->list, error));
    if (options->delta != NULL) FST_TRY(fsti_fold_open(&worker->fold, error));
    return fsti_frame_writer_open(options->level, &worker->writer, error);
}

fst_status fsti_make_tensors(delta_pool *pool, uint32_t thread, fst_error *error) {
    make_job *job = pool->context;
    make_worker worker = {.job = job, .shard = &job->shards[thread]};
    size_t task;
    fst_status status = open_worker(&worker, error);
    while (status == FST_OK && fsti_pool_take(pool, &task)) {
        worker.task = &job->tasks[task];
        status = make_tensor(&worker, error);
        if (status != FST_OK && worker.task->tensor != NULL)
            fsti_fold_locate(worker.fold, &worker.frames, worker.task->tensor, error);
    }
    fsti_frame_writer_close(worker.writer);
    fsti_fold_close(worker.fold);
    fsti_change_list_close(&worker.list);
    fsti_free(worker.old);
    fsti_free(worker.made);
    fsti_free(worker.difference);
    fsti_free(worker.positions);
    return status;
}
