// SPDX-License-Identifier: Apache-2.0
/// Splits chunks into byte planes. Private to the codec module.
#ifndef FSTI_CODEC_PLANES_H
#define FSTI_CODEC_PLANES_H

#include "codec.h"

/// How the elements of a chunk are split.
typedef struct plane_cut {
    fsti_codec_layout layout;
    uint32_t element_bytes, plane_count, rotation;
    size_t element_count, plane_bytes;
} plane_cut;

plane_cut fsti_planes_of(fst_dtype dtype, size_t true_bytes);
/// For splits into more than one plane.
void fsti_planes_split(const plane_cut *cut, const void *source, unsigned char *const *planes);
void fsti_planes_join(const plane_cut *cut, const unsigned char *const *planes, void *target);

/// The header of a plane: kind, value, u32 bytes, little-endian.
#define PLANE_HEAD_BYTES 6u
typedef enum plane_kind { PLANE_RAW = 0, PLANE_CONSTANT = 1, PLANE_CODED = 2 } plane_kind;
typedef struct plane_head {
    uint8_t kind, value;
    uint32_t stored_bytes;
} plane_head;

static inline size_t plane_align(size_t size) {
    return (size + FSTI_PLANE_ALIGNMENT - 1) & ~(size_t)(FSTI_PLANE_ALIGNMENT - 1);
}

#endif
