// SPDX-License-Identifier: Apache-2.0
/// Makes a delta: threads compare old and new tensors block by block and compress the differences.
/// Each thread writes its own shard, so that only blocks are kept in memory.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "change_list.h"
#include "make_folder.h"
#include "output/output.h"
#include "shard_write.h"
#include "sync_folder.h"

#define MAKE_THREADS_MAX 16u

/// A tensor to be compared.
typedef struct make_task {
    fsti_name name;
    size_t old;  ///< index in the old model
    size_t made; ///< index in the new model, the delta, or the tensors in memory
    uint64_t size_bytes;
    const delta_tensor *tensor; ///< if the new state is a delta: its tensor
} make_task;

typedef struct make_job {
    const fst_delta_make_options *options;
    const fsti_digest_kind *kind;
    fst_model *old, *made; ///< the new model; NULL if the new state is not a checkpoint
    make_task *tasks;
    size_t task_count;
    shard_writer shards[MAKE_THREADS_MAX];
    uint32_t thread_count;
    atomic_uint_least64_t bytes_read, bytes_hashed, tensor_bytes;
} make_job;

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

/// Compresses zeros for the unchanged bytes before the first block that differs.
static fst_status put_zeros(make_worker *worker, uint64_t size, fst_error *error) {
    memset(worker->difference, 0, DELTA_BLOCK_BYTES);
    for (; size > 0; size -= fsti_min(size, DELTA_BLOCK_BYTES))
        FST_TRY(fsti_frame_write(worker->writer, worker->difference,
                                 (size_t)fsti_min(size, DELTA_BLOCK_BYTES), error));
    return FST_OK;
}

static fst_status put_xor(make_worker *worker, const change_block *block, bool *is_begun,
                          fst_error *error) {
    fsti_frame_sink sink = {fsti_shard_put, worker->shard};
    if (!*is_begun) {
        if (memcmp(block->old, block->made, block->size) == 0) return FST_OK;
        *is_begun = true;
        FST_TRY(fsti_frame_write_begin(worker->writer, worker->task->size_bytes, &sink, error));
        FST_TRY(put_zeros(worker, block->begin, error));
    }
    for (size_t i = 0; i < block->size; i++) worker->difference[i] = block->old[i] ^ block->made[i];
    return fsti_frame_write(worker->writer, worker->difference, block->size, error);
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

/// The first pass: computes the checksums, and the frame of an xor delta or the list of changes of
/// an overwrite delta.
static fst_status first_pass(make_worker *worker, make_digests *digests, bool *is_changed,
                             fst_error *error) {
    make_job *job = worker->job;
    bool is_xor = job->options->encoding == FST_DELTA_XOR;
    worker->list.count = 0;
    worker->list.is_kept = true;
    FST_TRY(begin_pass(worker, error));
    FST_TRY(begin_digests(worker, digests, error));
    fst_status status = FST_OK;
    for (uint64_t at = 0; at < worker->task->size_bytes && status == FST_OK;
         at += DELTA_BLOCK_BYTES) {
        change_block block;
        status = read_block(worker, at, &block, error);
        if (status != FST_OK) break;
        if (!update_digests(digests, &block)) status = fsti_error_memory(error, block.size);
        atomic_fetch_add_explicit(&job->bytes_hashed, block.size, memory_order_relaxed);
        if (status == FST_OK && is_xor) status = put_xor(worker, &block, is_changed, error);
        if (!is_xor) fsti_change_list_add(&worker->list, &block);
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
    // Little-endian.
    unsigned char count[4] = {(unsigned char)list->count, (unsigned char)(list->count >> 8),
                              (unsigned char)(list->count >> 16),
                              (unsigned char)(list->count >> 24)};
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

static fst_status run_make(delta_pool *pool, uint32_t thread, fst_error *error) {
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

static fst_status refuse_tensor(fsti_name name, fst_status status, const char *what,
                                fst_error *error) {
    fsti_error_location location = {
        .tensor = name.bytes, .tensor_size = name.size, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, status, location, "%s", what);
}

static fsti_name memory_name(const void *context, size_t at) {
    const fst_delta_memory *tensors = context;
    return (fsti_name){tensors[at].name, strlen(tensors[at].name)};
}

static fsti_name delta_name(const void *context, size_t at) {
    const fst_delta *delta = context;
    return (fsti_name){delta->tensors[at].name, delta->tensors[at].name_size};
}

#define SHAPE_TEXT_BYTES 200

/// Prints as many dimensions as fit.
static void print_shape(const fst_tensor_info *info, char out[SHAPE_TEXT_BYTES]) {
    size_t at = (size_t)snprintf(out, SHAPE_TEXT_BYTES, "[");
    for (uint32_t i = 0; i < info->rank && at < SHAPE_TEXT_BYTES - 30; i++)
        at += (size_t)snprintf(out + at, SHAPE_TEXT_BYTES - at, "%s%llu", i == 0 ? "" : ", ",
                               (unsigned long long)info->shape[i]);
    (void)snprintf(out + at, SHAPE_TEXT_BYTES - at, "]");
}

/// Refuses a changed dtype or shape, which a delta does not record.
static fst_status compare_kinds(const fst_model *model, size_t index, const fst_tensor_info *made,
                                fst_error *error) {
    fst_tensor_info old;
    fsti_model_tensor_info(model, index, &old);
    fsti_error_location location = {
        .tensor = old.name, .tensor_size = old.name_size, .byte_offset = FST_NO_OFFSET};
    if (old.dtype != made->dtype)
        return fsti_error_set(error, FST_E_TENSOR_INVALID_INFO, location,
                              "the tensor is %s in the old checkpoint and %s in the new one; that "
                              "needs a full version",
                              fsti_dtype_name(old.dtype), fsti_dtype_name(made->dtype));
    if (old.rank == made->rank && memcmp(old.shape, made->shape, old.rank * sizeof *old.shape) == 0)
        return FST_OK;
    char shapes[2][SHAPE_TEXT_BYTES];
    print_shape(&old, shapes[0]);
    print_shape(made, shapes[1]);
    return fsti_error_set(error, FST_E_TENSOR_INVALID_INFO, location,
                          "the tensor has shape %s in the old checkpoint and %s in the new one; "
                          "that needs a full version",
                          shapes[0], shapes[1]);
}

/// Finds the new state of a tensor, and refuses one that a delta cannot describe.
static fst_status find_made(const make_job *job, const fsti_name_table *names, make_task *task,
                            fst_error *error) {
    const fst_delta_make_options *options = job->options;
    uint64_t size = task->size_bytes;
    if (job->made != NULL) {
        fst_tensor_info info;
        FST_TRY(fsti_model_find(job->made, task->name.bytes, task->name.size, &task->made, error));
        fsti_model_tensor_info(job->made, task->made, &info);
        size = info.size_bytes;
        FST_TRY(compare_kinds(job->old, task->old, &info, error));
    } else {
        task->made = fsti_name_table_find(names, task->name);
        if (options->delta != NULL && task->made != SIZE_MAX)
            task->tensor = &options->delta->tensors[task->made];
        if (options->delta == NULL && task->made == SIZE_MAX)
            return refuse_tensor(task->name, FST_E_TENSOR_NOT_FOUND,
                                 "the new state lacks a tensor of the old checkpoint", error);
        if (options->delta == NULL) size = options->tensors[task->made].size_bytes;
    }
    if (size != task->size_bytes)
        return refuse_tensor(task->name, FST_E_TENSOR_INVALID_INFO,
                             "the tensor has another size in the new state; that needs a full "
                             "version",
                             error);
    if (options->encoding == FST_DELTA_OVERWRITE && size > UINT32_MAX)
        return refuse_tensor(task->name, FST_E_UNSUPPORTED,
                             "an overwrite delta cannot address a tensor of 4 GiB or more; use xor",
                             error);
    return FST_OK;
}

static int compare_tasks(const void *a_pointer, const void *b_pointer) {
    const make_task *a = a_pointer, *b = b_pointer;
    if (a->size_bytes != b->size_bytes) return a->size_bytes > b->size_bytes ? -1 : 1;
    return a->old < b->old ? -1 : a->old > b->old;
}

/// Makes a task for each tensor, the largest first. If the new state is a delta, only for the
/// tensors that it changes.
static fst_status collect_tasks(make_job *job, fst_error *error) {
    const fst_delta_make_options *options = job->options;
    size_t count = fsti_model_tensor_count(job->old), others;
    fsti_name_table names = {0};
    bool is_made = true;
    others = job->made != NULL        ? fsti_model_tensor_count(job->made)
             : options->delta != NULL ? options->delta->tensor_count
                                      : options->tensor_count;
    if (options->delta != NULL)
        is_made = fsti_name_table_make(&names, delta_name, options->delta, others + 1);
    else if (job->made == NULL)
        is_made = fsti_name_table_make(&names, memory_name, options->tensors, others + 1);
    job->tasks = fsti_alloc_zeroed(count + 1, sizeof *job->tasks);
    fst_status status = job->tasks == NULL || !is_made ? fsti_error_memory(error, count) : FST_OK;
    for (size_t i = 0; i < others && job->made == NULL && status == FST_OK; i++)
        if (fsti_name_table_put(&names, i) != SIZE_MAX)
            status = fsti_error_set(error, FST_E_DUPLICATE_TENSOR, FSTI_NO_LOCATION,
                                    "a tensor is given twice");
    for (size_t i = 0; i < count && status == FST_OK; i++) {
        fst_tensor_info info;
        fsti_model_tensor_info(job->old, i, &info);
        make_task *task = &job->tasks[job->task_count];
        *task = (make_task){
            .name = {info.name, info.name_size}, .old = i, .size_bytes = info.size_bytes};
        status = find_made(job, &names, task, error);
        if (options->delta == NULL || task->tensor != NULL) job->task_count++;
    }
    if (status == FST_OK && job->task_count != others)
        status = fsti_error_set(error, FST_E_TENSOR_NOT_FOUND, FSTI_NO_LOCATION,
                                "the new state has %zu tensors that the old checkpoint lacks",
                                others - job->task_count);
    fsti_name_table_clear(&names);
    if (status == FST_OK && job->tasks != NULL)
        qsort(job->tasks, job->task_count, sizeof *job->tasks, compare_tasks);
    return status;
}

static fsti_name task_name(const void *context, size_t at) {
    const make_job *job = context;
    return job->tasks[at].name;
}

static int compare_rows(const void *a_pointer, const void *b_pointer) {
    const fsti_delta_row *a = a_pointer, *b = b_pointer;
    size_t size = a->name_size < b->name_size ? a->name_size : b->name_size;
    int order = memcmp(a->name, b->name, size);
    if (order != 0) return order;
    return a->name_size < b->name_size ? -1 : a->name_size > b->name_size;
}

static fst_status put_index(const make_job *job, const char *folder, uint32_t shard_count,
                            fst_error *error) {
    const fst_delta_make_options *options = job->options;
    fsti_delta_row *rows = fsti_alloc_zeroed(job->task_count + 1, sizeof *rows);
    char *text = NULL, *path = fsti_location_join(folder, "/" DELTA_INDEX_NAME);
    size_t size = 0, count = 0;
    uint32_t shard = 0;
    fst_status status =
        rows == NULL || path == NULL ? fsti_error_memory(error, job->task_count) : FST_OK;
    for (uint32_t i = 0; i < job->thread_count && status == FST_OK; i++) {
        const shard_writer *writer = &job->shards[i];
        for (size_t k = 0; k < writer->entry_count; k++)
            rows[count++] =
                (fsti_delta_row){writer->entries[k].name, writer->entries[k].name_size, shard};
        shard += writer->entry_count > 0;
    }
    fsti_delta_draft draft = {.version = options->version,
                              .base = options->base_version,
                              .encoding = options->encoding == FST_DELTA_XOR ? "xor" : "overwrite",
                              .checksum = job->kind->name,
                              .rows = rows,
                              .row_count = count,
                              .shard_count = shard_count,
                              .is_compact = options->dialect == FST_DELTA_MODELEXPRESS};
    if (status == FST_OK && rows != NULL) {
        qsort(rows, count, sizeof *rows, compare_rows);
        status = fsti_delta_text_write(&draft, &text, &size, error);
    }
    bool durable = (options->flags & FST_DELTA_DURABLE) != 0;
    if (status == FST_OK) {
        status = fsti_shard_put_text(path, text, size, durable, error);
        fsti_free(text);
    }
    fsti_free(rows);
    fsti_free(path);
    return status;
}

/// Writes the headers, renames the shards, and writes the index last: without it, readers find no
/// delta.
static fst_status publish(make_job *job, const char *folder, fst_error *error) {
    bool durable = (job->options->flags & FST_DELTA_DURABLE) != 0;
    uint32_t shard_count = 0, shard = 0;
    for (uint32_t i = 0; i < job->thread_count; i++) shard_count += job->shards[i].entry_count > 0;
    for (uint32_t i = 0; i < job->thread_count; i++) {
        char name[FSTI_DELTA_SHARD_NAME_BYTES + 1] = "/";
        if (job->shards[i].entry_count == 0) continue;
        FST_TRY(fsti_shard_finish(&job->shards[i], durable, error));
        fsti_delta_shard_name(shard++, shard_count, name + 1);
        FST_TRY(fsti_make_folder_list(folder, job->shards[i].fd, name + 1, durable, error));
        char *path = fsti_location_join(folder, name);
        if (path == NULL) return fsti_error_memory(error, strlen(folder));
        fst_status status = rename(job->shards[i].path, path) == 0
                                ? FST_OK
                                : fsti_error_errno(error, errno, path, "renaming the shard");
        fsti_free(path);
        FST_TRY(status);
    }
    if (durable) FST_TRY(fsti_folder_sync(folder, error));
    FST_TRY(put_index(job, folder, shard_count, error));
    return durable ? fsti_folder_sync(folder, error) : FST_OK;
}

static fst_status open_states(make_job *job, const char *old, fst_error *error) {
    model_request request = {0};
    const fst_delta *delta = job->options->delta;
    FST_TRY(fsti_sync_expect(
        old, delta == NULL ? job->options->base_version : delta->versions[0].text.base, error));
    FST_TRY(fsti_model_open(old, &request, &job->old, error));
    if (job->options->checkpoint == NULL) return FST_OK;
    // The new state must be of one version, too; its note may name any.
    FST_TRY(fsti_sync_expect(job->options->checkpoint, NULL, error));
    return fsti_model_open(job->options->checkpoint, &request, &job->made, error);
}

/// Refuses a base that already has all values of the delta that is the new state: a delta lists
/// only values that change, so it was not made for this base.
static fst_status refuse_nothing(const make_job *job, fst_error *error) {
    const fst_delta *delta = job->options->delta;
    if (delta == NULL || delta->version_count > 1 || job->task_count == 0) return FST_OK;
    for (uint32_t i = 0; i < job->thread_count; i++)
        if (job->shards[i].entry_count > 0) return FST_OK;
    return fsti_error_set(error, FST_E_VERSION, FSTI_NO_LOCATION,
                          "the checkpoint holds all new values of the delta, so it is not version "
                          "%s, which the delta is based on",
                          delta->versions[0].text.base);
}

static fst_status make_shards(make_job *job, const char *folder, fst_error *error) {
    uint64_t room = fsti_shard_header_room(task_name, job, job->task_count);
    const fst_delta *delta = job->options->delta;
    // The memory of a thread, in decoders: two for the encoder and the blocks.
    size_t decoders = 2;
    if (job->options->encoding == FST_DELTA_OVERWRITE)
        decoders += DELTA_LIST_BYTES / DELTA_DECODER_BYTES;
    if (delta != NULL)
        decoders += fsti_delta_decoders(delta, (delta_span){0, delta->version_count});
    job->thread_count = fsti_pool_threads(job->options->thread_count, decoders);
    job->thread_count = (uint32_t)fsti_min(job->thread_count, MAKE_THREADS_MAX);
    // Each thread writes a shard, so more threads than tensors would be useless.
    job->thread_count = (uint32_t)fsti_min(job->thread_count, fsti_max(job->task_count, 1));
    for (uint32_t i = 0; i < job->thread_count; i++)
        FST_TRY(fsti_shard_open(folder, i, room, &job->shards[i], error));
    delta_pool pool = {.task_count = job->task_count,
                       .thread_count = job->thread_count,
                       .context = job,
                       .run = run_make};
    FST_TRY(fsti_pool_run(&pool, error));
    FST_TRY(refuse_nothing(job, error));
    return publish(job, folder, error);
}

fst_status fsti_delta_make(const char *old, const char *folder,
                           const fst_delta_make_options *options, fst_delta_stats *stats,
                           fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    make_job job = {.options = options, .kind = fsti_digest_get(options->digest)};
    for (size_t i = 0; i < MAKE_THREADS_MAX; i++) job.shards[i].fd = -1;
    fst_status status = job.kind->ready(error);
    if (status == FST_OK && options->delta != NULL &&
        options->delta->version_count > DELTA_FOLD_MAX)
        status = fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                                "at most %u versions can be folded into one", DELTA_FOLD_MAX);
    if (status == FST_OK) status = open_states(&job, old, error);
    if (status == FST_OK) status = collect_tasks(&job, error);
    int lock = -1;
    if (status == FST_OK)
        status =
            fsti_make_folder_begin(folder, (options->flags & FST_DELTA_DURABLE) != 0, &lock, error);
    bool is_begun = status == FST_OK;
    if (status == FST_OK) status = make_shards(&job, folder, error);
    stats->thread_count = job.thread_count;
    stats->bytes_read = atomic_load(&job.bytes_read);
    stats->bytes_hashed = atomic_load(&job.bytes_hashed);
    stats->tensor_bytes = atomic_load(&job.tensor_bytes);
    for (uint32_t i = 0; i < job.thread_count; i++) {
        stats->tensor_count += job.shards[i].entry_count;
        stats->bytes_written += job.shards[i].bytes_written;
        fsti_shard_close(&job.shards[i]);
    }
    if (is_begun) fsti_make_folder_end(folder, lock, status);
    fsti_free(job.tasks);
    fsti_model_unref(job.made);
    fsti_model_unref(job.old);
    stats->total_ns = fsti_now_ns() - start_ns;
    return status;
}
