// SPDX-License-Identifier: Apache-2.0
/// The door of the I/O room: files, what is resident of them, and the engines that read them.
/// Knows files and addresses, never tensors, headers or devices.
#ifndef FSTI_IO_H
#define FSTI_IO_H

#include "base/base.h"
#include "cache/cache.h"
#include "fastsafetensors/loader.h"
#include "fastsafetensors/model.h"
#include "net/net.h"

/// Alignment that direct reads keep for offset, size and address. STATX_DIOALIGN may allow less;
/// none that is sold wants more.
#define FSTI_IO_PAGE_BYTES 4096u

/// A regular file, open from header to last byte on one descriptor, so that it cannot be swapped
/// for another. Shared by reference count; safe from any thread.
typedef struct fsti_file fsti_file;

/// Opens `path` for reading: a file, or the address of an object. FIFOs and devices are refused
/// without blocking.
fst_status fsti_file_open(const char *path, fsti_file **out, fst_error *error);
/// The same for what the program has: see fst_source. `source` is copied and taken over: its
/// release is called with the last reference, or here when opening fails.
fst_status fsti_file_open_source(const fst_source *source, fsti_file **out, fst_error *error);
typedef struct fsti_io_op fsti_io_op;
/// A file whose bytes are made of another's, as they are read. From any thread.
typedef struct fsti_file_maker {
    fsti_file *origin; ///< a reference that is taken over; the name, the device and changes are its
    uint64_t size_bytes;
    void *context;
    /// Fills op->result, and what else it says there; reads fall short only at the end.
    void (*read)(void *context, fsti_io_op *op);
    /// Lets go of what [begin, end) was made of: see fsti_file_let_go().
    void (*let_go)(void *context, uint64_t begin, uint64_t end);
    void (*release)(void *context);
    const char *what; ///< "the file is ..", for who wants what such a file can't do
} fsti_file_maker;
/// The maker is copied, and released with the last reference, or here when this fails.
fst_status fsti_file_make(const fsti_file_maker *maker, fsti_file **out, fst_error *error);
fsti_file *fsti_file_ref(fsti_file *file);
void fsti_file_unref(fsti_file *file);

const char *fsti_file_path(const fsti_file *file);
uint64_t fsti_file_size(const fsti_file *file);
/// The number of the device that the file lies on (st_dev).
uint64_t fsti_file_device(const fsti_file *file);

/// Whether it is an object of a server, read by requests.
bool fsti_file_is_object(const fsti_file *file);
/// Whether it is an object that is whole in the cache on disk, and read from there as a file.
bool fsti_file_is_kept(const fsti_file *file);
/// Its size does not fit what it holds: of an object both are asked for anew at its next opening.
void fsti_file_distrust(const fsti_file *file);
/// Of an address: where it is read from, in words; else "".
const char *fsti_file_origin_words(const fsti_file *file);
/// Why nothing of it is left in the cache on disk any more, an errno; 0: it is, or there is none.
int fsti_file_cache_failure(const fsti_file *file);
/// Where the credentials of an address are from, in words.
const char *fsti_file_credentials(const fsti_file *file);
/// What opening it, and reads that were waited for, have cost; zeros of what is no object.
void fsti_file_net_counts(const fsti_file *file, fsti_net_counts *out);

/// Whether it lies on a file system that is memory, or always answers by way of its cache (a
/// network's, a user's): the kernel has its own ways there, and to open a file again may drop what
/// is cached of it.
bool fsti_file_is_cached(fsti_file *file);

/// Of a file that is made of another: whether that can be read past the page cache, or only by way
/// of it. Both are false of others.
bool fsti_file_is_made_around(fsti_file *file);
bool fsti_file_is_made_by_cache(fsti_file *file);

/// Reads up to `size` bytes at `offset`, fewer only at the end of the file. *got: bytes read.
fst_status fsti_file_read(fsti_file *file, void *target, size_t size, uint64_t offset, size_t *got,
                          fst_error *error);
/// The same of whole pages, into memory that begins at one, past the page cache: the bytes that
/// came, fewer only at the end of the file; -errno where the file can't be read that way.
int64_t fsti_file_read_around(fsti_file *file, void *target, size_t size, uint64_t offset);
/// System calls that fsti_file_read() has made on the file.
uint32_t fsti_file_read_count(const fsti_file *file);

/// FST_E_FILE_CHANGED when size or modification time differ from what they were at open.
fst_status fsti_file_check(const fsti_file *file, fst_error *error);

/// One name in a folder, as long as the visit lasts.
typedef struct fsti_folder_entry {
    const char *name; ///< without the folder; never "." or ".."
    int folder_fd;
    bool may_be_folder; ///< or a link to one; where that is not told, true
} fsti_folder_entry;

/// Anything but FST_OK ends the visit, and is what it returns.
typedef fst_status (*fsti_folder_visitor)(void *context, const fsti_folder_entry *entry,
                                          fst_error *error);
/// Calls with each name in the folder, in no order. A folder that can't be listed to its end is an
/// error.
fst_status fsti_folder_visit(const char *folder, fsti_folder_visitor visit, void *context,
                             fst_error *error);

/// A private mapping of the whole file, for views. *out stays valid until fsti_io_unmap().
fst_status fsti_file_map_private(fsti_file *file, bool writable, void **out, fst_error *error);
void fsti_io_unmap(void *address, uint64_t size_bytes);

/// Asks the kernel to bring the range of a mapping into the page cache in huge pages, and to read
/// as much at once, whatever the device's readahead is: where it does so a start costs a fault per
/// huge page, the next ones as well. What is read may exceed the range by two huge pages. Kernels
/// that do not know it, and file systems without large pages, take no notice.
void fsti_file_expect(char *mapping, uint64_t begin, uint64_t end);

/// A file's bytes read in order, to nowhere, so that they are in the page cache: the kernel sees a
/// stream come, reads ahead of it, and takes pages that grow (which later starts map in fewer
/// steps than those that it was told to read). Of one thread, with an opening of its own where that
/// costs nothing, since streams that share one look like reads here and there. Nothing at `end` and
/// behind it is wanted: so far ahead the kernel is kept from reading. The file outlives it.
typedef struct fsti_file_stream fsti_file_stream;
fst_status fsti_stream_open(fsti_file *file, uint64_t end, fsti_file_stream **out,
                            fst_error *error);
/// Adds its calls to *read_count. Where the file ends early, FST_OK.
fst_status fsti_stream_read(fsti_file_stream *stream, uint64_t begin, uint64_t end,
                            uint64_t *read_count, fst_error *error);
void fsti_stream_close(fsti_file_stream *stream);

/// Nanoseconds of this thread that a first look at a page of [begin, end), which is in the page
/// cache, takes: the mean of some. Up to 300 where memory is at hand; a virtual machine whose host
/// has to find the page first takes over 1,000.
uint64_t fsti_file_look_ns(const fsti_file *file, uint64_t begin, uint64_t end);

/// Makes the pages of a mapping present. An I/O error or a file that has shrunk is an error here
/// rather than a signal later.
fst_status fsti_file_populate(fsti_file *file, char *mapping, uint64_t begin, uint64_t end,
                              fst_error *error);

/// Bytes of [begin, end) in the page cache: all of them, none, or at least so many. Passive: starts
/// no reading. False when the system does not tell: to who neither owns nor may write the file it
/// tells nothing, or falsehoods.
bool fsti_file_resident(fsti_file *file, uint64_t begin, uint64_t end, uint64_t *bytes);
/// Whether the byte at `at` can be had without waiting; anybody may ask. Not passive: where it
/// can't, the kernel starts reading some pages there.
bool fsti_file_reads_at_once(fsti_file *file, uint64_t at);

/// One read or write in flight. The caller fills the first part and keeps it alive until it is
/// reaped.
struct fsti_io_op {
    fsti_file *file; ///< to read from
    bool is_write;   ///< to `write_fd` instead
    int write_fd;
    uint64_t offset;
    size_t size;
    void *buffer;            ///< unused by a mapped engine
    fst_engine engine;       ///< who reads: FST_ENGINE_AUTO for headers and other reads in passing
    const atomic_bool *stop; ///< NULL, or: when it is true a read that waits for others may end
    bool is_around; ///< a file that is made of another reads what is absent past the page cache
    // filled by the engine:
    int64_t result;   ///< bytes, or -errno; fewer bytes than asked for are possible
    const void *data; ///< where the bytes are: `buffer`, or the mapping
    struct fsti_io_op *next;
    fsti_net_counts net; ///< of an object: what the read has cost
    // filled by a file that is made of another, or an object:
    fst_error *error;      ///< NULL, or where it says why `result` is negative
    uint64_t stored_bytes; ///< that it has read
    uint64_t decoded_bytes, decode_ns;
};

/// Whether a read that ended with `result` (EINTR, EAGAIN) is to be tried once more as it is: not
/// for ever, nor without a pause. *tries counts those in a row, and begins at 0.
bool fsti_io_tries_again(int64_t result, uint32_t *tries);

/// A way to read. A lane is one thread's use of it.
typedef struct fsti_io_engine {
    const char *name;
    fst_engine number; ///< its place in the table of engines
    bool is_direct;    ///< offset, size and buffer must be multiples of FSTI_IO_PAGE_BYTES
    bool is_mapped;    ///< hands out pages of a mapping; copying them needs fsti_io_guarded()
    bool is_async;     ///< many reads in flight per lane
    bool is_network;   ///< reads of whole chunks are requests: many, and straight to their place
    bool is_remote;    ///< buffers are addresses of a device, whose context is current
    /// Whether it works for `file` (NULL: on this machine), and why.
    bool (*usable)(fsti_file *file, char *reason, size_t reason_size);
    fst_status (*lane_open)(uint32_t depth, void **lane, fst_error *error);
    void (*lane_close)(void *lane);
    /// Queues a read; the lane has room for `depth`.
    void (*submit)(void *lane, fsti_io_op *read);
    /// Waits for one queued read; NULL when none is queued.
    fsti_io_op *(*reap)(void *lane);
} fsti_io_engine;

extern const fsti_io_engine fsti_io_engine_pread, fsti_io_engine_direct, fsti_io_engine_uring,
    fsti_io_engine_mmap, fsti_io_engine_gds, fsti_io_engine_http;

/// The engine of that number; NULL for FST_ENGINE_AUTO and for no engine.
const fsti_io_engine *fsti_io_engine_get(fst_engine engine);

/// What a load does with a file's mapping, where there is one.
typedef struct fsti_io_wish {
    bool guard_allowed;
    uint64_t buffer_bytes; ///< of address space that is to be left for the load's buffers
} fsti_io_wish;

/// The engine that was asked for; FST_E_UNSUPPORTED when it does not work for the file.
fst_status fsti_io_check_forced(fsti_file *file, fst_engine forced, const fsti_io_wish *wish,
                                const fsti_io_engine **out, fst_error *error);

/// What works for a file, and why the rest does not.
typedef struct fsti_io_facts {
    bool has_direct, has_ring;
    bool copies_mapping; ///< pages may be copied from a mapping: there is one, and a guard
    char absent_reason[128], resident_reason[64];
} fsti_io_facts;
void fsti_io_probe(fsti_file *file, const fsti_io_wish *wish, fsti_io_facts *out);

/// Whether GPUDirect Storage can be used at all: cuFile, or hipFile; and why not. Of cuFile nothing
/// is touched where neither its kernel module nor a setting makes it more than a detour, unless it
/// `is_demanded`.
bool fsti_gds_usable(bool is_hip, bool is_demanded, char *reason, size_t reason_size);
/// What a probe has found of the file's file system in this process: false when there was none.
/// When *is_good, fsti_io_engine_gds reads the file.
bool fsti_gds_recall(fsti_file *file, bool is_hip, bool *is_good, char *reason, size_t reason_size);
/// Whether the file's bytes really go straight to a device, by reading some to `target`, whole
/// pages of FSTI_GDS_PROBE_BYTES on the current device; remembered. It needs the process to be
/// quiet.
#define FSTI_GDS_PROBE_BYTES ((uint64_t)64 << 10)
/// Drivers begin memory that is this large at a page.
#define FSTI_GDS_SCRATCH_BYTES ((uint64_t)2 << 20)
bool fsti_gds_probe(fsti_file *file, bool is_hip, void *target, char *reason, size_t reason_size);
/// For tests: another place where cuFile's module shows itself (NULL: its own); no verdict any
/// more.
void fsti_gds_fake_module(const char *path);
void fsti_gds_forget_verdicts(void);

/// The read-only mapping of the whole file that copies are made from, or NULL. It lives as long as
/// the file.
const char *fsti_io_file_mapping(fsti_file *file);
/// Takes pages that were copied from the mapping off this process's account; they stay in the page
/// cache. A load's peak would be its tensors and the file otherwise.
void fsti_io_forget(fsti_file *file, uint64_t begin, uint64_t end);

/// Asks the kernel to drop a range, whole pages around it, from the page cache; what somebody has
/// mapped stays.
void fsti_file_let_go(const fsti_file *file, uint64_t begin, uint64_t end);
/// Asks the kernel to read nothing but what is asked for.
void fsti_file_expect_jumps(const fsti_file *file);
/// Tells the kernel that the file will be read from front to back, by its mapping as well: its
/// window is twice as large then, the pages in it as well.
void fsti_file_expect_stream(const fsti_file *file);

/// Installs the SIGBUS guard once a process; false when that failed or somebody replaced it.
bool fsti_io_guard_ready(void);
/// For tests: installs it anew over what is there now.
void fsti_io_guard_install(void);
/// Runs `work(context)`, which reads [begin, begin + size); false when a page there could not be
/// had (the file shrank, or an I/O error). `work` must own nothing that needs undoing.
bool fsti_io_guarded(void (*work)(void *context), void *context, const void *begin, uint64_t size);

// ---- for the room of files that are being made ----

/// Opens the file behind a descriptor once more, past the page cache; -1 and why not. `path` (may
/// be NULL): where the file was, for systems without /proc.
int fsti_io_reopen_direct(int fd, const char *path, int flags, char *reason, size_t reason_size);
/// The descriptor of a file that was opened by its path, to copy from; else -1.
int fsti_file_descriptor(const fsti_file *file);
/// The same to tell files apart: also of one that is made of another, whose it is.
int fsti_file_identity(const fsti_file *file);
/// Gives a finished read or write to the test hook, if there is one.
void fsti_io_finish(fsti_io_op *op);
/// Whether a test pretends that this is missing.
bool fsti_io_hidden(unsigned feature);

/// For tests: called with every finished read or write, may change its result.
typedef void (*fsti_io_fault_hook)(fsti_io_op *read);
void fsti_io_fault_hook_set(fsti_io_fault_hook hook);
/// For tests: pretend that these are missing (bits).
enum {
    FSTI_IO_HIDE_CACHESTAT = 1,
    FSTI_IO_HIDE_URING = 2,
    FSTI_IO_HIDE_DIRECT = 4,
    FSTI_IO_HIDE_TMPFILE = 8,
    FSTI_IO_HIDE_PROC = 16,
    FSTI_IO_HIDE_PATIENCE = 32, ///< who waits for another save gives up at once
    FSTI_IO_HIDE_COLD = 64,     ///< no page is slow to come by
    FSTI_IO_HIDE_WARM = 128,    ///< every page is
    FSTI_IO_HIDE_AHEAD = 256,   ///< the device does not read ahead
    FSTI_IO_HIDE_DISK = 512,    ///< file systems that are a disk's
};
void fsti_io_hide(unsigned features);

#endif
