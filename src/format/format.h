// SPDX-License-Identifier: Apache-2.0
/// The door of the format room: headers and index files, from bytes to validated tables.
/// Pure: no system calls, no threads. Format facts: https://huggingface.co/docs/safetensors and
/// docs/FORMAT.md (verdicts of the reference implementation, tried one by one).
#ifndef FSTI_FORMAT_H
#define FSTI_FORMAT_H

#include "base/base.h"
#include "bundle.h"
#include "sums.h"
#include "digest/digest.h"
#include "dtype/dtype.h"
#include "fastsafetensors/model.h"
#include "packed.h"

/// The header's length field comes first: 8 bytes, little-endian.
#define FSTI_FORMAT_LENGTH_BYTES 8u
/// The format's limit for the JSON header.
#define FSTI_FORMAT_HEADER_BYTES_MAX 100000000u
/// Zero bytes that must follow the JSON text in memory, so that scanning needs no bounds checks.
#define FSTI_FORMAT_PADDING_BYTES 32u

/// One tensor of a header. 40 bytes: 250,000 of them stay well below the header's own size.
typedef struct fsti_tensor {
    uint64_t begin, end; ///< bytes, relative to the data section
    uint32_t name_at;    ///< in header->bytes; NUL-terminated there
    uint32_t name_size;
    uint32_t shape_at; ///< in header->shapes
    uint32_t rank;
    uint32_t hash;   ///< upper half of the name's hash
    uint8_t dtype;   ///< fst_dtype
    uint8_t escaped; ///< used while parsing
} fsti_tensor;

/// A span of the header's text, decoded and NUL-terminated.
typedef struct fsti_text {
    uint32_t at, size;
} fsti_text;

typedef struct fsti_metadata_pair {
    fsti_text key, value;
} fsti_metadata_pair;

/// A parsed and validated header. Immutable, shared by reference count.
typedef struct fsti_header {
    fsti_refcount refs;
    char *bytes; ///< the JSON text; names are decoded in place
    size_t byte_count;
    uint64_t data_begin;  ///< bytes of the file before the data section
    uint64_t data_bytes;  ///< bytes of the data section that tensors cover
    fsti_tensor *tensors; ///< in file order: by (begin, end)
    size_t tensor_count;
    uint64_t *shapes;
    size_t shape_count;
    uint32_t *slots; ///< name table: open addressing, tag (8 bits) and index + 1 (24 bits)
    size_t slot_count;
    uint64_t hash_key;
    fsti_metadata_pair *metadata;
    size_t metadata_count;
    bool has_metadata;
    uint64_t table_bytes; ///< memory of all of the above
} fsti_header;

/// How a header is to be judged.
typedef struct fsti_header_rules {
    const char *path;   ///< for messages
    uint64_t file_size; ///< of the whole file
    bool lenient;       ///< bytes after the last tensor are accepted
    bool cut;           ///< a file that ends too early is accepted: tensors that are whole stay
    uint64_t hash_key;
} fsti_header_rules;

/// Checks the length field: at least 8 bytes, N within the limit and inside the file.
/// `prefix` holds min(8, file_size) bytes.
fst_status fsti_header_length(const unsigned char *prefix, const fsti_header_rules *rules,
                              uint64_t *header_bytes, fst_error *error);

/// Parses and validates `byte_count` bytes of JSON, followed by FSTI_FORMAT_PADDING_BYTES zero
/// bytes. Takes `bytes` (from fsti_alloc) over, also on failure. *out: one reference.
fst_status fsti_header_parse(char *bytes, size_t byte_count, const fsti_header_rules *rules,
                             fsti_header **out, fst_error *error);

fsti_header *fsti_header_ref(fsti_header *header);
void fsti_header_unref(fsti_header *header);

/// Index of the tensor of that name, or SIZE_MAX.
size_t fsti_header_find(const fsti_header *header, const char *name, size_t name_size);

static inline const char *fsti_header_name(const fsti_header *header, const fsti_tensor *tensor) {
    return header->bytes + tensor->name_at;
}
static inline const uint64_t *fsti_header_shape(const fsti_header *header,
                                                const fsti_tensor *tensor) {
    return header->shapes + tensor->shape_at;
}

/// Fillers stand between aligned tensors, since the format has no holes: tensors of U8 that are
/// called FSTI_FILLER_NAME and a number, in a file whose metadata has the key FSTI_FILLER_KEY.
#define FSTI_FILLER_NAME "__padding__."
#define FSTI_FILLER_KEY "__padding__"

/// Whether a name begins as fillers' names do.
bool fsti_filler_name(const char *name, size_t name_size);
/// Whether the metadata has the key: all of it is looked through.
bool fsti_header_has_key(const fsti_header *header, const char *key);

/// Whether a tensor is what a filler is, in a file that has the mark.
bool fsti_filler_like(const char *name, size_t name_size, fst_dtype dtype, uint32_t rank);
/// How many tensors of a header are fillers: 0 without the mark. All are looked at.
size_t fsti_header_filler_count(const fsti_header *header);
/// Whether one is, in a header with the mark.
bool fsti_header_is_filler(const fsti_header *header, const fsti_tensor *tensor);

/// Which file holds which tensor, by *.safetensors.index.json.
typedef struct fsti_index_entry {
    fsti_text name;
    uint32_t file; ///< in index->files
} fsti_index_entry;

typedef struct fsti_index {
    char *bytes;
    fsti_index_entry *entries;
    size_t entry_count;
    fsti_text *files; ///< unique, in order of first mention
    size_t file_count;
} fsti_index;

/// Parses an index file; `bytes` as for fsti_header_parse(). A file name that leaves the folder
/// (absolute, or with a ".." component) is FST_E_PATH_ESCAPES.
fst_status fsti_index_parse(char *bytes, size_t byte_count, const char *path, uint64_t hash_key,
                            fsti_index *out, fst_error *error);
void fsti_index_clear(fsti_index *index);

/// True for a relative path without "..", and without a NUL that would hide the rest of it.
bool fsti_path_stays_inside(const char *name, size_t size);

// ---- manifests ----

/// A file of a manifest.
typedef struct fsti_manifest_file {
    const char *name; ///< relative to the model's folder; NUL-terminated
    size_t name_size;
    uint64_t size_bytes;
    fsti_file_stamp stamp;
    uint64_t header_bytes; ///< that `header` is the digest of; 0: no safetensors file
    unsigned char header[FSTI_DIGEST_BYTES_MAX];
    const unsigned char *digests; ///< of its chunks
    const char *tensor_lines;     ///< digests of tensors: whole lines, as they stand in the text
    size_t tensor_lines_size;
} fsti_manifest_file;

typedef struct fsti_manifest {
    char *bytes; ///< the text; names and digests are decoded in place
    const fsti_digest_kind *kind;
    uint32_t chunk_bytes;
    fsti_manifest_file *files; ///< by name, ascending
    size_t file_count;
    size_t sealed_bytes; ///< that `seal` is the digest of
    unsigned char seal[FSTI_DIGEST_BYTES_MAX];
} fsti_manifest;

/// What the first and the last line say (kind, sealed_bytes, seal), so that a text can be held
/// against its seal before it is read. Nothing is to be cleared. False when it is no manifest.
/// `bytes` as for fsti_header_parse().
bool fsti_manifest_peek(const char *bytes, size_t byte_count, fsti_manifest *out);
/// Parses a manifest; `bytes` as for fsti_header_parse(). FST_E_MANIFEST.
fst_status fsti_manifest_parse(char *bytes, size_t byte_count, const char *path, fsti_manifest *out,
                               fst_error *error);
void fsti_manifest_clear(fsti_manifest *manifest);
/// NULL: it does not list the file.
const fsti_manifest_file *fsti_manifest_find(const fsti_manifest *manifest, const char *name,
                                             size_t name_size);

// ---- writing ----

/// One tensor of a header to be written.
typedef struct fsti_header_entry {
    const char *name;
    size_t name_size;
    fst_dtype dtype;
    uint32_t rank;
    const uint64_t *shape;
    uint64_t begin, end; ///< bytes, relative to the data section
} fsti_header_entry;

/// A header to be written: `order` lists entries as they are to come.
typedef struct fsti_header_draft {
    const fsti_header_entry *entries;
    const uint32_t *order;
    size_t entry_count;
    const fst_metadata_entry *metadata;
    size_t metadata_count;
    bool has_metadata, metadata_last;
    uint64_t alignment_bytes; ///< of the data section's begin; a multiple of 8
} fsti_header_draft;

/// Writes length field, JSON and padding spaces, byte for byte as the reference writer does.
/// *out is from fsti_alloc. A header beyond the format's limit is FST_E_HEADER_TOO_LARGE.
fst_status fsti_header_write(const fsti_header_draft *draft, char **out, size_t *size_bytes,
                             fst_error *error);

/// Writes the length field: `json_bytes`, little-endian.
void fsti_header_put_length(char *field, uint64_t json_bytes);

/// Lines under construction; `bytes` is from fsti_alloc.
typedef struct fsti_lines {
    char *bytes;
    size_t size, capacity;
} fsti_lines;

/// A manifest to be written: `files` by name, ascending.
typedef struct fsti_manifest_draft {
    const fsti_digest_kind *kind; ///< ready
    uint32_t chunk_bytes;
    const fsti_manifest_file *files;
    size_t file_count;
} fsti_manifest_draft;
/// *out is from fsti_alloc.
fst_status fsti_manifest_write(const fsti_manifest_draft *draft, char **out, size_t *size_bytes,
                               fst_error *error);
/// The line of a tensor's digest, as fsti_manifest_file.tensor_lines has them. *out grows by it;
/// it is from fsti_alloc. False without memory.
bool fsti_manifest_put_tensor(const fsti_digest_kind *kind, const unsigned char *digest,
                              const fsti_header *header, const fsti_tensor *tensor,
                              fsti_lines *out);

/// An index as Hugging Face's libraries write it: keys sorted, indented by two, ASCII only.
/// `names` (NUL-free JSON text is made of any UTF-8) and `files` belong together, one each tensor.
typedef struct fsti_index_row {
    const char *name;
    size_t name_size;
    const char *file;
} fsti_index_row;
fst_status fsti_index_write(const fsti_index_row *rows, size_t row_count, uint64_t total_bytes,
                            char **out, size_t *size_bytes, fst_error *error);

/// True for well-formed UTF-8 (no surrogates, no overlong forms, at most U+10FFFF); else
/// *fault_at is the first bad byte.
bool fsti_utf8_valid(const unsigned char *bytes, size_t size, size_t *fault_at);

#endif
