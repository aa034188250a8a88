// SPDX-License-Identifier: Apache-2.0
/// Deltas for tensors in memory. The new bytes are computed and verified block by block, and the
/// changed ones are kept. A short second step writes them into the tensors. Also patches: the
/// changed elements with their positions.
#include <stdlib.h>
#include <string.h>

#include "live_change.h"

struct fst_delta_change {
    const fst_delta *delta; ///< only set while the change is prepared
    changed_tensor *tensors;
    size_t tensor_count;
    uint32_t thread_count;
    bool is_committed;
};

static size_t count_pieces(const changed_tensor *tensor) {
    return (size_t)((tensor->size_bytes + CHANGED_PIECE_BYTES - 1) / CHANGED_PIECE_BYTES);
}

void fsti_delta_drop(fst_delta_change *change) {
    if (change == NULL) return;
    for (size_t i = 0; i < change->tensor_count; i++) {
        changed_tensor *tensor = &change->tensors[i];
        for (size_t k = 0; tensor->pieces != NULL && k < count_pieces(tensor); k++)
            fsti_free(tensor->pieces[k].bytes);
        fsti_free(tensor->pieces);
    }
    fsti_free(change->tensors);
    fsti_free(change);
}

/// The input and output of make_new(): `old` has `size` bytes, and take() receives the new bytes
/// block by block, in order, from byte `at` on.
typedef struct new_bytes {
    const unsigned char *old;
    size_t size;
    fst_status (*take)(void *context, size_t at, const unsigned char *made, size_t size,
                       fst_error *error);
    void *context;
} new_bytes;

/// Whether one size is 2, 4 or 8 times the other, as sizes of elements are.
static bool differ_by_dtype(uint64_t a, uint64_t b) {
    for (uint64_t times = 2; times <= 8; times *= 2)
        if (a / times == b || b / times == a) return true;
    return false;
}

/// Refuses a tensor of another size than the frame states: it probably has another dtype, or the
/// delta is damaged.
static fst_status refuse_size(const delta_fold *fold, const delta_tensor *tensor, size_t size,
                              fst_error *error) {
    uint64_t stated = fsti_fold_other_bytes(fold);
    fsti_error_location location = {
        .tensor = tensor->name, .tensor_size = tensor->name_size, .byte_offset = FST_NO_OFFSET};
    fst_status status = differ_by_dtype(size, stated) ? FST_E_TENSOR_INVALID_INFO : FST_E_CORRUPT;
    if (status == FST_E_CORRUPT) location = FSTI_NO_LOCATION; // fsti_fold_locate() adds the tensor
    return fsti_error_set(error, status, location,
                          "the tensor has %zu bytes, but the delta was made of one with %llu: it "
                          "has another dtype or shape than in the checkpoint%s",
                          size, (unsigned long long)stated,
                          status == FST_E_CORRUPT ? ", or the delta is damaged" : "");
}

/// Computes the new bytes of a tensor. Their checksum is verified at the end, after take() has
/// received all of them.
static fst_status make_new(delta_fold *fold, const fst_delta *delta, const delta_tensor *tensor,
                           const new_bytes *bytes, fst_error *error) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    delta_frames frames = fsti_delta_frames(delta, tensor, (delta_span){0, delta->version_count});
    const fsti_digest_kind *kind = fsti_delta_digest(delta, &frames, digest);
    unsigned char *block = fsti_alloc(DELTA_BLOCK_BYTES);
    if (block == NULL) return fsti_error_memory(error, DELTA_BLOCK_BYTES);
    void *state = kind->begin();
    fst_status status = state == NULL ? fsti_error_memory(error, 64) : FST_OK;
    bool is_begun = status == FST_OK;
    if (is_begun) status = fsti_fold_begin(fold, &frames, bytes->size, NULL, error);
    if (is_begun && status == FST_E_CORRUPT && fsti_fold_other_bytes(fold) > 0)
        status = refuse_size(fold, tensor, bytes->size, error);
    for (size_t at = 0; at < bytes->size && status == FST_OK; at += DELTA_BLOCK_BYTES) {
        size_t size = (size_t)fsti_min(DELTA_BLOCK_BYTES, bytes->size - at);
        memcpy(block, bytes->old + at, size);
        status = fsti_fold_apply(fold, block, size, error);
        if (status == FST_OK && !kind->update(state, block, size))
            status = fsti_error_memory(error, size);
        if (status == FST_OK) status = bytes->take(bytes->context, at, block, size, error);
    }
    fsti_free(block);
    if (state != NULL && !kind->end(state, digest) && status == FST_OK)
        status = fsti_error_memory(error, 64);
    if (status == FST_OK) status = fsti_fold_end(fold, error);
    if (status == FST_OK) return fsti_delta_check_digest(delta, tensor, &frames, digest, error);
    fsti_fold_locate(fold, &frames, tensor, error);
    return status;
}

// ---- preparing ----

typedef struct prepare_job {
    changed_tensor *tensor;
    changed_lines *lines;
} prepare_job;

static fst_status keep_changes(void *context, size_t at, const unsigned char *made, size_t size,
                               fst_error *error) {
    const prepare_job *job = context;
    const changed_tensor *tensor = job->tensor;
    size_t end = at + size;
    fsti_changed_lines_add(job->lines, tensor->target + at, made, size);
    if (end % CHANGED_PIECE_BYTES != 0 && end != tensor->size_bytes) return FST_OK;
    return fsti_changed_lines_take(job->lines, &tensor->pieces[at / CHANGED_PIECE_BYTES], error);
}

static fst_status prepare_tensor(delta_fold *fold, const fst_delta *delta, const prepare_job *job,
                                 fst_error *error) {
    changed_tensor *tensor = job->tensor;
    new_bytes bytes = {tensor->target, (size_t)tensor->size_bytes, keep_changes,
                       (void *)(uintptr_t)job};
    tensor->pieces = fsti_alloc_zeroed(count_pieces(tensor) + 1, sizeof *tensor->pieces);
    if (tensor->pieces == NULL) return fsti_error_memory(error, count_pieces(tensor));
    return make_new(fold, delta, tensor->tensor, &bytes, error);
}

static fst_status run_prepare(delta_pool *pool, uint32_t thread, fst_error *error) {
    fst_delta_change *change = pool->context;
    prepare_job job = {NULL, NULL};
    delta_fold *fold;
    size_t task;
    (void)thread;
    fst_status status = fsti_fold_open(&fold, error);
    if (status == FST_OK) status = fsti_changed_lines_open(&job.lines, error);
    while (status == FST_OK && fsti_pool_take(pool, &task)) {
        job.tensor = &change->tensors[task];
        status = prepare_tensor(fold, change->delta, &job, error);
    }
    fsti_changed_lines_close(job.lines);
    fsti_fold_close(fold);
    return status;
}

static fsti_name caller_tensor_name(const void *context, size_t at) {
    const fst_delta_memory *tensors = context;
    return (fsti_name){tensors[at].name, strlen(tensors[at].name)};
}

static int compare_sizes(const void *a_pointer, const void *b_pointer) {
    const changed_tensor *a = a_pointer, *b = b_pointer;
    if (a->size_bytes != b->size_bytes) return a->size_bytes > b->size_bytes ? -1 : 1;
    return a->tensor < b->tensor ? -1 : a->tensor > b->tensor;
}

static fst_status check_size(const fst_delta *delta, const delta_tensor *tensor,
                             uint64_t size_bytes, fst_error *error) {
    delta_frames frames = fsti_delta_frames(delta, tensor, (delta_span){0, delta->version_count});
    return fsti_delta_check_size(delta, tensor, &frames, size_bytes, error);
}

/// Finds the caller's tensor for each one that changes.
static fst_status find_targets(fst_delta_change *change, const fsti_delta_live *live,
                               fst_error *error) {
    const fst_delta *delta = change->delta;
    fsti_name_table table;
    bool is_made = fsti_name_table_make(&table, caller_tensor_name, live->tensors, live->count + 1);
    fst_status status = is_made ? FST_OK : fsti_error_memory(error, live->count);
    for (size_t i = 0; i < live->count && status == FST_OK; i++)
        if (fsti_name_table_put(&table, i) != SIZE_MAX)
            status = fsti_error_set(error, FST_E_DUPLICATE_TENSOR, FSTI_NO_LOCATION,
                                    "tensor '%.100s' is given twice", live->tensors[i].name);
    for (size_t i = 0; i < delta->tensor_count && status == FST_OK; i++) {
        const delta_tensor *tensor = &delta->tensors[i];
        size_t at = fsti_name_table_find(&table, (fsti_name){tensor->name, tensor->name_size});
        if (at == SIZE_MAX) {
            fsti_error_location location = {.tensor = tensor->name,
                                            .tensor_size = tensor->name_size,
                                            .byte_offset = FST_NO_OFFSET};
            status = fsti_error_set(error, FST_E_TENSOR_NOT_FOUND, location,
                                    "the delta changes a tensor that was not given");
            break;
        }
        status = check_size(delta, tensor, live->tensors[at].size_bytes, error);
        change->tensors[change->tensor_count++] =
            (changed_tensor){tensor, live->tensors[at].data, live->tensors[at].size_bytes, NULL};
    }
    fsti_name_table_clear(&table);
    return status;
}

fst_status fsti_delta_prepare(const fst_delta *delta, const fsti_delta_live *live,
                              const fst_delta_options *options, fst_delta_change **out,
                              fst_error *error) {
    *out = NULL;
    if (delta->version_count > DELTA_FOLD_MAX)
        return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                              "at most %u versions can be prepared at once", DELTA_FOLD_MAX);
    fst_delta_change *change = fsti_alloc_zeroed(1, sizeof *change);
    if (change == NULL) return fsti_error_memory(error, sizeof *change);
    change->delta = delta;
    change->tensors = fsti_alloc_zeroed(delta->tensor_count + 1, sizeof *change->tensors);
    fst_status status = change->tensors == NULL ? fsti_error_memory(error, delta->tensor_count)
                                                : find_targets(change, live, error);
    if (status == FST_OK && change->tensors != NULL) {
        qsort(change->tensors, change->tensor_count, sizeof *change->tensors, compare_sizes);
        change->thread_count =
            fsti_pool_threads(options->thread_count,
                              fsti_delta_decoders(delta, (delta_span){0, delta->version_count}));
        delta_pool pool = {.task_count = change->tensor_count,
                           .thread_count = change->thread_count,
                           .context = change,
                           .run = run_prepare};
        status = fsti_pool_run(&pool, error);
        if (status == FST_OK)
            status = fsti_check_shared(change->tensors, change->tensor_count, error);
    }
    if (status != FST_OK) {
        fsti_delta_drop(change);
        return status;
    }
    change->delta = NULL;
    *out = change;
    return FST_OK;
}

// ---- committing ----

/// A task is one piece. The pieces are numbered through all tensors.
static fst_status run_commit(delta_pool *pool, uint32_t thread, fst_error *error) {
    const fst_delta_change *change = pool->context;
    size_t task, tensor = 0, before = 0;
    (void)thread, (void)error;
    while (fsti_pool_take(pool, &task)) {
        // The task numbers of a thread ascend, so each search begins where the previous one ended.
        for (; task - before >= count_pieces(&change->tensors[tensor]); tensor++)
            before += count_pieces(&change->tensors[tensor]);
        const changed_tensor *changed = &change->tensors[tensor];
        uint64_t begin = (task - before) * CHANGED_PIECE_BYTES;
        fsti_changed_piece_write(
            &changed->pieces[task - before], changed->target + begin,
            (size_t)fsti_min(CHANGED_PIECE_BYTES, changed->size_bytes - begin));
    }
    return FST_OK;
}

void fsti_delta_commit(fst_delta_change *change) {
    if (change->is_committed) return;
    change->is_committed = true;
    delta_pool pool = {.context = change, .run = run_commit};
    pool.thread_count = fsti_cpu_count();
    if (pool.thread_count > DELTA_THREADS_MAX) pool.thread_count = DELTA_THREADS_MAX;
    for (size_t i = 0; i < change->tensor_count; i++)
        pool.task_count += count_pieces(&change->tensors[i]);
    (void)fsti_pool_run(&pool, NULL);
}

// ---- patches ----

/// Counts changed elements; with `patch` it also stores their values and indices.
static uint64_t walk_changes(const fst_delta_patch_options *options, const unsigned char *made,
                             const fst_delta_patch *patch) {
    const unsigned char *old = options->old;
    uint64_t count = options->size_bytes / options->element_bytes, found = 0;
    uint32_t size = options->element_bytes;
    for (uint64_t i = 0; i < count; i++) {
        if (memcmp(old + i * size, made + i * size, size) == 0) continue;
        if (patch != NULL) {
            memcpy((unsigned char *)patch->values + found * size, made + i * size, size);
            if (options->index_bytes == 4)
                ((int32_t *)patch->indices)[found] = (int32_t)i;
            else
                ((int64_t *)patch->indices)[found] = (int64_t)i;
        }
        found++;
    }
    return found;
}

/// Like walk_changes(), for 2-byte elements on little-endian CPUs: compares eight bytes at a time,
/// whose first element is in the lowest 16 bits.
static uint64_t walk_two_byte(const fst_delta_patch_options *options, const unsigned char *made,
                              const fst_delta_patch *patch) {
    const unsigned char *old = options->old;
    uint64_t found = 0, whole = options->size_bytes & ~(uint64_t)7;
    for (uint64_t at = 0; at < options->size_bytes; at += at < whole ? 8 : 2) {
        uint64_t a = 0, b = 0;
        memcpy(&a, old + at, at < whole ? 8 : 2);
        memcpy(&b, made + at, at < whole ? 8 : 2);
        uint64_t difference = a ^ b;
        for (uint64_t i = at / 2; difference != 0; i++, difference >>= 16, b >>= 16) {
            if ((difference & 0xffff) == 0) continue;
            if (patch != NULL) {
                ((uint16_t *)patch->values)[found] = (uint16_t)b;
                if (options->index_bytes == 4)
                    ((int32_t *)patch->indices)[found] = (int32_t)i;
                else
                    ((int64_t *)patch->indices)[found] = (int64_t)i;
            }
            found++;
        }
    }
    return found;
}

static fst_status fill_patch(const fst_delta_patch_options *options, const unsigned char *made,
                             fst_delta_patch *out, fst_error *error) {
    uint64_t (*walk)(const fst_delta_patch_options *, const unsigned char *,
                     const fst_delta_patch *) =
        options->element_bytes == 2 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? walk_two_byte
                                                                                 : walk_changes;
    out->element_count = walk(options, made, NULL);
    out->indices = fsti_alloc((size_t)(out->element_count * options->index_bytes) + 1);
    out->values = fsti_alloc((size_t)(out->element_count * options->element_bytes) + 1);
    if (out->indices == NULL || out->values == NULL) {
        fsti_free(out->indices);
        fsti_free(out->values);
        return fsti_error_memory(error, out->element_count * options->index_bytes);
    }
    walk(options, made, out);
    return FST_OK;
}

static fst_status keep_whole(void *context, size_t at, const unsigned char *made, size_t size,
                             fst_error *error) {
    (void)error;
    memcpy((unsigned char *)context + at, made, size);
    return FST_OK;
}

fst_status fsti_delta_patch_make(const fst_delta *delta, size_t index,
                                 const fst_delta_patch_options *options, fst_delta_patch *out,
                                 fst_error *error) {
    delta_fold *fold;
    if (delta->version_count > DELTA_FOLD_MAX)
        return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                              "at most %u versions can be folded into a patch", DELTA_FOLD_MAX);
    FST_TRY(check_size(delta, &delta->tensors[index], options->size_bytes, error));
    fsti_octets made = {fsti_alloc((size_t)options->size_bytes + 1), (size_t)options->size_bytes};
    if (made.bytes == NULL) return fsti_error_memory(error, options->size_bytes);
    new_bytes bytes = {options->old, made.size, keep_whole, made.bytes};
    fst_status status = fsti_fold_open(&fold, error);
    if (status == FST_OK) status = make_new(fold, delta, &delta->tensors[index], &bytes, error);
    fsti_fold_close(fold);
    if (status == FST_OK && options->dense) {
        out->indices = NULL;
        out->values = made.bytes;
        out->element_count = options->size_bytes / options->element_bytes;
        return FST_OK;
    }
    if (status == FST_OK) status = fill_patch(options, made.bytes, out, error);
    fsti_free(made.bytes);
    return status;
}
