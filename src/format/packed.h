// SPDX-License-Identifier: Apache-2.0
/// Compressed files: valid safetensors files whose compressed tensors are U8 vectors with reserved
/// names, described by a directory. See docs/FORMAT.md, "Compressed files". Included by format.h.
#ifndef FSTI_FORMAT_PACKED_H
#define FSTI_FORMAT_PACKED_H

#include "codec/codec.h"

struct fsti_header;

/// The directory's entry. A compressed tensor's entry has a dot and the tensor's name appended.
#define FSTI_PACKED_NAME "__packed__"
/// The metadata key that marks the file, with the version as its value.
#define FSTI_PACKED_KEY "fst.packed"
#define FSTI_PACKED_VERSION 1u
#define FSTI_PACKED_MAGIC "FSTPACK1"
#define FSTI_PACKED_HEAD_BYTES 64u
#define FSTI_PACKED_TENSOR_BYTES 32u
#define FSTI_PACKED_CHUNK_BYTES 8u
#define FSTI_PACKED_RAW (1u << 31)
/// Alignment of the directory and of compressed tensors in the data section.
#define FSTI_PACKED_ALIGNMENT 64u
/// A file may not claim an original larger than this times its own size plus FSTI_PACKED_SLACK.
#define FSTI_PACKED_FACTOR_MAX 64u
#define FSTI_PACKED_SLACK ((uint64_t)1 << 20)

typedef struct fsti_packed_chunk {
    uint64_t begin; ///< file offset; ends at the next chunk's begin, or at the tensor's stored_end
    uint32_t crc;
    uint32_t stored_bytes;
    bool is_raw;
} fsti_packed_chunk;

/// A tensor of the original file, by its index there.
typedef struct fsti_packed_tensor {
    bool is_packed;
    uint8_t chunk_log;
    uint64_t stored_begin, stored_end; ///< file offsets
    uint64_t chunk_first, chunk_count; ///< for compressed tensors
} fsti_packed_tensor;

/// A validated directory: the original file's header, and where its bytes are stored.
typedef struct fsti_packed {
    char *bytes;                 ///< the directory
    struct fsti_header *header;  ///< of the original file
    const char *original;        ///< the original header's bytes, including the length field
    uint64_t original_bytes;     ///< their count
    uint64_t true_bytes;         ///< size of the original file
    fsti_packed_tensor *tensors; ///< header->tensor_count of them
    fsti_packed_chunk *chunks;
    uint64_t chunk_count;
    size_t packed_count;   ///< compressed tensors
    uint64_t stored_bytes; ///< size of the compressed file
} fsti_packed;

/// Whether a header belongs to a compressed file, which then has a directory.
bool fsti_packed_is(const struct fsti_header *header);

/// The input for parsing a directory.
typedef struct fsti_packed_source {
    const struct fsti_header *header; ///< of the compressed file
    uint64_t file_size;
    const char *path; ///< for messages
    uint64_t hash_key;
    bool cut; ///< tensors at the end may be missing, which changes the error message
} fsti_packed_source;

/// Validates a directory of `byte_count` bytes, a complete entry from fsti_alloc(), which is taken
/// over, also on failure. FST_E_CORRUPT if it is invalid, FST_E_UNSUPPORTED for unknown features,
/// and errors of the original header. Allocations are bounded by the file's size.
fst_status fsti_packed_parse(char *bytes, size_t byte_count, const fsti_packed_source *source,
                             fsti_packed *out, fst_error *error);
void fsti_packed_clear(fsti_packed *packed);

/// The index of the tensor that contains byte `offset` of the original file, which must be in its
/// data section.
size_t fsti_packed_tensor_at(const fsti_packed *packed, uint64_t offset);
/// Decoded bytes of a chunk; the largest, if tensors differ, of which all others are divisors.
uint64_t fsti_packed_chunk_bytes(const fsti_packed *packed);

// ---- writing ----

/// A chunk in a directory.
typedef struct fsti_packed_mark {
    uint32_t stored; ///< stored bytes, with the flag FSTI_PACKED_RAW
    uint32_t crc;
} fsti_packed_mark;

/// A compressed tensor of a directory to write.
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
    uint64_t entry_bytes; ///< size of the directory's entry: fsti_packed_bytes() or more
} fsti_packed_draft;

/// Size of a directory for a number of tensors, chunks, and bytes of the original header; a
/// multiple of FSTI_PACKED_ALIGNMENT.
uint64_t fsti_packed_bytes(uint64_t tensor_count, uint64_t chunk_count, uint64_t original_bytes);
/// Writes the directory into `target`, which has entry_bytes.
void fsti_packed_put(const fsti_packed_draft *draft, unsigned char *target);

#endif
