// SPDX-License-Identifier: Apache-2.0
/// The codec's loops, scalar; see meson.build for the compiler's settings.
#define CODEC_NAME scalar
#include "layout_loops.h"
