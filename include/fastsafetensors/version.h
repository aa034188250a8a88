// SPDX-License-Identifier: Apache-2.0
/// The library's version. The build reads it from here.
///
///     if (fst_version_number() < FST_VERSION_NUMBER)
///         fprintf(stderr, "libfastsafetensors %s is older than its header\n", fst_version());
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

/// Returns the version of the loaded library as "MAJOR.MINOR.PATCH". Never NULL.
FST_API const char *fst_version(void);

/// Returns the version of the loaded library as one number. Compare it with FST_VERSION_NUMBER, the
/// version of the header: the loaded library may be newer.
FST_API uint32_t fst_version_number(void);

#ifdef __cplusplus
}
#endif

#endif
