// SPDX-License-Identifier: Apache-2.0
/// Interface of the format module: headers and index files, from bytes to validated tables. Pure:
/// no system calls, no threads. The format: https://huggingface.co/docs/safetensors and
/// docs/FORMAT.md (with the behaviour of the reference implementation, tested case by case).
///
/// Knows: the bytes of headers, indexes, manifests and directories.
/// Does not know: whether a file exists; it makes no system calls.
/// Main types: fsti_header, fsti_index, fsti_manifest.
#ifndef FSTI_FORMAT_H
#define FSTI_FORMAT_H

#include "base/primitives.h"
#include "bundle.h"
#include "delta_text.h"
#include "sums.h"
#include "digest/digest.h"
#include "dtype/dtype_info.h"
#include "fastsafetensors/model.h"
#include "packed.h"

/// A file starts with the header's length: 8 bytes, little-endian.
#define FSTI_FORMAT_LENGTH_BYTES 8u
/// The format's limit for the JSON header.
#define FSTI_FORMAT_HEADER_BYTES_MAX 100000000u
/// Limit of an index, a manifest or a list of digests: ours, for readers and writers.
#define FSTI_FORMAT_TEXT_BYTES_MAX ((uint64_t)1 << 30)
/// Maximum rank of a tensor. The reference has no limit; torch and numpy allow 64.
#define FSTI_FORMAT_RANK_MAX 4096u
/// Maximum of metadata entries, including repeated keys.
#define FSTI_FORMAT_METADATA_MAX ((size_t)1 << 20)
/// A header's tables may take as much memory as its text plus this. Tables of usual headers are
/// smaller than the text; headers of the shortest possible entries, or of many dimensions, are not.
#define FSTI_FORMAT_TABLES_SLACK ((uint64_t)4 << 20)
/// Zero bytes that must follow the JSON text in memory, so that scanning needs no bounds checks.
#define FSTI_FORMAT_PADDING_BYTES 32u

/// A tensor of a header. 40 bytes, so that 250,000 of them stay well below the header's size.
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

/// A parsed and validated header. Immutable and reference-counted.
typedef struct fsti_header {
    fsti_refcount refs;
    char *bytes; ///< the JSON text; names are decoded in place
    size_t byte_count;
    uint64_t data_begin;  ///< file offset of the data section
    uint64_t data_bytes;  ///< size of the data that tensors cover
    fsti_tensor *tensors; ///< in file order, by (begin, end)
    size_t tensor_count;
    uint64_t *shapes;
    size_t shape_count;
    uint32_t *slots; ///< name table: open addressing, tag (8 bits) and index + 1 (24 bits)
    size_t slot_count;
    uint64_t hash_key;
    fsti_metadata_pair *metadata;
    size_t metadata_count;
    bool has_metadata;
    uint64_t table_bytes; ///< memory of all tables above
} fsti_header;

/// Rules for validating a header.
typedef struct fsti_header_rules {
    const char *path;   ///< for messages
    uint64_t file_size; ///< of the whole file
    bool lenient;       ///< accept bytes after the last tensor
    bool cut;           ///< accept a truncated file and keep its complete tensors
    uint64_t hash_key;
} fsti_header_rules;

/// Checks the length field: at least 8 bytes, and N within the limit and the file. `prefix` has
/// min(8, file_size) bytes.
fst_status fsti_header_length(const unsigned char *prefix, const fsti_header_rules *rules,
                              uint64_t *header_bytes, fst_error *error);

/// Parses and validates `byte_count` bytes of JSON followed by FSTI_FORMAT_PADDING_BYTES zero
/// bytes. Takes over `bytes` (from fsti_alloc()), also on failure. *out: one reference.
fst_status fsti_header_parse(char *bytes, size_t byte_count, const fsti_header_rules *rules,
                             fsti_header **out, fst_error *error);

fsti_header *fsti_header_ref(fsti_header *header);
void fsti_header_unref(fsti_header *header);

/// The index of the tensor with that name, or SIZE_MAX.
size_t fsti_header_find(const fsti_header *header, const char *name, size_t name_size);

static inline const char *fsti_header_name(const fsti_header *header, const fsti_tensor *tensor) {
    return header->bytes + tensor->name_at;
}
static inline const uint64_t *fsti_header_shape(const fsti_header *header,
                                                const fsti_tensor *tensor) {
    static const uint64_t none[1]; // for a header whose tensors have no dimensions
    return header->shapes == NULL ? none : header->shapes + tensor->shape_at;
}

/// Padding tensors fill the space between aligned tensors, because the format allows no gaps: U8
/// tensors named FSTI_PADDING_NAME plus a number, in a file whose metadata has the key
/// FSTI_PADDING_KEY.
#define FSTI_PADDING_NAME "__padding__."
#define FSTI_PADDING_KEY "__padding__"

/// Whether a name starts like those of padding tensors.
bool fsti_padding_name(const char *name, size_t name_size);
/// Whether the metadata has the key. Searches all entries.
bool fsti_header_has_key(const fsti_header *header, const char *key);

/// Whether a tensor is a padding tensor, given that the file has the key.
bool fsti_padding_like(const char *name, size_t name_size, fst_dtype dtype, uint32_t rank);
/// The number of padding tensors in a header; 0 without the key. Examines all tensors.
size_t fsti_header_padding_count(const fsti_header *header);
/// Whether a tensor is padding, in a header with the key.
bool fsti_header_is_padding(const fsti_header *header, const fsti_tensor *tensor);

/// The file of each tensor, from *.safetensors.index.json.
typedef struct fsti_index_entry {
    fsti_text name;
    uint32_t file; ///< in index->files
} fsti_index_entry;

typedef struct fsti_index {
    char *bytes;
    fsti_index_entry *entries;
    size_t entry_count;
    fsti_text *files; ///< unique, in order of appearance
    size_t file_count;
} fsti_index;

/// Parses an index file; see fsti_header_parse() for `bytes`. FST_E_PATH_ESCAPES for a file name
/// that fsti_path_stays_inside() refuses.
fst_status fsti_index_parse(char *bytes, size_t byte_count, const char *path, uint64_t hash_key,
                            fsti_index *out, fst_error *error);
void fsti_index_clear(fsti_index *index);

/// Checks a file name that was read from a file. True for a relative path that stays in its folder:
/// not empty, not absolute, no parent component, no NUL byte, and no URL scheme (a name such as
/// "http://host/x" would be opened over the network). Every parser of file names must call this;
/// tests/unit/format/test_file_name_rules.c checks all of them.
bool fsti_path_stays_inside(const char *name, size_t size);
/// Whether a file has the name of a model file, of the index of a sharded model, or either.
bool fsti_name_is_model(const char *name);
bool fsti_name_is_index(const char *name);
bool fsti_name_leads_to_model(const char *name);

// ---- manifests ----

/// A file in a manifest.
typedef struct fsti_manifest_file {
    const char *name; ///< relative to the model's folder; NUL-terminated
    size_t name_size;
    uint64_t size_bytes;
    fsti_file_stamp stamp;
    uint64_t header_bytes; ///< size of the bytes that `header` digests; 0: not a safetensors file
    unsigned char header[FSTI_DIGEST_BYTES_MAX];
    const unsigned char *digests; ///< of its chunks
    const char *tensor_lines;     ///< digests of tensors: complete lines of the text
    size_t tensor_lines_size;
} fsti_manifest_file;

typedef struct fsti_manifest {
    char *bytes; ///< the text; names and digests are decoded in place
    const fsti_digest_kind *kind;
    uint32_t chunk_bytes;
    fsti_manifest_file *files; ///< sorted by name
    size_t file_count;
    size_t sealed_bytes; ///< size of the bytes that `seal` digests
    unsigned char seal[FSTI_DIGEST_BYTES_MAX];
} fsti_manifest;

/// Reads only the first and last line (kind, sealed_bytes, seal), so that the text can be verified
/// before parsing. Nothing needs to be cleared. False if it is not a manifest. See
/// fsti_header_parse() for `bytes`.
bool fsti_manifest_peek(const char *bytes, size_t byte_count, fsti_manifest *out);
/// Parses a manifest; see fsti_header_parse() for `bytes`. FST_E_MANIFEST.
fst_status fsti_manifest_parse(char *bytes, size_t byte_count, const char *path, fsti_manifest *out,
                               fst_error *error);
void fsti_manifest_clear(fsti_manifest *manifest);
/// The entry of a file, or NULL.
const fsti_manifest_file *fsti_manifest_find(const fsti_manifest *manifest, const char *name,
                                             size_t name_size);

// ---- writing ----

/// A tensor of a header to write.
typedef struct fsti_header_entry {
    const char *name;
    size_t name_size;
    fst_dtype dtype;
    uint32_t rank;
    const uint64_t *shape;
    uint64_t begin, end; ///< bytes, relative to the data section
} fsti_header_entry;

/// A header to write, with the entries in `order`.
typedef struct fsti_header_draft {
    const fsti_header_entry *entries;
    const uint32_t *order;
    size_t entry_count;
    const fst_metadata_entry *metadata;
    size_t metadata_count;
    bool has_metadata, metadata_last;
    uint64_t alignment_bytes; ///< of the start of the data section; a multiple of 8
} fsti_header_draft;

/// Writes length field, JSON and padding spaces, byte for byte like the reference writer. *out is
/// from fsti_alloc(). FST_E_HEADER_TOO_LARGE beyond the format's limit.
fst_status fsti_header_write(const fsti_header_draft *draft, char **out, size_t *size_bytes,
                             fst_error *error);

/// Writes the length field: `json_bytes`, little-endian.
void fsti_header_put_length(char *field, uint64_t json_bytes);

/// Lines being written; `bytes` is from fsti_alloc().
typedef struct fsti_lines {
    char *bytes;
    size_t size, capacity;
} fsti_lines;

/// A manifest to write, with `files` sorted by name.
typedef struct fsti_manifest_draft {
    const fsti_digest_kind *kind; ///< ready() was called
    uint32_t chunk_bytes;
    const fsti_manifest_file *files;
    size_t file_count;
} fsti_manifest_draft;
/// Writes a manifest. *out is from fsti_alloc(). FST_E_UNSUPPORTED beyond
/// FSTI_FORMAT_TEXT_BYTES_MAX.
fst_status fsti_manifest_write(const fsti_manifest_draft *draft, char **out, size_t *size_bytes,
                               fst_error *error);
/// Appends the line of a tensor's digest to *out (from fsti_alloc()), in the format of
/// fsti_manifest_file.tensor_lines. False without memory.
bool fsti_manifest_put_tensor(const fsti_digest_kind *kind, const unsigned char *digest,
                              const fsti_header *header, const fsti_tensor *tensor,
                              fsti_lines *out);

/// Writes an index like Hugging Face's libraries: sorted keys, indentation of two, ASCII only.
/// `names` (any UTF-8 without NUL) and `files` have one element per tensor.
typedef struct fsti_index_row {
    const char *name;
    size_t name_size;
    const char *file;
} fsti_index_row;
fst_status fsti_index_write(const fsti_index_row *rows, size_t row_count, uint64_t total_bytes,
                            char **out, size_t *size_bytes, fst_error *error);

/// Whether it is well-formed UTF-8 (no surrogates, no overlong forms, at most U+10FFFF); if not,
/// *fault_at is the first invalid byte.
bool fsti_utf8_valid(const unsigned char *bytes, size_t size, size_t *fault_at);
/// FST_E_ARGUMENT for a file name (of the file at `path`) that is not, which manifests and
/// signatures cannot list.
fst_status fsti_utf8_require_name(const char *name, const char *path, fst_error *error);

#endif
