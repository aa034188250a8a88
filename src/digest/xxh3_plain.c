// SPDX-License-Identifier: Apache-2.0
/// XXH3, with what every processor of the machine's kind has.
#define XXH3_SET plain
#include "xxh3_kernels.h"
