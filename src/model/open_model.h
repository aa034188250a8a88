// SPDX-License-Identifier: Apache-2.0
/// Interface of the model module: the files of a model, and one table of their tensors.
///
/// Knows: paths, files, headers, the table of tensors.
/// Does not know: memory for tensors, loads.
/// Main types: fst_model, model_file, model_entry.
#ifndef FSTI_OPEN_MODEL_H
#define FSTI_OPEN_MODEL_H

#include <pthread.h>

#include "digest/digest.h"
#include "format/format.h"
#include "io/io.h"
#include "memory/memory.h"

/// Digests of whole files or of tensors; NULL if there is a manifest.
typedef struct file_digests file_digests;

/// What a model is verified against: a manifest, and the folder that its names are relative to.
typedef struct model_verification {
    char *path;   ///< of the manifest, redacted
    char *source; ///< the URL to read, with its query; NULL: `path`
    char *folder; ///< with a final slash; "" is the current folder
    /// With digests of whole files, only says how the chunks kept in memory are digested.
    fsti_manifest manifest;
    file_digests *expected;
    uint64_t device, inode;          ///< of the file `path` before it was read; 0: of a URL
    struct timespec changed;         ///< of the same file: another one may get its inode
    struct model_verification *next; ///< for a model of several paths: the entries of earlier paths
} model_verification;

/// A bundle with a valid signature.
typedef struct signed_bundle {
    fsti_bundle bundle;
    fsti_statement statement;
} signed_bundle;

/// Reads a bundle and verifies its signature with a public key (both are paths). On failure there
/// is nothing to close. FST_E_SIGNATURE; FST_E_ARGUMENT for an invalid key.
fst_status fsti_signed_bundle_open(const char *path, const char *public_key, signed_bundle *out,
                                   fst_error *error);
/// The same with a key that was read before, which may be the private one.
fst_status fsti_signed_bundle_read(const char *path, const fsti_key *key, signed_bundle *out,
                                   fst_error *error);
void fsti_signed_bundle_close(signed_bundle *signed_by);

/// How to open a model.
typedef struct model_request {
    uint32_t flags;                     ///< FST_OPEN_*
    const char *manifest;               ///< NULL: none, or found by FST_OPEN_VERIFY
    const char *signature, *public_key; ///< of the manifest; both or neither
} model_request;

/// Reads the requested manifest of the model at `path`. *out is NULL if none was requested.
fst_status fsti_verification_open(const char *path, const model_request *request,
                                  model_verification **out, fst_error *error);
/// The same for another path of the model. A new manifest is put before the others in *list.
fst_status fsti_verification_add(const char *path, const model_request *request,
                                 model_verification **list, fst_error *error);
/// The kind of a file, after following links.
typedef enum path_kind { PATH_IS_ABSENT, PATH_IS_FILE, PATH_IS_FOLDER, PATH_IS_OTHER } path_kind;
/// Determines the kind. Failure to find out is an error, because treating the file as missing would
/// select a weaker digest source, or the wrong folder.
fst_status fsti_model_path_kind(const char *path, path_kind *out, fst_error *error);
/// Whether something has that path, also a link whose target is missing.
fst_status fsti_model_path_exists(const char *path, bool *out, fst_error *error);
/// Whether a failure to open a path may mean that nothing is there.
bool fsti_model_path_is_absent(const char *path, fst_status status);
/// The folder that a model's names are relative to, with a final slash; "" is the current folder.
/// *out is from fsti_alloc().
fst_status fsti_model_folder(const char *path, char **out, fst_error *error);
/// Closes all entries of the list.
void fsti_verification_close(model_verification *verification);
/// Finds a file in the manifest. FST_E_DIGEST if it is not listed.
fst_status fsti_verification_find(const model_verification *verification, const char *path,
                                  const fsti_manifest_file **out, fst_error *error);
/// The same for an open file. If digests are of whole files or tensors, the file is read and
/// verified now, and *out is the result.
fst_status fsti_verification_list(model_verification *verification, fsti_file *file,
                                  const fsti_manifest_file **out, fst_error *error);
/// Verifies the complete bytes of a file against the manifest. NULL accepts everything.
fst_status fsti_verification_check(const model_verification *verification, const char *path,
                                   const char *bytes, uint64_t size_bytes, fst_error *error);

/// One file of a model.
typedef struct model_file {
    fsti_file *file;
    fsti_header *header;
    uint32_t header_reads;
    size_t padding_count;
    fsti_digest_list digests; ///< of its chunks; kind is NULL without verification
    /// For a compressed file, whose original `file` and `header` show: its directory, which belongs
    /// to `file`, and its own header; else NULL.
    const fsti_packed *packed;
    fsti_header *stored_header;
    uint64_t workspace_bytes; ///< extra memory of each thread that reads it; 0: none
} model_file;

typedef struct model_entry {
    uint32_t file, tensor;
} model_entry;

struct fst_model {
    fsti_refcount refs;
    model_file *files;
    size_t file_count;
    /// By tensor index; NULL for one file without padding tensors, where both numbers are equal.
    /// Padding tensors come last, so that iterating over the model's tensors skips them, while they
    /// can be found by name.
    model_entry *entries;
    size_t tensor_count;
    size_t entry_count; ///< tensors and padding tensors
    uint32_t *slots;    ///< hash table of all names: index + 1; NULL if `entries` is
    size_t slot_count;
    uint64_t hash_key;
    model_verification *verification; ///< NULL: not verified
};

static inline model_entry fsti_model_entry(const fst_model *model, size_t index) {
    return model->entries == NULL ? (model_entry){0, (uint32_t)index} : model->entries[index];
}

fst_model *fsti_model_ref(fst_model *model);

/// Opens a file of the model and reads its header, with one or two reads.
fst_status fsti_model_file_open(const fst_model *model, const char *path, uint32_t flags,
                                model_file *out, fst_error *error);
/// The same for an open file, which is taken over, also on failure.
fst_status fsti_model_file_adopt(const fst_model *model, fsti_file *file, uint32_t flags,
                                 model_file *out, fst_error *error);
void fsti_model_file_clear(model_file *file);
/// Whether files are opened in parallel: several remote ones.
bool fsti_model_opens_parallel(const char *const *paths, size_t count);
/// Opens all files into model->files in parallel. The error of the first failed file, in order.
fst_status fsti_model_open_parallel(fst_model *model, const char *const *paths, size_t count,
                                    uint32_t flags, fst_error *error);

/// Adds the tensors of all files (or those that `index` assigns) to the model's table.
fst_status fsti_model_merge(fst_model *model, const fsti_index *index, fst_error *error);

/// Makes a new private mapping of a whole file. The caller owns the reference.
fst_status fsti_model_map_file(const fst_model *model, uint32_t file_index, bool is_writable,
                               fsti_buffer **out, fst_error *error);
/// Makes a new private, writable mapping of the pages of one tensor; *data: its first byte.
/// FST_E_UNSUPPORTED if very many tensors are mapped separately.
fst_status fsti_model_map_tensor(const fst_model *model, model_entry entry, fsti_buffer **out,
                                 char **data, fst_error *error);

/// The files of a path: a single file, a folder, or the files of an index.
typedef struct model_paths {
    char **paths;
    size_t count, capacity;
    fsti_index index;
    bool has_index;
    char *index_path; ///< or, without an index, the folder; NULL: a single file, or objects
    int index_fd;     ///< keeps the index's inode from being reused while the files are opened
} model_paths;
/// *out must be cleared, also after an error. An index is verified against `verification` (or
/// NULL).
fst_status fsti_model_paths(const char *path, uint64_t hash_key,
                            const model_verification *verification, model_paths *out,
                            fst_error *error);
void fsti_model_paths_clear(model_paths *paths);

/// Whether the manifests are still those that were read. A save removes a manifest before it
/// replaces the first file, so files that were opened before this call are not newer.
bool fsti_verification_same(const model_verification *verification);
/// FST_E_DIGEST if `verification` (or NULL) lists a file of a folder without an index, or an index,
/// that is not among `paths`: files of the verified model are missing.
fst_status fsti_verification_check_set(const model_verification *verification,
                                       const model_paths *paths, fst_error *error);
/// The same for files that an index names, if the list does not cover the index: a .digest file.
fst_status fsti_verification_check_index(const model_verification *verification,
                                         const model_paths *paths, fst_error *error);
/// FST_E_NOT_FOUND with the missing files, if a folder without an index has files named
/// "...-00001-of-00003.safetensors" and not all three. The first one may have the number 0.
fst_status fsti_model_check_shards(const model_paths *paths, const char *folder, fst_error *error);
/// Finds two files of a list whose names show that they are of two saves of one model, because a
/// save that was killed has left files of the previous one: "a-00001-of-00003.safetensors" and
/// "a-00002-of-00008.safetensors", or "a.safetensors". found[0] is NULL without such files.
fst_status fsti_model_find_two_saves(const char *const *paths, size_t count, const char *found[2],
                                     fst_error *error);
/// Whether the name belongs to a sharded model at a store that was saved next to another one. Only
/// its index refers to it.
bool fsti_model_is_tagged(const char *path);
/// Whether an index names files that a save has not given their final names.
bool fsti_model_names_hidden(const model_paths *paths);
/// A sharded model could not be opened. If files of its index are missing, returns an error that
/// names all of them.
fst_status fsti_model_name_missing(const model_paths *paths, fst_status status, fst_error *error);
/// Checks that the files of models that were opened one after the other belong to one save.
/// FST_E_FILE_CHANGED if they may not. *is_unfinished: because a save has not finished, or was
/// killed. own_index: the path of the index that they were opened by, or NULL.
fst_status fsti_models_check_save(const fst_model *const *models, size_t model_count,
                                  const char *own_index, bool *is_unfinished, fst_error *error);
/// *same: whether the index that `paths` came from (or its absence) is unchanged. Otherwise a save
/// has replaced the model meanwhile, and the open files may be mixed. An error: it is unknown.
fst_status fsti_model_paths_same(const model_paths *paths, bool *same, fst_error *error);

/// Reads a small file completely, followed by FSTI_FORMAT_PADDING_BYTES zero bytes.
fst_status fsti_model_read_text(const char *path, char **bytes, size_t *byte_count,
                                fst_error *error);

/// How much of a refused file is examined.
#define KIND_READ_BYTES ((size_t)4096)

/// Describes a file that is not a safetensors file from its first bytes, and what to do about it:
/// text to follow "the file is ". False if they do not identify it. For files whose header was
/// refused; the text may quote bytes of the file.
bool fsti_model_file_kind(const char *bytes, size_t byte_count, uint64_t file_size, char *text,
                          size_t text_size);

/// The same for a file that was refused as an index.
bool fsti_model_index_kind(const char *bytes, size_t byte_count, uint64_t file_size, char *text,
                           size_t text_size);

/// Describes a folder without safetensors files: text to append to a message, or "".
void fsti_model_folder_hint(const char *folder, char *text, size_t text_size);

// ---- the public functions; their arguments have been checked ----

fst_status fsti_model_open(const char *path, const model_request *request, fst_model **out,
                           fst_error *error);
/// Takes over the source in any case; it is released when it is not needed any more.
fst_status fsti_model_open_source(const fst_source *source, const model_request *request,
                                  fst_model **out, fst_error *error);
fst_status fsti_model_open_files(const char *const *paths, size_t path_count,
                                 const model_request *request, fst_model **out, fst_error *error);
void fsti_model_unref(fst_model *model);
size_t fsti_model_tensor_count(const fst_model *model);
/// The number of entries including padding tensors, which limits indexes. Parts of tensors with
/// more dimensions need a load.
#define FSTI_PART_RANK_MAX 8
/// Implements fst_part_copy(); the index is in range.
fst_status fsti_part_copy(const fst_model *model, const fst_part *part, int *copied,
                          fst_error *error);
fst_status fsti_model_check(const fst_model *model, fst_error *error);
size_t fsti_model_entry_count(const fst_model *model);
size_t fsti_model_file_count(const fst_model *model);
/// `index` must be in range.
void fsti_model_tensor_info(const fst_model *model, size_t index, fst_tensor_info *out);
void fsti_model_file_info(const fst_model *model, size_t index, fst_file_info *out);
/// Leaves *out unchanged if the model is not verified.
void fsti_model_verification(const fst_model *model, fst_verification *out);
void fsti_model_metadata(const fst_model *model, size_t file_index, size_t entry_index,
                         fst_metadata_entry *out);
fst_status fsti_model_find(const fst_model *model, const char *name, size_t name_size,
                           size_t *index, fst_error *error);

#endif
