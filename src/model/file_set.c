// SPDX-License-Identifier: Apache-2.0
/// A model: its files, and one table of tensors over all of them.
#include <string.h>
#include <time.h>

#include "open_model.h"

/// A model that is replaced while it is opened is opened again this often. Saves take much longer.
#define OPEN_TRIES_MAX 20
/// Files of a list are reopened this often, for at least two seconds, while a save of them is
/// published.
#define LIST_TRIES_MAX 40u
/// Attempts for files that do not match their manifest, before they count as damaged.
#define DIGEST_TRIES_MAX 3u
#define LIST_PAUSE_NS_MAX ((long)64 * 1000000)

fst_model *fsti_model_ref(fst_model *model) {
    fsti_refcount_ref(&model->refs);
    return model;
}

void fsti_model_unref(fst_model *model) {
    if (model == NULL || !fsti_refcount_unref(&model->refs)) return;
    for (size_t i = 0; i < model->file_count; i++) fsti_model_file_clear(&model->files[i]);
    fsti_free(model->files);
    fsti_free(model->entries);
    fsti_free(model->slots);
    fsti_verification_close(model->verification);
    fsti_free(model);
}

static fst_model *make_model(size_t file_count, fst_error *error) {
    fst_model *model = fsti_alloc_zeroed(1, sizeof *model);
    if (model == NULL) {
        fsti_error_memory(error, sizeof *model);
        return NULL;
    }
    fsti_refcount_init(&model->refs);
    model->hash_key = fsti_hash_key();
    model->files = fsti_alloc_zeroed(file_count, sizeof *model->files);
    if (model->files != NULL) return model;
    fsti_error_memory(error, file_count * sizeof *model->files);
    fsti_model_unref(model);
    return NULL;
}

/// The files of a model and their verification, which the model takes over.
typedef struct file_list {
    const char *const *paths;
    size_t count;
    const fsti_index *index; ///< NULL: no index
    model_verification *verification;
    const model_request *each; ///< NULL, or how to find a manifest for each path separately
    const char *own_index;     ///< NULL, or the path of the index that lists the files
    bool is_of_two_saves;      ///< result: open the files again,
    bool is_unfinished;        ///< after a pause, because a save has not finished
} file_list;

/// Returns a model whose files are open, unless something failed.
static fst_status finish_model(fst_model *model, fst_status status, file_list *files,
                               fst_model **out, fst_error *error) {
    // Before the names of the tensors are compared, because two saves have the same ones.
    if (status == FST_OK) {
        status = fsti_models_check_save((const fst_model *const *)&model, 1, files->own_index,
                                        &files->is_unfinished, error);
        files->is_of_two_saves = status == FST_E_FILE_CHANGED;
    }
    if (status == FST_OK) status = fsti_model_merge(model, files->index, error);
    if (status != FST_OK) {
        fsti_model_unref(model);
        return status;
    }
    *out = model;
    return FST_OK;
}

static fst_status open_files(file_list *files, uint32_t flags, fst_model **out, fst_error *error) {
    fst_model *model = make_model(files->count, error);
    fst_status status = model == NULL ? FST_E_NO_MEMORY : FST_OK;
    if (model == NULL)
        fsti_verification_close(files->verification);
    else
        model->verification = files->verification;
    // Not with digests of whole files, because scans of them run one after the other.
    bool is_ahead = status == FST_OK && files->each == NULL && model->verification == NULL &&
                    fsti_model_opens_parallel(files->paths, files->count);
    if (is_ahead)
        status = fsti_model_open_parallel(model, files->paths, files->count, flags, error);
    for (size_t i = 0; !is_ahead && i < files->count && status == FST_OK; i++) {
        if (files->each != NULL)
            status =
                fsti_verification_add(files->paths[i], files->each, &model->verification, error);
        if (status != FST_OK) break;
        status = fsti_model_file_open(model, files->paths[i], flags, &model->files[i], error);
        if (status == FST_OK) model->file_count++;
    }
    return model == NULL ? status : finish_model(model, status, files, out, error);
}

fst_status fsti_model_open_source(const fst_source *source, const model_request *request,
                                  fst_model **out, fst_error *error) {
    fsti_file *file;
    FST_TRY(fsti_file_open_source(source, &file, error));
    fst_model *model = make_model(1, error);
    if (model == NULL) {
        fsti_file_unref(file);
        return FST_E_NO_MEMORY;
    }
    fst_status status =
        fsti_verification_open(fsti_file_path(file), request, &model->verification, error);
    if (status == FST_OK)
        status = fsti_model_file_adopt(model, file, request->flags, &model->files[0], error);
    else
        fsti_file_unref(file);
    if (status == FST_OK) model->file_count = 1;
    return finish_model(model, status, &(file_list){.count = 1}, out, error);
}

/// Waits for a save that is being published.
static void wait_for_save(unsigned tries) {
    long pause_ns = tries < 6 ? 1000000L << tries : LIST_PAUSE_NS_MAX;
    if (!fsti_io_test_disables(FSTI_TEST_NO_LOCK_WAIT))
        nanosleep(&(struct timespec){.tv_nsec = pause_ns}, NULL);
}

fst_status fsti_model_open_files(const char *const *paths, size_t path_count,
                                 const model_request *request, fst_model **out, fst_error *error) {
    for (unsigned tries = 1;; tries++) {
        file_list files = {.paths = paths, .count = path_count, .each = request};
        fst_status status = open_files(&files, request->flags, out, error);
        if (status == FST_E_DIGEST && tries < DIGEST_TRIES_MAX) continue;
        if (status == FST_OK && fsti_verification_same((*out)->verification)) return FST_OK;
        if (status == FST_OK) {
            fsti_model_unref(*out);
            *out = NULL;
            status = fsti_error_set(error, FST_E_FILE_CHANGED, FSTI_NO_LOCATION,
                                    "a save replaced a manifest while the files were opened");
        } else if (!files.is_of_two_saves) {
            return status;
        }
        if (tries == LIST_TRIES_MAX) return status;
        if (files.is_unfinished) wait_for_save(tries);
    }
}

/// Whether no save has replaced a verified model, with its manifest, while it was opened. Files
/// that do not match a manifest may be those of the next save.
static bool is_verified_set(fst_status status, const fst_model *model, unsigned tries) {
    if (status != FST_OK) return status != FST_E_DIGEST || tries >= DIGEST_TRIES_MAX;
    return fsti_verification_same(model->verification);
}

/// One attempt. *same: no save has replaced the model meanwhile.
static fst_status open_path(const char *path, const model_request *request, unsigned tries,
                            bool *same, fst_model **out, fst_error *error) {
    model_paths paths;
    file_list files = {.paths = NULL};
    *same = true;
    FST_TRY(fsti_verification_open(path, request, &files.verification, error));
    fst_status status = fsti_model_paths(path, fsti_hash_key(), files.verification, &paths, error);
    files.paths = (const char *const *)paths.paths;
    files.count = paths.count;
    if (paths.has_index) {
        files.index = &paths.index;
        files.own_index = paths.index_path; // without an index it is the folder
    }
    if (status == FST_OK)
        status = open_files(&files, request->flags, out, error);
    else
        fsti_verification_close(files.verification);
    bool is_listed;
    fst_status listing = fsti_model_paths_same(&paths, &is_listed, status == FST_OK ? error : NULL);
    if (status == FST_OK && listing != FST_OK) {
        fsti_model_unref(*out);
        *out = NULL;
        status = listing;
    }
    *same = listing != FST_OK ||
            (!files.is_of_two_saves && is_listed && is_verified_set(status, *out, tries));
    if (files.is_unfinished) wait_for_save(tries);
    if (status == FST_E_NOT_FOUND && *same && paths.has_index) {
        status = fsti_model_name_missing(&paths, status, error);
        // A link to the index of a save that is being published, whose files are elsewhere.
        *same = !fsti_model_names_hidden(&paths);
        if (!*same) wait_for_save(tries);
    }
    fsti_model_paths_clear(&paths);
    return status;
}

fst_status fsti_model_open(const char *path, const model_request *request, fst_model **out,
                           fst_error *error) {
    fst_status status = FST_OK;
    for (unsigned tries = 1; tries <= OPEN_TRIES_MAX; tries++) {
        bool same;
        status = open_path(path, request, tries, &same, out, error);
        if (same) return status;
        if (status == FST_OK) fsti_model_unref(*out);
        *out = NULL;
    }
    if (status != FST_OK) return status;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    return fsti_error_set(error, FST_E_FILE_CHANGED, location,
                          "the model was replaced repeatedly while it was opened. Try again");
}

size_t fsti_model_tensor_count(const fst_model *model) { return model->tensor_count; }

size_t fsti_model_entry_count(const fst_model *model) { return model->entry_count; }

size_t fsti_model_file_count(const fst_model *model) { return model->file_count; }

void fsti_model_tensor_info(const fst_model *model, size_t index, fst_tensor_info *out) {
    model_entry entry = fsti_model_entry(model, index);
    const fsti_header *header = model->files[entry.file].header;
    const fsti_tensor *tensor = &header->tensors[entry.tensor];
    *out = (fst_tensor_info){.struct_size = sizeof *out,
                             .name = fsti_header_name(header, tensor),
                             .name_size = tensor->name_size,
                             .dtype = (fst_dtype)tensor->dtype,
                             .rank = tensor->rank,
                             .shape = fsti_header_shape(header, tensor),
                             .element_count = 1,
                             .size_bytes = tensor->end - tensor->begin,
                             .file_index = entry.file,
                             .file_offset = header->data_begin + tensor->begin};
    for (uint32_t i = 0; i < tensor->rank; i++) out->element_count *= out->shape[i];
    const fsti_packed *packed = model->files[entry.file].packed;
    out->stored_bytes = out->size_bytes;
    if (packed == NULL) return;
    const fsti_packed_tensor *stored = &packed->tensors[entry.tensor];
    out->stored_bytes = stored->stored_end - stored->stored_begin;
}

void fsti_model_file_info(const fst_model *model, size_t index, fst_file_info *out) {
    const model_file *file = &model->files[index];
    *out = (fst_file_info){.struct_size = sizeof *out,
                           .path = fsti_file_path(file->file),
                           .size_bytes = fsti_file_size(file->file),
                           .header_bytes = file->header->data_begin,
                           .tensor_count = file->header->tensor_count,
                           .metadata_count = file->header->metadata_count,
                           .has_metadata = file->header->has_metadata,
                           .header_reads = file->header_reads,
                           .table_bytes = file->header->table_bytes,
                           .padding_count = file->padding_count,
                           .stored_bytes = fsti_file_size(file->file)};
    if (file->packed == NULL) return;
    out->stored_bytes = file->packed->stored_bytes;
    out->compressed_count = file->packed->packed_count;
}

fst_status fsti_model_check(const fst_model *model, fst_error *error) {
    for (size_t i = 0; i < model->file_count; i++)
        FST_TRY(fsti_file_check(model->files[i].file, error));
    return FST_OK;
}

void fsti_model_metadata(const fst_model *model, size_t file_index, size_t entry_index,
                         fst_metadata_entry *out) {
    const fsti_header *header = model->files[file_index].header;
    const fsti_metadata_pair *pair = &header->metadata[entry_index];
    *out = (fst_metadata_entry){.key = header->bytes + pair->key.at,
                                .key_size = pair->key.size,
                                .value = header->bytes + pair->value.at,
                                .value_size = pair->value.size};
}
