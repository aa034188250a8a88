// SPDX-License-Identifier: Apache-2.0
/// Opening a model and listing its tensors. No tensor data is read here.
///
///     fst_model *model;
///     if (fst_model_open("model.safetensors", NULL, &model, NULL) != FST_OK) return 1;
///     for (size_t i = 0; i < fst_model_tensor_count(model); i++) {
///         fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
///         if (fst_model_tensor_info(model, i, &info, NULL) != FST_OK) return 1;
///         printf("%s %s\n", info.name, fst_dtype_name(info.dtype));
///     }
///     fst_model_close(model);
#ifndef FASTSAFETENSORS_MODEL_H
#define FASTSAFETENSORS_MODEL_H

#include "base.h"
#include "dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/// An open model: one or more files as one set of tensors with unique names. Tensors are numbered
/// from 0, file by file, in the order of their bytes. An open model never changes, so any number of
/// threads may use it at once. Closing it does not invalidate its loaders and tensors, which keep
/// what they need.
/// Padding tensors (fst_save_options.alignment_bytes) are not counted, loaded or listed.
/// fst_model_find() finds one by its full name; its index is fst_model_tensor_count() or above and
/// can be used like any other.
typedef struct fst_model fst_model;

/// Accept bytes after the data of the last tensor, which some writers leave there. All other rules
/// of the format still apply.
#define FST_OPEN_LENIENT 1u

/// Accept a truncated file, such as an interrupted download: the model has only the tensors whose
/// bytes are all in the file. FST_E_UNSUPPORTED for compressed files.
#define FST_OPEN_CUT 2u

/// Verify all bytes that are loaded against the digests next to the model: FILE.manifest, or
/// model.manifest in its folder, or digests of whole files or tensors (fst_verified_by in
/// verify.h). FST_E_NOT_FOUND without digests.
#define FST_OPEN_VERIFY 4u

/// Show the stored form of compressed files (docs/FORMAT.md): U8 tensors with reserved names.
/// Without this flag the model has the original tensors, and loads decompress them.
#define FST_OPEN_STORED 8u

/// The program reads parts of the model, for example one rank's share: reads of up to 1 MiB bring
/// only their own pages into the page cache. Without this flag the kernel reads around them as much
/// as the device's readahead allows, often several MiB. No effect on network file systems and URLs.
#define FST_OPEN_PARTS 16u

/// Options for opening a model.
typedef struct fst_open_options {
    size_t struct_size; ///< sizeof(fst_open_options)
    uint32_t flags;     ///< FST_OPEN_* or 0
    /// Path of a manifest (verify.h) to verify the model against; NULL: none, or the one that
    /// FST_OPEN_VERIFY finds. A file that it does not list, or that has another size or header, is
    /// FST_E_DIGEST before its header is parsed.
    const char *manifest;
    /// Paths of an OpenSSF model-signing bundle (verify.h) that lists the manifest, and of the PEM
    /// public key of its signature. Both or none, and only with a manifest. FST_E_SIGNATURE if the
    /// signature does not match, or if the manifest's digest is XXH3, which does not protect
    /// against forgery.
    const char *signature;
    const char *public_key;
} fst_open_options;

/// Opens a model. `path` is a .safetensors file, an index (*.safetensors.index.json), a folder (its
/// only index, or else all its *.safetensors files sorted by name), or a URL (remote.h). With an
/// index, the weight_map decides which tensors the model has and which file holds each.
/// Reads and validates headers; reads no tensor data. `options` may be NULL.
/// On success *out is an open model, to be closed with fst_model_close(); on failure it is NULL.
/// Errors: those of the format (FST_E_HEADER_* and so on), FST_E_NOT_FOUND, FST_E_PERMISSION,
/// FST_E_NOT_REGULAR, FST_E_NO_TENSORS, FST_E_PATH_ESCAPES, FST_E_DUPLICATE_TENSOR, FST_E_IO, ...
FST_API FST_NODISCARD fst_status fst_model_open(const char *path, const fst_open_options *options,
                                                fst_model **out, fst_error *error);

/// Opens `path_count` files, at least one, as one model, in the order given. A tensor name in two
/// files is FST_E_DUPLICATE_TENSOR. With FST_OPEN_VERIFY each file has its own manifest; manifests
/// with different chunk sizes are FST_E_UNSUPPORTED.
/// If a save replaces local files of the set meanwhile, they are opened again until all belong to
/// one save; FST_E_FILE_CHANGED if the save is not finished after about two seconds.
FST_API FST_NODISCARD fst_status fst_model_open_files(const char *const *paths, size_t path_count,
                                                      const fst_open_options *options,
                                                      fst_model **out, fst_error *error);

/// Reads up to `size_bytes` bytes at `offset` of a source into `target`. Returns the number of
/// bytes (if it is smaller, the library calls again for the rest), 0 at the end, or -errno. Called
/// from any thread, several at once.
typedef int64_t (*fst_read_callback)(void *context, void *target, size_t size_bytes,
                                     uint64_t offset);

/// A safetensors file without a path. Set exactly one of `data`, `read` and, if both are NULL,
/// `descriptor`.
typedef struct fst_source {
    size_t struct_size; ///< sizeof(fst_source)
    const char *name;   ///< for messages and fst_file_info.path; NULL: "(memory)" or similar
    const void *data;   ///< the whole file; must not change or be freed before `release`
    fst_read_callback read;
    /// An open regular file, used if `data` and `read` are NULL: in a zeroed struct, descriptor 0.
    /// Its position is neither used nor moved. It stays the caller's and may
    /// be closed after the call.
    int descriptor;
    uint64_t size_bytes; ///< of `data`, or of what `read` returns; not used for a descriptor
    void *context;       ///< passed to `read` and `release`
    /// Called once, from any thread, when the source is no longer needed: after the last model and
    /// load that use it, or before the call returns if opening fails. Not called if `source` is
    /// NULL or its struct_size is wrong. May be NULL. Loaded tensors do not need the source.
    void (*release)(void *context);
} fst_source;

/// Opens a model from memory, from a function, or from a file descriptor. Tensors are copies, and
/// FST_MODE_MAP is FST_E_IO for memory and functions.
FST_API FST_NODISCARD fst_status fst_model_open_source(const fst_source *source,
                                                       const fst_open_options *options,
                                                       fst_model **out, fst_error *error);

/// Closes a model. NULL is allowed.
FST_API void fst_model_close(fst_model *model);

/// Returns the number of tensors; 0 for NULL.
FST_API size_t fst_model_tensor_count(const fst_model *model);

/// Returns the number of files; 0 for NULL.
FST_API size_t fst_model_file_count(const fst_model *model);

/// A tensor as its file's header describes it. The pointers belong to the model.
typedef struct fst_tensor_info {
    size_t struct_size; ///< sizeof(fst_tensor_info)
    const char *name;   ///< UTF-8, NUL-terminated; may contain NUL bytes, see name_size
    size_t name_size;   ///< bytes, without the terminating NUL
    fst_dtype dtype;
    uint32_t rank;         ///< number of dimensions; 0: a scalar
    const uint64_t *shape; ///< `rank` element counts; never NULL
    uint64_t element_count;
    uint64_t size_bytes;
    uint32_t file_index;   ///< the file that holds it
    uint64_t file_offset;  ///< of its first byte in the file (compressed: in the original file)
    uint64_t stored_bytes; ///< its bytes in the file; differs from size_bytes if compressed
} fst_tensor_info;

/// Describes tensor `index`. FST_E_ARGUMENT if it is out of range.
FST_API FST_NODISCARD fst_status fst_model_tensor_info(const fst_model *model, size_t index,
                                                       fst_tensor_info *out, fst_error *error);

/// Finds the index of a tensor by name. `name_size` is in bytes; SIZE_MAX: NUL-terminated.
/// FST_E_TENSOR_NOT_FOUND if no tensor has that name.
FST_API FST_NODISCARD fst_status fst_model_find(const fst_model *model, const char *name,
                                                size_t name_size, size_t *index, fst_error *error);

/// A file of a model. The pointers belong to the model.
typedef struct fst_file_info {
    size_t struct_size;      ///< sizeof(fst_file_info)
    const char *path;        ///< the path or URL that was opened
    uint64_t size_bytes;     ///< of the file; of a compressed one: of the original
    uint64_t header_bytes;   ///< bytes before the first byte of tensor data
    size_t tensor_count;     ///< in its header, padding tensors included
    size_t metadata_count;   ///< entries of __metadata__
    int has_metadata;        ///< 1 if there is a __metadata__ object, even an empty one
    uint32_t header_reads;   ///< read calls that the header took
    uint64_t table_bytes;    ///< memory of the parsed header
    size_t padding_count;    ///< padding tensors
    uint64_t stored_bytes;   ///< of the file on disk; differs from size_bytes if compressed
    size_t compressed_count; ///< compressed tensors
} fst_file_info;

/// Describes file `index`. FST_E_ARGUMENT if it is out of range.
FST_API FST_NODISCARD fst_status fst_model_file_info(const fst_model *model, size_t index,
                                                     fst_file_info *out, fst_error *error);

/// A key and a value of __metadata__. This struct never changes. Read from a model, the strings
/// belong to the model and are NUL-terminated.
typedef struct fst_metadata_entry {
    const char *key;
    size_t key_size;
    const char *value;
    size_t value_size;
} fst_metadata_entry;

/// Reads entry `entry_index` of the __metadata__ of file `file_index`, in the order of the file.
FST_API FST_NODISCARD fst_status fst_model_metadata(const fst_model *model, size_t file_index,
                                                    size_t entry_index, fst_metadata_entry *out,
                                                    fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
