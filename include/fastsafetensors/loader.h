// SPDX-License-Identifier: Apache-2.0
/// Loading tensors: all or some, at once or as a stream, into our memory or the caller's.
#ifndef FASTSAFETENSORS_LOADER_H
#define FASTSAFETENSORS_LOADER_H

#include "base.h"
#include "device.h"
#include "dtype.h"
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

/// A load in progress or finished. It belongs to the process that opened it: after a fork() the
/// child may close it, which only frees memory, and everything else is FST_E_UNSUPPORTED there.
/// Models, and tensors that were handed out, may be used in the child. fst_loader_cancel() and
/// fst_loader_stats_get() may be called from any thread; of the others, one at a time.
typedef struct fst_loader fst_loader;

/// One loaded tensor. It owns its memory: it stays valid after the loader, the model and the file
/// are closed, until its last reference goes. Reading its fields is safe from any thread, and so
/// are ref and unref.
typedef struct fst_tensor fst_tensor;

/// How tensors come to memory. It does not depend on what the page cache happens to hold.
///
/// A view is the file's own pages, as mmap(2) gives them, private: what the program writes to a
/// view stays with the program. What others do to the file shows: bytes that are overwritten in
/// place change under a view that has not been written to, and a file that is cut off makes
/// touching it a SIGBUS. Replacing a file by rename, as this library and most others save, leaves
/// views as they are. Who can't rely on that asks for FST_MODE_LOAD, whose tensors are memory of
/// their own.
typedef enum fst_load_mode {
    /// MAP on the CPU, LOAD where views can't be what is asked for: to a device, into memory of the
    /// caller's, with a conversion, engine, allocator or budget, around the page cache, where the
    /// system refuses the mapping, and where most bytes would have to be copied out of it (tensors
    /// at odd addresses of their file, slices of many pieces) and fit the memory that is left.
    FST_MODE_AUTO = 0,
    FST_MODE_LOAD = 1, ///< read into memory of our own (or the caller's), aligned
    /// Views of the file, no copy. What can be none (a tensor at an address of the file that its
    /// dtype does not allow, a slice of many pieces) is read to memory of its own when it is asked
    /// for, as by FST_MODE_LOAD.
    FST_MODE_MAP = 2,
} fst_load_mode;
#define FST_MODE_COUNT 3

/// Whether what a load reads from storage stays in the page cache, where the next start of the
/// program, and others on the host, find it.
typedef enum fst_cache {
    /// KEEP when the request fits comfortably in the memory that is left (of the machine, and up
    /// the whole path of the cgroup). Memory of one's own on the CPU has to fit beside what is
    /// kept, as large as it becomes by a conversion; above 512 MiB, and less than half of a model
    /// above 128 MiB, it is filled around the cache. Up to 1 MiB always, but with a budget. Else
    /// what is absent is read around the cache where the file system can, or, for views, comes when
    /// it is touched.
    FST_CACHE_AUTO = 0,
    /// What is absent is brought into the page cache by large reads, whatever the readahead setting
    /// of the device (where that is off, pages come one by one to who neither owns nor may write
    /// the file); views wait for it, memory of one's own is copied from there. Not with the
    /// engines that go around it.
    FST_CACHE_KEEP = 1,
    /// What is absent is read around the page cache where the file system can, else through it and
    /// dropped there at once, unless the kernel does not tell whether somebody else had it there.
    /// What is cached stays, and is taken from there where all of a unit of work is. FST_MODE_AUTO
    /// is then LOAD; pages of FST_MODE_MAP come when they are touched, or verified, and stay. Not
    /// with the engines that need the cache.
    FST_CACHE_BYPASS = 2,
} fst_cache;
#define FST_CACHE_COUNT 3

/// What moves the bytes in FST_MODE_LOAD; views are made by none of them.
typedef enum fst_engine {
    FST_ENGINE_AUTO =
        0, ///< per chunk: what is cached is copied from a mapping, the rest read direct
    FST_ENGINE_PREAD = 1,  ///< threads of buffered preads
    FST_ENGINE_DIRECT = 2, ///< threads of preads past the page cache (O_DIRECT)
    FST_ENGINE_URING = 3,  ///< io_uring past the page cache (O_DIRECT)
    FST_ENGINE_MMAP = 4,   ///< copies from a mapping
    FST_ENGINE_GDS =
        5, ///< GPUDirect Storage; not to be asked for here, but by fst_load_options.gds
    FST_ENGINE_HTTP = 6, ///< range requests, of what was opened by an address
} fst_engine;
#define FST_ENGINE_COUNT 7

/// The order in which a stream hands tensors out.
typedef enum fst_order {
    FST_ORDER_FILE = 0,    ///< as the bytes lie in the files
    FST_ORDER_REQUEST = 1, ///< as the request names them
} fst_order;
#define FST_ORDER_COUNT 2

/// Whether files are read straight to the memory of a GPU (GPUDirect Storage: cuFile, hipFile).
typedef enum fst_gds {
    FST_GDS_AUTO = 0,   ///< where a probe on the file shows real direct transfers
    FST_GDS_OFF = 1,    ///< never
    FST_GDS_STRICT = 2, ///< or fail: FST_E_UNSUPPORTED with the reason, which begins with "gds"
} fst_gds;
#define FST_GDS_COUNT 3

/// One tensor of a request.
typedef struct fst_request_item {
    size_t tensor_index; ///< in the model
    /// NULL for the whole tensor, else `rank` numbers each: elements begin <= i < end of every
    /// dimension (begin <= end <= shape). Not for dtypes below 8 bits unless the last dimension is
    /// whole, and in at most 2^22 pieces of the file.
    const uint64_t *slice_begin;
    const uint64_t *slice_end;
    /// NULL for our memory, else where its bytes go (row-major, packed); the caller keeps it alive
    /// until the loader is closed. An address of options.device. Not in FST_MODE_MAP.
    void *destination;
    size_t destination_bytes; ///< must equal the bytes of the tensor or slice
    uint64_t reserved[4];     ///< 0
} fst_request_item;

/// What the loader tells while it works: how far it is when fst_loader_open() returns, from the
/// thread that calls that, unless it was told before, and whenever something is done, from one of
/// the load's threads; one call at a time and none after fst_loader_close(), before which the last
/// one of a load that has succeeded says `total` of `total`. Return 0 to go on, anything else to
/// cancel. It must not call into the same loader.
typedef int (*fst_progress_callback)(void *context, uint64_t bytes_done, uint64_t bytes_total,
                                     size_t tensors_done, size_t tensors_total);

/// Chooses tensors: return non-zero to keep. Called once a tensor, before anything is read.
typedef int (*fst_tensor_predicate)(void *context, const fst_tensor_info *info);

/// A request. Everything but struct_size may be zero. What is asked for: `items` when item_count
/// is not 0, else all tensors that match every one of `globs` (any of them) and `predicate`.
typedef struct fst_load_options {
    size_t struct_size; ///< sizeof(fst_load_options)
    fst_load_mode mode;
    fst_engine engine;
    fst_order order;
    /// 0: as many as the process may use processors, at most 16; at least 2 for a ring (one
    /// reads, one makes memory), and 4 for reads that block.
    uint32_t thread_count;
    const fst_request_item *items; ///< read during fst_loader_open() only
    size_t item_count;
    const char *const *globs; ///< shell patterns (* ? [..]) over whole names; a name matching any
    size_t glob_count;
    fst_tensor_predicate predicate; ///< NULL: all
    void *predicate_context;
    /// Most bytes of tensors that may be read and not yet handed out by fst_loader_next();
    /// 0: no limit (everything is kept in the loader as well). A single tensor that is above it
    /// with what its memory takes (whole pages, and one for its place in the first; huge ones from
    /// 2 MiB on) is FST_E_BUDGET, with both numbers. Slots that reads go through (`bounce_bytes` of
    /// the statistics) come on top, and what fst_loader_item() reads beside the stream. What
    /// threads decompress with (some 4.3 MiB each) is within it: where files are compressed, a
    /// third of it may go there, and no more threads are used than that allows.
    uint64_t budget_bytes;
    /// Copied; NULL: our huge-page arenas. It is called by one thread of the load at a time,
    /// without a lock: it may ask the loader for statistics, or cancel it.
    const fst_allocator *allocator;
    fst_progress_callback progress;
    void *progress_context;
    /// 1: tensors become `dtype` on the way where that is possible: float types to any float type
    /// (rounding to nearest even), integers to wider ones that hold every value; others stay as
    /// they are. Not in FST_MODE_MAP. Destinations then have the converted size.
    int convert;
    fst_dtype dtype;
    /// 1: pages of FST_MODE_MAP may not be written (a store faults); 0: stores stay private.
    int map_read_only;
    /// 1: FST_MODE_MAP makes the pages that are in the page cache present ahead of use, by threads,
    /// and fst_loader_wait() waits for that; 0: pages come when they are touched.
    int map_populate;
    /// 1: never install the SIGBUS guard that turns a file shrinking under a mapping into an
    /// error; cached chunks are then read with pread.
    int no_sigbus_guard;
    /// Where tensors go; all zero: the CPU. On a GPU, `allocator` gives memory of that device, and
    /// FST_MODE_MAP is FST_E_ARGUMENT. Tensors that are handed out may be used on any stream at
    /// once: their copies and conversions are over. Those of 16 bytes or more are aligned to 16.
    fst_device device;
    /// A stream of the device's driver (its handle; 1: the default stream, of HIP as well), or 0:
    /// nothing is written before what is queued on it now is done, and to memory that `allocator`
    /// gives not before what was queued when it came. For memory that work of the caller's may
    /// still use: destinations, and allocators that reuse memory in the order of a stream.
    uintptr_t stream;
    fst_gds gds;
    /// Knobs of experimental.h, for measuring and for machines that nobody has met; NULL: as the
    /// library decides. Read during fst_loader_open() only.
    const struct fst_load_tuning *tuning;
    fst_cache cache;
} fst_load_options;

/// Plans the request and starts reading in the background; up to 64 KiB, or what is cached up to
/// 1 MiB, is read before it returns. `model` may be closed afterwards.
/// `options` may be NULL: everything, mode auto. On success *out is the caller's.
/// An unknown name or index, a slice out of range, a wrong destination size: FST_E_ARGUMENT.
FST_API FST_NODISCARD fst_status fst_loader_open(fst_model *model, const fst_load_options *options,
                                                 fst_loader **out, fst_error *error);

/// Number of tensors of the request; 0 for NULL.
FST_API size_t fst_loader_tensor_count(const fst_loader *loader);

/// Waits until every byte asked for is in place, at most `timeout_ms` milliseconds (negative:
/// no limit): FST_OK, FST_E_TIMEOUT, or what made the load fail. With budget_bytes set it is
/// FST_E_ARGUMENT: such a load is finished by fst_loader_next().
FST_API FST_NODISCARD fst_status fst_loader_wait(fst_loader *loader, int64_t timeout_ms,
                                                 fst_error *error);

/// The next tensor of the stream, in the order asked for, as soon as its bytes are there; FST_END
/// after the last. *out is a reference of the caller's. `timeout_ms` as in fst_loader_wait().
FST_API FST_NODISCARD fst_status fst_loader_next(fst_loader *loader, int64_t timeout_ms,
                                                 fst_tensor **out, fst_error *error);

/// Item `item_index` of the request (for a request without items: of the tensors chosen, in file
/// order), at any time and any number of times, whatever the stream has handed out. Waits for its
/// bytes, `timeout_ms` as in fst_loader_wait(); if the stream has let go of them, or has not come
/// to them, they are read beside it. That goes on after FST_E_TIMEOUT, for 8 items at a time (a
/// ninth is begun when one of those was taken, or not asked for in 10 s): who asks again finds it
/// further on. *out is the caller's reference.
FST_API FST_NODISCARD fst_status fst_loader_item(fst_loader *loader, size_t item_index,
                                                 int64_t timeout_ms, fst_tensor **out,
                                                 fst_error *error);

/// The same by name; a request with several items of that name gives the first.
FST_API FST_NODISCARD fst_status fst_loader_tensor(fst_loader *loader, const char *name,
                                                   size_t name_size, int64_t timeout_ms,
                                                   fst_tensor **out, fst_error *error);

/// Makes the load stop soon: calls that wait, or would have to, return FST_E_CANCELLED. What is in
/// place can still be had. NULL is allowed.
FST_API void fst_loader_cancel(fst_loader *loader);

/// Stops what still runs, waits for its threads and drops the loader. Tensors handed out stay
/// valid. NULL is allowed.
FST_API void fst_loader_close(fst_loader *loader);

/// What a load did and why. Counters are exact once fst_loader_wait() has returned FST_OK or
/// fst_loader_next() FST_END.
typedef struct fst_load_stats {
    size_t struct_size; ///< sizeof(fst_load_stats), set by the caller
    char mode[16];      ///< "load" or "map"
    char engine[48];    ///< what read the bytes: "uring", "mmap", "uring+mmap", "pread", ...
    char reason[512];   ///< why these were chosen
    uint32_t thread_count;
    size_t tensor_count;
    uint64_t bytes_requested; ///< of tensors and slices asked for, as they come to memory
    /// Read from files or copied from mappings: what was asked for, and gaps between that were read
    /// over; not the rest of pages at the ends of direct reads. Of compressed files, bytes of what
    /// they were made from: stored_bytes tells what was read of them.
    uint64_t bytes_read;
    uint64_t bytes_direct;    ///< of them past the page cache
    uint64_t bytes_mapped;    ///< taken from a mapping: copied, or made present for views
    uint64_t bytes_copied;    ///< moved once more in memory (from a slot or a mapping)
    uint64_t bytes_converted; ///< of them converted to another dtype on the way, as read
    uint64_t read_count;      ///< read operations
    uint64_t chunk_count;     ///< units of work
    /// Of them found whole in the page cache beforehand, where that decides how they come (not
    /// with an engine asked for), and as far as the kernel tells: of files that the process neither
    /// owns nor may write to, views are asked for single bytes here and there.
    uint64_t chunks_resident;
    uint64_t buffer_bytes;        ///< memory allocated for tensors by this load
    uint64_t buffer_bytes_peak;   ///< most of it alive and not yet handed out at one time; and,
                                  ///< of compressed files, what its threads decompress with
    uint64_t bounce_bytes;        ///< memory of bounce slots
    uint64_t plan_ns;             ///< time to plan
    uint64_t first_tensor_ns;     ///< from the start until the first tensor was complete
    uint64_t total_ns;            ///< from the start until the last byte was in place
    uint64_t read_ns;             ///< summed over threads: in read calls and waiting for them
    uint64_t copy_ns;             ///< summed over threads: copying
    uint64_t wait_ns;             ///< the caller's time in calls that wait
    uint64_t populate_ns;         ///< summed over threads: making destination pages
    uint64_t device_bytes;        ///< sent to the device from the processors' memory
    uint64_t device_copies;       ///< copies that the bus made for that, but for those to a kernel
    uint64_t device_launches;     ///< chunks that the device's kernel took apart
    uint64_t device_wait_ns;      ///< summed over threads: waiting for the device
    uint64_t gds_bytes;           ///< read straight to the device
    uint64_t cache_bytes;         ///< of bytes_read: by way of the page cache, where they stay
    uint64_t verified_bytes;      ///< held against their digests, and found to be right
    uint64_t digest_ns;           ///< summed over threads: digesting
    uint64_t stored_bytes;        ///< of compressed files: read of them
    uint64_t decoded_bytes;       ///< and what became of it; their plain tensors count in both
    uint64_t decode_ns;           ///< summed over threads: decoding
    uint64_t network_requests;    ///< of addresses: what was sent, to open the model as well
    uint64_t network_retries;     ///< of them, those that were sent again
    uint64_t network_hedges;      ///< of them, those sent beside one that was late
    uint64_t network_connections; ///< that were made for them
    uint64_t network_bytes;       ///< that came in answers, without their heads
    uint64_t disk_cache_bytes;    ///< of addresses: read from the cache on disk instead
    uint64_t disk_cache_written;  ///< of addresses: bytes that were left in it
} fst_load_stats;

/// The 64-bit counters of fst_load_stats, all of them and in its order: for tables and formats that
/// are made of them.
// clang-format off
#define FST_LOAD_COUNTERS(X) \
    X(bytes_requested) X(bytes_read) X(bytes_direct) X(bytes_mapped) X(bytes_copied) \
    X(bytes_converted) X(read_count) X(chunk_count) X(chunks_resident) X(buffer_bytes) \
    X(buffer_bytes_peak) X(bounce_bytes) X(plan_ns) X(first_tensor_ns) X(total_ns) \
    X(read_ns) X(copy_ns) X(wait_ns) X(populate_ns) X(device_bytes) X(device_copies) \
    X(device_launches) X(device_wait_ns) X(gds_bytes) X(cache_bytes) X(verified_bytes) \
    X(digest_ns) X(stored_bytes) X(decoded_bytes) X(decode_ns) X(network_requests) \
    X(network_retries) X(network_hedges) X(network_connections) X(network_bytes) \
    X(disk_cache_bytes) X(disk_cache_written)
// clang-format on

FST_API FST_NODISCARD fst_status fst_loader_stats_get(const fst_loader *loader,
                                                      fst_load_stats *stats, fst_error *error);

/// A tensor's description and bytes. For a slice, shape and sizes are the slice's.
/// The pointers belong to the tensor.
typedef struct fst_tensor_view {
    const char *name;
    size_t name_size;
    fst_dtype dtype;
    uint32_t rank;
    const uint64_t *shape; ///< not NULL
    uint64_t size_bytes;
    void *data;   ///< row-major, packed; not NULL unless size_bytes is 0; an address of `device`
    int writable; ///< 0 when stores to it fault (map_read_only)
    fst_device device; ///< FST_DEVICE_PINNED is memory of the processors, too
    uint64_t reserved[4];
} fst_tensor_view;

FST_API FST_NODISCARD fst_status fst_tensor_view_get(const fst_tensor *tensor, fst_tensor_view *out,
                                                     fst_error *error);

/// Copies the tensor's bytes to memory of the processors, from a device if need be, and waits.
/// `size_bytes` must be the tensor's. From any thread.
FST_API FST_NODISCARD fst_status fst_tensor_read(const fst_tensor *tensor, void *target,
                                                 size_t size_bytes, fst_error *error);

/// Bytes of a tensor, as they lie in its file.
typedef struct fst_range {
    size_t struct_size;  ///< sizeof(fst_range)
    size_t index;        ///< the tensor
    uint64_t begin, end; ///< of the tensor's bytes, begin <= i < end
} fst_range;

/// A view of a whole tensor, at once and for less than a load costs, where nothing is to be waited
/// for: the page cache has the bytes of the range. It is a view as FST_MODE_MAP gives them; other
/// bytes than the range's are read when they are touched. *out is the caller's reference; NULL
/// where that is not so (the page cache does not have them, or does not tell), where the range is
/// empty, where the tensor's place in the file is none for its dtype, where the file is no plain
/// one (compressed, of a server), where the system does not map it, and where the model is held
/// against a manifest: load it then. FST_E_ARGUMENT for a range beyond the tensor,
/// FST_E_FILE_CHANGED for a file that is another than when it was opened. From any thread.
FST_API FST_NODISCARD fst_status fst_range_view(fst_model *model, const fst_range *range,
                                                fst_tensor **out, fst_error *error);

/// One more reference; returns its argument. NULL gives NULL.
FST_API fst_tensor *fst_tensor_ref(fst_tensor *tensor);

/// One reference less; the last one frees the tensor and, if it was the last tensor of it, the
/// memory underneath. From any thread. NULL is allowed.
FST_API void fst_tensor_unref(fst_tensor *tensor);

/// What can be used here, for one file or in general.
typedef struct fst_engine_info {
    const char *name; ///< a constant
    int usable;
    int chosen;       ///< 1 for what a load of `path` that leaves the choice to us would use
    char reason[192]; ///< why, in words
    uint64_t reserved[4];
} fst_engine_info;

/// Probes the engines, the GPUs' drivers, and GPUDirect Storage; `path` is a model or any file to
/// probe for, or NULL for the machine alone. Fills at most `capacity` entries and sets *count to
/// how many there are. Opens the first GPU of each driver, if there is any.
FST_API FST_NODISCARD fst_status fst_engines_probe(const char *path, fst_engine_info *infos,
                                                   size_t capacity, size_t *count,
                                                   fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
