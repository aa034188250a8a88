// SPDX-License-Identifier: Apache-2.0
/// The loops of all instruction sets. fsti_codec_usable() checks whether this CPU has one of them.
#ifndef FSTI_TEST_ALL_KERNELS_H
#define FSTI_TEST_ALL_KERNELS_H

#include "codec/codec_kernels.h"

static const codec_kernels *const all_kernels[] = {
#if defined(__x86_64__)
    &fsti_codec_avx512,
    &fsti_codec_avx2,
#elif defined(__aarch64__)
    &fsti_codec_neon,
#endif
    &fsti_codec_scalar,
};
#define KERNEL_COUNT (sizeof all_kernels / sizeof *all_kernels)

#endif
