// SPDX-License-Identifier: Apache-2.0
/// Conversion kernels for NEON, which every AArch64 processor has; see meson.build for the
/// compiler's settings.
#define CONVERT_NAME neon
#include "convert_kernels.h"
