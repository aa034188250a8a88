// SPDX-License-Identifier: Apache-2.0
/// The 22 element types of the safetensors format.
///
///     uint64_t shape[2] = {4096, 4096}, size_bytes;
///     if (fst_dtype_tensor_bytes(FST_DTYPE_BF16, shape, 2, &size_bytes, NULL) == FST_OK)
///         printf("%s: %llu bytes\n", fst_dtype_name(FST_DTYPE_BF16),
///                (unsigned long long)size_bytes);
#ifndef FASTSAFETENSORS_DTYPE_H
#define FASTSAFETENSORS_DTYPE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/// An element type. Values never change, and new types are added at the end: expect values that
/// this header does not have, from a newer library. Shapes of F4 and F6 count elements, not bytes.
typedef enum fst_dtype {
    FST_DTYPE_BOOL = 0,
    FST_DTYPE_F4 = 1,
    FST_DTYPE_F6_E2M3 = 2,
    FST_DTYPE_F6_E3M2 = 3,
    FST_DTYPE_U8 = 4,
    FST_DTYPE_I8 = 5,
    FST_DTYPE_F8_E5M2 = 6,
    FST_DTYPE_F8_E4M3 = 7,
    FST_DTYPE_F8_E8M0 = 8,
    FST_DTYPE_F8_E4M3FNUZ = 9,
    FST_DTYPE_F8_E5M2FNUZ = 10,
    FST_DTYPE_I16 = 11,
    FST_DTYPE_U16 = 12,
    FST_DTYPE_F16 = 13,
    FST_DTYPE_BF16 = 14,
    FST_DTYPE_I32 = 15,
    FST_DTYPE_U32 = 16,
    FST_DTYPE_F32 = 17,
    FST_DTYPE_C64 = 18,
    FST_DTYPE_F64 = 19,
    FST_DTYPE_I64 = 20,
    FST_DTYPE_U64 = 21,
} fst_dtype;

/// The number of types that this header knows. Check a dtype against it before you index an array.
#define FST_DTYPE_COUNT 22

/// Returns the format's name of a dtype ("BF16"), or NULL for an unknown value.
FST_API const char *fst_dtype_name(fst_dtype dtype);

/// Returns the bits of one element (4, 6, 8, 16, 32 or 64), or 0 for an unknown value.
FST_API uint32_t fst_dtype_bits(fst_dtype dtype);

/// Finds a dtype by the format's name, case-sensitively. `name_size` is in bytes; SIZE_MAX:
/// NUL-terminated. An unknown name is FST_E_ARGUMENT; the message lists the names.
FST_API FST_NODISCARD fst_status fst_dtype_from_name(const char *name, size_t name_size,
                                                     fst_dtype *out, fst_error *error);

/// Returns 1 if a load can convert `from` to `to` (fst_load_options.convert): a float type to any
/// float type, rounding to nearest even (F64 to F32 first, as torch does); an integer type to a
/// wider one that holds every value; and every type to itself. Returns 0 otherwise; a load leaves
/// such tensors unchanged.
FST_API int fst_dtype_convertible(fst_dtype from, fst_dtype to);

/// Computes the bytes of a packed tensor. `shape` has `rank` element counts and may be NULL for
/// rank 0. Errors, as for a file's header: FST_E_VALIDATION_OVERFLOW, FST_E_MISALIGNED_SLICE (types
/// below 8 bits whose total is not whole bytes), FST_E_ARGUMENT (unknown dtype).
FST_API FST_NODISCARD fst_status fst_dtype_tensor_bytes(fst_dtype dtype, const uint64_t *shape,
                                                        uint32_t rank, uint64_t *size_bytes,
                                                        fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
