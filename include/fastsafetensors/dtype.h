// SPDX-License-Identifier: Apache-2.0
/// The 22 element types of the safetensors format.
#ifndef FASTSAFETENSORS_DTYPE_H
#define FASTSAFETENSORS_DTYPE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/// An element type. Numbers are part of the binary interface: they never change, and new types are
/// added behind the last, wherever the format sorts them. A program must expect numbers that its
/// header does not know, from a newer library that read a newer file. The format's shapes of F4 and
/// F6 count elements, not bytes.
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

/// How many types this header knows: 0 to FST_DTYPE_COUNT - 1. Test a number before it indexes an
/// array of this length.
#define FST_DTYPE_COUNT 22

/// The format's name of a dtype ("BF16"). NULL for a number that is no dtype.
FST_API const char *fst_dtype_name(fst_dtype dtype);

/// Bits of one element (4, 6, 8, 16, 32 or 64); 0 for a number that is no dtype.
FST_API uint32_t fst_dtype_bits(fst_dtype dtype);

/// The alignment in bytes that an element wants in memory (1, 2, 4 or 8; C64 wants 4);
/// 0 for a number that is no dtype.
FST_API uint32_t fst_dtype_alignment(fst_dtype dtype);

/// Finds a dtype by the format's name, exact case (`name_size` bytes; SIZE_MAX: NUL-terminated).
/// FST_E_ARGUMENT, which lists the known names, when there is none.
FST_API FST_NODISCARD fst_status fst_dtype_from_name(const char *name, size_t name_size,
                                                     fst_dtype *out, fst_error *error);

/// 1 when a load can make tensors of `from` into tensors of `to` (fst_load_options.convert): floats
/// to any float type, rounding to nearest even, integers to wider ones that hold every value, and
/// every dtype to itself. Else 0: such tensors stay as they are.
FST_API int fst_dtype_convertible(fst_dtype from, fst_dtype to);

/// Bytes of a packed tensor: `rank` numbers of elements, NULL for rank 0. Errors, as for a file's
/// header: FST_E_VALIDATION_OVERFLOW, FST_E_MISALIGNED_SLICE (types below a byte that do not fill
/// whole bytes), FST_E_ARGUMENT (no such dtype).
FST_API FST_NODISCARD fst_status fst_dtype_tensor_bytes(fst_dtype dtype, const uint64_t *shape,
                                                        uint32_t rank, uint64_t *size_bytes,
                                                        fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
