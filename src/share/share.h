// SPDX-License-Identifier: Apache-2.0
/// Interface of the share module: segments, which are memory files that the processes of one user
/// fill and map together, so that a node reads the bytes of a model once. Knows chunks and batches
/// by number, not files, tensors or plans.
///
/// A segment lies in a folder of the user on a tmpfs. It holds a header, one byte of state per
/// chunk and per batch, and the batches' bytes. A process claims a chunk by a lock on one byte of
/// the file, writes the chunk through a shared mapping and marks it as done. Locks end with the
/// process, so another process takes over what a killed one has not finished. A chunk that is done
/// never changes, because a process writes only under the lock. Tensors lie in private mappings of
/// the same pages: a store to them reaches no other process.
///
/// Knows: chunks and batches by number, processes, locks.
/// Does not know: files, tensors, plans.
/// Main types: fsti_share, fsti_share_request.
#ifndef FSTI_SHARE_H
#define FSTI_SHARE_H

#include "base/primitives.h"
#include "fastsafetensors/experimental/shared_segments.h"

/// A process's use of one segment. Reference-counted and thread-safe. In a forked child it only
/// keeps the mappings.
typedef struct fsti_share fsti_share;

/// What a segment must contain. Equal requests use the same segment.
typedef struct fsti_share_request {
    const void *key; ///< everything that determines the bytes
    size_t key_bytes;
    const char *label;           ///< for people: the model's path
    const uint64_t *batch_bytes; ///< by batch
    uint32_t batch_count, chunk_count;
    uint32_t grace_s; ///< the segment outlives its last user by this; 0: the environment's number
} fsti_share_request;

/// Opens the segment of a request, or makes it. Also removes segments without users whose
/// grace period is over. Does no more than wait some seconds for other processes that do the same.
/// NULL: *why says why the load has to use its own memory.
fsti_share *fsti_share_open(const fsti_share_request *request, char *why, size_t why_size);
fsti_share *fsti_share_ref(fsti_share *share);
/// The last reference of the last process removes the segment, or starts its grace period.
void fsti_share_unref(fsti_share *share);

/// Reserves the memory of a batch, unless a process did. False with errno: there is no memory in
/// the folder's file system. The caller has checked its own memory limits.
bool fsti_share_reserve(fsti_share *share, uint32_t batch);
/// Whether a batch needs no more memory.
bool fsti_share_is_reserved(const fsti_share *share, uint32_t batch);
/// The shared mapping of a reserved batch, for writing its chunks, until fsti_share_end_writes().
/// NULL with errno on failure.
char *fsti_share_map_shared(fsti_share *share, uint32_t batch);
/// Makes a private mapping of a reserved batch: stores stay in this process. NULL with errno on
/// failure. Free with munmap(2).
char *fsti_share_map_private(const fsti_share *share, uint32_t batch, bool is_writable);
/// Gives up all claims and the shared mapping. Nothing may write any more.
void fsti_share_end_writes(fsti_share *share);

typedef enum fsti_share_step {
    FSTI_SHARE_DONE,    ///< the bytes are there
    FSTI_SHARE_CLAIMED, ///< the caller writes the chunk, then calls fsti_share_finish()
    FSTI_SHARE_TAKEN,   ///< another process or load writes it; try again later
    FSTI_SHARE_STALLED, ///< the same, but no chunk of the segment was finished for some time
} fsti_share_step;
/// Claims a chunk. The owner of a stalled chunk may be stopped, and may still write it later, so
/// the caller has to read the chunk into its own memory.
fsti_share_step fsti_share_claim(fsti_share *share, uint32_t chunk);
/// Marks a chunk as done, after its last byte was written, and ends the claim.
void fsti_share_finish(fsti_share *share, uint32_t chunk);
bool fsti_share_is_done(const fsti_share *share, uint32_t chunk);
/// Whether all chunks are done.
bool fsti_share_is_complete(const fsti_share *share);

// ---- for people (fst_segment_visit() and others); the arguments are checked ----

fst_status fsti_share_visit(const char *folder, fst_segment_visitor visit, void *context,
                            fst_error *error);
fst_status fsti_share_drop(const char *folder, const char *name, fst_segments_dropped *out,
                           fst_error *error);
fst_status fsti_share_pin(const char *folder, const char *name, bool is_pinned, fst_error *error);

/// For tests: the time without progress after which a claim does not count; 0: the default.
void fsti_share_stall_time(uint64_t stall_ns);

#endif
