// SPDX-License-Identifier: Apache-2.0
/// The list of statuses: X(constant, name, meaning), in numeric order. The public header has the
/// enum written out, so that moving a line cannot change a number; error.c checks that both agree.
#ifndef FSTI_STATUS_MAP_H
#define FSTI_STATUS_MAP_H

#define FSTI_STATUS_MAP(X)                                                                         \
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
    X(FST_END, "End", "no more tensors")                                                           \
    X(FST_E_DIGEST, "DigestMismatch", "bytes differ from their digest")                            \
    X(FST_E_MANIFEST, "InvalidManifest", "invalid manifest")                                       \
    X(FST_E_SIGNATURE, "InvalidSignature", "signature not accepted")                               \
    X(FST_E_CORRUPT, "CorruptData", "compressed bytes are damaged")                                \
    X(FST_E_VERSION, "VersionMismatch", "versions do not follow each other")

#endif
