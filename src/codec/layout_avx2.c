// SPDX-License-Identifier: Apache-2.0
/// The codec's loops for AVX2. meson.build sets the compiler flags.
#define CODEC_NAME avx2
#include "layout_loops.h"
