// SPDX-License-Identifier: Apache-2.0
/// Own declarations of the part of the DLPack ABI that is exported. Source:
/// https://dmlc.github.io/dlpack/latest/c_api.html (1.0 and later; type codes of 1.1).
#ifndef FSTPY_DLPACK_ABI_H
#define FSTPY_DLPACK_ABI_H

#include <stdint.h>

typedef struct dl_device {
    int32_t type; ///< DL_CPU, DL_CUDA or DL_ROCM
    int32_t id;
} dl_device;

typedef struct dl_type {
    uint8_t code, bits;
    uint16_t lanes;
} dl_type;

typedef struct dl_tensor {
    void *data;
    dl_device device;
    int32_t rank;
    dl_type type;
    int64_t *shape;
    int64_t *strides; ///< in elements; NULL: packed, row-major
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *self);
} dl_managed;

typedef struct dl_managed_versioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct dl_managed_versioned *self);
    uint64_t flags; ///< bit 0: read-only
    dl_tensor tensor;
} dl_managed_versioned;

enum {
    DL_CPU = 1,
    DL_CUDA = 2,
    DL_ROCM = 10,
    DL_INT = 0,
    DL_UINT = 1,
    DL_FLOAT = 2,
    DL_BFLOAT = 4,
    DL_COMPLEX = 5,
    DL_BOOL = 6,
    DL_FLOAT8_E4M3FN = 10,
    DL_FLOAT8_E4M3FNUZ = 11,
    DL_FLOAT8_E5M2 = 12,
    DL_FLOAT8_E5M2FNUZ = 13,
    DL_FLOAT8_E8M0FNU = 14,
    DL_FLAG_READ_ONLY = 1
};

#endif
