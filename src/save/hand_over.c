// SPDX-License-Identifier: Apache-2.0
/// Sharded models written by several processes: handed over files, joined files, and publishing by
/// one process.
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "model/open_model.h"
#include "save_state.h"

// ---- handing files over ----

fst_status fsti_writer_hand_over(fst_writer *writer, fst_error *error) {
    FST_TRY(fsti_writer_check_owner(writer, error));
    if (writer->publication.role == ROLE_JOINED)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "the file belongs to another process");
    if (writer->publication.manifest.kind != NULL && writer->options.others_write == 0)
        return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                              "the process that publishes the file creates its manifest: "
                              "fst_publish_options.manifest");
    FST_TRY(fsti_writer_make_finished(writer, error));
    fst_status status = FST_OK;
    for (uint32_t f = 0; f < writer->contents.file_count && status == FST_OK; f++) {
        fsti_output *output = writer->contents.files[f].output;
        if (writer->options.others_write != 0) status = fsti_output_share(output, error);
        if (status == FST_OK) status = fsti_output_name(output, error);
    }
    if (status == FST_OK)
        writer->publication.role = ROLE_HANDED_OVER;
    else
        atomic_store(&writer->state, WRITER_FAILED);
    return status;
}

const char *fsti_writer_hidden_path(const fst_writer *writer, uint32_t file_index) {
    if (writer->publication.role != ROLE_HANDED_OVER || file_index >= writer->contents.file_count)
        return NULL;
    return fsti_output_hidden_path(writer->contents.files[file_index].output);
}

// ---- existing files ----

/// The tensors of some files. The models keep names and shapes alive.
typedef struct found_tensors {
    fst_model **models;
    size_t model_count;
    fst_save_tensor *tensors;
    size_t count, capacity;
} found_tensors;

static fst_status add_tensors(found_tensors *found, const fst_model *model, fst_error *error) {
    for (size_t i = 0; i < fsti_model_tensor_count(model); i++) {
        fst_tensor_info info;
        fsti_model_tensor_info(model, i, &info);
        if (!fsti_array_reserve((void **)&found->tensors, &found->capacity, found->count,
                                sizeof *found->tensors, INT32_MAX))
            return fsti_error_memory(error, sizeof *found->tensors);
        found->tensors[found->count++] =
            (fst_save_tensor){.name = info.name,
                              .name_size = info.name_size,
                              .dtype = info.dtype,
                              .rank = info.rank,
                              .shape = info.shape,
                              .file_index = (uint32_t)found->model_count - 1};
    }
    return FST_OK;
}

static fst_status find_tensors(found_tensors *found, const char *const *paths, size_t path_count,
                               fst_error *error) {
    found->models = fsti_alloc_zeroed(path_count, sizeof *found->models);
    if (found->models == NULL) return fsti_error_memory(error, path_count * sizeof(fst_model *));
    for (size_t i = 0; i < path_count; i++) {
        FST_TRY(fsti_model_open(paths[i], &(model_request){.flags = 0}, &found->models[i], error));
        found->model_count = i + 1;
        FST_TRY(add_tensors(found, found->models[i], error));
    }
    return FST_OK;
}

static void clear_found(found_tensors *found) {
    for (size_t i = 0; i < found->model_count; i++) fsti_model_unref(found->models[i]);
    fsti_free(found->models);
    fsti_free(found->tensors);
}

/// The source of files that several processes write, with fst_writer_write() or through mappings:
/// only ends this process's mapping.
static fst_status end_mapping(fst_writer *writer, uint32_t file_index, fst_error *error) {
    (void)error;
    fsti_output_unmap(writer->contents.files[file_index].output);
    return FST_OK;
}

static const fsti_source_kind written_by_several = {.fill = end_mapping};

/// Makes a writer for existing files.
static fst_status begin_existing(const char *path, const char *const *hidden,
                                 const found_tensors *found, const fst_save_options *options,
                                 fst_writer **out, fst_error *error) {
    save_request request = {.path = path,
                            .tensors = found->tensors,
                            .tensor_count = found->count,
                            .options = options,
                            .source = {.kind = &written_by_several},
                            .hidden = hidden};
    return fsti_writer_begin(&request, out, error);
}

// ---- joining ----

/// Takes the offsets from the existing file's header, which may differ from a new layout.
static void copy_offsets(fst_writer *writer, const fst_model *model) {
    fst_file_info file;
    fsti_model_file_info(model, 0, &file);
    writer->contents.files[0].layout.file_bytes = writer->progress.bytes_total = file.size_bytes;
    writer->contents.files[0].header_put = true;
    for (size_t i = 0; i < writer->contents.tensor_count; i++) {
        fst_tensor_info info;
        fsti_model_tensor_info(model, i, &info);
        writer->contents.tensors[i].offset = info.file_offset;
    }
}

/// Only a temporary file is written in place, and not a compressed one, whose tensors have no fixed
/// offsets.
static fst_status check_joinable(const char *path, const fst_model *model, fst_error *error) {
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    if (!fsti_hidden_is(fsti_path_name(path)))
        return fsti_error_set(error, FST_E_ARGUMENT, location,
                              "not a file name returned by fst_writer_hidden_path()");
    if (model->files[0].packed == NULL) return FST_OK;
    return fsti_error_set(error, FST_E_UNSUPPORTED, location,
                          "parts of a compressed file can't be written");
}

static fst_status begin_joined(const char *path, const found_tensors *found,
                               const fst_save_options *options, fst_writer **out,
                               fst_error *error) {
    fst_writer *writer;
    FST_TRY(begin_existing(path, &path, found, options, &writer, error));
    writer->publication.role = ROLE_JOINED; // closing it keeps the file
    fst_status status = fsti_output_check_shared(writer->contents.files[0].output, error);
    if (status != FST_OK) {
        fsti_writer_close(writer);
        return status;
    }
    copy_offsets(writer, found->models[0]);
    *out = writer;
    return FST_OK;
}

fst_status fsti_writer_join(const char *path, const fst_save_options *options, fst_writer **out,
                            fst_error *error) {
    fst_save_options save = {.struct_size = sizeof save,
                             .promise = options->promise,
                             .order = FST_SAVE_ORDER_GIVEN,
                             .others_write = 1,
                             .progress = options->progress,
                             .progress_context = options->progress_context};
    found_tensors found = {0};
    fst_status status = find_tensors(&found, &path, 1, error);
    if (status == FST_OK) status = check_joinable(path, found.models[0], error);
    if (status == FST_OK) status = begin_joined(path, &found, &save, out, error);
    clear_found(&found);
    return status;
}

// ---- publishing ----

/// Only handed over files within the folder may be renamed or deleted.
static fst_status check_temporary_file(const char *folder, const char *path, fst_error *error) {
    struct stat own, parent_info;
    const char *name = fsti_path_name(path);
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    if (!fsti_hidden_is(name))
        return fsti_error_set(error, FST_E_ARGUMENT, location,
                              "not a file name returned by fst_writer_hand_over()");
    char *parent =
        name == path ? fsti_string_copy(".", 1) : fsti_string_copy(path, (size_t)(name - path));
    if (parent == NULL) return fsti_error_memory(error, strlen(path));
    bool is_inside = stat(folder, &own) == 0 && stat(parent, &parent_info) == 0 &&
                     own.st_dev == parent_info.st_dev && own.st_ino == parent_info.st_ino;
    fsti_free(parent);
    if (is_inside) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, location, "the file is not in the folder '%.200s'",
                          folder);
}

static int compare_names(const void *one, const void *other) {
    return strcmp(fsti_path_name(*(const char *const *)one),
                  fsti_path_name(*(const char *const *)other));
}

/// Refuses a file that is given twice. All files are in one folder, so equal names mean the same
/// file.
static fst_status check_given_once(const char *const *paths, size_t path_count, fst_error *error) {
    const char **sorted = fsti_alloc_zeroed(path_count, sizeof *sorted);
    if (sorted == NULL) return fsti_error_memory(error, path_count * sizeof *sorted);
    memcpy(sorted, paths, path_count * sizeof *sorted);
    qsort(sorted, path_count, sizeof *sorted, compare_names);
    fst_status status = FST_OK;
    for (size_t i = 1; i < path_count && status == FST_OK; i++) {
        fsti_error_location location = {.file = sorted[i], .byte_offset = FST_NO_OFFSET};
        if (compare_names(&sorted[i - 1], &sorted[i]) == 0)
            status = fsti_error_set(error, FST_E_ARGUMENT, location, "the file is given twice");
    }
    fsti_free(sorted);
    return status;
}

static fst_status publish(const char *folder, const char *const *paths, const found_tensors *found,
                          const fst_publish_options *options, fst_save_stats *stats,
                          fst_error *error) {
    fst_writer *writer;
    fst_save_options save = {.struct_size = sizeof save,
                             .promise = options->promise,
                             .file_count = (uint32_t)found->model_count,
                             .stem = options->stem,
                             .manifest = options->manifest,
                             .digest = options->digest};
    FST_TRY(begin_existing(folder, paths, found, &save, &writer, error));
    writer->publication.role = ROLE_ADOPTED;
    writer->publication.names_only = options->names_only != 0;
    writer->progress.bytes_total = 0;
    for (size_t i = 0; i < found->model_count; i++) {
        fst_file_info file;
        fsti_model_file_info(found->models[i], 0, &file);
        writer->progress.bytes_total += file.size_bytes;
    }
    atomic_store(&writer->state, WRITER_FINISHED);
    fst_status status = fsti_writer_commit(writer, error);
    if (status == FST_OK) status = fsti_writer_stats(writer, stats, error);
    fsti_writer_close(writer);
    return status;
}

fst_status fsti_set_publish(const char *folder, const char *const *paths, size_t path_count,
                            const fst_publish_options *options, fst_save_stats *stats,
                            fst_error *error) {
    for (size_t i = 0; i < path_count; i++) FST_TRY(check_temporary_file(folder, paths[i], error));
    FST_TRY(check_given_once(paths, path_count, error));
    found_tensors found = {0};
    fst_status status = find_tensors(&found, paths, path_count, error);
    if (status == FST_OK) status = publish(folder, paths, &found, options, stats, error);
    clear_found(&found);
    return status;
}
