// SPDX-License-Identifier: Apache-2.0
/// Conversion kernels for the baseline of the processor family; see meson.build for the compiler's
/// settings.
#define CONVERT_NAME scalar
#include "convert_kernels.h"
