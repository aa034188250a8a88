// SPDX-License-Identifier: Apache-2.0
/// Threads that read and encode chunks, which one thread consumes in order. Private to the save
/// module. Memory: four chunks per thread.
#ifndef FSTI_ENCODE_RING_H
#define FSTI_ENCODE_RING_H

#include "codec/codec.h"
#include "io/io.h"

typedef struct encode_ring encode_ring;

/// A tensor whose chunks are encoded.
typedef struct encode_item {
    fst_dtype dtype;
    uint64_t begin, size_bytes; ///< in the file; at least 1 byte
    uint64_t chunk_first;       ///< index among the chunks of all items
    atomic_bool is_refused;     ///< skip its remaining chunks
} encode_item;

/// The job of a ring. It must stay valid until the ring is closed.
typedef struct encode_job {
    fsti_file *file;
    encode_item *items;
    size_t item_count;
    uint64_t chunk_count; ///< of all items
    uint32_t thread_count;
} encode_job;

fst_status fsti_encode_open(const encode_job *job, encode_ring **out, fst_error *error);
/// Returns the next encoded chunk, valid until the next call. For a refused item, any bytes.
fst_status fsti_encode_next(encode_ring *ring, const fsti_chunk **out, fst_error *error);
void fsti_encode_close(encode_ring *ring);

#define ENCODE_CHUNK_BYTES ((uint64_t)1 << FSTI_CHUNK_LOG_DEFAULT)

static inline uint64_t encode_chunks_of(uint64_t size_bytes) {
    return (size_bytes + ENCODE_CHUNK_BYTES - 1) / ENCODE_CHUNK_BYTES;
}

#endif
