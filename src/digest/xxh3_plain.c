// SPDX-License-Identifier: Apache-2.0
/// XXH3 for the baseline CPU of the architecture.
#define XXH3_SET plain
#include "xxh3_kernels.h"
