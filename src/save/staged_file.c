// SPDX-License-Identifier: Apache-2.0
/// A file of a save and its stage.
#include "save_state.h"

fst_status fsti_writer_open_stage(fst_writer *writer, save_file *file, fst_error *error) {
    stage_options options = {.promise = writer->options.promise,
                             .engine = writer->options.engine,
                             .file_bytes = file->layout.file_bytes,
                             .report = fsti_progress_report,
                             .report_context = &writer->progress,
                             .digests = file->digests.passing};
    if (file->stage == NULL) FST_TRY(fsti_stage_open(file->output, &options, &file->stage, error));
    if (file->header_put) return FST_OK;
    file->header_put = true;
    return fsti_stage_put(file->stage, 0, file->layout.header, file->layout.header_bytes, true,
                          error);
}

fst_status fsti_writer_close_stage(fst_writer *writer, save_file *file, fst_error *error) {
    if (file->stage == NULL) return FST_OK;
    fst_status status = fsti_stage_drain(file->stage, error);
    pthread_mutex_lock(&writer->progress.lock);
    fsti_stage_close(file->stage, &writer->progress.counts);
    pthread_mutex_unlock(&writer->progress.lock);
    file->stage = NULL;
    return status;
}

fst_status fsti_writer_fill_staged(fst_writer *writer, uint32_t file_index, fill_stage fill,
                                   fst_error *error) {
    save_file *file = &writer->contents.files[file_index];
    fst_status status = fsti_writer_open_stage(writer, file, error);
    if (status == FST_OK) status = fill(writer, file_index, error);
    fst_status closed = fsti_writer_close_stage(writer, file, status == FST_OK ? error : NULL);
    fsti_output_unmap(file->output);
    return status == FST_OK ? closed : status;
}
