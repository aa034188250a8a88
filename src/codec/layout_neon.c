// SPDX-License-Identifier: Apache-2.0
/// The codec's loops for NEON. meson.build sets the compiler flags.
#define CODEC_NAME neon
#include "layout_loops.h"
