// SPDX-License-Identifier: Apache-2.0
/// Conversion kernels for NEON, which every AArch64 CPU has. meson.build sets the compiler flags.
#define CONVERT_NAME neon
#include "convert_kernels.h"
