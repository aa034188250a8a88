// SPDX-License-Identifier: Apache-2.0
/// Listing and pruning the disk cache of remote objects (remote.h says what it is).
///
///     fst_cache_pruned pruned = FST_STRUCT_INIT(fst_cache_pruned);
///     if (fst_cache_prune(NULL, 100ull << 30, &pruned, NULL) == FST_OK)
///         printf("%zu objects removed\n", pruned.removed_count);
#ifndef FASTSAFETENSORS_OBJECT_CACHE_H
#define FASTSAFETENSORS_OBJECT_CACHE_H

#include "../base.h"

#ifdef __cplusplus
extern "C" {
#endif

/// An object in the cache.
typedef struct fst_cache_object {
    size_t struct_size;  ///< set by the library
    const char *address; ///< its URL without the query, or ""; valid during the call
    uint64_t size_bytes; ///< of the object
    uint64_t kept_bytes; ///< bytes of the object that are in the cache
    uint64_t disk_bytes; ///< disk space of its files
    int64_t used_s;      ///< when it was last opened, in Unix time
    int is_whole;        ///< 1: completely cached and checked
    int in_use;          ///< 1: a process has it open
} fst_cache_object;

/// Receives one object.
typedef void (*fst_cache_visitor)(void *context, const fst_cache_object *object);

/// Calls `visit` for each object of a cache, the least recently used first, on the calling thread.
/// `cache_dir` as in fst_remote_options; NULL: the configured one, or FST_E_ARGUMENT;
/// FST_E_NOT_FOUND if the folder does not exist.
FST_API FST_NODISCARD fst_status fst_cache_visit(const char *cache_dir, fst_cache_visitor visit,
                                                 void *context, fst_error *error);

/// The result of pruning.
typedef struct fst_cache_pruned {
    size_t struct_size;     ///< sizeof(fst_cache_pruned)
    size_t removed_count;   ///< objects
    uint64_t removed_bytes; ///< on disk
    size_t left_count;
    uint64_t left_bytes;
} fst_cache_pruned;

/// Removes the least recently used objects until the cache takes at most `bytes_max` (0: all), and
/// files that killed processes have left there. Objects in use stay.
FST_API FST_NODISCARD fst_status fst_cache_prune(const char *cache_dir, uint64_t bytes_max,
                                                 fst_cache_pruned *out, fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
