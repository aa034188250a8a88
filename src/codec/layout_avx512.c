// SPDX-License-Identifier: Apache-2.0
/// The codec's loops for AVX-512. meson.build sets the compiler flags.
#define CODEC_NAME avx512
#include "layout_loops.h"
