// SPDX-License-Identifier: Apache-2.0
/// The library's version: the single source, read by the build as well.
#ifndef FASTSAFETENSORS_VERSION_H
#define FASTSAFETENSORS_VERSION_H

#include "base.h"

#define FST_VERSION_MAJOR 1
#define FST_VERSION_MINOR 0
#define FST_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/// The version of the library that runs, as "MAJOR.MINOR.PATCH". A constant; never NULL.
FST_API const char *fst_version(void);

#ifdef __cplusplus
}
#endif

#endif
