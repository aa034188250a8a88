// SPDX-License-Identifier: Apache-2.0
/// Deltas for tensors in memory. The new bytes are computed and verified in separate memory, and a
/// short second step copies them into the tensors. Also patches: the changed elements with their
/// positions.
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "delta_private.h"

/// Bytes that a thread copies at a time in the second step.
#define COPY_BYTES ((uint64_t)4 << 20)

/// The new bytes of one tensor.
typedef struct changed_tensor {
    const delta_tensor *tensor;
    unsigned char *target; ///< the caller's
    unsigned char *bytes;  ///< new ones; from fsti_alloc
    uint64_t size_bytes;
} changed_tensor;

struct fst_delta_change {
    const fst_delta *delta; ///< only set while the change is prepared
    changed_tensor *tensors;
    size_t tensor_count;
    uint32_t thread_count;
};

void fsti_delta_drop(fst_delta_change *change) {
    if (change == NULL) return;
    for (size_t i = 0; i < change->tensor_count; i++) fsti_free(change->tensors[i].bytes);
    fsti_free(change->tensors);
    fsti_free(change);
}

/// Replaces the old bytes in `bytes` by the new ones and verifies these.
static fst_status make_new(delta_fold *fold, const fst_delta *delta, const delta_tensor *tensor,
                           fsti_octets bytes, fst_error *error) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    delta_frames frames = fsti_delta_frames(delta, tensor, (delta_span){0, delta->version_count});
    const fsti_digest_kind *kind = fsti_delta_digest(delta, &frames, digest);
    void *state = kind->begin();
    if (state == NULL) return fsti_error_memory(error, 64);
    fst_status status = fsti_fold_begin(fold, &frames, bytes.size, NULL, error);
    for (size_t at = 0; at < bytes.size && status == FST_OK; at += DELTA_BLOCK_BYTES) {
        size_t size = (size_t)fsti_min(DELTA_BLOCK_BYTES, bytes.size - at);
        status = fsti_fold_apply(fold, bytes.bytes + at, size, error);
        if (status == FST_OK && !kind->update(state, bytes.bytes + at, size))
            status = fsti_error_memory(error, size);
    }
    if (!kind->end(state, digest) && status == FST_OK) status = fsti_error_memory(error, 64);
    if (status == FST_OK) status = fsti_fold_end(fold, error);
    if (status == FST_OK) return fsti_delta_check_digest(delta, tensor, &frames, digest, error);
    fsti_fold_locate(fold, &frames, tensor, error);
    return status;
}

static fst_status run_prepare(delta_pool *pool, uint32_t thread, fst_error *error) {
    fst_delta_change *change = pool->context;
    delta_fold *fold;
    size_t task;
    (void)thread;
    fst_status status = fsti_fold_open(&fold, error);
    while (status == FST_OK && fsti_pool_take(pool, &task)) {
        changed_tensor *tensor = &change->tensors[task];
        tensor->bytes = fsti_alloc((size_t)tensor->size_bytes + 1);
        if (tensor->bytes == NULL) {
            status = fsti_error_memory(error, tensor->size_bytes);
            break;
        }
        memcpy(tensor->bytes, tensor->target, (size_t)tensor->size_bytes);
        fsti_octets bytes = {tensor->bytes, (size_t)tensor->size_bytes};
        status = make_new(fold, change->delta, tensor->tensor, bytes, error);
    }
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
            fsti_error_location place = {.tensor = tensor->name,
                                         .tensor_size = tensor->name_size,
                                         .byte_offset = FST_NO_OFFSET};
            status = fsti_error_set(error, FST_E_TENSOR_NOT_FOUND, place,
                                    "the delta changes a tensor that was not given");
            break;
        }
        change->tensors[change->tensor_count++] =
            (changed_tensor){tensor, live->tensors[at].data, NULL, live->tensors[at].size_bytes};
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
    }
    if (status != FST_OK) {
        fsti_delta_drop(change);
        return status;
    }
    change->delta = NULL;
    *out = change;
    return FST_OK;
}

/// Copies with stores that bypass the caches: the target is not read first, which saves a third of
/// the memory traffic. Bytes outside whole aligned lines are copied as usual.
static void copy_around_caches(unsigned char *target, const unsigned char *source, size_t size) {
#ifdef __SSE2__
    size_t before = (size_t)fsti_min(size, -(uintptr_t)target & 63);
    memcpy(target, source, before);
    size_t at = before;
    for (; at + 64 <= size; at += 64)
        for (size_t i = 0; i < 64; i += 16)
            _mm_stream_si128((__m128i *)(void *)(target + at + i),
                             _mm_loadu_si128((const __m128i *)(const void *)(source + at + i)));
    memcpy(target + at, source + at, size - at);
    _mm_sfence();
#else
    memcpy(target, source, size);
#endif
}

/// A task is one piece of COPY_BYTES. The pieces are numbered through all tensors.
static fst_status run_commit(delta_pool *pool, uint32_t thread, fst_error *error) {
    const fst_delta_change *change = pool->context;
    size_t task, tensor = 0, before = 0;
    (void)thread, (void)error;
    while (fsti_pool_take(pool, &task)) {
        // The task numbers of a thread ascend, so each search begins where the previous one ended.
        for (;; tensor++) {
            size_t pieces =
                (size_t)((change->tensors[tensor].size_bytes + COPY_BYTES - 1) / COPY_BYTES);
            if (task - before < pieces) break;
            before += pieces;
        }
        const changed_tensor *changed = &change->tensors[tensor];
        uint64_t begin = (task - before) * COPY_BYTES;
        copy_around_caches(changed->target + begin, changed->bytes + begin,
                           (size_t)fsti_min(COPY_BYTES, changed->size_bytes - begin));
    }
    return FST_OK;
}

void fsti_delta_commit(fst_delta_change *change) {
    delta_pool pool = {.context = change, .run = run_commit};
    pool.thread_count = fsti_cpu_count();
    if (pool.thread_count > DELTA_THREADS_MAX) pool.thread_count = DELTA_THREADS_MAX;
    for (size_t i = 0; i < change->tensor_count; i++)
        pool.task_count += (size_t)((change->tensors[i].size_bytes + COPY_BYTES - 1) / COPY_BYTES);
    (void)fsti_pool_run(&pool, NULL);
    fsti_delta_drop(change);
}

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

/// Like walk_changes(), for 2-byte elements: compares eight bytes at a time.
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

fst_status fsti_delta_patch_make(const fst_delta *delta, size_t index,
                                 const fst_delta_patch_options *options, fst_delta_patch *out,
                                 fst_error *error) {
    delta_fold *fold;
    if (delta->version_count > DELTA_FOLD_MAX)
        return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                              "at most %u versions can be folded into a patch", DELTA_FOLD_MAX);
    fsti_octets made = {fsti_alloc((size_t)options->size_bytes + 1), (size_t)options->size_bytes};
    if (made.bytes == NULL) return fsti_error_memory(error, options->size_bytes);
    memcpy(made.bytes, options->old, made.size);
    fst_status status = fsti_fold_open(&fold, error);
    if (status == FST_OK) status = make_new(fold, delta, &delta->tensors[index], made, error);
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
