// SPDX-License-Identifier: Apache-2.0
/// The codec's loops in plain C. meson.build sets the compiler flags.
#define CODEC_NAME scalar
#include "layout_loops.h"
