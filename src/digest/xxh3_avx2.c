// SPDX-License-Identifier: Apache-2.0
/// XXH3 for AVX2.
#define XXH3_SET avx2
#include "xxh3_kernels.h"
