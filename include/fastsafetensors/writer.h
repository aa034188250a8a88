// SPDX-License-Identifier: Apache-2.0
/// Saving tensors: one file or a sharded set, from memory or as a stream, all or nothing.
#ifndef FASTSAFETENSORS_WRITER_H
#define FASTSAFETENSORS_WRITER_H

#include "base.h"
#include "device.h"
#include "dtype.h"
#include "loader.h"
#include "model.h"
#include "verify.h"

#ifdef __cplusplus
extern "C" {
#endif

/// A save in progress. Nothing of it is seen under the target's name before
/// fst_writer_commit(): until then the old model is there, from then on the new one. Whatever
/// happens (any call that fails, a kill, for durable saves a power cut, another save of the same
/// target at the same time), opening the path gives the whole old model, the whole new one or,
/// where there was none, an error that says what is missing. A reader that is opening a set while
/// it is replaced gets one of the two.
///
/// fst_writer_write() may be called from many threads at once, and fst_writer_cancel() and
/// fst_writer_stats_get() beside everything; of the others, one at a time. In a child of the
/// process that opened it, a writer can only be closed, which leaves everything to the parent.
typedef struct fst_writer fst_writer;

/// What a save promises once it has returned FST_OK. Either way a crash of the program leaves the
/// old model or the new one, whole. After a power cut a quick save may have lost both: file systems
/// may have made the new name last before the bytes.
typedef enum fst_save_promise {
    FST_SAVE_QUICK = 0,   ///< the kernel has the bytes
    FST_SAVE_DURABLE = 1, ///< the device has them: files and folders are synced, new ones too
} fst_save_promise;
#define FST_SAVE_PROMISE_COUNT 2

/// The order of tensors in the file.
typedef enum fst_save_order {
    FST_SAVE_ORDER_REFERENCE =
        0,                    ///< as the reference writer: by dtype (largest first), then by name
    FST_SAVE_ORDER_NAME = 1,  ///< by name, bytewise
    FST_SAVE_ORDER_GIVEN = 2, ///< as the caller lists them
} fst_save_order;
#define FST_SAVE_ORDER_COUNT 3

/// How bytes go to the disk.
typedef enum fst_save_engine {
    FST_SAVE_ENGINE_AUTO = 0, ///< durable: past the page cache where that works; quick: through it
    FST_SAVE_ENGINE_BUFFERED = 1, ///< writes through the page cache
    FST_SAVE_ENGINE_DIRECT = 2,   ///< writes past it (O_DIRECT), one at a time
    FST_SAVE_ENGINE_URING = 3,    ///< writes past it, many in flight
} fst_save_engine;
#define FST_SAVE_ENGINE_COUNT 4

/// Which tensors are written compressed (docs/FORMAT.md): without loss, and only where it saves
/// something. A file that does not become smaller is written plain.
typedef enum fst_compress {
    FST_COMPRESS_NONE = 0,
    FST_COMPRESS_FLOAT = 1, ///< those of floats
    FST_COMPRESS_ALL = 2,   ///< integers and booleans, too
} fst_compress;
#define FST_COMPRESS_COUNT 3

/// One tensor to save. The strings, the shape and `data` are the caller's; all but `data` may go
/// when the opening call has returned, `data` must stay until the writer is closed.
typedef struct fst_save_tensor {
    const char *name; ///< UTF-8; any but "__metadata__", each once
    size_t name_size; ///< bytes; SIZE_MAX: NUL-terminated
    fst_dtype dtype;
    uint32_t rank;
    const uint64_t *shape; ///< elements; the product times the dtype's bits must be whole bytes
    const void *data;      ///< row-major, packed; NULL: fst_writer_write() brings the bytes
    uint32_t file_index;   ///< which file of a set (file_count > 0), else 0
    fst_device device;     ///< whose address `data` is; all zero: the CPU's. What the caller has
                           ///< queued for it on the device must be done
    uint64_t reserved[4];  ///< 0
} fst_save_tensor;

/// How to save. Everything but struct_size may be zero.
typedef struct fst_save_options {
    size_t struct_size; ///< sizeof(fst_save_options)
    fst_save_promise promise;
    fst_save_order order;
    fst_save_engine engine;
    /// Where tensors begin in the file: at multiples of this (a power of two up to 1 MiB). The
    /// header ends in spaces up to there. The format allows no holes, so behind a tensor that ends
    /// elsewhere comes a filler: a U8 tensor "__padding__.N", and a metadata key "__padding__" that
    /// marks the file. With the reference order, tensors that end at a multiple come first, so
    /// there are as few fillers as there can be, and none where every size is a multiple. This
    /// library leaves fillers out when it opens a file; other readers see them as tensors. 0:
    /// packed, as the reference writer does.
    uint64_t alignment_bytes;
    /// Bytes before the data section are a multiple of this (a multiple of 8); 0: alignment_bytes,
    /// at least 8. Spaces fill it.
    uint64_t header_alignment_bytes;
    const fst_metadata_entry *metadata; ///< sizes may be SIZE_MAX: NUL-terminated
    size_t metadata_count;
    int has_metadata;  ///< 1: write __metadata__ even without entries
    int metadata_last; ///< 1: __metadata__ ends the header; 0: it begins it
    /// 0: `path` is a file. Else `path` is a folder (made if missing) that gets this many files:
    /// "<stem>-00001-of-0000N.safetensors" and "<stem>.safetensors.index.json", or, of one file,
    /// "<stem>.safetensors" alone. The index comes into place last; files of an earlier set of
    /// the same stem go after that.
    uint32_t file_count;
    const char *stem;      ///< NULL: "model"
    uint32_t thread_count; ///< for sets; 0: as many as the process may use
    /// Called as bytes are written, from the thread that writes them (of sets, also threads of the
    /// library's), one call at a time; non-zero cancels. It may call fst_writer_stats_get() and
    /// fst_writer_cancel().
    fst_progress_callback progress;
    void *progress_context;
    int others_write; ///< 1: other processes bring what comes without data (fst_writer_join())
    int replace_link; ///< 1: a `path` that is a symbolic link is replaced, as in sets
    /// A compressed file is made of the plain one, which lies beside it until the save is finished:
    /// free space for both is needed. FST_E_UNSUPPORTED with others_write, and without libzstd.
    fst_compress compress;
    /// A manifest (verify.h) of what is saved, made of the bytes as they are written and published
    /// with them: its path, or "" for the place where FST_OPEN_VERIFY looks for it. NULL: none is
    /// made. Either way a manifest of the old model at that place goes with it: none is ever there
    /// that a model which is whole does not fit. It lists the files of the save. With others_write
    /// the files are read for it when they are committed. FST_E_UNSUPPORTED for what is handed over
    /// to be published (fst_publish_options.manifest), and without libcrypto for SHA-256.
    const char *manifest;
    fst_digest digest; ///< of the manifest
} fst_save_options;

/// What a save did and why.
typedef struct fst_save_stats {
    size_t struct_size; ///< sizeof(fst_save_stats), set by the caller
    char engine[16];    ///< "buffered", "direct" or "uring"; "http" at addresses
    char reason[256];
    uint32_t file_count;
    size_t tensor_count;
    size_t padding_count;   ///< filling tensors that alignment_bytes made
    uint64_t bytes_total;   ///< of all files, headers included
    uint64_t bytes_written; ///< by write operations
    uint64_t bytes_direct;  ///< of them past the page cache
    uint64_t bytes_staged;  ///< of them copied to a slot first
    uint64_t write_count;
    uint64_t sync_count;  ///< fsync calls, of files and folders
    uint64_t stage_bytes; ///< memory of the slots
    uint64_t total_ns;    ///< from open to commit
    uint64_t sync_ns;     ///< of it in fsync
    size_t step_count;    ///< of publishing: changes of names, and syncs of folders
    /// Hidden files of killed saves of the same target that this one has removed.
    size_t leftover_count;
    /// Not "": the new model is in place, whole, but not all that belonged to the old one, or to
    /// publishing, could be tidied up (a name that may not be removed, say). A set may then lie
    /// under hidden names that its index leads to; the next save tidies up.
    char warning[256];
    uint64_t bytes_shared; ///< of fst_header_edit(): blocks of the old file that the new one shares
    uint64_t bytes_copied; ///< likewise: copied from the old file
    uint64_t bytes_hashed; ///< for the manifest
    /// Of them read from the new file: compressed ones, and chunks whose bytes came out of order
    /// or by fst_writer_map().
    uint64_t bytes_read;
} fst_save_stats;

/// Begins a save: lays the file or files out, makes them under hidden names beside the target and
/// reserves their space, so that a full disk is noticed here (FST_E_NO_SPACE). A path that is a
/// symbolic link is followed; links inside of a set's folder are replaced. An existing file's
/// owner, permissions and access list are kept; where the owner or group can't be, nobody gets more
/// rights than before. A file that may not be written to, or that is no regular file, is an error.
/// An address (s3://, gs://, az://) is saved to in parts (docs/remote.md): what needs files is
/// FST_E_UNSUPPORTED, and a set of as many files as the one that is there replaces it file by file.
/// On success *out is the caller's.
FST_API FST_NODISCARD fst_status fst_writer_open(const char *path, const fst_save_tensor *tensors,
                                                 size_t tensor_count,
                                                 const fst_save_options *options, fst_writer **out,
                                                 fst_error *error);

/// Writes bytes [offset, offset + size_bytes) of a tensor that came without data. Each byte once,
/// in any order; in the order of the file it is fastest. Bytes that have come before are
/// FST_E_ARGUMENT, with tensor and range, and the save goes on; after any other error it has failed
/// and can only be closed. `data` may be reused afterwards.
FST_API FST_NODISCARD fst_status fst_writer_write(fst_writer *writer, size_t tensor_index,
                                                  uint64_t offset, const void *data,
                                                  size_t size_bytes, fst_error *error);

/// Gives the bytes of a tensor that came without data as memory of the file itself, to be filled
/// before fst_writer_finish(). It goes when the writer is finished or closed. Not for a tensor of
/// which bytes were written. Where the file system can't reserve space (no fallocate), a disk that
/// becomes full is a SIGBUS in the program that fills it.
FST_API FST_NODISCARD fst_status fst_writer_map(fst_writer *writer, size_t tensor_index, void **out,
                                                fst_error *error);

/// Writes what came with data, checks that no byte is missing (FST_E_ARGUMENT names tensor and
/// range; they may still be written) and syncs if so promised. Nothing has its name yet: several
/// writers can be finished before the first is committed.
FST_API FST_NODISCARD fst_status fst_writer_finish(fst_writer *writer, fst_error *error);

/// Finishes if need be and puts the files in place. On failure the old ones stay, or are brought
/// back: the message names the step and the file. FST_OK once the new model is in place: what could
/// not be tidied up then is in fst_save_stats.warning. Sets are published one at a time in a
/// folder: FST_E_TIMEOUT when another save is at it for half a minute. Where a file system has no
/// hard links, replacing a set copies its files once, and a durable save whose last sync fails
/// can't bring the old file back: the message says so.
FST_API FST_NODISCARD fst_status fst_writer_commit(fst_writer *writer, fst_error *error);

/// Makes a save fail soon with FST_E_CANCELLED: calls that write, finish or commit, up to the
/// instant at which the new model comes into place. From any thread. NULL is allowed.
FST_API void fst_writer_cancel(fst_writer *writer);

/// Ends a save; one that was not committed leaves nothing behind. NULL is allowed.
FST_API void fst_writer_close(fst_writer *writer);

/// The path of file `file_index`, or of the index (file_index == file count, of sets of several
/// files); NULL when there is none. It belongs to the writer.
FST_API const char *fst_writer_path(const fst_writer *writer, uint32_t file_index);

FST_API FST_NODISCARD fst_status fst_writer_stats_get(const fst_writer *writer,
                                                      fst_save_stats *stats, fst_error *error);

/// Saves tensors that all have data: open, commit, close. `stats` may be NULL. An error means that
/// the old model is there.
FST_API FST_NODISCARD fst_status fst_save(const char *path, const fst_save_tensor *tensors,
                                          size_t tensor_count, const fst_save_options *options,
                                          fst_save_stats *stats, fst_error *error);

/// A new name of a tensor. Sizes may be SIZE_MAX: NUL-terminated.
typedef struct fst_tensor_rename {
    const char *from;
    size_t from_size;
    const char *to;
    size_t to_size;
    uintptr_t reserved[2]; ///< 0
} fst_tensor_rename;

/// What to change in a file's header. Everything but struct_size may be zero.
typedef struct fst_edit_options {
    size_t struct_size; ///< sizeof(fst_edit_options)
    fst_save_promise promise;
    int clear_metadata;                 ///< 1: entries that are not set here go
    const fst_metadata_entry *metadata; ///< entries to set; one whose value is NULL goes
    size_t metadata_count;
    const fst_tensor_rename *renames; ///< taken at once: two tensors may exchange their names
    size_t rename_count;
    /// Called as bytes are copied, from the calling thread; non-zero cancels.
    fst_progress_callback progress;
    void *progress_context;
    /// A manifest of the edited file, as fst_save_options.manifest: NULL makes none, and takes that
    /// of the old file away. What was not written is read for it.
    const char *manifest;
    fst_digest digest; ///< of the manifest
} fst_edit_options;

/// Changes metadata and names of tensors of the file `path`, without loading a tensor. The edited
/// file comes to `target` or, if that is NULL, takes the place of the old one; a symbolic link is
/// followed. It is published as every save is: at every instant the old file is there or the new
/// one, whole, and permissions are kept: a new file gets those of the file it was made from.
///
/// What that costs: where the file system shares blocks between files (btrfs, XFS, bcachefs, ZFS,
/// NFS 4.2, ..) only the header is written, whatever the file's size: the header grows and shrinks
/// by whole blocks. Elsewhere (ext4, tmpfs, and from one file system to another) the kernel copies
/// the tensors' bytes: the time and the free space of a copy, but no memory. `stats` (may be NULL)
/// tells: bytes_shared, bytes_copied, and `engine` "shared", "kernel" or "buffered".
///
/// A name that no tensor has is FST_E_TENSOR_NOT_FOUND. FST_E_ARGUMENT: `path` is a set of files
/// (edit one of them), a tensor is to get two new names, or a tensor would change its name although
/// an index leads to the file: one in the file's folder or the one above it, by any name or link.
/// FST_E_FILE_CHANGED: somebody else has replaced or written to the file meanwhile. Edits of a file
/// at once are told so, too, and lose nothing: they wait for each other by a lock (flock) on its
/// folder, where that has locks and may be read; FST_E_TIMEOUT after half a minute. What is not
/// noticed: writes through a shared mapping that the file system has not dated yet (msync() does
/// that), and a program without that lock that replaces the file in the instant before the edit
/// does; fst_save() of one file takes no lock.
FST_API FST_NODISCARD fst_status fst_header_edit(const char *path, const char *target,
                                                 const fst_edit_options *options,
                                                 fst_save_stats *stats, fst_error *error);

/// How to compress or decompress a file. Everything but struct_size may be zero.
typedef struct fst_pack_options {
    size_t struct_size; ///< sizeof(fst_pack_options)
    fst_save_promise promise;
    fst_compress compress; ///< of fst_file_compress(); FST_COMPRESS_NONE: as FST_COMPRESS_FLOAT
    uint32_t thread_count; ///< that encode; 0: as many as the process may use
    /// Called as bytes are done, from the calling thread; non-zero cancels.
    fst_progress_callback progress;
    void *progress_context;
    /// A manifest of the new file, which is read for it, as fst_save_options.manifest: NULL makes
    /// none, and takes that of an old file at `target` away.
    const char *manifest;
    fst_digest digest; ///< of the manifest
} fst_pack_options;

/// Writes the safetensors file `path` compressed to `target`, which gets its permissions and comes
/// into place as every save does; it may be `path` itself. Memory: some MiB a thread. `options` and
/// `stats` may be NULL; stats->bytes_total is the new file's. FST_E_ARGUMENT for a file that is
/// compressed already, FST_E_UNSUPPORTED without libzstd.
FST_API FST_NODISCARD fst_status fst_file_compress(const char *path, const char *target,
                                                   const fst_pack_options *options,
                                                   fst_save_stats *stats, fst_error *error);

/// Writes the file that the compressed file `path` was made from, byte for byte, to `target`; of a
/// plain file, which compressing makes of one that does not shrink, a copy. FST_E_CORRUPT for one
/// that is damaged.
FST_API FST_NODISCARD fst_status fst_file_decompress(const char *path, const char *target,
                                                     const fst_pack_options *options,
                                                     fst_save_stats *stats, fst_error *error);

// A set that several processes write together. Each process may write files of its own (a writer a
// file, then fst_writer_hand_over()), and one of them publishes all of them: fst_set_publish(). Or
// one process makes the files (fst_save_options.others_write, fst_writer_hand_over()), the others
// write parts of them (fst_writer_join()), and the first commits. How the processes tell each
// other paths, and that they are done, is theirs. What a save promises holds for these, too: until
// everything is published the old model is there, whoever dies.

/// Finishes if need be, and gives the files hidden names, under which other processes find them
/// until they are published: fst_writer_hidden_path(). The writer must stay open until then: the
/// files of one that is closed, or whose process has died, go. They stay where a publication has
/// got so far that an index leads to them.
FST_API FST_NODISCARD fst_status fst_writer_hand_over(fst_writer *writer, fst_error *error);

/// The hidden path of file `file_index`, once it is handed over; else NULL. It belongs to the
/// writer.
FST_API const char *fst_writer_hidden_path(const fst_writer *writer, uint32_t file_index);

/// Opens a file that another process has handed over with others_write, to write parts of it by
/// fst_writer_write() or fst_writer_map(); tensors are numbered as fst_model_open() of the path
/// numbers them. Nobody counts which bytes have come: that every one does is the processes'
/// business. fst_writer_finish() makes them last, if `options` (may be NULL: promise and progress
/// are looked at) say so; closing leaves the file to its maker. On success *out is the caller's.
FST_API FST_NODISCARD fst_status fst_writer_join(const char *path, const fst_save_options *options,
                                                 fst_writer **out, fst_error *error);

/// How to publish. Everything but struct_size may be zero.
typedef struct fst_publish_options {
    size_t struct_size; ///< sizeof(fst_publish_options)
    fst_save_promise promise;
    /// 1: the set is found by its files' names alone. An index is there while it is published, and
    /// stays only where the set had one; files of other counts stay.
    int without_index;
    const char *stem; ///< NULL: "model"
    /// A manifest of the set, which is read for it, as fst_save_options.manifest: NULL makes none,
    /// and takes that of the old model away. Not without_index.
    const char *manifest;
    fst_digest digest; ///< of the manifest
} fst_publish_options;

/// Publishes files that were handed over, in this order, as one set of the folder that they lie in:
/// under the names of a set that fst_writer_open() makes, and with its promises. The index is made
/// of the files' headers. `paths` are hidden ones of that folder (else FST_E_ARGUMENT); a tensor in
/// two files is FST_E_ARGUMENT. Whatever is returned, the hidden names are gone afterwards, or an
/// index leads to them, but for those of files that were refused. `stats` may be NULL.
FST_API FST_NODISCARD fst_status fst_set_publish(const char *folder, const char *const *paths,
                                                 size_t path_count,
                                                 const fst_publish_options *options,
                                                 fst_save_stats *stats, fst_error *error);

/// A hidden file that a save has made: ".NAME.<16 hex digits>.tmp".
typedef struct fst_leftover {
    const char *path; ///< valid during the call
    uint64_t size_bytes;
    int in_use; ///< 1: its save lives, or an index leads to it; 0: left over from a killed one
    uint64_t reserved[4];
} fst_leftover;

/// Told of one after the other, by the thread that asks.
typedef void (*fst_leftover_callback)(void *context, const fst_leftover *leftover);

/// Tells of the hidden files of saves in a folder, or of one target's if `path` is no folder.
/// Saves remove those of their own targets that are not in use, so only what nobody saves again
/// stays. FST_E_TIMEOUT while a save is being published.
FST_API FST_NODISCARD fst_status fst_leftovers_visit(const char *path, fst_leftover_callback visit,
                                                     void *context, fst_error *error);
/// Removes those that are not in use. `count` and `size_bytes` (may be NULL): of what was removed.
FST_API FST_NODISCARD fst_status fst_leftovers_remove(const char *path, size_t *count,
                                                      uint64_t *size_bytes, fst_error *error);

/// What fst_shards_assign() has to know of a tensor.
typedef struct fst_shard_item {
    uint64_t size_bytes;
    uint64_t group; ///< tensors of the same non-zero group share memory: one file, counted once
    uint64_t reserved[2]; ///< 0
} fst_shard_item;

/// Splits tensors into files of at most `file_bytes_max` bytes as Hugging Face's libraries do: in
/// the order given, a new file when the next tensor would not fit, a larger one alone in a file at
/// that point; a group goes where the first of it is. file_of[i]: 0 .. *file_count - 1.
FST_API FST_NODISCARD fst_status fst_shards_assign(const fst_shard_item *items, size_t item_count,
                                                   uint64_t file_bytes_max, uint32_t *file_of,
                                                   uint32_t *file_count, fst_error *error);

/// The layout of one file without writing it: for saves to memory and for previews.
typedef struct fst_layout fst_layout;
FST_API FST_NODISCARD fst_status fst_layout_open(const fst_save_tensor *tensors,
                                                 size_t tensor_count,
                                                 const fst_save_options *options, fst_layout **out,
                                                 fst_error *error);
/// The bytes before the data section (length field, JSON, padding); they belong to the layout.
FST_API const char *fst_layout_header(const fst_layout *layout, size_t *size_bytes);
/// Where tensor `tensor_index` begins and how large it is, counted from the start of the file.
FST_API FST_NODISCARD fst_status fst_layout_tensor(const fst_layout *layout, size_t tensor_index,
                                                   uint64_t *offset, uint64_t *size_bytes,
                                                   fst_error *error);
/// Bytes of the whole file, and filling tensors in it. 0 for NULL.
FST_API uint64_t fst_layout_file_bytes(const fst_layout *layout);
FST_API size_t fst_layout_padding_count(const fst_layout *layout);
FST_API void fst_layout_close(fst_layout *layout);

#ifdef __cplusplus
}
#endif

#endif
