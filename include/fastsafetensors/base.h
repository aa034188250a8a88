// SPDX-License-Identifier: Apache-2.0
/// Status codes, errors, the allocator, the log, and the rules that hold for the whole interface.
///
///     fst_error error;
///     fst_model *model;
///     if (fst_model_open(path, NULL, &model, &error) != FST_OK) {
///         fprintf(stderr, "%s [%s]\n", error.message, fst_status_name(error.status));
///         return 1;
///     }
///     fst_model_close(model);
///
/// **Versions.** A program that was compiled against a 1.x header works with every later 1.x
/// library. The value of an enumerator never changes, and new ones are added at the end, so a
/// program must expect values that its header does not have. FST_..._COUNT is the number of values
/// in this header.
///
/// **Structs.** A struct that may get more fields begins with `struct_size`, which the caller sets
/// to sizeof (FST_STRUCT_INIT does it). New fields are added at the end, and zero is their default.
/// A library that is newer than the program takes missing fields as zero; one that is older
/// refuses fields that it does not know with FST_E_ARGUMENT unless they are zero (and structs above
/// 64 KiB). All elements of an array have the struct_size of the first. Structs without struct_size
/// never change.
/// What experimental.h declares may change or be removed in any release.
///
/// **Callbacks.** Each comment says which thread calls. A callback must not use the handle that it
/// belongs to unless its comment allows it, and must not leave by longjmp() or an exception.
///
/// **Threads and signals.** The library's threads block all signals except SIGSEGV, SIGBUS, SIGFPE,
/// SIGILL and SIGABRT, so other signals are handled on the program's threads.
/// Calls continue after EINTR. The library may install one handler, for SIGBUS
/// (fst_load_tuning.keep_sigbus_handler in experimental/load_tuning.h).
///
/// **Cancellation and stacks.** A thread that is cancelled (pthread_cancel) during a call returns
/// from it, and ends at its next cancellation point. To end a wait early, use fst_loader_cancel(),
/// fst_writer_cancel() or a time limit. Threads that call the library need 128 KiB of stack.
///
/// **fork().** A child process may open models and start loads and saves at any time. Handles that
/// the parent opened belong to the parent: closing them in the child frees memory and does not
/// touch the parent's files or threads; every other call on a loader or writer is
/// FST_E_UNSUPPORTED there. Open models and returned tensors can be used in the child.
///
/// **Descriptors.** An open model has one file descriptor per file, and a second one after the
/// first load that bypasses the page cache, until the model and its loads are closed. While a load
/// reads files into the page cache each of its threads has two more; an io_uring is one, and so is
/// userfaultfd(2) for new memory. A save has one per file, and a second one while it bypasses the
/// page cache. All are closed on exec, and that of userfaultfd(2) in a child of fork().
///
/// **dlclose().** The library cannot be unloaded: threads and a signal handler may still use it.
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

/// The initial value of a struct that begins with struct_size; all other fields are zero:
/// `fst_load_options options = FST_STRUCT_INIT(fst_load_options);`.
#ifdef __cplusplus
template <typename Struct> inline Struct fst_struct_init() {
    Struct value = Struct();
    value.struct_size = sizeof value;
    return value;
}
#define FST_STRUCT_INIT(type) (fst_struct_init<type>())
#else
#define FST_STRUCT_INIT(type) ((type){.struct_size = sizeof(type)})
#endif

#ifdef __cplusplus
extern "C" {
#endif

/// The result of a call. FST_OK is 0. FST_END means that there are no more tensors and is not a
/// failure. fst_status_name() and fst_status_meaning() also know codes that the loaded library has
/// and this header does not. 1 to 14 are the errors of the safetensors package, with its names.
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
    FST_E_VERSION = 36,                    ///< versions do not follow each other
} fst_status;

/// Details of a failure. The caller owns it, usually on the stack. A failed call fills all of it, a
/// successful call leaves it unchanged. NULL is allowed wherever a function takes one. All strings
/// are NUL-terminated; texts that do not fit are cut. This struct never changes.
typedef struct fst_error {
    fst_status status;
    int32_t os_errno;     ///< errno of the failed system call, or 0
    int32_t device_code;  ///< the code of the GPU's driver, or 0
    uint64_t byte_offset; ///< position in `file`, from its first byte, or FST_NO_OFFSET
    char file[256];       ///< the file, or ""
    char tensor[128];     ///< the tensor, or ""
    char message[512];    ///< one sentence with the file, tensor and position; printable text
} fst_error;

#define FST_NO_OFFSET UINT64_MAX

/// The name of a status ("InvalidOffset"). Never NULL: an unknown number gives "Unknown".
FST_API const char *fst_status_name(fst_status status);

/// What a status means, in a few words. Never NULL.
FST_API const char *fst_status_meaning(fst_status status);

/// Two functions of the program that allocate and free memory for tensor data. `allocate` returns
/// `size_bytes` bytes aligned to `alignment` (a power of two, at most 4096), or NULL: the load then
/// waits for memory that it will release itself, or fails with FST_E_NO_MEMORY. With NULL and an
/// errno of ECANCELED it fails at once with FST_E_CANCELLED. `allocate` is called
/// by fst_loader_open() and by threads of the load, one call at a time per load; other calls on
/// that loader may wait meanwhile, so it must not wait for them. `release` frees what `allocate`
/// returned, and is called from any thread. Both functions must stay callable until the last tensor
/// is released.
typedef struct fst_allocator {
    size_t struct_size; ///< sizeof(fst_allocator)
    void *context;      ///< passed to both functions
    void *(*allocate)(void *context, size_t size_bytes, size_t alignment);
    void (*release)(void *context, void *pointer, size_t size_bytes);
} fst_allocator;

/// Receives the progress of a call; return 0 to continue, another value to cancel it. One call at a
/// time. For work without tensors, such as digesting files, both tensor counts are 0. Each function
/// that takes a callback says which thread calls it.
typedef int (*fst_progress_callback)(void *context, uint64_t bytes_done, uint64_t bytes_total,
                                     size_t tensors_done, size_t tensors_total);

/// Frees memory that the library keeps for later loads, pinned memory included, and returns the
/// number of freed bytes. From any thread. Waits for the drivers of GPUs, without a time limit.
FST_API uint64_t fst_memory_trim(void);

/// The importance of a log line.
typedef enum fst_log_level {
    /// The library worked around a problem: retries of a load (one line at its end with number,
    /// causes and host), an I/O method that failed, a cache folder that can't be used (once per
    /// process and folder), temporary files of killed saves.
    FST_LOG_WARNING = 0,
    /// One line when a save or a load of a whole model ends: the files, the I/O method and its
    /// reason, and the time it took. Loads of a part of a model log that line at FST_LOG_DEBUG.
    FST_LOG_INFO = 1,
    FST_LOG_DEBUG = 2, ///< the steps of loads and saves
} fst_log_level;

/// Receives one log line: printable text without a newline, valid during the call. Called from
/// threads of the program and of the library, several at once. The only function of the library
/// that it may call is fst_log_set().
typedef void (*fst_log_callback)(void *context, fst_log_level level, const char *text);

/// Passes log lines up to `level` to `callback`. NULL, the default, turns the log off. The library
/// itself never prints. A callback that is already running on another thread may end after
/// fst_log_set() has returned: do not free `context` at once. From any thread.
FST_API void fst_log_set(fst_log_callback callback, void *context, fst_log_level level);

#ifdef __cplusplus
}
#endif

#endif
