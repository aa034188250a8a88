// SPDX-License-Identifier: Apache-2.0
/// Edits: writes a new header before the old file's tensors, and publishes it like every save.
#include <string.h>
#include <sys/stat.h>

#include "model/open_model.h"
#include "save_state.h"

/// The parts of the new header.
typedef struct header_edit {
    const char *given; ///< the path, with its links
    fst_model *model;
    fst_file_info file;
    fst_save_tensor *tensors;
    size_t tensor_count;
    fst_metadata_entry *metadata;
    size_t metadata_count;
    char *keys; ///< keys of digests whose tensors are renamed
} header_edit;

/// The metadata key of a tensor's embedded digest: this and the tensor's name.
#define DIGEST_KEY "digest.tensor."

static fst_status refuse_as(fst_status status, const char *path, const char *why,
                            fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    return fsti_error_set(error, status, location, "%s", why);
}

static fst_status refuse(const char *path, const char *why, fst_error *error) {
    return refuse_as(FST_E_ARGUMENT, path, why, error);
}

// ---- the new header ----

static fst_status rename_tensors(header_edit *edit, const fst_edit_options *options,
                                 fst_error *error) {
    for (size_t i = 0; i < options->rename_count; i++) {
        const fst_tensor_rename *rename = &options->renames[i];
        size_t index = 0;
        FST_TRY(fsti_model_find(edit->model, rename->from, rename->from_size, &index, error));
        fst_tensor_info old;
        fsti_model_tensor_info(edit->model, index, &old);
        fst_save_tensor *tensor = &edit->tensors[fsti_model_entry(edit->model, index).tensor];
        fsti_error_location location = {
            .file = edit->file.path, .tensor = old.name, .tensor_size = old.name_size};
        if (tensor->name != old.name)
            return fsti_error_set(error, FST_E_ARGUMENT, location, "two new names for one tensor");
        if (edit->file.padding_count > 0 && fsti_padding_name(rename->to, rename->to_size))
            return fsti_error_set(error, FST_E_ARGUMENT, location,
                                  "names that begin with " FSTI_PADDING_NAME
                                  " are reserved for padding tensors");
        tensor->name = rename->to;
        tensor->name_size = rename->to_size;
    }
    return FST_OK;
}

static fst_status describe_tensors(header_edit *edit, const fst_edit_options *options,
                                   fst_error *error) {
    // The file's tensors, including padding, in file order.
    const fsti_header *header = edit->model->files[0].header;
    edit->tensor_count = header->tensor_count;
    edit->tensors = fsti_alloc_zeroed(edit->tensor_count + 1, sizeof *edit->tensors);
    if (edit->tensors == NULL)
        return fsti_error_memory(error, edit->tensor_count * sizeof *edit->tensors);
    for (size_t i = 0; i < edit->tensor_count; i++) {
        const fsti_tensor *tensor = &header->tensors[i];
        edit->tensors[i] = (fst_save_tensor){.name = fsti_header_name(header, tensor),
                                             .name_size = tensor->name_size,
                                             .dtype = (fst_dtype)tensor->dtype,
                                             .rank = tensor->rank,
                                             .shape = fsti_header_shape(header, tensor)};
    }
    return rename_tensors(edit, options, error);
}

/// The tensor whose digest a key stores, if the tensor is renamed.
static const fst_save_tensor *renamed_by_key(const header_edit *edit,
                                             const fst_metadata_entry *entry) {
    size_t prefix = strlen(DIGEST_KEY);
    const fsti_header *header = edit->model->files[0].header;
    if (entry->key_size < prefix || memcmp(entry->key, DIGEST_KEY, prefix) != 0) return NULL;
    size_t index = fsti_header_find(header, entry->key + prefix, entry->key_size - prefix);
    if (index == SIZE_MAX) return NULL;
    const fst_save_tensor *tensor = &edit->tensors[index];
    return tensor->name == fsti_header_name(header, &header->tensors[index]) ? NULL : tensor;
}

/// Renames the keys of digests with their tensors.
static fst_status rename_digests(header_edit *edit, fst_error *error) {
    size_t prefix = strlen(DIGEST_KEY), wanted = 0;
    for (size_t i = 0; i < edit->metadata_count; i++) {
        const fst_save_tensor *tensor = renamed_by_key(edit, &edit->metadata[i]);
        if (tensor != NULL) wanted += prefix + tensor->name_size + 1;
    }
    char *key = edit->keys = fsti_alloc_zeroed(wanted + 1, 1);
    if (key == NULL) return fsti_error_memory(error, wanted);
    for (size_t i = 0; i < edit->metadata_count; i++) {
        const fst_save_tensor *tensor = renamed_by_key(edit, &edit->metadata[i]);
        if (tensor == NULL) continue;
        memcpy(key, DIGEST_KEY, sizeof DIGEST_KEY);
        memcpy(key + prefix, tensor->name, tensor->name_size);
        edit->metadata[i].key = key;
        edit->metadata[i].key_size = prefix + tensor->name_size;
        key += edit->metadata[i].key_size + 1;
    }
    return FST_OK;
}

/// Whether it is the key that marks padding tensors. It must stay, because they would otherwise
/// become ordinary tensors.
static bool is_padding_mark(const header_edit *edit, const fst_metadata_entry *entry) {
    return edit->file.padding_count > 0 && entry->key_size == strlen(FSTI_PADDING_KEY) &&
           memcmp(entry->key, FSTI_PADDING_KEY, entry->key_size) == 0;
}

/// Copies the old entries in their order.
static fst_status copy_metadata(header_edit *edit, const fst_edit_options *options,
                                fst_error *error) {
    size_t capacity = edit->file.metadata_count + options->metadata_count + 1;
    edit->metadata = fsti_alloc(capacity * sizeof *edit->metadata);
    if (edit->metadata == NULL) return fsti_error_memory(error, capacity * sizeof *edit->metadata);
    for (size_t i = 0; i < edit->file.metadata_count; i++) {
        fst_metadata_entry *entry = &edit->metadata[edit->metadata_count];
        fsti_model_metadata(edit->model, 0, i, entry);
        if (options->clear_metadata == 0 || is_padding_mark(edit, entry)) edit->metadata_count++;
    }
    return rename_digests(edit, error);
}

static fsti_name name_of_key(const void *context, size_t index) {
    const fst_metadata_entry *entry = &((const header_edit *)context)->metadata[index];
    return (fsti_name){entry->key, entry->key_size};
}

/// Sets an entry at its position, or appends it. A deleted entry keeps its position without a
/// value.
static void change_entry(header_edit *edit, fsti_name_table *table,
                         const fst_metadata_entry *change) {
    size_t at = fsti_name_table_find(table, (fsti_name){change->key, change->key_size});
    bool exists = at != SIZE_MAX && edit->metadata[at].value != NULL;
    if (change->value == NULL) {
        if (exists) edit->metadata[at].value = NULL;
    } else if (exists) {
        edit->metadata[at] = *change;
    } else {
        edit->metadata[edit->metadata_count] = *change;
        fsti_name_table_put(table, edit->metadata_count++);
    }
}

static fst_status change_metadata(header_edit *edit, const fst_edit_options *options,
                                  fst_error *error) {
    fsti_name_table table;
    FST_TRY(copy_metadata(edit, options, error));
    size_t capacity = edit->metadata_count + options->metadata_count;
    if (!fsti_name_table_make(&table, name_of_key, edit, capacity))
        return fsti_error_memory(error, capacity * sizeof *table.slots);
    for (size_t i = 0; i < edit->metadata_count; i++) fsti_name_table_put(&table, i);
    fst_status status = FST_OK;
    for (size_t i = 0; status == FST_OK && i < options->metadata_count; i++) {
        const fst_metadata_entry *change = &options->metadata[i];
        if (change->value == NULL && is_padding_mark(edit, change))
            status =
                refuse(edit->file.path,
                       "the metadata key " FSTI_PADDING_KEY " marks padding tensors and can't be "
                       "removed while the file has padding tensors",
                       error);
        else
            change_entry(edit, &table, change);
    }
    fsti_name_table_clear(&table);
    size_t kept = 0;
    for (size_t i = 0; i < edit->metadata_count; i++)
        if (edit->metadata[i].value != NULL) edit->metadata[kept++] = edit->metadata[i];
    edit->metadata_count = kept;
    return status;
}

// ---- the file ----

/// An index maps tensor names to files, so renaming in one file alone would break the model.
static fst_status check_index(const header_edit *edit, const char *target, fst_error *error) {
    struct stat info;
    const char *given = edit->given;
    // The model was opened through an index, so the index refers to the file, wherever they are.
    bool is_indexed = (target == NULL || fsti_save_is_same_file(edit->file.path, target)) &&
                      !fsti_save_is_same_file(edit->file.path, given) && stat(given, &info) == 0 &&
                      S_ISREG(info.st_mode);
    // With the links of the path that was given, which an index may have in its names, too.
    const char *named = target == NULL ? given : target;
    if (!is_indexed) FST_TRY(fsti_save_is_indexed(named, &is_indexed, error));
    if (!is_indexed) return FST_OK;
    return refuse(named,
                  "an index in the folder lists this file's tensor names. "
                  "Write the edited file to another folder",
                  error);
}

static fst_status write_file(const header_edit *edit, const char *target,
                             const fst_edit_options *options, fst_save_stats *stats,
                             fst_error *error) {
    fst_save_options save = {.struct_size = sizeof save,
                             .promise = options->promise,
                             .order = FST_SAVE_ORDER_GIVEN,
                             .metadata = edit->metadata,
                             .metadata_count = edit->metadata_count,
                             .has_metadata = edit->file.has_metadata,
                             .progress = options->progress,
                             .progress_context = options->progress_context,
                             .manifest = options->manifest,
                             .digest = options->digest};
    fst_writer *writer;
    save_request request = {.path = target,
                            .tensors = edit->tensors,
                            .tensor_count = edit->tensor_count,
                            .options = &save,
                            .source = {.kind = &fsti_source_edited,
                                       .origin = edit->model->files[0].file,
                                       .origin_begin = edit->file.header_bytes}};
    FST_TRY(fsti_writer_begin(&request, &writer, error));
    fst_status status = fsti_writer_commit(writer, error);
    if (status == FST_OK) status = fsti_writer_stats(writer, stats, error);
    fsti_writer_close(writer);
    return status;
}

static fst_status edit_model(header_edit *edit, const char *path, const char *target,
                             const fst_edit_options *options, fst_save_stats *stats,
                             fst_error *error) {
    if (fsti_model_file_count(edit->model) != 1)
        return refuse(path, "a sharded model. Edit one of its files", error);
    fsti_model_file_info(edit->model, 0, &edit->file);
    if (edit->model->files[0].packed != NULL)
        return refuse_as(FST_E_UNSUPPORTED, path,
                         "a compressed file. Decompress it, edit the result, and compress that",
                         error);
    if (options->rename_count > 0) FST_TRY(check_index(edit, target, error));
    if (target == NULL) target = edit->file.path;
    FST_TRY(describe_tensors(edit, options, error));
    FST_TRY(change_metadata(edit, options, error));
    return write_file(edit, target, options, stats, error);
}

fst_status fsti_header_edit(const char *path, const char *target, const fst_edit_options *options,
                            fst_save_stats *stats, fst_error *error) {
    char *fixed = NULL;
    FST_TRY(fsti_path_absolute(path, &fixed, error));
    header_edit edit = {.given = path};
    fst_status status =
        fsti_async_await_file(fixed, options->progress, options->progress_context, error);
    if (status == FST_OK)
        status = fsti_model_open(fixed, &(model_request){.flags = 0}, &edit.model, error);
    if (status == FST_OK) status = edit_model(&edit, fixed, target, options, stats, error);
    fsti_free(edit.tensors);
    fsti_free(edit.metadata);
    fsti_free(edit.keys);
    fsti_model_unref(edit.model);
    fsti_free(fixed);
    return status;
}
