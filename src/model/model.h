// SPDX-License-Identifier: Apache-2.0
/// The door of the model room: a model's files, and one table of tensors over all of them.
#ifndef FSTI_MODEL_H
#define FSTI_MODEL_H

#include <pthread.h>

#include "digest/digest.h"
#include "format/format.h"
#include "io/io.h"
#include "memory/memory.h"

/// Digests of whole files or of tensors; NULL where there is a manifest.
typedef struct whole_digests whole_digests;

/// What a model is held against: a manifest, and the folder that its names are relative to.
typedef struct model_verification {
    char *path;   ///< of the manifest
    char *source; ///< what is read, with its query; NULL: what `path` tells
    char *folder; ///< with its last slash; "" is the current one
    /// Where there are `whole` digests, no more than how the chunks kept in memory are digested.
    fsti_manifest manifest;
    whole_digests *whole;
    struct model_verification *next; ///< of a model of several paths: what the ones before have
} model_verification;

/// A bundle whose signature is good.
typedef struct signed_bundle {
    fsti_bundle bundle;
    fsti_statement statement;
} signed_bundle;

/// Reads a bundle and verifies its signature with a public key (both are paths). On failure
/// nothing is to be closed: FST_E_SIGNATURE, FST_E_ARGUMENT for what is no key.
fst_status fsti_signed_bundle_open(const char *path, const char *public_key, signed_bundle *out,
                                   fst_error *error);
/// The same with a key that was read already, which may be the private one.
fst_status fsti_signed_bundle_read(const char *path, const fsti_key *key, signed_bundle *out,
                                   fst_error *error);
void fsti_signed_bundle_close(signed_bundle *signed_by);

/// How a model is to be opened.
typedef struct model_wish {
    uint32_t flags;                     ///< FST_OPEN_*
    const char *manifest;               ///< NULL: what FST_OPEN_VERIFY finds, or none
    const char *signature, *public_key; ///< that the manifest is signed by; both or none
} model_wish;

/// Reads the manifest that is wished for at `path`, a model's; *out is NULL where none is.
fst_status fsti_verification_open(const char *path, const model_wish *wish,
                                  model_verification **out, fst_error *error);
/// The same for a further path of the model: what it finds comes before the others in *list, unless
/// that is the manifest that is first already.
fst_status fsti_verification_add(const char *path, const model_wish *wish,
                                 model_verification **list, fst_error *error);
/// What lies at a path, links followed.
typedef enum path_look { PATH_IS_ABSENT, PATH_IS_FILE, PATH_IS_FOLDER, PATH_IS_OTHER } path_look;
/// Looks there. What can't be seen is an error: who passes it over takes the next best thing for
/// what a model is held against, or the folder above for the model's.
fst_status fsti_model_look(const char *path, path_look *out, fst_error *error);
/// A path with more behind it; of an address, before its query. From fsti_alloc, or NULL.
char *fsti_model_join(const char *start, const char *end);
/// A path as it may be told: an address without its query. From fsti_alloc, or NULL.
char *fsti_model_tell(const char *path);
/// The folder that a model's names are relative to, with its last slash; "" is the current one.
/// *out is from fsti_alloc.
fst_status fsti_model_folder(const char *path, char **out, fst_error *error);
/// All of a list.
void fsti_verification_close(model_verification *verification);
/// What the manifest says of a file; FST_E_DIGEST when it does not list it.
fst_status fsti_verification_find(const model_verification *verification, const char *path,
                                  const fsti_manifest_file **out, fst_error *error);
/// The same of a file that is open. Where digests are of whole files, or of tensors, it is read now
/// and held against them: *out is what came of it.
fst_status fsti_verification_list(model_verification *verification, fsti_file *file,
                                  const fsti_manifest_file **out, fst_error *error);
/// Holds the whole bytes of a file against the manifest. NULL accepts everything.
fst_status fsti_verification_check(const model_verification *verification, const char *path,
                                   const char *bytes, uint64_t size_bytes, fst_error *error);

/// One file of a model.
typedef struct model_file {
    fsti_file *file;
    fsti_header *header;
    uint32_t header_reads;
    size_t filler_count;
    fsti_digest_list digests; ///< of its chunks; kind is NULL when the model is not verified
    fsti_buffer *mappings[2]; ///< private views, read-only and writable; made on first use
    /// Of a compressed file, which `file` and `header` show as the original: its directory, which
    /// belongs to `file`, and its own header; else NULL.
    const fsti_packed *packed;
    fsti_header *stored_header;
    uint64_t room_bytes; ///< memory of each thread that reads it, beside its target; 0: none
} model_file;

typedef struct model_entry {
    uint32_t file, tensor;
} model_entry;

struct fst_model {
    fsti_refcount refs;
    model_file *files;
    size_t file_count;
    /// By tensor index; NULL for one file without fillers, where both numbers are the same. Fillers
    /// come last, behind the model's tensors: whoever goes through these does not meet them, and
    /// who asks for one by name finds it.
    model_entry *entries;
    size_t tensor_count;
    size_t entry_count; ///< tensors and fillers
    uint32_t *slots;    ///< names of all entries: index + 1; NULL where `entries` is
    size_t slot_count;
    uint64_t hash_key;
    model_verification *verification; ///< NULL: none
    pthread_mutex_t lock;             ///< for mappings
};

static inline model_entry fsti_model_entry(const fst_model *model, size_t index) {
    return model->entries == NULL ? (model_entry){0, (uint32_t)index} : model->entries[index];
}

fst_model *fsti_model_ref(fst_model *model);

/// Opens a file of the model and reads its header with one or two reads.
fst_status fsti_model_file_open(const fst_model *model, const char *path, uint32_t flags,
                                model_file *out, fst_error *error);
/// The same for a file that is open; it is taken over, also when that fails.
fst_status fsti_model_file_take(const fst_model *model, fsti_file *file, uint32_t flags,
                                model_file *out, fst_error *error);
void fsti_model_file_clear(model_file *file);
/// Whether files are opened together: several, all at addresses.
bool fsti_model_opens_ahead(const char *const *paths, size_t count);
/// Opens them all into model->files, some at a time; the first in order that fails is the error.
fst_status fsti_model_open_ahead(fst_model *model, const char *const *paths, size_t count,
                                 uint32_t flags, fst_error *error);

/// Adds the tensors of all files (or those that `index` maps) to the model's table.
fst_status fsti_model_merge(fst_model *model, const fsti_index *index, fst_error *error);

/// The private mapping of a file, the same one each time. *out: a new reference.
fst_status fsti_model_mapping(fst_model *model, uint32_t file_index, bool writable,
                              fsti_buffer **out, fst_error *error);

/// Which files make up a path: one, a folder's, or an index's.
typedef struct model_paths {
    char **paths;
    size_t count, capacity;
    fsti_index index;
    bool has_index;
    char *index_path; ///< or where an index would be looked for: the folder; NULL: a single file,
                      ///< or objects
    int index_hold;   ///< keeps the index's inode from being used again while the set is opened
} model_paths;
/// *out is to be cleared also after an error. An index is held against `verification` (or NULL).
fst_status fsti_model_paths(const char *path, uint64_t hash_key,
                            const model_verification *verification, model_paths *out,
                            fst_error *error);
void fsti_model_paths_clear(model_paths *paths);

/// FST_E_DIGEST when `verification` (or NULL) lists a file of a folder without an index, or an
/// index, that is not among `paths`, the folder's: a set from which files were taken away is not
/// the one that was listed.
fst_status fsti_verification_check_set(const model_verification *verification,
                                       const model_paths *paths, fst_error *error);
/// FST_E_NOT_FOUND that names the missing ones, where files of a folder without an index are called
/// "..-00001-of-00003.safetensors" and are not three.
fst_status fsti_model_check_shards(const model_paths *paths, const char *folder, fst_error *error);
/// Whether the name is of a set at a store that was saved beside another: only its index leads
/// to it.
bool fsti_model_is_tagged(const char *path);
/// s3://bucket is the folder s3://bucket/.
bool fsti_model_is_bucket(const char *url);
/// A set could not be opened, by `status`: if that is because files are gone that the index names,
/// names all of them.
fst_status fsti_model_name_missing(const model_paths *paths, fst_status status, fst_error *error);
/// Whether a folder still has no index, and the files that were listed.
bool fsti_model_list_same(const char *folder, const model_paths *before);
/// Whether the files are still those at their paths: without an index nothing else tells that a
/// save has replaced some of them while they were opened one after the other.
bool fsti_model_files_same(const fst_model *model);
/// Whether the index that `paths` were made of is still the one at its path (or none still is):
/// else a save has replaced the set meanwhile, and the files that were opened may be of both.
bool fsti_model_paths_same(const model_paths *paths);

/// A whole small file, ended by FSTI_FORMAT_PADDING_BYTES zero bytes.
fst_status fsti_model_read_text(const char *path, char **bytes, size_t *byte_count,
                                fst_error *error);

/// What is looked at of a file that was refused.
#define KIND_READ_BYTES ((size_t)4096)

/// Says what a file is that is no safetensors file, by its first bytes, and what to do about it:
/// words to follow "the file is ". False when they tell nothing. About files whose header was
/// refused; the text may quote bytes of the file.
bool fsti_model_file_kind(const char *bytes, size_t byte_count, uint64_t file_size, char *text,
                          size_t text_size);

/// The same of a file that was refused as an index.
bool fsti_model_index_kind(const char *bytes, size_t byte_count, uint64_t file_size, char *text,
                           size_t text_size);

/// Says what a folder without safetensors files has instead: words to follow a message, or "".
void fsti_model_folder_hint(const char *folder, char *text, size_t text_size);

// ---- the public functions; their arguments have been checked ----

fst_status fsti_model_open(const char *path, const model_wish *wish, fst_model **out,
                           fst_error *error);
/// Takes the source over in any case: it is released when nobody needs it any more.
fst_status fsti_model_open_source(const fst_source *source, const model_wish *wish, fst_model **out,
                                  fst_error *error);
fst_status fsti_model_open_files(const char *const *paths, size_t path_count,
                                 const model_wish *wish, fst_model **out, fst_error *error);
void fsti_model_unref(fst_model *model);
size_t fsti_model_tensor_count(const fst_model *model);
/// With fillers: what indexes are below.
/// A tensor of more dimensions is loaded.
#define FSTI_PART_RANK_MAX 8
/// As fst_part_copy(); the index is in range.
fst_status fsti_part_copy(const fst_model *model, const fst_part *part, int *copied,
                          fst_error *error);
fst_status fsti_model_check(const fst_model *model, fst_error *error);
size_t fsti_model_entry_count(const fst_model *model);
size_t fsti_model_file_count(const fst_model *model);
/// `index` is in range.
void fsti_model_tensor_info(const fst_model *model, size_t index, fst_tensor_info *out);
void fsti_model_file_info(const fst_model *model, size_t index, fst_file_info *out);
/// Leaves *out as it is when the model is not verified.
void fsti_model_verification(const fst_model *model, fst_verification *out);
void fsti_model_metadata(const fst_model *model, size_t file_index, size_t entry_index,
                         fst_metadata_entry *out);
fst_status fsti_model_find(const fst_model *model, const char *name, size_t name_size,
                           size_t *index, fst_error *error);

#endif
