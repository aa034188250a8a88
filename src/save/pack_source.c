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
    return fsti_progress_report(context, 0, error);
}

static uint32_t count_threads(const fst_writer *writer) {
    uint32_t wanted = writer->options.thread_count, files = writer->contents.file_count;
    if (wanted == 0) wanted = fsti_cpu_count();
    return (uint32_t)fsti_max(1, wanted / fsti_min(files, wanted));
}

static pack_request make_request(fst_writer *writer) {
    return (pack_request){.file = writer->source.origin,
                          .header = writer->source.origin_header,
                          .compress = writer->options.compress,
                          .thread_count = count_threads(writer),
                          .report = fsti_progress_report,
                          .context = &writer->progress};
}

static void count_saving(save_progress *progress, uint64_t plain_bytes, uint64_t size_bytes) {
    pthread_mutex_lock(&progress->lock);
    progress->bytes_packed += plain_bytes - size_bytes;
    pthread_mutex_unlock(&progress->lock);
}

/// Compresses the plain file into a new one for the same target, and deletes the plain one.
static fst_status replace_plain(fst_writer *writer, save_file *file, uint64_t *size_bytes,
                                fst_error *error) {
    fst_model *plain;
    fsti_output *packed;
    bool durable = writer->options.promise == FST_SAVE_DURABLE;
    pack_request request = make_request(writer);
    FST_TRY(open_plain(file, &plain, error));
    request.file = plain->files[0].file;
    request.header = plain->files[0].header;
    request.report = report_nothing;
    fst_status status = fsti_output_open(&file->target, 0, durable, &packed, error);
    if (status == FST_OK) {
        status = fsti_pack(&request, packed, size_bytes, error);
        fsti_output *unused = status == FST_OK ? file->output : packed;
        if (status == FST_OK) file->output = packed;
        fsti_output_close(unused);
    }
    fsti_model_unref(plain);
    return status;
}

static fst_status pack_written(fst_writer *writer, uint32_t file_index, fst_error *error) {
    save_file *file = &writer->contents.files[file_index];
    uint64_t size_bytes = 0;
    FST_TRY(writer->source.plain->fill(writer, file_index, error));
    FST_TRY(replace_plain(writer, file, &size_bytes, error));
    count_saving(&writer->progress, file->layout.file_bytes, size_bytes);
    return FST_OK;
}

static fst_status check_plain(const fst_writer *writer, fst_error *error) {
    const fsti_source_kind *plain = writer->source.plain;
    return plain->ready == NULL ? FST_OK : plain->ready(writer, error);
}

static fst_status pack_origin(fst_writer *writer, uint32_t file_index, fst_error *error) {
    save_progress *progress = &writer->progress;
    pack_request request = make_request(writer);
    uint64_t size_bytes = 0;
    FST_TRY(fsti_pack(&request, writer->contents.files[file_index].output, &size_bytes, error));
    count_saving(progress, fsti_file_size(writer->source.origin), size_bytes);
    pthread_mutex_lock(&progress->lock);
    progress->counts.bytes_written = size_bytes;
    progress->counts.engine = "buffered";
    progress->tensors_done = progress->tensor_count;
    pthread_mutex_unlock(&progress->lock);
    return FST_OK;
}

const fsti_source_kind fsti_source_packed = {.fill = pack_written, .ready = check_plain};
const fsti_source_kind fsti_source_compressed = {.fill = pack_origin,
                                                 .unchanged = fsti_origin_unchanged};
