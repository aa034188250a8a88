// SPDX-License-Identifier: Apache-2.0
/// The codec's loops, avx2; see meson.build for the compiler's settings.
#define CODEC_NAME avx2
#include "layout_loops.h"
