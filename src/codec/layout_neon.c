// SPDX-License-Identifier: Apache-2.0
/// The codec's loops, neon; see meson.build for the compiler's settings.
#define CODEC_NAME neon
#include "layout_loops.h"
