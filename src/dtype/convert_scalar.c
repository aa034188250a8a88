// SPDX-License-Identifier: Apache-2.0
/// Conversion kernels for the baseline CPU of the architecture. meson.build sets the compiler
/// flags.
#define CONVERT_NAME scalar
#include "convert_kernels.h"
