// SPDX-License-Identifier: Apache-2.0
/// Compressing and decompressing files: saves whose bytes come from another file.
#include <string.h>

#include "model/open_model.h"
#include "pack.h"
#include "save_state.h"

/// Opens a file that this save has written.
static fst_status open_plain(const save_file *file, fst_model **out, fst_error *error) {
    fst_source source = {.struct_size = sizeof source,
                         .name = fsti_output_path(file->output),
                         .descriptor = fsti_output_descriptor(file->output)};
    return fsti_model_open_source(&source, &(model_request){.flags = FST_OPEN_STORED}, out, error);
}

/// These bytes were reported when the plain file was written; the callback may still cancel.
static fst_status report_nothing(void *context, uint64_t size_bytes, fst_error *error) {
    (void)size_bytes;
    return fsti_writer_report(context, 0, error);
}

static uint32_t count_threads(const fst_writer *writer) {
    uint32_t wanted = writer->options.thread_count, files = writer->file_count;
    if (wanted == 0) wanted = fsti_cpu_count();
    return (uint32_t)fsti_max(1, wanted / fsti_min(files, wanted));
}

/// Compresses the plain file into a new one for the same target, and deletes the plain one.
static fst_status replace_plain(fst_writer *writer, save_file *file, pack_request *request,
                                uint64_t *size_bytes, fst_error *error) {
    fst_model *plain;
    fsti_output *packed;
    bool durable = writer->options.promise == FST_SAVE_DURABLE;
    FST_TRY(open_plain(file, &plain, error));
    request->file = plain->files[0].file;
    request->header = plain->files[0].header;
    request->report = report_nothing;
    fst_status status = fsti_output_open(&file->target, 0, durable, &packed, error);
    if (status == FST_OK) {
        status = fsti_pack(request, packed, size_bytes, error);
        fsti_output *unused = status == FST_OK ? file->output : packed;
        if (status == FST_OK) file->output = packed;
        fsti_output_close(unused);
    }
    fsti_model_unref(plain);
    return status;
}

fst_status fsti_writer_pack(fst_writer *writer, save_file *file, fst_error *error) {
    pack_request request = {.file = writer->origin,
                            .header = writer->origin_header,
                            .compress = writer->options.compress,
                            .thread_count = count_threads(writer),
                            .report = fsti_writer_report,
                            .context = writer};
    uint64_t size_bytes = 0;
    uint64_t plain_bytes =
        writer->is_whole ? fsti_file_size(writer->origin) : file->layout.file_bytes;
    fst_status status = writer->origin != NULL
                            ? fsti_pack(&request, file->output, &size_bytes, error)
                            : replace_plain(writer, file, &request, &size_bytes, error);
    FST_TRY(status);
    pthread_mutex_lock(&writer->lock);
    writer->bytes_packed += plain_bytes - size_bytes;
    if (writer->origin != NULL) {
        writer->counts.bytes_written = size_bytes;
        writer->counts.engine = "buffered";
        writer->tensors_done = writer->tensor_count;
    }
    pthread_mutex_unlock(&writer->lock);
    return FST_OK;
}

fst_status fsti_writer_copy_whole(fst_writer *writer, fst_error *error) {
    fsti_copy copy = {.source = writer->origin, .report = fsti_writer_report, .context = writer};
    FST_TRY(fsti_output_copy(writer->files[0].output, &copy, error));
    // Space was reserved for a header of one page, which can be more than a small file.
    FST_TRY(fsti_output_trim(writer->files[0].output, fsti_file_size(writer->origin), error));
    pthread_mutex_lock(&writer->lock);
    writer->bytes_copied = copy.bytes_copied;
    writer->counts.bytes_written = copy.bytes_copied;
    writer->counts.write_count = copy.call_count;
    writer->counts.engine = copy.engine;
    pthread_mutex_unlock(&writer->lock);
    return FST_OK;
}

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
    save_request request = {.path = target,
                            .options = &save,
                            .origin = model->files[0].file,
                            .origin_header = header,
                            .is_whole = true};
    fst_writer *writer;
    FST_TRY(fsti_writer_begin(&request, &writer, error));
    fst_status status = fsti_writer_commit(writer, error);
    if (status == FST_OK) status = fsti_writer_stats(writer, stats, error);
    if (status == FST_OK) stats->tensor_count = model->tensor_count;
    fsti_writer_close(writer);
    return status;
}

/// Keeps the file's absolute path, to check at the end that it is still there.
static fst_status open_origin(const char *path, uint32_t flags, fst_model **out, fst_error *error) {
    char *fixed = NULL;
    FST_TRY(fsti_path_absolute(path, &fixed, error));
    fst_status status = fsti_model_open(fixed, &(model_request){.flags = flags}, out, error);
    fsti_free(fixed);
    return status;
}

fst_status fsti_file_compress(const char *path, const char *target, const fst_pack_options *options,
                              fst_save_stats *stats, fst_error *error) {
    fst_model *model;
    FST_TRY(open_origin(path, FST_OPEN_STORED, &model, error));
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
    FST_TRY(open_origin(path, 0, &model, error));
    fst_status status;
    if (model->file_count != 1)
        status = refuse(path, "a sharded model. Decompress its files one by one", error);
    else // an incompressible file was stored uncompressed, so copy it
        status = write_file(model, NULL, target, options, stats, error);
    fsti_model_unref(model);
    return status;
}
