// SPDX-License-Identifier: Apache-2.0
/// Loaded tensors.
///
///     fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
///     if (fst_tensor_view_get(tensor, &view, NULL) == FST_OK && view.dtype == FST_DTYPE_F32)
///         printf("%.*s: first element %g\n", (int)view.name_size, view.name,
///                (double)*(const float *)view.data);
///     fst_tensor_unref(tensor);
#ifndef FASTSAFETENSORS_TENSOR_H
#define FASTSAFETENSORS_TENSOR_H

#include "base.h"
#include "device.h"
#include "dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/// A loaded tensor with a reference count. It stays valid after the loader and the model are
/// closed, until its last reference is released. It keeps its memory alive, unless this is memory
/// of the caller (fst_part.destination). All functions of this header may be called from any
/// thread.
typedef struct fst_tensor fst_tensor;

/// The description and the bytes of a tensor; of a slice, its own shape and size. The pointers
/// belong to the tensor.
typedef struct fst_tensor_view {
    size_t struct_size; ///< sizeof(fst_tensor_view)
    const char *name;   ///< UTF-8, NUL-terminated; may contain NUL bytes, see name_size
    size_t name_size;   ///< bytes, without the terminating NUL
    fst_dtype dtype;
    uint32_t rank;         ///< number of dimensions; 0: a scalar
    const uint64_t *shape; ///< `rank` element counts; never NULL
    uint64_t size_bytes;
    void *data;        ///< an address of `device`; row-major, packed; NULL only if size_bytes is 0
    int writable;      ///< 0: a store to `data` faults (fst_load_options.map_read_only)
    fst_device device; ///< the CPU can also access FST_DEVICE_PINNED
} fst_tensor_view;

/// Describes a tensor. FST_E_ARGUMENT if `tensor` or `out` is NULL.
FST_API FST_NODISCARD fst_status fst_tensor_view_get(const fst_tensor *tensor, fst_tensor_view *out,
                                                     fst_error *error);

/// Copies the bytes of a tensor to `target` in memory of the CPU, from a GPU if necessary, and
/// returns when the copy is complete. `size_bytes` must be the tensor's size, else FST_E_ARGUMENT.
FST_API FST_NODISCARD fst_status fst_tensor_read(const fst_tensor *tensor, void *target,
                                                 size_t size_bytes, fst_error *error);

/// Adds a reference and returns `tensor`. NULL is allowed.
FST_API fst_tensor *fst_tensor_ref(fst_tensor *tensor);

/// Releases a reference; the last one frees the tensor. NULL is allowed.
FST_API void fst_tensor_unref(fst_tensor *tensor);

#ifdef __cplusplus
}
#endif

#endif
