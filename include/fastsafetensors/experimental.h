// SPDX-License-Identifier: Apache-2.0
/// Functions that may change or be removed in any release: for measurements, for programs that
/// build their own loaders and savers, and for this project's command and Python package.
/// fastsafetensors.h does not include this header.
///
///     #include <fastsafetensors/experimental.h>
///
///     size_t count;
///     const fst_load_counter *counters = fst_load_counters(&count);
///     for (size_t i = 0; i < count; i++) puts(counters[i].name);
#ifndef FASTSAFETENSORS_EXPERIMENTAL_H
#define FASTSAFETENSORS_EXPERIMENTAL_H

#include "experimental/async_save.h"
#include "experimental/cached_part.h"
#include "experimental/digest_stream.h"
#include "experimental/load_tuning.h"
#include "experimental/memory_pool.h"
#include "experimental/object_cache.h"
#include "experimental/shared_segments.h"
#include "experimental/save_layout.h"
#include "experimental/shared_save.h"
#include "experimental/terminal_text.h"
#include "experimental/weight_delta.h"

#endif
