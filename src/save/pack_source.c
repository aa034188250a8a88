// SPDX-License-Identifier: Apache-2.0
/// Compressed bytes: of an existing file, or of a file that the save has just written.
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
