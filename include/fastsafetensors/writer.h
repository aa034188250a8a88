// SPDX-License-Identifier: Apache-2.0
/// Saving tensors: one file or a sharded set, from memory or as a stream. A save replaces the old
/// model completely or not at all. Saves while the program continues: experimental/async_save.h.
///
///     uint64_t shape[2] = {2, 2};
///     float values[4] = {1, 2, 3, 4};
///     fst_save_tensor tensor = FST_STRUCT_INIT(fst_save_tensor);
///     tensor.name = "weight";
///     tensor.dtype = FST_DTYPE_F32;
///     tensor.rank = 2;
///     tensor.shape = shape;
///     tensor.data = values;
///     fst_error error;
///     if (fst_save("model.safetensors", &tensor, 1, NULL, NULL, &error) != FST_OK)
///         fprintf(stderr, "%s\n", error.message);
#ifndef FASTSAFETENSORS_WRITER_H
#define FASTSAFETENSORS_WRITER_H

#include "base.h"
#include "device.h"
#include "dtype.h"
#include "model.h"
#include "verify.h"

#ifdef __cplusplus
extern "C" {
#endif

/// A save in progress. The target keeps its old content until fst_writer_commit(). Whatever happens
/// (a call that fails, a kill, for durable saves a power cut, another save of the same target at
/// the same time), opening the target gives the complete old model or the complete new one; if
/// there was no old model, it may be an error that names the missing file. A reader that opens a
/// set while it is replaced gets one of the two.
///
/// fst_writer_write() may be called from several threads at once, and fst_writer_cancel() and
/// fst_writer_stats_get() at any time; call the others from one thread at a time. After a fork(),
/// the child can only close a writer, which has no effect on the parent's save.
typedef struct fst_writer fst_writer;

/// What a save guarantees when it returns FST_OK. With both values, a crash of the program leaves
/// the complete old model or the complete new one. A power cut after a quick save may lose both
/// models, because the file system may store the new name before the data.
typedef enum fst_save_promise {
    FST_SAVE_QUICK = 0,   ///< the kernel has the bytes
    FST_SAVE_DURABLE = 1, ///< the device has them: files and folders are synced
} fst_save_promise;
#define FST_SAVE_PROMISE_COUNT 2

/// The order of tensors in a file.
typedef enum fst_save_order {
    FST_SAVE_ORDER_REFERENCE = 0, ///< like safetensors: by dtype (largest first), then by name
    FST_SAVE_ORDER_NAME = 1,      ///< by the bytes of the name
    FST_SAVE_ORDER_GIVEN = 2,     ///< the order of the array
} fst_save_order;
#define FST_SAVE_ORDER_COUNT 3

/// How bytes are written.
typedef enum fst_save_engine {
    FST_SAVE_ENGINE_AUTO = 0,     ///< durable: DIRECT or URING where that works; quick: BUFFERED
    FST_SAVE_ENGINE_BUFFERED = 1, ///< through the page cache
    FST_SAVE_ENGINE_DIRECT = 2,   ///< bypassing it (O_DIRECT), one write at a time
    FST_SAVE_ENGINE_URING = 3,    ///< bypassing it, many writes in flight
} fst_save_engine;
#define FST_SAVE_ENGINE_COUNT 4

/// Which tensors are written compressed (docs/FORMAT.md). Compression is lossless and used only
/// where it saves space; a file that does not become smaller is written uncompressed.
typedef enum fst_compress {
    FST_COMPRESS_NONE = 0,
    FST_COMPRESS_FLOAT = 1, ///< tensors of float types
    FST_COMPRESS_ALL = 2,   ///< also integers and booleans
} fst_compress;
#define FST_COMPRESS_COUNT 3

/// A tensor to save. `data` must stay valid until the writer is closed; everything else may be
/// freed when the opening call has returned.
typedef struct fst_save_tensor {
    size_t struct_size; ///< sizeof(fst_save_tensor)
    const char *name;   ///< UTF-8, unique, not "__metadata__"
    size_t name_size;   ///< bytes; 0 or SIZE_MAX: the name is NUL-terminated
    fst_dtype dtype;
    uint32_t rank;         ///< number of dimensions; 0: a scalar
    const uint64_t *shape; ///< `rank` element counts; the tensor's bits must be whole bytes
    const void *data;      ///< row-major, packed; NULL: fst_writer_write() provides the bytes
    uint32_t file_index;   ///< the file of a set (file_count > 0); else 0
    /// The device of `data`; all zero: the CPU. Work that writes to it must be complete.
    fst_device device;
} fst_save_tensor;

/// How to save. All fields except struct_size may be zero.
typedef struct fst_save_options {
    size_t struct_size; ///< sizeof(fst_save_options)
    fst_save_promise promise;
    const fst_metadata_entry *metadata; ///< sizes of 0 or SIZE_MAX: NUL-terminated
    size_t metadata_count;

    /// 0: `path` is a file, without the name of an index (FST_E_ARGUMENT for "*.index.json").
    /// Otherwise `path` is a folder, created if missing, that gets this many files,
    /// "<stem>-00001-of-0000N.safetensors", and "<stem>.safetensors.index.json"; for one file only
    /// "<stem>.safetensors". The index is replaced last; then files of an older set of the same
    /// stem are removed.
    uint32_t file_count;
    const char *stem; ///< NULL: "model"; not read for a file

    fst_save_order order;

    /// Tensors begin at multiples of this in the file (a power of two up to 1 MiB); 0: packed, like
    /// safetensors. The header is padded with spaces. The format does not allow gaps, so a tensor
    /// whose size is not a multiple is followed by a padding tensor (U8, "__padding__.N"), and the
    /// metadata key "__padding__" marks the file. With the reference order, tensors whose size is a
    /// multiple come first, which needs the fewest padding tensors. This library hides padding
    /// tensors when it opens a file; other readers show them.
    uint64_t alignment_bytes;
    /// The data section begins at a multiple of this: a multiple of 8 and of alignment_bytes, at
    /// most 1 MiB; 0: alignment_bytes, at least 8. With the reference order and an alignment_bytes
    /// of 0 or 1, tensors whose size is a multiple come first: they begin at multiples as well.
    uint64_t header_alignment_bytes;
    int has_metadata;  ///< 1: write __metadata__ even without entries
    int metadata_last; ///< 1: __metadata__ is at the end of the header; 0: at the beginning

    /// Compressing makes a temporary uncompressed file next to the target: free space for both is
    /// needed. FST_E_UNSUPPORTED with others_write, and without libzstd.
    fst_compress compress;

    /// The path of a manifest (verify.h) to write; "": where FST_OPEN_VERIFY finds it; NULL: none,
    /// and a manifest of the old model is removed. It is computed while the bytes are written,
    /// lists the files of the save, and is published with them. With others_write the files are
    /// read for it at commit. FST_E_UNSUPPORTED for files that are handed over (use
    /// fst_publish_options.manifest), and without libcrypto for SHA-256. FST_E_ARGUMENT if it would
    /// replace an existing file whose name ends in .safetensors or .safetensors.index.json.
    const char *manifest;
    fst_digest digest; ///< of the manifest

    fst_save_engine engine;
    uint32_t thread_count; ///< for sets; 0: the number of CPUs that the process may use

    /// Called as bytes are written, from the thread that writes them (for sets also from threads of
    /// the library). It may call fst_writer_stats_get() and fst_writer_cancel().
    fst_progress_callback progress;
    void *progress_context;

    int replace_link; ///< 1: replace a `path` that is a symbolic link; 0: follow it
    /// 1: after fst_writer_hand_over() other processes write the tensors that have no data, with
    /// fst_writer_join(). Their bytes are not checked at commit. Without fst_writer_hand_over() a
    /// commit is FST_E_ARGUMENT if a byte is missing.
    int others_write;
} fst_save_options;

/// What a save did, and why.
typedef struct fst_save_stats {
    size_t struct_size; ///< sizeof(fst_save_stats)
    char engine[16];    ///< "buffered", "direct" or "uring"; "http" for URLs
    char reason[256];   ///< why it was chosen
    uint32_t file_count;
    size_t tensor_count;
    size_t padding_count;   ///< padding tensors for alignment_bytes
    uint64_t bytes_total;   ///< of all files, headers included
    uint64_t bytes_written; ///< by write operations
    uint64_t bytes_direct;  ///< part of bytes_written that bypassed the page cache
    uint64_t bytes_staged;  ///< part of bytes_written that was copied to a buffer first
    uint64_t write_count;   ///< write operations
    uint64_t sync_count;    ///< fsync calls, of files and folders
    uint64_t stage_bytes;   ///< memory of the buffers
    uint64_t total_ns;      ///< from open to commit
    uint64_t sync_ns;       ///< part of total_ns in fsync
    size_t step_count;      ///< renames, removals and folder syncs of publishing
    size_t leftover_count;  ///< temporary files of killed saves of this target that were removed
    /// Not "": the new model is in place and complete, but a file of the old one could not be
    /// removed (the user may not delete it, for example). A set may then have files under temporary
    /// names that its index refers to; the next save repairs that.
    char warning[256];
    uint64_t bytes_shared; ///< by fst_header_edit(): in blocks that both files share
    uint64_t bytes_copied; ///< by fst_header_edit(): copied from the old file
    uint64_t bytes_hashed; ///< for the manifest
    /// Part of bytes_hashed that was read from the new file: compressed files, and chunks whose
    /// bytes were written out of order or through fst_writer_map().
    uint64_t bytes_read;
} fst_save_stats;

/// Saves tensors that all have data: open, commit and close in one call. `options` and `stats` may
/// be NULL. On failure the old model is unchanged.
FST_API FST_NODISCARD fst_status fst_save(const char *path, const fst_save_tensor *tensors,
                                          size_t tensor_count, const fst_save_options *options,
                                          fst_save_stats *stats, fst_error *error);

/// Begins a save: computes the layout, creates the files under temporary names next to the target
/// and reserves their space, so that a full disk fails here (FST_E_NO_SPACE). A `path` that is a
/// symbolic link is followed; links inside the folder of a set are replaced. Links are followed
/// once, here: the save stays in the folder to which they lead now. Owner, permissions and
/// access list of an existing file are kept; if the owner or group can't be kept, the
/// permissions are reduced. A target that is write-protected or not a regular file is an error.
/// To a URL (s3://, gs://, az://) the save uploads in parts, and a set replaces an older one when
/// its index is replaced (docs/remote.md); options that need local files are FST_E_UNSUPPORTED. A
/// relative path is made absolute here, so that the program may change its working folder. If that
/// is impossible (a parent folder without search permission, a path near PATH_MAX), a commit from
/// another working folder is FST_E_FILE_CHANGED. On success *out is a writer, to be closed with
/// fst_writer_close().
FST_API FST_NODISCARD fst_status fst_writer_open(const char *path, const fst_save_tensor *tensors,
                                                 size_t tensor_count,
                                                 const fst_save_options *options, fst_writer **out,
                                                 fst_error *error);

/// Writes bytes [offset, offset + size_bytes) of a tensor that has no data. Write each byte once,
/// in any order; file order is fastest. Bytes that were written before, or lie outside of the
/// tensor, are FST_E_ARGUMENT with tensor and range, as are other invalid arguments, and the save
/// continues. After any other error the save has failed and can only be closed. `data` may be
/// reused after the call.
FST_API FST_NODISCARD fst_status fst_writer_write(fst_writer *writer, size_t tensor_index,
                                                  uint64_t offset, const void *data,
                                                  size_t size_bytes, fst_error *error);

/// Writes all tensors that have data, checks that no byte is missing (FST_E_ARGUMENT with tensor
/// and range; it may still be written), and syncs if the save is durable. Nothing is published yet,
/// so that several writers can be finished before the first is committed.
FST_API FST_NODISCARD fst_status fst_writer_finish(fst_writer *writer, fst_error *error);

/// Finishes if necessary, waits for the end of asynchronous saves of the same files that this
/// process has started before this call, and puts the files in place. On failure the old files stay
/// or are restored; the message names the step and the file. FST_OK means that the new model is in
/// place; see fst_save_stats.warning. Sets in one folder are published one at a time: FST_E_TIMEOUT
/// if another save publishes for half a minute. On a file system without hard links, replacing a
/// set copies its old files once, and a durable save whose last sync fails can't restore the old
/// file; the message says so.
FST_API FST_NODISCARD fst_status fst_writer_commit(fst_writer *writer, fst_error *error);

/// Cancels a save and does not wait for it: its calls return FST_E_CANCELLED soon, unless the new
/// model is already in place. FST_E_IO: a store was sent the whole object and did not say whether
/// it has stored it. From any thread. NULL is allowed.
FST_API void fst_writer_cancel(fst_writer *writer);

/// Closes a writer and frees it. Without a commit its files are removed. NULL is allowed.
FST_API void fst_writer_close(fst_writer *writer);

/// Reads the statistics of a save, during it or after it.
FST_API FST_NODISCARD fst_status fst_writer_stats_get(const fst_writer *writer,
                                                      fst_save_stats *stats, fst_error *error);

/// A new name for a tensor. Sizes of 0 or SIZE_MAX: NUL-terminated. This struct never changes.
typedef struct fst_tensor_rename {
    const char *from;
    size_t from_size;
    const char *to;
    size_t to_size;
} fst_tensor_rename;

/// What to change in the header of a file. All fields except struct_size may be zero.
typedef struct fst_edit_options {
    size_t struct_size; ///< sizeof(fst_edit_options)
    fst_save_promise promise;
    int clear_metadata;                 ///< 1: remove all entries that `metadata` does not set
    const fst_metadata_entry *metadata; ///< set in order; a NULL value removes the entry
    size_t metadata_count;
    const fst_tensor_rename *renames; ///< applied at once: two tensors may exchange their names
    size_t rename_count;
    /// Called on the calling thread as bytes are copied, and, with 0 of 0 bytes, while the call
    /// waits for an asynchronous save.
    fst_progress_callback progress;
    void *progress_context;
    /// A manifest of the edited file, as fst_save_options.manifest. NULL: none, and the manifest of
    /// the old file is removed. Bytes that the edit does not write are read for it.
    const char *manifest;
    fst_digest digest; ///< of the manifest
} fst_edit_options;

/// Changes metadata and tensor names of the file `path` without loading tensors. The edited file is
/// written to `target`, or replaces `path` if `target` is NULL; a symbolic link is followed. It is
/// published like every save, with the permissions of the file that it replaces or is made from. It
/// begins when the asynchronous saves of the model at `path` have ended that this process has
/// started.
///
/// Cost: if the file system can share blocks between files (btrfs, XFS, bcachefs, ZFS, NFS 4.2)
/// only the header is written, and it grows or shrinks by whole blocks. Otherwise (ext4, tmpfs,
/// from one file system to another) the kernel copies the file, which takes its time and space but
/// no memory. `stats` (may be NULL) has bytes_shared, bytes_copied, and `engine` "shared",
/// "kernel" or "buffered".
///
/// FST_E_TENSOR_NOT_FOUND: a name that no tensor has. FST_E_UNSUPPORTED: a compressed file.
/// FST_E_ARGUMENT: `path` is a set of files (edit one of them), a tensor gets two new names, or a
/// tensor would be renamed although an index in the file's folder or in the folder above it refers
/// to the file. FST_E_FILE_CHANGED: another program has replaced the file or written to it
/// meanwhile. Concurrent edits wait for each other with a lock (flock) on the folder, where that is
/// possible; FST_E_TIMEOUT after half a minute.
/// Not detected: stores through a shared mapping before msync(), and a program without the lock
/// that replaces the file in the instant before the edit does; fst_save() of one file takes no
/// lock.
FST_API FST_NODISCARD fst_status fst_header_edit(const char *path, const char *target,
                                                 const fst_edit_options *options,
                                                 fst_save_stats *stats, fst_error *error);

/// How to compress or decompress a file. All fields except struct_size may be zero.
typedef struct fst_pack_options {
    size_t struct_size; ///< sizeof(fst_pack_options)
    fst_save_promise promise;
    fst_compress compress; ///< for fst_file_compress(); FST_COMPRESS_NONE: FST_COMPRESS_FLOAT
    uint32_t thread_count; ///< for compressing; 0: the number of CPUs that the process may use
    fst_progress_callback progress; ///< as of fst_edit_options
    void *progress_context;
    /// A manifest of the new file, as fst_save_options.manifest. The new file is read for it. NULL:
    /// none, and the manifest of an old file at `target` is removed.
    const char *manifest;
    fst_digest digest; ///< of the manifest
} fst_pack_options;

/// Compresses the safetensors file `path` to `target`, which may be the same path and gets the same
/// permissions. It is published like every save, and begins like fst_header_edit(). Needs a few MiB
/// per thread. `options` and `stats` may be NULL; stats->bytes_total is the size of the new file.
/// FST_E_ARGUMENT for a compressed file, FST_E_UNSUPPORTED without libzstd.
FST_API FST_NODISCARD fst_status fst_file_compress(const char *path, const char *target,
                                                   const fst_pack_options *options,
                                                   fst_save_stats *stats, fst_error *error);

/// Restores the original of the compressed file `path`, byte for byte, at `target`; copies a file
/// that is not compressed. FST_E_CORRUPT for a damaged file.
FST_API FST_NODISCARD fst_status fst_file_decompress(const char *path, const char *target,
                                                     const fst_pack_options *options,
                                                     fst_save_stats *stats, fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
