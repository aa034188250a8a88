// SPDX-License-Identifier: Apache-2.0
/// A model: its files, and one table of tensors over all of them.
#include <string.h>

#include "model.h"

/// A set that is replaced while it is opened is opened again; saves take far longer than that.
#define OPEN_TRIES_MAX 20

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
    pthread_mutex_destroy(&model->lock);
    fsti_free(model);
}

static fst_model *make_model(size_t file_count, fst_error *error) {
    fst_model *model = fsti_alloc_zeroed(1, sizeof *model);
    if (model == NULL) {
        fsti_error_memory(error, sizeof *model);
        return NULL;
    }
    fsti_refcount_init(&model->refs);
    pthread_mutex_init(&model->lock, NULL);
    model->hash_key = fsti_hash_key();
    model->files = fsti_alloc_zeroed(file_count, sizeof *model->files);
    if (model->files != NULL) return model;
    fsti_error_memory(error, file_count * sizeof *model->files);
    fsti_model_unref(model);
    return NULL;
}

/// Hands a model out whose files are open, unless something was wrong.
static fst_status finish_model(fst_model *model, fst_status status, const fsti_index *index,
                               fst_model **out, fst_error *error) {
    if (status == FST_OK) status = fsti_model_merge(model, index, error);
    if (status != FST_OK) {
        fsti_model_unref(model);
        return status;
    }
    *out = model;
    return FST_OK;
}

/// Files that make up a model, and what they are held against, which the model takes over.
typedef struct file_list {
    const char *const *paths;
    size_t count;
    const fsti_index *index; ///< NULL: none
    model_verification *verification;
    const model_wish *each; ///< NULL, or what each path finds a manifest of its own by
} file_list;

static fst_status open_files(const file_list *files, uint32_t flags, fst_model **out,
                             fst_error *error) {
    fst_model *model = make_model(files->count, error);
    fst_status status = model == NULL ? FST_E_NO_MEMORY : FST_OK;
    if (model == NULL)
        fsti_verification_close(files->verification);
    else
        model->verification = files->verification;
    // Without digests: a scan of whole files takes them in turn.
    bool is_ahead = status == FST_OK && files->each == NULL && model->verification == NULL &&
                    fsti_model_opens_ahead(files->paths, files->count);
    if (is_ahead) status = fsti_model_open_ahead(model, files->paths, files->count, flags, error);
    for (size_t i = 0; !is_ahead && i < files->count && status == FST_OK; i++) {
        if (files->each != NULL)
            status =
                fsti_verification_add(files->paths[i], files->each, &model->verification, error);
        if (status != FST_OK) break;
        status = fsti_model_file_open(model, files->paths[i], flags, &model->files[i], error);
        if (status == FST_OK) model->file_count++;
    }
    return model == NULL ? status : finish_model(model, status, files->index, out, error);
}

fst_status fsti_model_open_source(const fst_source *source, const model_wish *wish, fst_model **out,
                                  fst_error *error) {
    fsti_file *file;
    FST_TRY(fsti_file_open_source(source, &file, error));
    fst_model *model = make_model(1, error);
    if (model == NULL) {
        fsti_file_unref(file);
        return FST_E_NO_MEMORY;
    }
    fst_status status =
        fsti_verification_open(fsti_file_path(file), wish, &model->verification, error);
    if (status == FST_OK)
        status = fsti_model_file_take(model, file, wish->flags, &model->files[0], error);
    else
        fsti_file_unref(file);
    if (status == FST_OK) model->file_count = 1;
    return finish_model(model, status, NULL, out, error);
}

fst_status fsti_model_open_files(const char *const *paths, size_t path_count,
                                 const model_wish *wish, fst_model **out, fst_error *error) {
    file_list files = {.paths = paths, .count = path_count, .each = wish};
    return open_files(&files, wish->flags, out, error);
}

/// One try; *same: no save has replaced the set meanwhile.
static fst_status open_path(const char *path, const model_wish *wish, bool *same, fst_model **out,
                            fst_error *error) {
    model_paths paths;
    file_list files = {.paths = NULL};
    *same = true;
    FST_TRY(fsti_verification_open(path, wish, &files.verification, error));
    fst_status status = fsti_model_paths(path, fsti_hash_key(), files.verification, &paths, error);
    files.paths = (const char *const *)paths.paths;
    files.count = paths.count;
    files.index = paths.has_index ? &paths.index : NULL;
    if (status == FST_OK)
        status = open_files(&files, wish->flags, out, error);
    else
        fsti_verification_close(files.verification);
    *same = fsti_model_paths_same(&paths);
    if (*same && status == FST_OK && paths.count > 1 && paths.index_path != NULL &&
        !paths.has_index)
        *same = fsti_model_files_same(*out);
    if (status == FST_E_NOT_FOUND && *same && paths.has_index)
        status = fsti_model_name_missing(&paths, status, error);
    fsti_model_paths_clear(&paths);
    return status;
}

fst_status fsti_model_open(const char *path, const model_wish *wish, fst_model **out,
                           fst_error *error) {
    fst_status status = FST_OK;
    for (unsigned tries = 0; tries < OPEN_TRIES_MAX; tries++) {
        bool same;
        status = open_path(path, wish, &same, out, error);
        if (same) return status;
        if (status == FST_OK) fsti_model_unref(*out);
        *out = NULL;
    }
    if (status != FST_OK) return status;
    fsti_error_place place = FSTI_NOWHERE;
    place.file = path;
    return fsti_error_set(error, FST_E_FILE_CHANGED, place,
                          "the set was replaced again and again while it was opened");
}

size_t fsti_model_tensor_count(const fst_model *model) { return model->tensor_count; }

size_t fsti_model_entry_count(const fst_model *model) { return model->entry_count; }

size_t fsti_model_file_count(const fst_model *model) { return model->file_count; }

void fsti_model_tensor_info(const fst_model *model, size_t index, fst_tensor_info *out) {
    model_entry entry = fsti_model_entry(model, index);
    const fsti_header *header = model->files[entry.file].header;
    const fsti_tensor *tensor = &header->tensors[entry.tensor];
    *out = (fst_tensor_info){.name = fsti_header_name(header, tensor),
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
    *out = (fst_file_info){.path = fsti_file_path(file->file),
                           .size_bytes = fsti_file_size(file->file),
                           .header_bytes = file->header->data_begin,
                           .tensor_count = file->header->tensor_count,
                           .metadata_count = file->header->metadata_count,
                           .has_metadata = file->header->has_metadata,
                           .header_reads = file->header_reads,
                           .table_bytes = file->header->table_bytes,
                           .filler_count = file->filler_count,
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

static void release_mapping(fsti_buffer *buffer) {
    fsti_io_unmap(buffer->data, buffer->size_bytes);
}

static fst_status make_mapping(fsti_file *file, bool writable, fsti_buffer **out,
                               fst_error *error) {
    void *address;
    uint64_t size = fsti_file_size(file);
    FST_TRY(fsti_file_map_private(file, writable, &address, error));
    fst_status status = fsti_buffer_wrap(address, size, release_mapping, out, error);
    if (status != FST_OK)
        fsti_io_unmap(address, size);
    else
        (*out)->writable = writable;
    return status;
}

fst_status fsti_model_mapping(fst_model *model, uint32_t file_index, bool writable,
                              fsti_buffer **out, fst_error *error) {
    model_file *file = &model->files[file_index];
    fst_status status = FST_OK;
    pthread_mutex_lock(&model->lock);
    fsti_buffer **mapping = &file->mappings[writable];
    if (*mapping == NULL) status = make_mapping(file->file, writable, mapping, error);
    if (status == FST_OK) *out = fsti_buffer_ref(*mapping);
    pthread_mutex_unlock(&model->lock);
    return status;
}
