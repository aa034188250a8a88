// SPDX-License-Identifier: Apache-2.0
/// Interface of the io module: files, their residency in the page cache, and the engines that read
/// them.
///
/// Knows: files and objects as bytes at offsets, the page cache.
/// Does not know: tensors; of devices only the addresses that GPUDirect Storage reads to.
/// Main types: fsti_file, fsti_io_engine, fsti_io_request.
#ifndef FSTI_IO_H
#define FSTI_IO_H

#include "base/primitives.h"
#include "cache/cache.h"
#include "fastsafetensors/experimental/load_tuning.h"
#include "fastsafetensors/model.h"
#include "http/http.h"

/// Alignment of direct reads: offset, size and address. STATX_DIOALIGN may report less; no common
/// device needs more.
#define FSTI_IO_PAGE_BYTES 4096u

/// A regular file, opened once for header and data, so that no other file can take its place in
/// between. Reference-counted and thread-safe.
typedef struct fsti_file fsti_file;

/// Opens a path or URL for reading. FIFOs and devices are refused without blocking.
fst_status fsti_file_open(const char *path, fsti_file **out, fst_error *error);
/// Opens a source of the program (see fst_source). Copies `source` and takes ownership: release is
/// called with the last reference, or here on failure.
fst_status fsti_file_open_source(const fst_source *source, fsti_file **out, fst_error *error);
typedef struct fsti_io_op fsti_io_op;
/// A file whose bytes are computed from another file while reading (decompression). Thread-safe.
typedef struct fsti_derivation {
    fsti_file *origin; ///< owned reference to the stored file, which provides name, device and
                       ///< change detection
    uint64_t size_bytes;
    void *context;
    /// Sets op->result and its other outputs. Short reads only at the end of the file.
    void (*read)(void *context, fsti_io_op *op);
    /// Drops cached pages of the stored file that [begin, end) needs: see fsti_file_drop_cached().
    void (*drop_cached)(void *context, uint64_t begin, uint64_t end);
    void (*release)(void *context);
    const char *what; ///< "the file is ...", for errors of unsupported operations
} fsti_derivation;
/// Copies the derivation and takes ownership; it is released with the last reference, or here on
/// failure.
fst_status fsti_file_derive(const fsti_derivation *derivation, fsti_file **out, fst_error *error);
fsti_file *fsti_file_ref(fsti_file *file);
void fsti_file_unref(fsti_file *file);

const char *fsti_file_path(const fsti_file *file);
uint64_t fsti_file_size(const fsti_file *file);
/// The device number of the file system (st_dev).
uint64_t fsti_file_device(const fsti_file *file);

/// Whether it is a remote object read by requests.
bool fsti_file_is_object(const fsti_file *file);
/// Whether it is a remote object that is completely in the disk cache and read from there.
bool fsti_file_is_disk_cached(const fsti_file *file);
/// Marks the stored size and version of a remote object as wrong: the next open queries both again.
void fsti_file_invalidate(const fsti_file *file);
/// For a URL, a text that says where it is read from; else "".
const char *fsti_file_origin_text(const fsti_file *file);
/// The errno that stopped storing the object in the disk cache; 0: no failure, or no cache.
int fsti_file_cache_failure(const fsti_file *file);
/// The source of a URL's credentials, as text.
const char *fsti_file_credentials(const fsti_file *file);
/// Network counts of opening and blocking reads; zeros if it is not a remote object.
void fsti_file_net_counts(const fsti_file *file, fsti_http_counts *out);
/// Adds a remote object's retries since the last call to *sum.
void fsti_file_take_retries(const fsti_file *file, fsti_retries *sum);
/// Logs a warning, once per process and folder, if the disk cache failed to store the object.
void fsti_file_warn_cache(const fsti_file *file);

/// Whether its file system is in memory or always reads through a cache (network and user-space
/// file systems). There the kernel's own readahead works best, and reopening a file may drop its
/// cached pages.
bool fsti_file_has_own_readahead(fsti_file *file);
/// Whether its file system belongs to another machine or process, by its kind: a read may wait
/// long, so many must be under way at once.
bool fsti_file_is_distant(fsti_file *file);
/// Whether its file system drops the file's cached pages whenever a program opens it, as many
/// user-space file systems do: then the page cache is of no use to the next program. Found out by
/// opening it for direct reads; false if that is impossible.
bool fsti_file_loses_cache(fsti_file *file);

/// For a derived file, whether the stored file can be read directly, or only through the page
/// cache. Both are false for other files.
bool fsti_file_derived_bypasses_cache(fsti_file *file);
bool fsti_file_derived_uses_cache(fsti_file *file);

/// Reads up to `size` bytes at `offset`, fewer only at the end of the file. *got: bytes read.
fst_status fsti_file_read(fsti_file *file, void *target, size_t size, uint64_t offset, size_t *got,
                          fst_error *error);
/// Reads whole pages directly into page-aligned memory. Returns the number of bytes, fewer only at
/// the end of the file, or -errno if direct reads fail.
int64_t fsti_file_read_direct(fsti_file *file, void *target, size_t size, uint64_t offset);
/// Writes what identifies the file's version on this machine until its next start: device, file
/// system, inode, size and times, and the mount if the times are whole seconds. For a remote object
/// its address and version, which may contain secrets. False if nothing does, or it is too long.
bool fsti_file_version_text(const fsti_file *file, char *out, size_t size);
/// Whether a process has the file open for writing, or mapped for it: its bytes may change before
/// its times do, or after. False if that is unknown: the file is remote, or another user's and this
/// process is not privileged.
bool fsti_file_has_writer(fsti_file *file);
/// System calls made by fsti_file_read() on the file.
uint32_t fsti_file_read_count(const fsti_file *file);

/// FST_E_FILE_CHANGED if size or modification time changed since the file was opened.
fst_status fsti_file_check(const fsti_file *file, fst_error *error);

/// One name in a folder, valid during the visit.
typedef struct fsti_folder_entry {
    const char *name; ///< without the folder; never "." or ".."
    int folder_fd;
    bool may_be_folder; ///< or a link to a folder; true if unknown
} fsti_folder_entry;

/// Any status except FST_OK ends the visit and is returned.
typedef fst_status (*fsti_folder_visitor)(void *context, const fsti_folder_entry *entry,
                                          fst_error *error);
/// Calls `visit` for each name in the folder, unordered. An incomplete listing is an error.
fst_status fsti_folder_visit(const char *folder, fsti_folder_visitor visit, void *context,
                             fst_error *error);

/// A range of a file to map.
typedef struct fsti_map_range {
    uint64_t begin; ///< a multiple of the page size
    uint64_t size_bytes;
    bool is_writable; ///< stores are private to this mapping; otherwise they fault
} fsti_map_range;
/// Makes a new private mapping. *out is valid until fsti_io_unmap(). FST_E_UNSUPPORTED for a file
/// without a descriptor (compressed, remote).
fst_status fsti_file_map_private(fsti_file *file, const fsti_map_range *range, void **out,
                                 fst_error *error);
void fsti_io_unmap(void *address, uint64_t size_bytes);

/// Reads a file in order and discards the bytes, to fill the page cache. The kernel recognises a
/// sequential stream, reads ahead, and allocates growing pages, which later mappings map in fewer
/// faults than pages read by advice. For one thread; uses its own open file where that is cheap,
/// because streams that share one look like random access. Readahead does not go past `end`. The
/// file must outlive the stream.
typedef struct fsti_file_stream fsti_file_stream;
fst_status fsti_stream_open(fsti_file *file, uint64_t end, fsti_file_stream **out,
                            fst_error *error);
/// Adds its number of calls to *read_count. A file that ends early is FST_OK.
fst_status fsti_stream_read(fsti_file_stream *stream, uint64_t begin, uint64_t end,
                            uint64_t *read_count, fst_error *error);
void fsti_stream_close(fsti_file_stream *stream);

/// From now on small reads of the file bring only their own pages into the page cache. By default
/// the kernel reads around each absent page as much as the device's readahead allows, which may be
/// several MiB: good for a program that reads a file from begin to end, not for a rank that needs a
/// part of each tensor. Any thread may call it.
void fsti_file_read_parts(fsti_file *file);
/// Has the kernel start to read the pages of [begin, end), without waiting for them.
void fsti_file_start_reads(const fsti_file *file, uint64_t begin, uint64_t end);
/// The same, and exactly these pages, if the file is read in parts.
void fsti_file_start_part(const fsti_file *file, uint64_t begin, uint64_t end);

/// Prefaults a mapping. An I/O error or a shrunken file is an error here instead of a signal later.
fst_status fsti_file_populate(fsti_file *file, char *mapping, uint64_t begin, uint64_t end,
                              fst_error *error);

/// Bytes of [begin, end) in the page cache: all, 0, or a lower bound. Starts no reads. False if
/// unknown: for files that the process neither owns nor may write, the kernel hides or falsifies
/// it.
bool fsti_file_resident(fsti_file *file, uint64_t begin, uint64_t end, uint64_t *bytes);
/// Whether all pages of a range are in the page cache with their bytes: fsti_file_resident() counts
/// pages that are being read as well. False if unknown.
bool fsti_file_is_read(fsti_file *file, uint64_t begin, uint64_t end);
/// Whether the byte at `at` can be read without waiting; works for all files. If it cannot, the
/// kernel starts reading some pages there.
bool fsti_file_is_resident_at(fsti_file *file, uint64_t at);

/// One read or write in flight. The caller fills the first part and keeps it until it is reaped.
struct fsti_io_op {
    fsti_file *file; ///< the file to read
    bool is_write;   ///< writes to `write_fd` instead
    int write_fd;
    uint64_t offset;
    size_t size;
    void *buffer;      ///< not used by a mapped engine
    fst_engine engine; ///< the engine that reads; FST_ENGINE_AUTO for headers and similar reads
    const atomic_bool *stop; ///< NULL, or a flag that allows a read which waits for others to end
    bool bypasses_cache;     ///< a derived file reads absent pages of the stored file directly
    // set by the engine:
    int64_t result;   ///< bytes or -errno; may be less than requested
    const void *data; ///< the bytes: `buffer`, or the mapping
    struct fsti_io_op *next;
    fsti_http_counts net; ///< network counts of a remote read
    // set by a derived file or a remote object:
    fst_error *error;                   ///< NULL, or receives the reason of a negative `result`
    uint64_t stored_bytes;              ///< bytes read from the stored file
    uint64_t verified_bytes, digest_ns; ///< of stored bytes
    uint64_t decoded_bytes, decode_ns;
};

/// Whether a read with this `result` (EINTR, EAGAIN) should be retried. Pauses, and limits the
/// number of retries in a row, which *tries counts from 0.
bool fsti_io_should_retry(int64_t result, uint32_t *tries);

/// Engines that a request can't name, after those of fst_engine.
enum { FSTI_ENGINE_GDS = FST_ENGINE_COUNT, FSTI_ENGINE_HTTP, FSTI_ENGINE_COUNT };

/// An I/O engine. A lane is its state for one thread.
typedef struct fsti_io_engine {
    const char *name;
    fst_engine number;    ///< index in the table of engines
    bool is_direct;       ///< offset, size and buffer must be multiples of FSTI_IO_PAGE_BYTES
    bool is_mapped;       ///< returns pages of a mapping; copying them needs fsti_io_guarded()
    bool is_async;        ///< many reads in flight per lane
    bool is_network;      ///< reads of whole chunks become requests: many at a time, into their
                          ///< destination
    bool reads_to_device; ///< buffers are device addresses, with the device's context current
    /// Whether it works for `file` (NULL: on this machine), and the reason.
    bool (*usable)(fsti_file *file, char *reason, size_t reason_size);
    fst_status (*lane_open)(uint32_t depth, void **lane, fst_error *error);
    void (*lane_close)(void *lane);
    /// Queues a read, which may not begin before reap(), or begins a write (direct and uring only).
    /// A lane holds at most `depth`.
    void (*submit)(void *lane, fsti_io_op *op);
    /// Waits for one of them. NULL if none is queued.
    fsti_io_op *(*reap)(void *lane);
} fsti_io_engine;

extern const fsti_io_engine fsti_io_engine_pread, fsti_io_engine_direct, fsti_io_engine_uring,
    fsti_io_engine_mmap, fsti_io_engine_gds, fsti_io_engine_http;

/// The engine with that number; NULL for FST_ENGINE_AUTO and unknown numbers.
const fsti_io_engine *fsti_io_engine_get(fst_engine engine);

/// How a load intends to use a file's mapping.
typedef struct fsti_io_request {
    const char *no_mapping; ///< why the mapping must not be copied from; NULL: it may be
    uint64_t buffer_bytes;  ///< address space to leave for the load's buffers
} fsti_io_request;

/// Checks a forced engine. FST_E_UNSUPPORTED if it does not work for the file.
fst_status fsti_io_check_forced(fsti_file *file, fst_engine forced, const fsti_io_request *request,
                                const fsti_io_engine **out, fst_error *error);

/// Which engines work for a file, and the reasons.
typedef struct fsti_io_facts {
    bool has_direct, has_ring;
    bool copies_mapping; ///< mapped pages can be copied under the guard
    char absent_reason[128], resident_reason[64];
} fsti_io_facts;
void fsti_io_probe(fsti_file *file, const fsti_io_request *request, fsti_io_facts *out);

/// Whether GPUDirect Storage is available (cuFile or hipFile), and the reason if not. cuFile is
/// loaded only if its kernel module or a setting makes it useful, or it `is_demanded`.
bool fsti_gds_usable(bool is_hip, bool is_demanded, char *reason, size_t reason_size);
/// The probe result of the file's file system in this process. False if it was not probed. If
/// *is_good, fsti_io_engine_gds reads the file.
bool fsti_gds_find_verdict(fsti_file *file, bool is_hip, bool *is_good, char *reason,
                           size_t reason_size);
/// Probes whether reads really go directly to the device, by reading FSTI_GDS_PROBE_BYTES in whole
/// pages to `target` on the current device. The result is stored. Works best while the process does
/// no other reads.
#define FSTI_GDS_PROBE_BYTES ((uint64_t)64 << 10)
/// Drivers align allocations of this size to a page.
#define FSTI_GDS_SCRATCH_BYTES ((uint64_t)2 << 20)
bool fsti_gds_probe(fsti_file *file, bool is_hip, void *target, char *reason, size_t reason_size);
/// What cuFile needs of the system. For tests: NULL or 0 is the usual value.
typedef struct fsti_gds_system {
    const char *module;      ///< exists if cuFile's kernel module is loaded
    const char *module_list; ///< /proc/modules
    const char *udev;        ///< udev's database of disks
    uint32_t start_ms;       ///< the time that the library may take to start
} fsti_gds_system;
void fsti_gds_fake_system(const fsti_gds_system *system);
/// For tests: forgets the probe results.
void fsti_gds_clear_verdicts(void);

/// The read-only mapping of the complete file for copies, or NULL. Valid as long as the file is
/// open.
const char *fsti_io_file_mapping(fsti_file *file);
/// Unmaps pages that were copied from the mapping, so that they do not count as this process's
/// memory. They stay in the page cache. Without this, the peak of a load would include the file.
void fsti_io_drop_mapped(fsti_file *file, uint64_t begin, uint64_t end);
/// Whether the pages of a copied range may stay mapped for the next loads, such as other slices of
/// the same tensor. When that would be more than 64 MiB, in huge pages, all are unmapped.
bool fsti_io_keep_mapped(fsti_file *file, uint64_t begin, uint64_t end);

/// Drops a range from the page cache, including partial pages at its ends. Pages that are mapped
/// stay.
void fsti_file_drop_cached(const fsti_file *file, uint64_t begin, uint64_t end);
/// Disables readahead for the file.
void fsti_file_advise_random(const fsti_file *file);
/// Advises sequential access, also through a mapping: the kernel then doubles readahead and the
/// size of its pages.
void fsti_file_advise_sequential(const fsti_file *file);

/// Whether the file system is distant and takes long to answer a read: reads an absent byte of
/// [begin, end), or a few if the kernel hides what is absent. The answer holds for a minute. False
/// if all is cached.
bool fsti_file_answers_slowly(fsti_file *file, uint64_t begin, uint64_t end);
/// Has page faults of a mapping of the whole file read 2 MiB at once, whatever the readahead
/// setting of the device, but nothing behind `end`.
void fsti_file_advise_large_reads(const fsti_file *file, char *mapping, uint64_t begin,
                                  uint64_t end);

/// Installs the SIGBUS guard once per process. False if that failed or the program replaced the
/// handler.
bool fsti_io_guard_ready(void);
/// For tests: installs the guard again over the current handler.
void fsti_io_guard_install(void);
/// Runs `work(context)`, which reads [begin, begin + size). False if a page could not be read (the
/// file shrank, or an I/O error). `work` is interrupted by a jump, so it must not own resources.
bool fsti_io_guarded(void (*work)(void *context), void *context, const void *begin, uint64_t size);

// ---- for the output module ----

/// Reopens the file of a descriptor with O_DIRECT. -1 and the reason on failure. `path` (may be
/// NULL) is used on systems without /proc.
int fsti_io_reopen_direct(int fd, const char *path, int flags, char *reason, size_t reason_size);
/// The descriptor of a file opened by path, for copying; else -1.
int fsti_file_descriptor(const fsti_file *file);
/// A descriptor that identifies the file. For a derived file it is that of the stored file.
int fsti_file_identity(const fsti_file *file);
/// Passes a finished read or write to the test hook, if set.
void fsti_io_finish(fsti_io_op *op);
/// Whether a test has disabled this feature (FSTI_TEST_NO_...).
bool fsti_io_test_disables(unsigned feature);

/// For tests: called with every finished read or write, and may change its result.
typedef void (*fsti_io_fault_hook)(fsti_io_op *read);
void fsti_io_fault_hook_set(fsti_io_fault_hook hook);
/// For tests: features to disable (bits).
enum {
    FSTI_TEST_NO_CACHESTAT = 1,
    FSTI_TEST_NO_URING = 2,
    FSTI_TEST_NO_DIRECT = 4,
    FSTI_TEST_NO_TMPFILE = 8,
    FSTI_TEST_NO_PROC = 16,
    FSTI_TEST_NO_LOCK_WAIT = 32, ///< locks of other saves are not waited for
    FSTI_TEST_NO_AHEAD = 256,    ///< the device looks as if it did not read ahead
    FSTI_TEST_NO_DISK = 512,     ///< file systems look like disks
};
void fsti_io_test_disable(unsigned features);

/// Whether a file is a model or an index, by its name (also through links, and if it does not
/// exist yet) or because it begins like one or may not be read. No manifest, list or signature may
/// replace it or have such a name. For a URL the name decides.
bool fsti_path_is_model(const char *path);
/// Whether a path or URL has the name of an index: NAME.index.json, or a variant such as
/// NAME.safetensors.index.V.json.
bool fsti_path_has_index_name(const char *path);

#endif
