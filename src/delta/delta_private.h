// SPDX-License-Identifier: Apache-2.0
/// Declarations shared by the files of the delta module.
#ifndef FSTI_DELTA_PRIVATE_H
#define FSTI_DELTA_PRIVATE_H

#include "codec/codec.h"
#include "delta.h"
#include "location/location.h"
#include "model/open_model.h"

/// Tensors are processed in blocks: small enough for the CPU's cache.
#define DELTA_BLOCK_BYTES ((size_t)256 << 10)
/// The most versions that are folded in one pass. Each needs a decoder per thread.
#define DELTA_FOLD_MAX 16u
/// Memory of the decoders of all threads together, at most, and about that of one decoder (zstd
/// level 1).
#define DELTA_DECODER_BUDGET ((size_t)48 << 20)
#define DELTA_DECODER_BYTES ((size_t)1 << 20)
#define DELTA_THREADS_MAX 64u
/// Memory of the decoded overwrite lists that one thread keeps, for all frames of a tensor
/// together.
#define DELTA_LIST_BYTES ((size_t)8 << 20)

#define DELTA_INDEX_NAME "model.safetensors.index.json"

/// One opened version.
typedef struct delta_version {
    char *folder, *index_path;
    fsti_delta_text text;
    unsigned char index_digest[16]; ///< XXH3 of the index's text and of all entries' checksums
    fst_delta_encoding encoding;
    const fsti_digest_kind *kind;
    model_file *shards;      ///< in the order of text.index->files
    const char ***checksums; ///< for each shard, in the order of the tensors in its header
    size_t shard_count;
} delta_version;

/// The stored bytes of a tensor in one version.
typedef struct delta_frame {
    fsti_file *file;      ///< borrowed
    const char *checksum; ///< of the new tensor, in hexadecimal; checked to be well-formed
    uint64_t offset, size_bytes;
    uint32_t version;
    fst_delta_encoding encoding;
} delta_frame;

/// A tensor that the chain changes: frames[first_frame] and the following, in the order of
/// versions.
typedef struct delta_tensor {
    const char *name;
    size_t name_size;
    size_t first_frame, frame_count;
} delta_tensor;

struct fst_delta {
    delta_version *versions;
    size_t version_count;
    delta_tensor *tensors; ///< by name
    size_t tensor_count;
    delta_frame *frames;
    size_t frame_count;
};

/// A part of a chain that is applied at once: versions [first, end).
typedef struct delta_span {
    size_t first, end;
} delta_span;

/// The frames of a tensor within a span: at most DELTA_FOLD_MAX.
typedef struct delta_frames {
    const delta_frame *frames;
    size_t count;
} delta_frames;
delta_frames fsti_delta_frames(const fst_delta *delta, const delta_tensor *tensor, delta_span span);
/// The longest span from `first` on that can be folded at once: one encoding, at most
/// DELTA_FOLD_MAX versions.
delta_span fsti_delta_span(const fst_delta *delta, size_t first);

/// The checksum that the frames' tensor has in the last version of them; `digest` has room for
/// FSTI_DIGEST_BYTES_MAX bytes.
const fsti_digest_kind *fsti_delta_digest(const fst_delta *delta, const delta_frames *frames,
                                          unsigned char *digest);
/// FST_E_DIGEST unless `found` equals the checksum that fsti_delta_digest() gives.
fst_status fsti_delta_check_digest(const fst_delta *delta, const delta_tensor *tensor,
                                   const delta_frames *frames, const unsigned char *found,
                                   fst_error *error);

// ---- folding: the frames of one tensor, applied block by block (tensor_fold.c) ----

/// Old values that "overwrite" frames replace, kept so that they can be put back. Positions are
/// counted per frame, in the order of the list.
typedef struct fold_undo {
    fst_status (*save)(void *context, const void *values, size_t size, uint64_t at,
                       fst_error *error);
    fst_status (*load)(void *context, void *values, size_t size, uint64_t at, fst_error *error);
    void *context;
} fold_undo;

/// One thread's decoders.
typedef struct delta_fold delta_fold;
fst_status fsti_fold_open(delta_fold **out, fst_error *error);
void fsti_fold_close(delta_fold *fold);
/// Begins a tensor of `size_bytes`. `undo` may be NULL; it is copied.
fst_status fsti_fold_begin(delta_fold *fold, const delta_frames *frames, uint64_t size_bytes,
                           const fold_undo *undo, fst_error *error);
/// After fsti_fold_begin() failed: the size of the tensor that an xor frame was made of, if that is
/// why; else 0.
uint64_t fsti_fold_other_bytes(const delta_fold *fold);
/// Bytes that the undo values of the tensor take; valid after fsti_fold_begin(). 0 for xor.
uint64_t fsti_fold_undo_bytes(const delta_fold *fold);
/// Turns the old bytes of the next block into the new ones, in place.
fst_status fsti_fold_apply(delta_fold *fold, unsigned char *block, size_t size, fst_error *error);
/// The reverse of fsti_fold_apply(). Needs `undo` for overwrite frames.
fst_status fsti_fold_revert(delta_fold *fold, unsigned char *block, size_t size, fst_error *error);
/// Skips the next `size` bytes.
fst_status fsti_fold_skip(delta_fold *fold, uint64_t size, fst_error *error);
/// FST_E_CORRUPT if a frame has data left after the end of the tensor.
fst_status fsti_fold_end(delta_fold *fold, fst_error *error);
/// Adds the tensor's name, and the shard whose frame was decoded last, to an error of the kind
/// FST_E_CORRUPT: the frame reader knows neither. `frames` are those of fsti_fold_begin().
void fsti_fold_locate(const delta_fold *fold, const delta_frames *frames,
                      const delta_tensor *tensor, fst_error *error);

// ---- threads (task_pool.c) ----

typedef struct delta_pool delta_pool;
struct delta_pool {
    size_t task_count;
    uint32_t thread_count;
    void *context;
    /// Called once by each thread, which takes tasks until all are done. A failure ends the pool.
    fst_status (*run)(delta_pool *pool, uint32_t thread, fst_error *error);
    // private to task_pool.c
    atomic_size_t next;
    atomic_bool is_failed;
    pthread_mutex_t lock;
    fst_status status;
    fst_error error;
};
/// The next task; false when all are taken or the pool has failed.
bool fsti_pool_take(delta_pool *pool, size_t *task);
fst_status fsti_pool_run(delta_pool *pool, fst_error *error);
/// Memory of a thread that folds the span, counted in decoders: overwrite frames need two decoders
/// each, and the lists.
size_t fsti_delta_decoders(const fst_delta *delta, delta_span span);
/// The number of threads to use if `wanted` are requested (0: one per CPU) and each needs the
/// memory of `decoders` decoders.
uint32_t fsti_pool_threads(uint32_t wanted, size_t decoders);

// ---- which base tensors a delta changes (delta_bind.c) ----

/// A changed tensor and its position in the base.
typedef struct bound_tensor {
    const delta_tensor *tensor;
    size_t base; ///< tensor index of the model
    uint32_t file;
    uint64_t offset, size_bytes;
    uint64_t first_block; ///< how many blocks the tensors before it have
} bound_tensor;
/// Refuses an overwrite delta for a tensor that its positions cannot address.
fst_status fsti_delta_check_size(const fst_delta *delta, const delta_tensor *tensor,
                                 const delta_frames *frames, uint64_t size_bytes, fst_error *error);
/// The tensors that the span changes, largest first. *out is from fsti_alloc.
fst_status fsti_delta_bind(const fst_delta *delta, delta_span span, const fst_model *base,
                           bound_tensor **out, size_t *count, fst_error *error);

#endif
