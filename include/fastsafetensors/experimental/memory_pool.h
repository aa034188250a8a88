// SPDX-License-Identifier: Apache-2.0
/// The pool that keeps memory of released tensors for the next load. There is one per process; all
/// functions may be called from any thread. fst_memory_trim() (base.h) empties it.
///
///     fst_memory_keep(1u << 30);
///     // ... loads whose tensors are released ...
///     fst_memory_trim();
#ifndef FASTSAFETENSORS_MEMORY_POOL_H
#define FASTSAFETENSORS_MEMORY_POOL_H

#include "../base.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Sets how many bytes of released tensor memory are kept for the next load; 0, the default: none.
/// A load into kept memory does not wait for new pages, which is more than half of the time of a
/// load from the page cache. At most 1,024 blocks are kept; small tensors share blocks of up to
/// 64 MiB (256 MiB in verified loads).
FST_API void fst_memory_keep(uint64_t size_bytes);

/// Counts the buffers of tensors that are not released, and their bytes. Either pointer may be
/// NULL.
FST_API void fst_memory_live(size_t *buffer_count, uint64_t *size_bytes);

/// Returns the number of pinned bytes that loads to GPUs use for staging.
FST_API uint64_t fst_memory_pinned(void);

#ifdef __cplusplus
}
#endif

#endif
