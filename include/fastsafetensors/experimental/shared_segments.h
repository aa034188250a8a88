// SPDX-License-Identifier: Apache-2.0
/// Listing, pinning and dropping the shared memory of loads with FST_SHARE_NODE (loader.h).
///
/// A segment is a file in a folder of the user: FASTSAFETENSORS_SHARE_DIR, or
/// /dev/shm/fastsafetensors-UID. `folder` of the functions is another folder, or NULL for this one.
/// All functions may be called from any thread.
///
///     fst_segments_dropped dropped = FST_STRUCT_INIT(fst_segments_dropped);
///     if (fst_segment_drop(NULL, NULL, &dropped, NULL) == FST_OK)
///         printf("%zu segments dropped\n", dropped.count);
#ifndef FASTSAFETENSORS_SHARED_SEGMENTS_H
#define FASTSAFETENSORS_SHARED_SEGMENTS_H

#include "../base.h"

#ifdef __cplusplus
extern "C" {
#endif

/// A segment: the tensors of one request for one version of the files.
typedef struct fst_segment {
    size_t struct_size;    ///< set by the library
    const char *name;      ///< 32 digits; valid during the call
    const char *label;     ///< the path of the model's first file; valid during the call
    uint64_t size_bytes;   ///< of the tensors
    uint64_t memory_bytes; ///< memory that it takes now
    uint64_t grace_s;      ///< seconds that it is kept after its last process has ended
    int64_t used_s;        ///< when a process last opened or closed it, in Unix time
    int is_complete;       ///< 1: all tensors are loaded
    int is_pinned;         ///< 1: kept without users, even after the grace period
    int in_use;            ///< 1: a process uses it
} fst_segment;

/// Receives one segment.
typedef void (*fst_segment_visitor)(void *context, const fst_segment *segment);

/// Calls `visit` for each segment, the least recently used first, on the calling thread. A missing
/// folder has no segments. FST_E_PERMISSION if the folder is not the user's alone.
FST_API FST_NODISCARD fst_status fst_segment_visit(const char *folder, fst_segment_visitor visit,
                                                   void *context, fst_error *error);

/// The result of dropping segments.
typedef struct fst_segments_dropped {
    size_t struct_size; ///< sizeof(fst_segments_dropped)
    size_t count;
    uint64_t memory_bytes; ///< their memory, which is free when no process uses it any more
} fst_segments_dropped;

/// Drops the segments whose name begins with `name` (NULL: all), pinned ones too: later loads do
/// not find them. Processes that use them keep their tensors. FST_E_NOT_FOUND if `name` matches
/// none.
FST_API FST_NODISCARD fst_status fst_segment_drop(const char *folder, const char *name,
                                                  fst_segments_dropped *out, fst_error *error);

/// Pins (`is_pinned` 1) the segment whose name begins with `name`, or unpins it (0). A pinned
/// segment takes memory until it is dropped or the machine restarts. FST_E_NOT_FOUND if no segment
/// matches, FST_E_ARGUMENT if several do.
FST_API FST_NODISCARD fst_status fst_segment_pin(const char *folder, const char *name,
                                                 int is_pinned, fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
