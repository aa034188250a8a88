// SPDX-License-Identifier: Apache-2.0
/// XXH3 for AVX-512.
#define XXH3_SET avx512
#include "xxh3_kernels.h"
