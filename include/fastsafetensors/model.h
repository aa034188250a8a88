// SPDX-License-Identifier: Apache-2.0
/// Opening a model and describing its tensors; no tensor data is moved here.
#ifndef FASTSAFETENSORS_MODEL_H
#define FASTSAFETENSORS_MODEL_H

#include "base.h"
#include "dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/// An opened model: one or more files seen as one set of tensors with unique names, numbered from
/// 0 in file order (files in their order, tensors of a file by their place in it).
/// Fillers, which stand between aligned tensors (fst_save_options.alignment_bytes), are none of its
/// tensors: they are not counted, loaded or listed. fst_model_find() finds one by its whole name;
/// its index is beyond fst_model_tensor_count() and serves like any other. Immutable once opened:
/// any number of threads may use one at once. Loaders and tensors keep what they need of it, so
/// closing it never invalidates them.
typedef struct fst_model fst_model;

/// Accept bytes after the last tensor's data (padding that some writers leave). Nothing else of
/// the strict rules is relaxed.
#define FST_OPEN_LENIENT 1u

/// Accept a file that ends before its data does, as an interrupted download: the model has the
/// tensors whose bytes are all there, and no others. Not of compressed files: FST_E_UNSUPPORTED.
#define FST_OPEN_CUT 2u

/// Hold all bytes that are loaded against the digests that lie beside the model: a file's in
/// FILE.manifest, else in model.manifest of its folder; else by what says something of whole files
/// or tensors (fst_verified_by in verify.h). FST_E_NOT_FOUND where there is nothing.
#define FST_OPEN_VERIFY 4u

/// Show compressed files (docs/FORMAT.md) as they are stored: U8 vectors of reserved names. Without
/// it they are shown as the file that they were made from, and loads decode.
#define FST_OPEN_STORED 8u

typedef struct fst_open_options {
    size_t struct_size; ///< sizeof(fst_open_options)
    uint32_t flags;     ///< FST_OPEN_* or 0
    /// The path of a manifest (verify.h) to hold the model against; NULL: none, or what
    /// FST_OPEN_VERIFY finds. Files are looked up by their path in the model's folder; one that is
    /// not listed, of another size, or with another header is FST_E_DIGEST, before its header is
    /// parsed. Names of tensors, shapes and metadata are then the manifest's, too.
    const char *manifest;
    /// Paths of an OpenSSF model-signing bundle (verify.h) that lists the manifest, and of the
    /// public key (PEM) that it must be signed with: FST_E_SIGNATURE where it is not, or where the
    /// manifest's digests secure nothing (XXH3). Both or none, and with a manifest.
    const char *signature;
    const char *public_key;
} fst_open_options;

/// What is known of a tensor from the header. The pointers belong to the model.
typedef struct fst_tensor_info {
    const char *name; ///< UTF-8, NUL-terminated; it may hold NULs of its own: use name_size
    size_t name_size; ///< bytes, without the terminating NUL
    fst_dtype dtype;
    uint32_t rank;         ///< number of dimensions; 0 is a scalar
    const uint64_t *shape; ///< rank numbers, elements; not NULL
    uint64_t element_count;
    uint64_t size_bytes;
    uint32_t file_index;   ///< which file holds it
    uint64_t file_offset;  ///< where its bytes begin, counted from the first byte of the file; of a
                           ///< compressed file: of the one that it was made from
    uint64_t stored_bytes; ///< that it takes in the file: other than size_bytes where compressed
    uint64_t reserved[3];
} fst_tensor_info;

typedef struct fst_file_info {
    const char *path;        ///< as it was opened; belongs to the model
    uint64_t size_bytes;     ///< of the whole file; of a compressed one: when it is decompressed
    uint64_t header_bytes;   ///< bytes before the first byte of tensor data
    size_t tensor_count;     ///< in the file's header
    size_t metadata_count;   ///< entries of __metadata__
    int has_metadata;        ///< 1 when the file has a __metadata__ object, even an empty one
    uint32_t header_reads;   ///< read calls that the header took
    uint64_t table_bytes;    ///< memory of the parsed header, the header's own bytes included
    size_t filler_count;     ///< of its tensors, those that only fill alignment
    uint64_t stored_bytes;   ///< of the whole file as it lies there: other than size_bytes where
                             ///< compressed
    size_t compressed_count; ///< of its tensors, those that are compressed
    uint64_t reserved[3];
} fst_file_info;

/// Opens a model: `path` is a .safetensors file, an index (*.safetensors.index.json), or a folder
/// (its only index, else all its *.safetensors files sorted by name).
/// With an index, the weight_map decides which tensors the model has and which file holds each.
/// Headers are read and validated, data is not touched. `options` may be NULL.
/// On success *out is the caller's, to be closed with fst_model_close(); on failure it is NULL.
/// Errors: the format's (FST_E_HEADER_* and so on), FST_E_NOT_FOUND, FST_E_PERMISSION,
/// FST_E_NOT_REGULAR, FST_E_NO_TENSORS, FST_E_PATH_ESCAPES, FST_E_DUPLICATE_TENSOR, FST_E_IO, ...
FST_API FST_NODISCARD fst_status fst_model_open(const char *path, const fst_open_options *options,
                                                fst_model **out, fst_error *error);

/// Opens `path_count` files as one model, in the order given. A tensor name in two files is an
/// error, and so is no path at all. With FST_OPEN_VERIFY each finds a manifest of its own; chunks
/// of different sizes are FST_E_UNSUPPORTED.
FST_API FST_NODISCARD fst_status fst_model_open_files(const char *const *paths, size_t path_count,
                                                      const fst_open_options *options,
                                                      fst_model **out, fst_error *error);

/// Gives bytes [offset, offset + size_bytes) of a source: how many (fewer are asked for again), 0
/// at its end, or -errno. From any thread, several at once.
typedef int64_t (*fst_read_callback)(void *context, void *target, size_t size_bytes,
                                     uint64_t offset);

/// A safetensors file that has no path. It begins with the length field, like a file. Exactly one
/// of: `data`; `read`; else `descriptor`.
typedef struct fst_source {
    size_t struct_size; ///< sizeof(fst_source)
    const char *name;   ///< for messages and fst_file_info.path; NULL: "(memory)" and the like
    const void *data;   ///< its bytes, which must neither change nor go before `release`
    fst_read_callback read;
    /// An open regular file, whose position is neither used nor moved. It stays the caller's and
    /// may be closed after the call.
    int descriptor;
    uint64_t size_bytes; ///< of `data`, or of what `read` gives; not used for descriptors
    void *context;       ///< of both functions
    /// Called once, from any thread, when nobody needs the source any more: after the last model
    /// and load of it (tensors are copies), or, when opening fails, before that returns. Not called
    /// when `source` is NULL or its struct_size is wrong. NULL: nobody is told.
    void (*release)(void *context);
} fst_source;

/// Opens a model from bytes that the program has. Memory is copied from, never changed or mapped;
/// tensors of it, and of what a function gives, are owned (FST_MODE_MAP is FST_E_IO for them).
FST_API FST_NODISCARD fst_status fst_model_open_source(const fst_source *source,
                                                       const fst_open_options *options,
                                                       fst_model **out, fst_error *error);

/// Drops the caller's hold on a model. NULL is allowed.
FST_API void fst_model_close(fst_model *model);

/// Numbers of tensors and files; 0 for NULL.
FST_API size_t fst_model_tensor_count(const fst_model *model);
FST_API size_t fst_model_file_count(const fst_model *model);

/// Describes tensor `index`. FST_E_ARGUMENT when out of range.
FST_API FST_NODISCARD fst_status fst_model_tensor_info(const fst_model *model, size_t index,
                                                       fst_tensor_info *out, fst_error *error);

/// Finds a tensor by name (`name_size` bytes; SIZE_MAX means NUL-terminated).
/// FST_E_TENSOR_NOT_FOUND when there is none.
FST_API FST_NODISCARD fst_status fst_model_find(const fst_model *model, const char *name,
                                                size_t name_size, size_t *index, fst_error *error);

/// A part of a tensor, and where it is to go.
typedef struct fst_part {
    size_t struct_size;          ///< sizeof(fst_part)
    size_t index;                ///< the tensor
    const uint64_t *begin, *end; ///< first element and the one behind the last, by dimension
    void *target;                ///< the part in C order, packed
    uint64_t target_bytes;       ///< its size: the part's
} fst_part;

/// The most bytes that lie between the first and the last byte of what fst_part_copy() copies.
#define FST_PART_BYTES_MAX 262144

/// Copies a small part of a tensor on the calling thread, for less than a load costs, where nothing
/// is to be waited for. *copied is 0, and the target untouched, where that is not so (the page
/// cache does not have it, or does not tell), where the part is spread over more than
/// FST_PART_BYTES_MAX, where its elements are no whole bytes, and where the model is held against a
/// manifest: load it then. FST_E_ARGUMENT for a part beyond the shape, or a target of another size.
FST_API FST_NODISCARD fst_status fst_part_copy(const fst_model *model, const fst_part *part,
                                               int *copied, fst_error *error);

/// Whether the files are still the ones that were opened, by size and time of the last change (who
/// writes to a file and puts its time back is not noticed: a manifest notices that):
/// FST_E_FILE_CHANGED names one that is not. For who has taken views, when he is done with them.
FST_API FST_NODISCARD fst_status fst_model_check(const fst_model *model, fst_error *error);

/// Describes file `index`.
FST_API FST_NODISCARD fst_status fst_model_file_info(const fst_model *model, size_t index,
                                                     fst_file_info *out, fst_error *error);

/// One entry of a text map. The pointers belong to the model; NUL-terminated.
typedef struct fst_metadata_entry {
    const char *key;
    size_t key_size;
    const char *value;
    size_t value_size;
    uintptr_t reserved[2]; ///< 0
} fst_metadata_entry;

/// Entry `entry_index` of the __metadata__ of file `file_index`, in the order of the file.
FST_API FST_NODISCARD fst_status fst_model_metadata(const fst_model *model, size_t file_index,
                                                    size_t entry_index, fst_metadata_entry *out,
                                                    fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
