// SPDX-License-Identifier: Apache-2.0
/// The library's version: the single source, read by the build as well.
#ifndef FASTSAFETENSORS_VERSION_H
#define FASTSAFETENSORS_VERSION_H

#include "base.h"

#define FST_VERSION_MAJOR 1
#define FST_VERSION_MINOR 0
#define FST_VERSION_PATCH 0
/// The header's version as one number: 1.2.3 is 10203.
#define FST_VERSION_NUMBER (FST_VERSION_MAJOR * 10000 + FST_VERSION_MINOR * 100 + FST_VERSION_PATCH)

#ifdef __cplusplus
extern "C" {
#endif

/// The version of the library that runs, as "MAJOR.MINOR.PATCH". A constant; never NULL.
FST_API const char *fst_version(void);

/// The same as one number, to be compared with FST_VERSION_NUMBER of the header that a program was
/// compiled against: the library that runs may be newer.
FST_API uint32_t fst_version_number(void);

#ifdef __cplusplus
}
#endif

#endif
