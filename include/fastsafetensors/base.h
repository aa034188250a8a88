// SPDX-License-Identifier: Apache-2.0
/// Statuses, errors, memory, and what holds for all of the interface.
///
/// **Versions.** A program compiled against one 1.x header works with every later 1.x library.
/// Numbers of enums never change; new ones are added behind the last, so a program must expect
/// numbers that it does not know. FST_..._COUNT says how many a header knows. Structs grow at
/// their end: those of options and statistics begin with `struct_size`, to be set by the caller
/// (FST_STRUCT_INIT); the others, and elements of arrays, have `reserved` words, which are zero
/// until a later version gives them a meaning. What a caller hands in must be zero there.
/// experimental.h is the exception: what stands there may change or go with any release.
///
/// **Callbacks.** Each says from which thread it comes. None may call into the handle that it
/// belongs to, unless its comment allows it. None may leave by longjmp or an exception.
///
/// **Threads and signals.** Threads of the library block every signal but those of faults (SIGSEGV,
/// SIGBUS, SIGFPE, SIGILL), so a program's handlers run on its own threads. Calls go on after
/// EINTR. One handler may be installed, for SIGBUS (see fst_load_options.no_sigbus_guard).
///
/// **fork().** A child may open models and begin loads and saves of its own at any time. Handles of
/// the parent's belong to the parent: in the child, closing them frees memory and touches no file
/// or thread of the parent's; everything else on a loader or writer is FST_E_UNSUPPORTED. An opened
/// model, and tensors that were handed out, can be used in the child.
///
/// **Descriptors.** An opened model holds one descriptor a file, and from the first load past the
/// page cache on a second one, both until its last load is closed. While a load brings files into
/// the page cache each of its threads holds two more, and a ring is one. A save holds one a file,
/// and a second one while it writes past the page cache. All are closed on exec.
///
/// **dlclose().** The library stays mapped once it was loaded: threads and a signal handler may be
/// its own.
#ifndef FASTSAFETENSORS_BASE_H
#define FASTSAFETENSORS_BASE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FST_API __attribute__((visibility("default")))
#define FST_NODISCARD __attribute__((warn_unused_result))
#else
#define FST_API
#define FST_NODISCARD
#endif

#ifdef __cplusplus
extern "C" {
#endif

/// The first value of a struct that begins with struct_size: `fst_load_options options =
/// FST_STRUCT_INIT(fst_load_options);`. Everything else is zero, which is the default.
#ifdef __cplusplus
#define FST_STRUCT_INIT(type) (type{sizeof(type)})
#else
#define FST_STRUCT_INIT(type) ((type){.struct_size = sizeof(type)})
#endif

/// The outcome of a call. FST_OK is 0; FST_END says "nothing more" and is no failure. Numbers are
/// part of the binary interface: they never change, and new ones are added behind the last. A
/// program must expect numbers that its header does not know, from a newer library;
/// fst_status_name() and fst_status_meaning() know them. 1 to 14 are the reference validator's
/// (safetensors), by the same names, so that programs can match on them.
typedef enum fst_status {
    FST_OK = 0,                      ///< success
    FST_E_HEADER_TOO_SMALL = 1,      ///< header too small
    FST_E_HEADER_TOO_LARGE = 2,      ///< header too large
    FST_E_INVALID_HEADER_LENGTH = 3, ///< invalid header length
    FST_E_INVALID_HEADER = 4,        ///< invalid UTF-8 in header
    FST_E_INVALID_HEADER_JSON = 5,   ///< invalid JSON in header
    FST_E_INVALID_OFFSET = 6,        ///< invalid offset for tensor
    FST_E_VALIDATION_OVERFLOW =
        7,                      ///< overflow computing buffer size from shape and/or element type
    FST_E_MISALIGNED_SLICE = 8, ///< sub-byte tensor does not fill whole bytes
    FST_E_TENSOR_INVALID_INFO = 9,         ///< invalid shape, data type, or offset for tensor
    FST_E_METADATA_INCOMPLETE_BUFFER = 10, ///< incomplete metadata, file not fully covered
    FST_E_TENSOR_NOT_FOUND = 11,           ///< tensor not found
    FST_E_IO = 12,                         ///< I/O error
    FST_E_INDEX_JSON = 13,                 ///< invalid index file
    FST_E_INVALID_TENSOR_VIEW = 14,        ///< invalid tensor view
    FST_E_ARGUMENT = 15,                   ///< invalid argument
    FST_E_NO_MEMORY = 16,                  ///< out of memory
    FST_E_NOT_FOUND = 17,                  ///< no such file or directory
    FST_E_PERMISSION = 18,                 ///< permission denied
    FST_E_NOT_REGULAR = 19,                ///< not a regular file
    FST_E_NO_TENSORS = 20,                 ///< no safetensors files in folder
    FST_E_PATH_ESCAPES = 21,               ///< path leaves the model's folder
    FST_E_DUPLICATE_TENSOR = 22,           ///< tensor name in two files
    FST_E_SHORT_READ = 23,                 ///< file ended before the data did
    FST_E_FILE_CHANGED = 24,               ///< file changed since its header was read
    FST_E_UNSUPPORTED = 25,                ///< not supported here
    FST_E_BUDGET = 26,                     ///< memory budget too small
    FST_E_CANCELLED = 27,                  ///< cancelled
    FST_E_TIMEOUT = 28,                    ///< timed out
    FST_E_NO_SPACE = 29,                   ///< not enough space on the device
    FST_E_DEVICE = 30,                     ///< the GPU's driver reported an error
    FST_END = 31,                          ///< no more tensors
    FST_E_DIGEST = 32,                     ///< bytes differ from their digest
    FST_E_MANIFEST = 33,                   ///< invalid manifest
    FST_E_SIGNATURE = 34,                  ///< signature not accepted
    FST_E_CORRUPT = 35,                    ///< compressed bytes are damaged
} fst_status;

/// What went wrong, in words and in numbers. The caller owns it, usually on the stack; a failing
/// call fills all of it, a successful one leaves it alone. NULL is allowed wherever one is taken.
/// All strings are NUL-terminated; what does not fit is cut.
typedef struct fst_error {
    fst_status status;
    int32_t os_errno;    ///< errno of the failing system call, or 0
    int32_t device_code; ///< the device driver's code, or 0
    uint32_t reserved_word;
    uint64_t byte_offset; ///< position in `file`, counted from its first byte; FST_NO_OFFSET: none
    char file[256];       ///< the file concerned, or ""
    char tensor[128];     ///< the tensor concerned, or ""
    char message[512];    ///< a sentence for a person, with file, tensor and position in it;
                          ///< printable: control bytes, whatever they come from, are '?'
    uint64_t reserved[6];
} fst_error;

#define FST_NO_OFFSET UINT64_MAX

/// The name of a status ("InvalidOffset"). Never NULL: an unknown number gives "Unknown".
FST_API const char *fst_status_name(fst_status status);

/// What a status means, in a few words. Never NULL.
FST_API const char *fst_status_meaning(fst_status status);

/// Gives memory for tensor data. `allocate` returns `size_bytes` bytes aligned to `alignment` (a
/// power of two, at most 4096) or NULL; `release` takes back what allocate gave, from any thread.
/// `allocate` is called by fst_loader_open() and by threads of the load, one call at a time a load,
/// with no lock of the library held but the one that makes other calls of that load's wait.
/// `context` is passed through. Both must stay callable until the
/// last tensor is released.
typedef struct fst_allocator {
    void *context;
    void *(*allocate)(void *context, size_t size_bytes, size_t alignment);
    void (*release)(void *context, void *pointer, size_t size_bytes);
    uintptr_t reserved[3]; ///< 0
} fst_allocator;

// ---- memory of tensors, for the whole process; safe from any thread at any time ----

/// How many bytes of tensor memory that was released are kept for the next load, instead of being
/// given back to the system: a load into kept memory saves making its pages, over half of the
/// time of a load from the page cache. 0 (the default): none. At most 1,024 pieces are kept, of
/// up to 64 MiB for tensors that are smaller, 256 MiB in verified loads.
FST_API void fst_memory_keep(uint64_t size_bytes);

/// Gives kept memory and idle page-locked memory back to the system; returns how many bytes.
FST_API uint64_t fst_memory_trim(void);

/// Buffers of tensors that are still alive, and their bytes. Either pointer may be NULL.
FST_API void fst_memory_live(size_t *buffer_count, uint64_t *size_bytes);

/// Page-locked bytes that loads to GPUs go through; kept for the next load.
FST_API uint64_t fst_memory_pinned(void);

// ---- a log of decisions ----

/// How much a line of the log matters.
typedef enum fst_log_level {
    FST_LOG_WARNING = 0, ///< something went worse than it should have, and was got around
    FST_LOG_INFO = 1,    ///< what was decided, once a load or save
    FST_LOG_DEBUG = 2,   ///< steps on the way
} fst_log_level;

/// Takes a line without a newline, printable. From any thread of the program's or the library's,
/// several at once; the text is valid during the call. It may call fst_log_set(), nothing else.
typedef void (*fst_log_callback)(void *context, fst_log_level level, const char *text);

/// Tells `callback` every line of at most that level from now on; NULL: nobody (the default).
/// The library itself never prints. A call that has begun on another thread may still end after
/// fst_log_set() has returned, so `context` must not be freed at once. From any thread.
FST_API void fst_log_set(fst_log_callback callback, void *context, fst_log_level level);

#ifdef __cplusplus
}
#endif

#endif
