// SPDX-License-Identifier: Apache-2.0
/// See model_saves.h.
#include "model_saves.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/primitives.h"
#include "codec/codec.h"
#include "fixture.h"

#define TENSOR_COUNT 4u
/// Enough for blocks that an edit can share, and to be compressed.
#define TENSOR_BYTES 8192u

/// Edits the file, whose metadata is to hold `value`.
static fst_status edit_model(const char *path, char value, fst_save_promise promise,
                             const char *manifest, fst_error *error) {
    const char text[] = {value, '\0'};
    fst_metadata_entry entry = {"value", SIZE_MAX, text, SIZE_MAX};
    fst_edit_options options = FST_STRUCT_INIT(fst_edit_options);
    options.promise = promise;
    options.metadata = &entry;
    options.metadata_count = 1;
    options.manifest = manifest;
    return fst_header_edit(path, NULL, &options, NULL, error);
}

/// A rank's file, with every tensor that is its.
static fst_status open_rank(const char *folder, const fst_save_tensor *tensors, uint32_t rank,
                            const fst_save_options *set, fst_writer **out, fst_error *error) {
    char path[512];
    size_t count = 0;
    fst_save_tensor own[TENSOR_COUNT];
    fst_save_options options = *set;
    for (uint32_t i = 0; i < TENSOR_COUNT; i++) {
        if (tensors[i].file_index != rank) continue;
        own[count] = tensors[i];
        own[count++].file_index = 0;
    }
    if (options.file_count == 1)
        snprintf(path, sizeof path, "%s/model.safetensors", folder);
    else
        snprintf(path, sizeof path, "%s/model-%05u-of-%05u.safetensors", folder, rank + 1,
                 options.file_count);
    options.file_count = 0;
    options.replace_link = 1;
    fst_status status = fst_writer_open(path, own, count, &options, out, error);
    return status == FST_OK ? fst_writer_hand_over(*out, error) : status;
}

static fst_status save_ranks(const char *folder, const fst_save_tensor *tensors,
                             const fst_save_options *set, int names_only, fst_error *error) {
    fst_writer *writers[8] = {NULL};
    const char *paths[8];
    fst_status status = FST_OK;
    fst_publish_options options = FST_STRUCT_INIT(fst_publish_options);
    options.promise = set->promise;
    options.names_only = names_only;
    mkdir(folder, 0700);
    for (uint32_t r = 0; r < set->file_count && status == FST_OK; r++) {
        status = open_rank(folder, tensors, r, set, &writers[r], error);
        paths[r] = fst_writer_hidden_path(writers[r], 0);
    }
    if (status == FST_OK)
        status = fst_set_publish(folder, paths, set->file_count, &options, NULL, error);
    for (uint32_t r = 0; r < set->file_count; r++) fst_writer_close(writers[r]);
    return status;
}

/// A rank's part of the files that another one has made: every other half of a tensor.
static fst_status fill_part(const fst_writer *maker, const fst_save_tensor *tensors, size_t half,
                            const fst_save_options *set, fst_error *error) {
    fst_status status = FST_OK;
    for (uint32_t f = 0; f < set->file_count && status == FST_OK; f++) {
        fst_writer *part;
        status = fst_writer_join(fst_writer_hidden_path(maker, f), set, &part, error);
        if (status != FST_OK) break;
        size_t index = 0;
        for (uint32_t i = 0; i < TENSOR_COUNT && status == FST_OK; i++)
            if (tensors[i].file_index == f)
                status = fst_writer_write(part, index++, half * TENSOR_BYTES / 2, tensors[i].data,
                                          TENSOR_BYTES / 2, error);
        if (status == FST_OK) status = fst_writer_finish(part, error);
        fst_writer_close(part);
    }
    return status;
}

static fst_status save_parts(const char *folder, const fst_save_tensor *tensors,
                             const fst_save_options *set, fst_error *error) {
    fst_writer *maker;
    fst_save_tensor empty[TENSOR_COUNT];
    fst_save_options options = *set;
    memcpy(empty, tensors, sizeof empty);
    for (size_t i = 0; i < TENSOR_COUNT; i++) empty[i].data = NULL;
    options.others_write = 1;
    fst_status status = fst_writer_open(folder, empty, TENSOR_COUNT, &options, &maker, error);
    if (status != FST_OK) return status;
    status = fst_writer_hand_over(maker, error);
    for (size_t half = 0; half < 2 && status == FST_OK; half++)
        status = fill_part(maker, tensors, half, set, error);
    if (status == FST_OK) status = fst_writer_commit(maker, error);
    fst_writer_close(maker);
    return status;
}

static fst_status compress_model(const char *path, fst_save_promise promise, const char *manifest,
                                 fst_error *error) {
    char source[600];
    fst_pack_options options = FST_STRUCT_INIT(fst_pack_options);
    options.compress = FST_COMPRESS_ALL;
    options.manifest = manifest;
    options.promise = promise;
    options.thread_count = 1;
    snprintf(source, sizeof source, "%.*s/" SOURCE, (int)(strrchr(path, '/') - path), path);
    return fst_file_compress(source, path, &options, NULL, error);
}

bool can_save(uint32_t file_count) {
    fsti_decoder *decoder;
    if (file_count == EDIT || (file_count & (PACKED | COPY)) == 0) return true;
    if (fsti_decoder_open(&decoder, NULL) != FST_OK) return false;
    fsti_decoder_close(decoder);
    return true;
}

bool is_file(uint32_t files) { return files == EDIT || FILE_COUNT(files) == 0; }

static fst_status save_async(const char *path, const fst_save_tensor *tensors,
                             const fst_save_options *save_options, fst_error *error) {
    fst_async_options options = {.struct_size = sizeof options, .save = save_options};
    fst_async_save *save;
    FST_TRY(fst_async_save_start(path, tensors, TENSOR_COUNT, &options, &save, error));
    fst_status status = fst_async_save_wait(save, -1, error);
    fst_async_save_close(save);
    return status;
}

fst_status save_model(const char *path, uint32_t file_count, char value, fst_save_promise promise,
                      fst_error *error) {
    static const uint64_t shape[] = {TENSOR_BYTES};
    static const char *const names[] = {"a", "b", "c", "d"};
    char data[TENSOR_BYTES];
    memset(data, value, sizeof data);
    fst_save_tensor tensors[TENSOR_COUNT];
    for (uint32_t i = 0; i < TENSOR_COUNT; i++)
        tensors[i] =
            (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                              .name = names[i],
                              .name_size = 1,
                              .dtype = FST_DTYPE_U8,
                              .rank = 1,
                              .shape = shape,
                              .data = data,
                              .file_index = is_file(file_count) ? 0 : i % FILE_COUNT(file_count)};
    const char *manifest = file_count != EDIT && (file_count & MANIFEST) != 0 ? "" : NULL;
    if (file_count == EDIT || file_count == LISTED_EDIT)
        return edit_model(path, value, promise, manifest, error);
    if ((file_count & COPY) != 0) return compress_model(path, promise, manifest, error);
    fst_save_options options = FST_STRUCT_INIT(fst_save_options);
    options.promise = promise;
    options.file_count = FILE_COUNT(file_count);
    options.thread_count = 1; // calls have the same order in every run
    options.manifest = manifest;
    if ((file_count & PACKED) != 0) options.compress = FST_COMPRESS_ALL;
    if ((file_count & PARTS) != 0) return save_parts(path, tensors, &options, error);
    if ((file_count & (RANKS | RANKS_NO_INDEX)) != 0)
        return save_ranks(path, tensors, &options, (file_count & RANKS_NO_INDEX) != 0, error);
    if ((file_count & ASYNC) != 0) return save_async(path, tensors, &options, error);
    return fst_save(path, tensors, TENSOR_COUNT, &options, NULL, error);
}

int model_at(const char *path) {
    fst_model *model;
    fst_loader *loader;
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    options.mode = FST_MODE_LOAD;
    options.tuning = fixture_engine(FST_ENGINE_PREAD);
    options.thread_count = 1;
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) return NO_MODEL;
    int found = fst_model_tensor_count(model) == TENSOR_COUNT ? NO_MODEL : NOT_WHOLE;
    if (fst_loader_open(model, &options, &loader, NULL) != FST_OK) found = NOT_WHOLE;
    for (fst_tensor *tensor; found != NOT_WHOLE;) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        fst_status status = fst_loader_next(loader, -1, &tensor, NULL);
        if (status == FST_END) break;
        if (status != FST_OK || fst_tensor_view_get(tensor, &view, NULL) != FST_OK)
            return NOT_WHOLE;
        for (uint64_t i = 0; i < view.size_bytes; i++) {
            int value = ((const unsigned char *)view.data)[i];
            if (found == NO_MODEL) found = value;
            if (found != value) found = NOT_WHOLE;
        }
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    fst_metadata_entry entry;
    if (found == OLD_MODEL && fst_model_metadata(model, 0, 0, &entry, NULL) == FST_OK)
        found = (unsigned char)entry.value[0]; // an edit leaves the tensors unchanged
    fst_model_close(model);
    return found;
}

int manifest_at(const char *path) {
    struct stat info;
    char manifest[600];
    bool is_folder = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    snprintf(manifest, sizeof manifest, "%s%s", path, is_folder ? "/model.manifest" : ".manifest");
    if (stat(manifest, &info) != 0) return 0;
    fst_check_options options = {.struct_size = sizeof options, .manifest = manifest};
    return fst_manifest_check(path, &options, NULL, NULL) == FST_OK ? 1 : -1;
}
