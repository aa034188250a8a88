// SPDX-License-Identifier: Apache-2.0
/// Compressing and decompressing files: saves whose bytes come from another file.
#include "model/open_model.h"
#include "save_state.h"

static fst_status refuse(const char *path, const char *why, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    return fsti_error_set(error, FST_E_ARGUMENT, location, "%s", why);
}

/// Saves the bytes of the model's only file: compressed if `header` is given.
static fst_status write_file(const fst_model *model, const fsti_header *header, const char *target,
                             const fst_pack_options *options, fst_save_stats *stats,
                             fst_error *error) {
    fst_save_options save = {.struct_size = sizeof save,
                             .promise = options->promise,
                             .thread_count = options->thread_count,
                             .compress = header == NULL ? FST_COMPRESS_NONE : options->compress,
                             .progress = options->progress,
                             .progress_context = options->progress_context,
                             .manifest = options->manifest,
                             .digest = options->digest};
    save_request request = {
        .path = target,
        .options = &save,
        .source = {.kind = header == NULL ? &fsti_source_copied : &fsti_source_compressed,
                   .origin = model->files[0].file,
                   .origin_header = header,
                   .is_whole = true}};
    fst_writer *writer;
    FST_TRY(fsti_writer_begin(&request, &writer, error));
    fst_status status = fsti_writer_commit(writer, error);
    if (status == FST_OK) status = fsti_writer_stats(writer, stats, error);
    if (status == FST_OK) stats->tensor_count = model->tensor_count;
    fsti_writer_close(writer);
    return status;
}

/// Opens the file after the saves of it that are in flight. Keeps its absolute path, to check at
/// the end that it is still there.
static fst_status open_origin(const char *path, uint32_t flags, const fst_pack_options *options,
                              fst_model **out, fst_error *error) {
    char *fixed = NULL;
    FST_TRY(fsti_path_absolute(path, &fixed, error));
    fst_status status =
        fsti_async_await_file(fixed, options->progress, options->progress_context, error);
    if (status == FST_OK)
        status = fsti_model_open(fixed, &(model_request){.flags = flags}, out, error);
    fsti_free(fixed);
    return status;
}

fst_status fsti_file_compress(const char *path, const char *target, const fst_pack_options *options,
                              fst_save_stats *stats, fst_error *error) {
    fst_model *model;
    FST_TRY(open_origin(path, FST_OPEN_STORED, options, &model, error));
    const model_file *file = &model->files[0];
    fst_status status;
    if (model->file_count != 1)
        status = refuse(path, "a sharded model. Compress its files one by one", error);
    else if (fsti_packed_is(file->header))
        status = refuse(path, "the file is already compressed", error);
    else
        status = write_file(model, file->header, target, options, stats, error);
    fsti_model_unref(model);
    return status;
}

fst_status fsti_file_decompress(const char *path, const char *target,
                                const fst_pack_options *options, fst_save_stats *stats,
                                fst_error *error) {
    fst_model *model;
    FST_TRY(open_origin(path, 0, options, &model, error));
    fst_status status;
    if (model->file_count != 1)
        status = refuse(path, "a sharded model. Decompress its files one by one", error);
    else // an incompressible file was stored uncompressed, so copy it
        status = write_file(model, NULL, target, options, stats, error);
    fsti_model_unref(model);
    return status;
}
