// SPDX-License-Identifier: Apache-2.0
/// Makes a delta: finds the tensors to compare, starts the threads, each of which writes its own
/// shard, and publishes the shards.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "make_folder.h"
#include "make_job.h"
#include "output/output.h"
#include "sync_folder.h"

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

/// Refuses tensors of the new state that the old checkpoint lacks. `count`: how many there are.
static fst_status refuse_others(const make_job *job, size_t others, size_t count,
                                fst_error *error) {
    const fst_delta_make_options *options = job->options;
    fsti_name name = {"", 0};
    size_t at;
    for (size_t i = 0; i < others; i++) {
        fst_tensor_info info = {0};
        if (job->made != NULL) fsti_model_tensor_info(job->made, i, &info);
        name = job->made != NULL        ? (fsti_name){info.name, info.name_size}
               : options->delta != NULL ? delta_name(options->delta, i)
                                        : memory_name(options->tensors, i);
        if (fsti_model_find(job->old, name.bytes, name.size, &at, NULL) != FST_OK) break;
    }
    fsti_error_location location = {
        .tensor = name.bytes, .tensor_size = name.size, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_TENSOR_NOT_FOUND, location,
                          "the old checkpoint lacks a tensor of the new state (%zu in all)", count);
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
        status = refuse_others(job, others, others - job->task_count, error);
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
                       .run = fsti_make_tensors};
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
    make_folder target = {.path = folder};
    if (status == FST_OK)
        status = fsti_make_folder_begin(&target, (options->flags & FST_DELTA_DURABLE) != 0, error);
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
    if (is_begun) fsti_make_folder_end(&target, status);
    fsti_free(job.tasks);
    fsti_model_unref(job.made);
    fsti_model_unref(job.old);
    stats->total_ns = fsti_now_ns() - start_ns;
    return status;
}
