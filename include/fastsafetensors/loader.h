// SPDX-License-Identifier: Apache-2.0
/// Loading tensors: all or some, at once or as a stream, into new memory or the caller's.
///
///     fst_loader *loader;
///     fst_tensor *tensor;
///     fst_load_options options = FST_STRUCT_INIT(fst_load_options);
///     options.budget_bytes = 256u << 20; // stream with at most 256 MiB of tensors in memory
///     if (fst_loader_open(model, &options, &loader, NULL) != FST_OK) return 1;
///     fst_status status;
///     while ((status = fst_loader_next(loader, -1, &tensor, NULL)) == FST_OK)
///         fst_tensor_unref(tensor);
///     fst_loader_close(loader);
///     return status == FST_END ? 0 : 1;
#ifndef FASTSAFETENSORS_LOADER_H
#define FASTSAFETENSORS_LOADER_H

#include "base.h"
#include "device.h"
#include "dtype.h"
#include "model.h"
#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/// A load that is running or finished. It belongs to the process that opened it (base.h, "fork()").
/// fst_loader_cancel() and fst_loader_stats_get() may be called from any thread, also during
/// another call; call the other functions from one thread at a time.
typedef struct fst_loader fst_loader;

/// Where the memory of tensors comes from. The choice does not depend on what is in the page cache.
///
/// A memory-mapped tensor ("view") is a private mapping of the file (mmap(2), copy-on-write):
/// stores do not reach the file. If another program overwrites bytes of the file in place, the
/// tensor shows the new bytes, except in pages that this program has stored to. If it truncates the
/// file, touching the missing pages raises SIGBUS. Replacing a file by rename, as this library and
/// most others save, does not affect views. Use FST_MODE_LOAD if files may change in other ways.
typedef enum fst_load_mode {
    /// The default: memory-mapped tensors (MAP) on the CPU, owned memory (LOAD) otherwise. LOAD is
    /// chosen for a GPU or pinned memory, for memory of the caller, with a conversion, an engine,
    /// an allocator, a budget or FST_CACHE_BYPASS, for a verified or compressed model, for a URL
    /// that is not complete in the disk cache, if the system refuses the mapping, and if most bytes
    /// would have to be copied out of a mapping (misaligned tensors, slices of many ranges) and fit
    /// in memory.
    FST_MODE_AUTO = 0,
    /// Owned memory: read into aligned memory that the library allocates, or into the caller's.
    FST_MODE_LOAD = 1,
    /// Memory-mapped tensors: no copy. Each load has its own private mapping of each file, so
    /// stores do not reach other loads either. The pages are freed with the load's last tensor of
    /// the file. A thread maps pages that are cached (from 8 MiB on) without being waited for,
    /// unless thread_count is 1; it lets go of them within milliseconds. A tensor that
    /// cannot be mapped (misaligned in its file, or a slice of many ranges) is read into owned
    /// memory on demand, as by FST_MODE_LOAD.
    FST_MODE_MAP = 2,
} fst_load_mode;
#define FST_MODE_COUNT 3

/// Whether a load leaves the bytes that it reads in the page cache, where the next start of the
/// program, and other programs on the host, find them.
typedef enum fst_cache {
    /// The default: KEEP if the request fits comfortably in the available memory (of the machine
    /// and of every cgroup above the process), else BYPASS. For owned memory on the CPU, the cached
    /// file and the converted tensors must both fit. Loads above 512 MiB into owned memory, and
    /// requests for less than half of a model that is larger than 128 MiB, are BYPASS; requests of
    /// up to 1 MiB without a budget are KEEP. Slices of many pieces, such as columns, count with
    /// their tensors, because the bytes between are read, too; if those fit, slices of up to
    /// 512 MiB are KEEP in models of any size. The choice does not change the mode. Where
    /// the next open() would drop the bytes from the page cache, as on many user-space file
    /// systems, owned memory is read with O_DIRECT.
    FST_CACHE_AUTO = 0,
    /// Bytes that are not in the page cache are read into it with large reads, whatever the
    /// readahead setting of the device. (If readahead is off, they are read page by page for a user
    /// who neither owns nor may write the file.) What the kernel has read ahead is not read again.
    /// Memory-mapped tensors are complete after these reads, and their pages are mapped; owned
    /// memory is copied from the cache. Excludes GPUDirect Storage, unless that is
    /// FST_GDS_STRICT. FST_E_ARGUMENT with engines that bypass it.
    FST_CACHE_KEEP = 1,
    /// Bytes that are not in the page cache are read with O_DIRECT if the file system supports it.
    /// Otherwise they are read through the page cache and then dropped from it, unless the kernel
    /// hides whether they were cached before. Cached bytes stay cached, and are used if all of a
    /// chunk is cached. FST_MODE_AUTO then means LOAD; pages of FST_MODE_MAP are read when they are
    /// touched or verified, and stay cached. FST_E_ARGUMENT with engines that need the cache.
    FST_CACHE_BYPASS = 2,
} fst_cache;
#define FST_CACHE_COUNT 3

/// Whether the processes of one user on one machine share the memory of a load.
typedef enum fst_share {
    FST_SHARE_OFF = 0, ///< the default: each load has its own memory
    /// Loads of the same tensors of the same files share their memory, in all processes of the
    /// user: each reads a part of the bytes into a segment, a file in
    /// /dev/shm/fastsafetensors-UID (FASTSAFETENSORS_SHARE_DIR names another folder), and maps
    /// all of it privately. Stores to a tensor stay in this process. The segment is removed when
    /// the last process has freed its tensors; with share_grace_s, by the first load after that
    /// time. If sharing is impossible (small load, full file system, memory limit, a folder that
    /// other users can access, a file that a process has open for writing, bytes that the program
    /// supplies), the load uses its own memory, and fst_load_stats.reason says why. Opening the
    /// load waits up to 5 seconds for processes that list or make segments. Memory-mapped tensors
    /// share the page cache and need no segment; of these, bytes that another process or the
    /// kernel's readahead brings into the page cache while the load runs are not prefaulted.
    /// FST_E_ARGUMENT with a device, destinations, an allocator or a budget.
    FST_SHARE_NODE = 1,
} fst_share;
#define FST_SHARE_COUNT 2

/// The order in which fst_loader_next() returns tensors.
typedef enum fst_order {
    FST_ORDER_FILE = 0,    ///< the order of the bytes in the files
    FST_ORDER_REQUEST = 1, ///< the order of fst_load_options.parts; without parts as FILE
} fst_order;
#define FST_ORDER_COUNT 2

/// A tensor, or a rectangular part of one, and optionally where its bytes go. Parts may
/// overlap: each tensor then has its own copy, or, in a memory-mapped load, its view of the same
/// pages. A model opened with FST_OPEN_VERIFY reads every chunk of the manifest that a part
/// touches.
typedef struct fst_part {
    size_t struct_size;  ///< sizeof(fst_part)
    size_t tensor_index; ///< in the model
    /// Both NULL: the whole tensor. Otherwise one element index per dimension: the part is begin <=
    /// i < end of every dimension, with begin <= end <= shape. Types below 8 bits need the whole
    /// last dimension. A part may consist of at most 2^22 ranges of the file.
    const uint64_t *begin;
    const uint64_t *end;
    /// Where to load the part; NULL: the library allocates memory. Otherwise memory of the caller
    /// on fst_load_options.device, of any alignment, which must stay valid until the loader is
    /// closed. It gets the part row-major and packed. fst_tensor_view.data is then this pointer, by
    /// which parts of one tensor can be distinguished. After an error or fst_loader_cancel() its
    /// content is undefined. Destinations must not overlap. Not with FST_MODE_MAP.
    void *destination;
    uint64_t destination_bytes; ///< must be the size of the part (after conversion)
} fst_part;

/// Chooses tensors: return non-zero to load one. Called once per tensor, by fst_loader_open().
typedef int (*fst_tensor_predicate)(void *context, const fst_tensor_info *info);

/// A request. All fields except struct_size may be zero, which loads all tensors. Most programs set
/// `mode`, `device` or `budget_bytes`, and perhaps what to load.
typedef struct fst_load_options {
    size_t struct_size; ///< sizeof(fst_load_options)
    fst_load_mode mode;

    /// The device of the tensors. On a GPU, `allocator` returns memory of that device, and
    /// FST_MODE_MAP is FST_E_ARGUMENT. A returned tensor may be used on any stream at once: its
    /// copies and conversions are complete. On a GPU, tensors of 16 bytes or more are aligned
    /// to 16.
    fst_device device;

    /// The most bytes of tensors that were read and not yet returned by fst_loader_next(); 0: no
    /// limit (the loader keeps all tensors). A converted tensor counts with its new size. A
    /// returned tensor no longer counts, whether released or not. Parts with a destination do
    /// not count. FST_E_ARGUMENT with FST_MODE_MAP, whose tensors need no memory. FST_E_BUDGET if a
    /// single tensor needs more: its size and up to 2 MiB, because memory is allocated in pages.
    /// The limit does not include the buffers that reads go through (fst_load_stats.bounce_bytes)
    /// and tensors that fst_loader_tensor_at() reads out of order. It includes about 4.3 MiB per
    /// thread that decompresses; fewer threads are used if these would take more than a third of
    /// it.
    uint64_t budget_bytes;

    /// What to load: `parts` if it is not NULL (part_count may be 0: nothing). Otherwise every
    /// tensor whose name matches one of `globs` (if there are any) and that `predicate` accepts (if
    /// it is not NULL). FST_E_ARGUMENT for parts together with globs or a predicate. Read during
    /// fst_loader_open() only.
    const fst_part *parts;
    size_t part_count;
    const char *const *globs; ///< shell patterns (* ? [abc]) for whole names; a name with a NUL
                              ///< byte matches none
    size_t glob_count;
    fst_tensor_predicate predicate;
    void *predicate_context;

    fst_order order;
    fst_cache cache;

    /// 1: convert tensors to `dtype` where fst_dtype_convertible() allows it; others keep their
    /// type. Not with FST_MODE_MAP. 0: `dtype` is not read.
    int convert;
    fst_dtype dtype;

    int map_read_only; ///< 1: a store to a memory-mapped tensor faults; 0: stores stay private

    /// 0: the number of CPUs that the process may use, at most 16, or 8 for a GPU; at least 2 with
    /// an io_uring, 4 for reads that block, and 32 on network and user-space file systems.
    uint32_t thread_count;

    /// Allocates the memory of tensors; NULL: the library does, in huge pages where possible. The
    /// struct is copied. Called by one thread at a time: it may call fst_loader_stats_get() and
    /// fst_loader_cancel(), but not close the load. Calls that wait for the load, or return its
    /// tensors, are FST_E_ARGUMENT in it. Calls of other threads on the load may wait while it
    /// runs, also beyond their `timeout_ms`; it must not wait for them.
    const fst_allocator *allocator;

    /// Called once by fst_loader_open() before it returns (unless it was called before), and by
    /// threads of the load whenever something is complete; never after fst_loader_close(). The last
    /// call of a successful load reports all bytes.
    fst_progress_callback progress;
    void *progress_context;

    /// The handle of a stream of the GPU's driver (1: the default stream), or 0. The load waits for
    /// the stream before it writes to memory that queued work may still use: to destinations when
    /// the work that was queued at fst_loader_open() is done, to memory of `allocator` when the
    /// work that was queued at its allocation is done.
    uintptr_t stream;

    /// Settings for measurements and unusual machines (experimental/load_tuning.h); NULL: the
    /// library decides. Read during fst_loader_open() only.
    const struct fst_load_tuning *tuning;

    fst_share share;
    /// Seconds that a segment stays after its last process has freed its tensors, for programs that
    /// restart. 0: FASTSAFETENSORS_SHARE_GRACE, or none. The value of the last load counts. Only
    /// with FST_SHARE_NODE.
    uint32_t share_grace_s;
} fst_load_options;

/// Plans a load and starts it in the background; up to 64 KiB, or up to 1 MiB that is in the page
/// cache, is read before the call returns. For owned memory, files of user-space file systems are
/// opened once more before. `options` may be NULL. `model` may be closed afterwards.
/// On success *out is a loader, to be closed with fst_loader_close(). FST_E_ARGUMENT: an index or a
/// part out of range, a destination of another size, options that exclude each other, or an option
/// that has no effect with this mode or device (an engine with MAP, a stream on the CPU). Options
/// named map_ apply to memory-mapped tensors and are allowed in every mode.
FST_API FST_NODISCARD fst_status fst_loader_open(fst_model *model, const fst_load_options *options,
                                                 fst_loader **out, fst_error *error);

/// Returns the number of tensors of the request; 0 for NULL.
FST_API size_t fst_loader_tensor_count(const fst_loader *loader);

/// Waits until all bytes are loaded. `timeout_ms` < 0: no limit; a call of the program's allocator
/// is waited for without limit. FST_OK, FST_E_TIMEOUT, or the error of the load. FST_E_ARGUMENT
/// with budget_bytes: use fst_loader_next() then.
FST_API FST_NODISCARD fst_status fst_loader_wait(fst_loader *loader, int64_t timeout_ms,
                                                 fst_error *error);

/// Waits for the next tensor of the stream and returns it in *out, which the caller releases with
/// fst_tensor_unref(). FST_END after the last one. `timeout_ms` as in fst_loader_wait().
FST_API FST_NODISCARD fst_status fst_loader_next(fst_loader *loader, int64_t timeout_ms,
                                                 fst_tensor **out, fst_error *error);

/// Returns tensor `position` of the request (of fst_load_options.parts, or of the chosen tensors in
/// file order), any number of times and independently of the stream. The caller releases *out with
/// fst_tensor_unref(). Waits for its bytes, `timeout_ms` as in fst_loader_wait(). Bytes that the
/// stream has released or not reached are read separately. Such a read goes on after FST_E_TIMEOUT,
/// and a later call waits for it, for up to 8 tensors at a time; the read of a ninth ends at its
/// time limit, and with a limit of 0 it does not begin.
FST_API FST_NODISCARD fst_status fst_loader_tensor_at(fst_loader *loader, size_t position,
                                                      int64_t timeout_ms, fst_tensor **out,
                                                      fst_error *error);

/// Like fst_loader_tensor_at(), for the first part of the request with that name. `name_size` is in
/// bytes; SIZE_MAX: NUL-terminated. FST_E_TENSOR_NOT_FOUND if the request has no such part.
FST_API FST_NODISCARD fst_status fst_loader_tensor(fst_loader *loader, const char *name,
                                                   size_t name_size, int64_t timeout_ms,
                                                   fst_tensor **out, fst_error *error);

/// Cancels a load and does not wait for its threads: calls that wait return FST_E_CANCELLED soon.
/// Complete tensors can still be fetched. NULL is allowed.
FST_API void fst_loader_cancel(fst_loader *loader);

/// Stops a load, waits for its threads and frees it. Returned tensors stay valid. NULL is allowed.
FST_API void fst_loader_close(fst_loader *loader);

/// What a load did, and why. Counters are final once fst_loader_wait() has returned FST_OK or
/// fst_loader_next() FST_END.
typedef struct fst_load_stats {
    size_t struct_size; ///< sizeof(fst_load_stats)
    char mode[16];      ///< "load" or "map"
    char engine[48];    ///< what read the bytes: "uring", "mmap", "uring+mmap", "pread", ...
    char reason[512];   ///< why these were chosen
    uint32_t thread_count;
    size_t tensor_count;
    uint64_t bytes_requested; ///< of the requested tensors and parts, after conversion
    /// Bytes that were read from files or copied from mappings: the requested ones and small gaps
    /// between them, without the rest of pages at the ends of direct reads. For compressed files:
    /// bytes of the original; stored_bytes counts what was read.
    uint64_t bytes_read;
    uint64_t bytes_direct; ///< part of bytes_read that bypassed the page cache
    /// From a mapping: copied (then they are part of bytes_read), or mapped for views.
    uint64_t bytes_mapped;
    uint64_t bytes_copied;    ///< copied once more in memory, from a buffer or a mapping
    uint64_t bytes_converted; ///< part of bytes_read that was converted to another dtype
    uint64_t read_count;      ///< read operations
    uint64_t chunk_count;     ///< units of work
    /// Chunks that were completely in the page cache, counted where that decides how they are read
    /// and where the kernel reports it. For files that the process neither owns nor may write,
    /// single bytes of views are probed.
    uint64_t chunks_resident;
    uint64_t buffer_bytes;          ///< memory that the load allocated for tensors
    uint64_t buffer_bytes_peak;     ///< the most of it at one time that was not yet returned, plus
                                    ///< for compressed files the memory of threads that decompress
    uint64_t bounce_bytes;          ///< buffers that reads go through
    uint64_t plan_ns;               ///< planning
    uint64_t first_tensor_ns;       ///< from the start until the first tensor was complete
    uint64_t total_ns;              ///< from the start until the last byte was loaded
    uint64_t read_ns;               ///< summed over threads: in read calls, and waiting for them
    uint64_t copy_ns;               ///< summed over threads: copying
    uint64_t wait_ns;               ///< of the caller, in calls that wait
    uint64_t populate_ns;           ///< summed over threads: allocating pages of destinations
    uint64_t device_bytes;          ///< copied from memory of the CPU to the device
    uint64_t device_copies;         ///< copy operations for that, without those for conversions
    uint64_t device_launches;       ///< kernel launches: chunks that the device converted
    uint64_t device_wait_ns;        ///< summed over threads: waiting for the device
    uint64_t gds_bytes;             ///< read directly to the device (GPUDirect Storage)
    uint64_t cache_bytes;           ///< part of bytes_read that was left in the page cache
    uint64_t verified_bytes;        ///< compared with digests, and correct
    uint64_t digest_ns;             ///< summed over threads: computing digests
    uint64_t stored_bytes;          ///< read from compressed files
    uint64_t decoded_bytes;         ///< the result, uncompressed tensors included
    uint64_t decode_ns;             ///< summed over threads: decompressing
    uint64_t network_requests;      ///< for URLs: requests sent, those to open the model included
    uint64_t network_retries;       ///< requests that were sent again
    uint64_t network_hedges;        ///< requests that duplicate a slow one
    uint64_t network_connections;   ///< connections that were opened
    uint64_t network_bytes;         ///< received, without HTTP headers
    uint64_t disk_cache_bytes;      ///< for URLs: read from the disk cache instead
    uint64_t disk_cache_written;    ///< for URLs: written to the disk cache
    uint64_t network_retry_wait_ns; ///< summed over requests: waiting before a retry
    /// Summed over requests with a response: from sending the request until the first byte of the
    /// response, including the time to open a connection.
    uint64_t network_first_byte_ns;
    /// Bytes of chunks that other loads had read into shared memory (FST_SHARE_NODE); not part of
    /// bytes_read.
    uint64_t shared_bytes;
} fst_load_stats;

/// Reads the statistics of a load, during it or after it.
FST_API FST_NODISCARD fst_status fst_loader_stats_get(const fst_loader *loader,
                                                      fst_load_stats *stats, fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
