// SPDX-License-Identifier: Apache-2.0
/// Weight deltas: what changed between two versions of a checkpoint, as a small folder of files.
/// Reinforcement learning publishes such folders every few minutes; receivers apply them to their
/// copy of the checkpoint, or to the tensors of a running model.
///
///     const char *folders[] = {"weight_v000007", "weight_v000008"};
///     fst_delta *delta;
///     if (fst_delta_open(folders, 2, &delta, NULL) != FST_OK) return 1;
///     fst_status status = fst_delta_apply(delta, "checkpoint", NULL, NULL, &error);
///     if (status != FST_OK) fprintf(stderr, "%s\n", error.message);
///     fst_delta_close(delta);
///
/// **Format** (SGLang, slime, miles, ModelExpress): a folder with model.safetensors.index.json and
/// shards. Each changed tensor is one U8 entry that holds one zstd frame: for "xor", old XOR new;
/// for "overwrite", a count, byte positions and new bytes. The index names the version and the
/// version that it is based on; each shard holds a checksum of every new tensor. docs/deltas.md has
/// the details and the limits.
///
/// **Threads.** An open fst_delta never changes and may be used by several threads at once.
/// Functions that take thread_count use that many threads and return when all of them have ended.
///
/// **Memory.** Applying to files and making use at most about 64 MiB in addition to the mapped
/// journal, with frames of zstd level 1; long chains are split for that (see fst_delta_apply()).
/// Higher levels have windows of up to 8 MiB, of which each thread holds one for each version, so
/// set thread_count where memory is scarce.
#ifndef FASTSAFETENSORS_WEIGHT_DELTA_H
#define FASTSAFETENSORS_WEIGHT_DELTA_H

#include "../loader.h"
#include "../verify.h"

#ifdef __cplusplus
extern "C" {
#endif

/// One delta version, or several that follow each other.
typedef struct fst_delta fst_delta;

/// How a changed tensor is stored.
typedef enum fst_delta_encoding {
    FST_DELTA_XOR = 0,       ///< "xor": old XOR new, as many bytes as the tensor has
    FST_DELTA_OVERWRITE = 1, ///< "overwrite": positions and new bytes; tensors below 4 GiB
} fst_delta_encoding;
#define FST_DELTA_ENCODING_COUNT 2

/// A delta. The pointers belong to it.
typedef struct fst_delta_info {
    size_t struct_size;          ///< sizeof(fst_delta_info)
    const char *base_version;    ///< the version that the first one is based on
    const char *version;         ///< the last one
    size_t version_count;        ///< versions of the chain
    size_t tensor_count;         ///< tensors that at least one version changes
    uint64_t stored_bytes;       ///< compressed bytes of all entries
    fst_delta_encoding encoding; ///< of the last version
    fst_digest digest;           ///< checksums of the last version
} fst_delta_info;

/// A changed tensor. The delta knows neither its dtype nor its shape: those are the base's.
typedef struct fst_delta_tensor {
    size_t struct_size; ///< sizeof(fst_delta_tensor)
    const char *name;   ///< NUL-terminated; belongs to the delta
    size_t name_size;
    size_t version_count;  ///< versions that change it
    uint64_t stored_bytes; ///< compressed bytes of its entries
} fst_delta_tensor;

/// Opens the versions in `folders` (paths or URLs), oldest first. Indexes and shard headers are
/// read and checked: known encoding, compression and checksum, names unique and equal in index and
/// shards, a well-formed checksum for each tensor, each version based on the one before. Compressed
/// data is not read. FST_E_VERSION if versions do not follow each other, FST_E_ARGUMENT for a
/// full version, FST_E_INDEX_JSON, FST_E_PATH_ESCAPES, FST_E_DUPLICATE_TENSOR,
/// FST_E_TENSOR_INVALID_INFO, errors of opening files. *out is NULL after an error.
FST_API FST_NODISCARD fst_status fst_delta_open(const char *const *folders, size_t folder_count,
                                                fst_delta **out, fst_error *error);

/// Closes a delta. Changes that were prepared with it stay valid. NULL is allowed.
FST_API void fst_delta_close(fst_delta *delta);

/// Describes a delta.
FST_API FST_NODISCARD fst_status fst_delta_info_get(const fst_delta *delta, fst_delta_info *out,
                                                    fst_error *error);

/// Describes changed tensor `index`; they are sorted by name.
FST_API FST_NODISCARD fst_status fst_delta_tensor_get(const fst_delta *delta, size_t index,
                                                      fst_delta_tensor *out, fst_error *error);

/// fst_delta_options.flags: the files are on the disk when the call returns.
#define FST_DELTA_DURABLE 1u
/// For fst_delta_apply(): a first pass decodes everything and verifies all checksums before
/// anything is changed. It takes about as long as applying.
#define FST_DELTA_CHECK_FIRST 2u
/// For fst_delta_apply(): only that pass; nothing is changed.
#define FST_DELTA_CHECK_ONLY 4u
/// For fst_delta_recover(): go back to the version that the folder had. After FST_DELTA_NEW_FILES
/// there is nothing to undo: before the renames begin the files are the old ones, and renames that
/// began are finished, also with this flag.
#define FST_DELTA_ROLL_BACK 8u

/// For fst_delta_apply(): write new files and give them the names of the old ones instead of
/// changing these in place. Readers that have the old files open keep their bytes. An error puts
/// the old files back, where the file system can exchange names. The new files share
/// unchanged blocks with the old ones if the file system can (XFS, Btrfs); otherwise files are
/// copied. Links are replaced, not followed.
#define FST_DELTA_NEW_FILES 16u

/// How to apply a delta. All fields except struct_size may be zero.
typedef struct fst_delta_options {
    size_t struct_size; ///< sizeof(fst_delta_options)
    uint32_t flags;     ///< FST_DELTA_* or 0
    /// 0: the number of CPUs that the process may use. At most 64, and fewer if their memory would
    /// exceed 64 MiB.
    uint32_t thread_count;
    /// The version of a folder that has no version note (.weight_sync/state.json). NULL: such a
    /// folder is taken to be the base of the delta, and only the checksums of changed tensors show
    /// if it is not. FST_E_VERSION if the folder's note names another version, except one to which
    /// the chain leads from this one: an earlier call, which was killed, may have come that far.
    const char *version;
} fst_delta_options;

/// What applying, verifying or making did.
typedef struct fst_delta_stats {
    size_t struct_size; ///< sizeof(fst_delta_stats)
    /// Tensors that were changed (verified, made), also by finishing an interrupted update first.
    size_t tensor_count;
    uint64_t tensor_bytes;  ///< their bytes
    uint64_t bytes_read;    ///< of tensors, from the checkpoint, in all passes
    uint64_t bytes_written; ///< to the checkpoint, or to the delta that was made
    uint64_t stored_bytes;  ///< compressed bytes of deltas that were read
    uint64_t bytes_hashed;  ///< for checksums
    uint32_t thread_count;
    int recovered; ///< 1: an interrupted update was finished first; 2: it was rolled back
    uint64_t total_ns;
} fst_delta_stats;

/// The size of a buffer for the name of a version.
#define FST_DELTA_VERSION_BYTES 256

/// Reads which version a checkpoint folder has from its version note (.weight_sync/state.json).
/// `version` is "" if it is unknown, and if *is_interrupted is 1: an update changes the files, or
/// was killed while it did. They may then be of two versions until fst_delta_recover() or
/// fst_delta_apply() finishes the update. FST_E_FILE_CHANGED if a file has another size or time
/// than after the last update: the checkpoint was saved again, or copied without its times.
FST_API FST_NODISCARD fst_status fst_delta_version(const char *checkpoint,
                                                   char version[FST_DELTA_VERSION_BYTES],
                                                   int *is_interrupted, fst_error *error);

/// Applies a delta to the files of a checkpoint folder, in place. All versions of the chain are
/// folded into one pass over each tensor; the checksum of the last version that names a tensor is
/// verified. Chains of more than 16 versions, or of both encodings, take several passes, each of
/// which ends with a complete version: after an error in a later pass the folder has the version
/// of the pass before it, and the version note names it. FST_DELTA_CHECK_FIRST and
/// FST_DELTA_CHECK_ONLY take chains of at most 16 versions (FST_E_UNSUPPORTED).
///
/// **Killed at any point**, the folder is finished by the next fst_delta_apply() or
/// fst_delta_recover(), from the journal in .weight_sync and the same delta folders; the checkpoint
/// is not copied. A chain of several passes may have stopped between two of them: the same call
/// goes on from the version that the folder has. **An error** (checksum, damaged frame, full disk)
/// rolls back: the folder has the old version again, or the message says that it could not be
/// rolled back. Until the call returns the files are of two versions, so an engine must not load
/// them meanwhile; the lock .weight_sync/lock is held.
///
/// A power cut while it runs is not covered: the next call reports it, and the checkpoint has to be
/// copied again. Files that are symbolic links or have several hard links are FST_E_UNSUPPORTED:
/// others would see the change.
///
/// FST_E_VERSION for a wrong base, a gap or a chain that was applied already;
/// FST_E_TENSOR_NOT_FOUND for a tensor that the checkpoint lacks; FST_E_FILE_CHANGED if a file has
/// changed since the last update; FST_E_CORRUPT, FST_E_DIGEST; FST_E_NO_SPACE also for a limit of
/// the file size (ulimit -f); FST_E_TIMEOUT while another process updates or reads the folder.
/// `options` and `stats` may be NULL.
FST_API FST_NODISCARD fst_status fst_delta_apply(const fst_delta *delta, const char *checkpoint,
                                                 const fst_delta_options *options,
                                                 fst_delta_stats *stats, fst_error *error);

/// Finishes an update that was killed, or with FST_DELTA_ROLL_BACK undoes it; the delta's folders
/// must still be at the same local paths. FST_OK if no update was interrupted. FST_E_FILE_CHANGED
/// if a file was saved again or changed after the kill; no file is changed then. `options` and
/// `stats` may be NULL.
FST_API FST_NODISCARD fst_status fst_delta_recover(const char *checkpoint,
                                                   const fst_delta_options *options,
                                                   fst_delta_stats *stats, fst_error *error);

/// Memory of one tensor, in the checkpoint's layout and dtype. This struct never changes.
typedef struct fst_delta_memory {
    const char *name; ///< NUL-terminated
    void *data;       ///< CPU memory, readable and (for commit) writable
    uint64_t size_bytes;
} fst_delta_memory;

/// Changes that are decoded and verified, and not written to the tensors yet.
typedef struct fst_delta_change fst_delta_change;

/// Makes and verifies the new bytes of all tensors that the delta changes, and keeps those that
/// differ: about 5 % of the tensors' bytes if 1 % of the elements change, at most 1.13 times
/// the tensors' bytes. The tensors are only read and may be used meanwhile, but not written to
/// until fst_delta_commit(), because bytes that do not change are not written then. Each changed
/// tensor must be among `tensors` and have the size that it had when the delta was made. Changed
/// tensors may share memory if they get the same bytes there (FST_E_ARGUMENT otherwise). Chains
/// have at most 16 versions. Errors as of fst_delta_apply(). The caller frees *out with
/// fst_delta_drop().
FST_API FST_NODISCARD fst_status fst_delta_prepare(const fst_delta *delta,
                                                   const fst_delta_memory *tensors,
                                                   size_t tensor_count,
                                                   const fst_delta_options *options,
                                                   fst_delta_change **out, fst_error *error);

/// Writes the changed bytes into the tensors, with one thread per CPU. It cannot fail. A thread
/// that reads the tensors during the call sees a mix of old and new bytes. A second call for a
/// change does nothing. fst_delta_drop() then frees the change: as that can take as long as the
/// writing, readers of the tensors go on before it. NULL is allowed.
FST_API void fst_delta_commit(fst_delta_change *change);

/// Frees a change, committed or not. NULL is allowed.
FST_API void fst_delta_drop(fst_delta_change *change);

/// What a patch is made of.
typedef struct fst_delta_patch_options {
    size_t struct_size; ///< sizeof(fst_delta_patch_options)
    const void *old;    ///< the tensor's bytes before the delta
    uint64_t size_bytes;
    uint32_t element_bytes; ///< 1, 2, 4 or 8
    uint32_t index_bytes;   ///< 4 or 8; 4 only if the last element's index is below 2^31
    int dense;              ///< 1: the whole new tensor instead of changed elements
} fst_delta_patch_options;

/// The changed elements of one tensor: new values (not differences) and the flat indices of their
/// elements, ascending. Free it with fst_delta_patch_clear().
typedef struct fst_delta_patch {
    size_t struct_size; ///< sizeof(fst_delta_patch)
    void *indices;      ///< element_count of index_bytes; NULL: the patch is dense
    void *values;       ///< element_count of element_bytes
    uint64_t element_count;
} fst_delta_patch;

/// Makes the patch of changed tensor `index`, verified by the delta's checksum. Needs as much
/// memory as the tensor has while it runs. Chains have at most 16 versions. The call does not check
/// that `old` is of the delta's base version: the caller does, with fst_delta_version(). Any number
/// of threads at once.
FST_API FST_NODISCARD fst_status fst_delta_patch_make(const fst_delta *delta, size_t index,
                                                      const fst_delta_patch_options *options,
                                                      fst_delta_patch *out, fst_error *error);

/// Frees the arrays of a patch. NULL is allowed.
FST_API void fst_delta_patch_clear(fst_delta_patch *patch);

/// The programs that will read the index. The shards are the same for all.
typedef enum fst_delta_dialect {
    FST_DELTA_SGLANG = 0,       ///< SGLang, slime and miles: decimal versions
    FST_DELTA_MODELEXPRESS = 1, ///< ModelExpress: xor and adler32 only; sorted, compact index
} fst_delta_dialect;
#define FST_DELTA_DIALECT_COUNT 2

/// What to make. `version`, `base_version` and one new state are required.
typedef struct fst_delta_make_options {
    size_t struct_size; ///< sizeof(fst_delta_make_options)
    /// Names of the new version and of its base; both are required. If both are decimal, the new
    /// one must be larger. For FST_DELTA_SGLANG they are decimal, and the new one must be the
    /// base's successor unless `delta` spans several versions.
    const char *version, *base_version;
    fst_delta_encoding encoding;
    fst_digest digest; ///< FST_DIGEST_ADLER32, _XXH3_128 or _BLAKE3
    fst_delta_dialect dialect;
    int level;             ///< of zstd, 1 to 19; 0: 1
    uint32_t thread_count; ///< 0: the number of CPUs; at most 16; each thread writes one shard
    uint32_t flags;        ///< FST_DELTA_DURABLE or 0
    /// The new state, exactly one of: the path of a checkpoint, tensors in memory, or a delta whose
    /// result is the new state (to convert between encodings, or to fold a chain into one version).
    const char *checkpoint;
    const fst_delta_memory *tensors;
    size_t tensor_count;
    const fst_delta *delta;
} fst_delta_make_options;

/// Makes a delta from the checkpoint at `old` to the new state, in one pass ("overwrite" reads
/// changed tensors up to three times). Both must have the same tensors with the same sizes; of two
/// checkpoints, also the same dtypes and shapes (FST_E_TENSOR_INVALID_INFO). Tensors that did not
/// change are left out. The shards are written first and the index last, each to a temporary name
/// first. After an error nothing stays in `folder`, unless the system refuses to list or remove the
/// files (a later call removes them), or if only the last fsync of the folder failed: then the
/// version is complete.
///
/// FST_E_ARGUMENT if `folder` holds an index or other files of a model; files of a killed call,
/// which its mark making.tmp lists, are removed. FST_E_VERSION if the version note of `old` names
/// another version than base_version (or than the delta's base), if an update of `old` was
/// interrupted, or if it already has all new values of an overwrite delta. FST_E_UNSUPPORTED for
/// tensors of 4 GiB or more with FST_DELTA_OVERWRITE, and for a delta of more than 16 versions.
/// `stats` may be NULL.
FST_API FST_NODISCARD fst_status fst_delta_make(const char *old, const char *folder,
                                                const fst_delta_make_options *options,
                                                fst_delta_stats *stats, fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
