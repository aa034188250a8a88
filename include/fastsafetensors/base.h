// SPDX-License-Identifier: Apache-2.0
/// Statuses, errors and the macros that every other public header uses.
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

/// Every status: X(constant, name, meaning). The names of the first fourteen are those of the
/// reference validator (safetensors), so that programs can match on them.
#define FST_STATUS_MAP(X)                                                                          \
    X(FST_OK, "Ok", "success")                                                                     \
    X(FST_E_HEADER_TOO_SMALL, "HeaderTooSmall", "header too small")                                \
    X(FST_E_HEADER_TOO_LARGE, "HeaderTooLarge", "header too large")                                \
    X(FST_E_INVALID_HEADER_LENGTH, "InvalidHeaderLength", "invalid header length")                 \
    X(FST_E_INVALID_HEADER, "InvalidHeader", "invalid UTF-8 in header")                            \
    X(FST_E_INVALID_HEADER_JSON, "InvalidHeaderDeserialization", "invalid JSON in header")         \
    X(FST_E_INVALID_OFFSET, "InvalidOffset", "invalid offset for tensor")                          \
    X(FST_E_VALIDATION_OVERFLOW, "ValidationOverflow",                                             \
      "overflow computing buffer size from shape and/or element type")                             \
    X(FST_E_MISALIGNED_SLICE, "MisalignedSlice", "sub-byte tensor does not fill whole bytes")      \
    X(FST_E_TENSOR_INVALID_INFO, "TensorInvalidInfo",                                              \
      "invalid shape, data type, or offset for tensor")                                            \
    X(FST_E_METADATA_INCOMPLETE_BUFFER, "MetadataIncompleteBuffer",                                \
      "incomplete metadata, file not fully covered")                                               \
    X(FST_E_TENSOR_NOT_FOUND, "TensorNotFound", "tensor not found")                                \
    X(FST_E_IO, "IoError", "I/O error")                                                            \
    X(FST_E_INDEX_JSON, "JsonError", "invalid index file")                                         \
    X(FST_E_INVALID_TENSOR_VIEW, "InvalidTensorView", "invalid tensor view")                       \
    X(FST_E_ARGUMENT, "InvalidArgument", "invalid argument")                                       \
    X(FST_E_NO_MEMORY, "OutOfMemory", "out of memory")                                             \
    X(FST_E_NOT_FOUND, "FileNotFound", "no such file or directory")                                \
    X(FST_E_PERMISSION, "PermissionDenied", "permission denied")                                   \
    X(FST_E_NOT_REGULAR, "NotRegularFile", "not a regular file")                                   \
    X(FST_E_NO_TENSORS, "NoModelFiles", "no safetensors files in folder")                          \
    X(FST_E_PATH_ESCAPES, "PathEscapes", "path leaves the model's folder")                         \
    X(FST_E_DUPLICATE_TENSOR, "DuplicateTensor", "tensor name in two files")                       \
    X(FST_E_SHORT_READ, "ShortRead", "file ended before the data did")                             \
    X(FST_E_FILE_CHANGED, "FileChanged", "file changed since its header was read")                 \
    X(FST_E_UNSUPPORTED, "Unsupported", "not supported here")                                      \
    X(FST_E_BUDGET, "BudgetExceeded", "memory budget too small")                                   \
    X(FST_E_CANCELLED, "Cancelled", "cancelled")                                                   \
    X(FST_E_TIMEOUT, "Timeout", "timed out")                                                       \
    X(FST_E_NO_SPACE, "NoSpace", "not enough space on the device")                                 \
    X(FST_E_DEVICE, "DeviceError", "the GPU's driver reported an error")                           \
    X(FST_END, "End", "no more tensors")

/// The outcome of a call. FST_OK is 0; FST_END says "nothing more" and is no failure.
typedef enum fst_status {
#define FST_STATUS_ENUM(constant, name, meaning) constant,
    FST_STATUS_MAP(FST_STATUS_ENUM)
#undef FST_STATUS_ENUM
        FST_STATUS_COUNT
} fst_status;

/// What went wrong, in words and in numbers. The caller owns it, usually on the stack; a failing
/// call fills all of it, a successful one leaves it alone. NULL is allowed wherever one is taken.
/// All strings are NUL-terminated; what does not fit is cut.
typedef struct fst_error {
    fst_status status;
    int os_errno;         ///< errno of the failing system call, or 0
    int device_code;      ///< the device driver's code, or 0
    uint64_t byte_offset; ///< position in `file`, counted from its first byte; FST_NO_OFFSET: none
    char file[256];       ///< the file concerned, or ""
    char tensor[128];     ///< the tensor concerned, or ""
    char message[512];    ///< a sentence for a person, with file, tensor and position in it
} fst_error;

#define FST_NO_OFFSET UINT64_MAX

/// The name of a status ("InvalidOffset"). Never NULL: an unknown number gives "Unknown".
FST_API const char *fst_status_name(fst_status status);

/// What a status means, in a few words. Never NULL.
FST_API const char *fst_status_meaning(fst_status status);

/// Gives memory for tensor data. `allocate` returns `size_bytes` bytes aligned to `alignment` (a
/// power of two, at most 4096) or NULL; `release` takes back what allocate gave, from any thread.
/// `context` is passed through. Both must stay callable until the last tensor is released.
typedef struct fst_allocator {
    void *context;
    void *(*allocate)(void *context, size_t size_bytes, size_t alignment);
    void (*release)(void *context, void *pointer, size_t size_bytes);
} fst_allocator;

/// How many bytes of tensor memory that was released are kept for the next load, instead of being
/// given back to the system: a load into kept memory saves making its pages, over half of the
/// time of a load from the page cache. 0 (the default): none. Safe from any thread.
FST_API void fst_keep_memory(uint64_t size_bytes);

/// Gives kept memory (arenas held for reuse between loads) back to the system.
/// Returns the number of bytes given back. Safe from any thread at any time.
FST_API size_t fst_trim(void);

#ifdef __cplusplus
}
#endif

#endif
