// SPDX-License-Identifier: Apache-2.0
/// Compressed files: valid safetensors files whose packed tensors are U8 vectors under reserved
/// names, described by a directory. docs/FORMAT.md, "Compressed files". A part of the format
/// room's door.
#ifndef FSTI_FORMAT_PACKED_H
#define FSTI_FORMAT_PACKED_H

#include "codec/codec.h"

struct fsti_header;

/// The directory's entry; of packed tensors the same with a dot and the tensor's name.
#define FSTI_PACKED_NAME "__packed__"
/// The key of the metadata that marks the file, and the version it has there.
#define FSTI_PACKED_KEY "fst.packed"
#define FSTI_PACKED_VERSION 1u
#define FSTI_PACKED_MAGIC "FSTPACK1"
#define FSTI_PACKED_HEAD_BYTES 64u
#define FSTI_PACKED_TENSOR_BYTES 32u
#define FSTI_PACKED_CHUNK_BYTES 8u
#define FSTI_PACKED_RAW (1u << 31)
/// Entries of the directory and of packed tensors begin at multiples of this in the data section.
#define FSTI_PACKED_ALIGNMENT 64u
/// A file may not claim to hold more than this times its own size and FSTI_PACKED_SLACK.
#define FSTI_PACKED_FACTOR_MAX 64u
#define FSTI_PACKED_SLACK ((uint64_t)1 << 20)

typedef struct fsti_packed_chunk {
    uint64_t begin; ///< in the file; the end is the next one's begin, or the tensor's stored_end
    uint32_t crc;
    uint32_t stored_bytes;
    bool is_raw;
} fsti_packed_chunk;

/// A tensor of the original file, by its number there.
typedef struct fsti_packed_tensor {
    bool is_packed;
    uint8_t chunk_log;
    uint64_t stored_begin, stored_end; ///< bytes of the file
    uint64_t chunk_first, chunk_count; ///< of packed ones
} fsti_packed_tensor;

/// A directory, validated: the original file by its header, and where its bytes are.
typedef struct fsti_packed {
    char *bytes;                 ///< the directory
    struct fsti_header *header;  ///< of the original file
    const char *original;        ///< that header's own bytes, length field included
    uint64_t original_bytes;     ///< their count
    uint64_t true_bytes;         ///< of the whole original file
    fsti_packed_tensor *tensors; ///< header->tensor_count
    fsti_packed_chunk *chunks;
    uint64_t chunk_count;
    size_t packed_count;   ///< tensors that are packed
    uint64_t stored_bytes; ///< of the whole compressed file
} fsti_packed;

/// Whether a header is one of a compressed file, which then has a directory.
bool fsti_packed_is(const struct fsti_header *header);

/// What a directory is read from.
typedef struct fsti_packed_source {
    const struct fsti_header *header; ///< of the compressed file
    uint64_t file_size;
    const char *path; ///< for messages
    uint64_t hash_key;
    bool cut; ///< tensors at the file's end may be missing: then it is refused in other words
} fsti_packed_source;

/// Validates a directory: `byte_count` bytes, the whole entry, from fsti_alloc, and taken over,
/// also on failure. FST_E_CORRUPT for what is wrong, FST_E_UNSUPPORTED for what is not known here;
/// the original header's own errors. Nothing is allocated that the file's size does not warrant.
fst_status fsti_packed_parse(char *bytes, size_t byte_count, const fsti_packed_source *source,
                             fsti_packed *out, fst_error *error);
void fsti_packed_clear(fsti_packed *packed);

/// The number of the tensor that has byte `offset` of the original file, which lies behind its
/// header and before its end.
size_t fsti_packed_tensor_at(const fsti_packed *packed, uint64_t offset);
/// True bytes of a chunk; where tensors differ, of the largest, which others' are parts of.
uint64_t fsti_packed_chunk_bytes(const fsti_packed *packed);

// ---- writing ----

/// A chunk as a directory tells it.
typedef struct fsti_packed_mark {
    uint32_t stored; ///< bytes, and FSTI_PACKED_RAW
    uint32_t crc;
} fsti_packed_mark;

/// A packed tensor of a directory that is being made.
typedef struct fsti_packed_draft_tensor {
    fst_dtype dtype;
    uint8_t chunk_log;
    uint64_t true_bytes, chunk_first;
} fsti_packed_draft_tensor;

typedef struct fsti_packed_draft {
    const fsti_packed_draft_tensor *tensors;
    uint32_t tensor_count;
    const fsti_packed_mark *marks;
    uint64_t mark_count;
    const char *original;
    uint64_t original_bytes, true_bytes;
    uint64_t entry_bytes; ///< of the directory's entry: fsti_packed_bytes() or more
} fsti_packed_draft;

/// Bytes of a directory with so many tensors, chunks, and bytes of the original header; a multiple
/// of FSTI_PACKED_ALIGNMENT.
uint64_t fsti_packed_bytes(uint64_t tensor_count, uint64_t chunk_count, uint64_t original_bytes);
/// Fills `target`, entry_bytes long.
void fsti_packed_put(const fsti_packed_draft *draft, unsigned char *target);

#endif
