// SPDX-License-Identifier: Apache-2.0
/// Conversion kernels for AVX2 and F16C. meson.build sets the compiler flags.
#define CONVERT_NAME avx2
#define CONVERT_F16C 1
#include "convert_kernels.h"
