// SPDX-License-Identifier: Apache-2.0
/// The layout of each dtype, and the choice of the best kernels for the CPU.
#include "codec.h"
#include "codec_kernels.h"
#include "planes.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#define HAS_CRC32 (1u << 7) /* HWCAP_CRC32 of asm/hwcap.h */
#endif

static _Atomic(const codec_kernels *) chosen;

bool fsti_codec_usable(const codec_kernels *kernels) {
#if defined(__x86_64__)
    if (kernels == &fsti_codec_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2");
    if (kernels == &fsti_codec_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
#elif defined(__aarch64__)
    if (kernels == &fsti_codec_neon) return (getauxval(AT_HWCAP) & HAS_CRC32) != 0;
#endif
    return kernels == &fsti_codec_scalar;
}

static const codec_kernels *best_kernels(void) {
#if defined(__x86_64__)
    if (fsti_codec_usable(&fsti_codec_avx512)) return &fsti_codec_avx512;
    if (fsti_codec_usable(&fsti_codec_avx2)) return &fsti_codec_avx2;
#elif defined(__aarch64__)
    if (fsti_codec_usable(&fsti_codec_neon)) return &fsti_codec_neon;
#endif
    return &fsti_codec_scalar;
}

const codec_kernels *fsti_codec_kernels(void) {
    // Relaxed is enough, because the tables are constants.
    const codec_kernels *kernels = atomic_load_explicit(&chosen, memory_order_relaxed);
    return kernels != NULL ? kernels : best_kernels();
}

void fsti_codec_use(const codec_kernels *kernels) { atomic_store(&chosen, kernels); }

uint32_t fsti_crc32c(const void *bytes, size_t size_bytes) {
    return fsti_codec_kernels()->crc32c(bytes, size_bytes);
}

bool fsti_codec_is_float(fst_dtype dtype) {
    switch (dtype) {
    case FST_DTYPE_BOOL:
    case FST_DTYPE_U8:
    case FST_DTYPE_I8:
    case FST_DTYPE_U16:
    case FST_DTYPE_I16:
    case FST_DTYPE_U32:
    case FST_DTYPE_I32:
    case FST_DTYPE_U64:
    case FST_DTYPE_I64: return false;
    default: return true;
    }
}

fsti_codec_layout fsti_codec_layout_of(fst_dtype dtype) {
    switch (dtype) {
    case FST_DTYPE_F16:
    case FST_DTYPE_BF16:
    case FST_DTYPE_F32:
    case FST_DTYPE_C64:
    case FST_DTYPE_F64: return FSTI_LAYOUT_ROTATED;
    case FST_DTYPE_F8_E4M3:
    case FST_DTYPE_F8_E4M3FNUZ: return FSTI_LAYOUT_NIBBLES;
    case FST_DTYPE_U16:
    case FST_DTYPE_I16:
    case FST_DTYPE_U32:
    case FST_DTYPE_I32:
    case FST_DTYPE_U64:
    case FST_DTYPE_I64: return FSTI_LAYOUT_INTEGERS;
    default: return FSTI_LAYOUT_BYTES;
    }
}

/// Complex numbers are pairs of floats.
static uint32_t element_bytes(fst_dtype dtype) {
    if (dtype == FST_DTYPE_C64) return 4;
    return fsti_dtype_bits(dtype) <= 8 ? 1 : fsti_dtype_bits(dtype) / 8;
}

plane_cut fsti_planes_of(fst_dtype dtype, size_t true_bytes) {
    plane_cut cut = {.layout = fsti_codec_layout_of(dtype), .element_bytes = element_bytes(dtype)};
    cut.element_count = true_bytes / cut.element_bytes;
    cut.plane_count = cut.layout == FSTI_LAYOUT_NIBBLES ? 2 : cut.element_bytes;
    cut.plane_bytes = cut.layout == FSTI_LAYOUT_NIBBLES ? (true_bytes + 1) / 2 : cut.element_count;
    cut.rotation = cut.layout == FSTI_LAYOUT_ROTATED ? 1 : 0;
    return cut;
}

void fsti_planes_split(const plane_cut *cut, const void *source, unsigned char *const *planes) {
    const codec_kernels *kernels = fsti_codec_kernels();
    if (cut->layout == FSTI_LAYOUT_NIBBLES)
        kernels->split_nibbles(source, planes, cut->element_count);
    else if (cut->element_bytes == 2)
        kernels->split_16(source, planes, cut->element_count, cut->rotation);
    else if (cut->element_bytes == 4)
        kernels->split_32(source, planes, cut->element_count, cut->rotation);
    else
        kernels->split_64(source, planes, cut->element_count, cut->rotation);
}

void fsti_planes_join(const plane_cut *cut, const unsigned char *const *planes, void *target) {
    const codec_kernels *kernels = fsti_codec_kernels();
    if (cut->layout == FSTI_LAYOUT_NIBBLES)
        kernels->join_nibbles(target, planes, cut->element_count);
    else if (cut->element_bytes == 2)
        kernels->join_16(target, planes, cut->element_count, cut->rotation);
    else if (cut->element_bytes == 4)
        kernels->join_32(target, planes, cut->element_count, cut->rotation);
    else
        kernels->join_64(target, planes, cut->element_count, cut->rotation);
}
