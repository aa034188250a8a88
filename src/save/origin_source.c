// SPDX-License-Identifier: Apache-2.0
/// Bytes of an existing file: copied whole, or behind a new header.
#include <stdio.h>
#include <sys/stat.h>

#include "io/io.h"
#include "save_state.h"

/// Writes the new header, and the data of the old file.
static fst_status copy_data(fst_writer *writer, uint32_t file_index, fst_error *error) {
    save_file *file = &writer->contents.files[file_index];
    const fst_layout *layout = &file->layout;
    fsti_copy copy = {.source = writer->source.origin,
                      .source_begin = writer->source.origin_begin,
                      .begin = layout->header_bytes,
                      .report = fsti_progress_report,
                      .context = &writer->progress};
    FST_TRY(fsti_output_copy(file->output, &copy, error));
    // Written after the copy, because sharing needs an empty block where the header ends.
    FST_TRY(fsti_output_write(file->output, layout->header, layout->header_bytes, 0, error));
    pthread_mutex_lock(&writer->progress.lock);
    writer->progress.bytes_shared = copy.bytes_shared;
    writer->progress.bytes_copied = copy.bytes_copied;
    writer->progress.counts.bytes_written = layout->header_bytes;
    writer->progress.counts.write_count = copy.call_count + 1;
    writer->progress.counts.engine = copy.engine;
    snprintf(writer->progress.counts.reason, sizeof writer->progress.counts.reason, "%s",
             copy.reason);
    writer->progress.tensors_done = writer->contents.tensor_count;
    pthread_mutex_unlock(&writer->progress.lock);
    return fsti_progress_report(&writer->progress, layout->header_bytes, error);
}

static fst_status copy_whole(fst_writer *writer, uint32_t file_index, fst_error *error) {
    fsti_output *output = writer->contents.files[file_index].output;
    fsti_copy copy = {.source = writer->source.origin,
                      .report = fsti_progress_report,
                      .context = &writer->progress};
    FST_TRY(fsti_output_copy(output, &copy, error));
    // Space was reserved for a header of one page, which can be more than a small file.
    FST_TRY(fsti_output_trim(output, fsti_file_size(writer->source.origin), error));
    pthread_mutex_lock(&writer->progress.lock);
    writer->progress.bytes_copied = copy.bytes_copied;
    writer->progress.counts.bytes_written = copy.bytes_copied;
    writer->progress.counts.write_count = copy.call_count;
    writer->progress.counts.engine = copy.engine;
    pthread_mutex_unlock(&writer->progress.lock);
    return FST_OK;
}

fst_status fsti_origin_unchanged(const fst_writer *writer, fst_error *error) {
    struct stat info, now;
    FST_TRY(fsti_file_check(writer->source.origin, error));
    const char *path = fsti_file_path(writer->source.origin);
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    if (fstat(fsti_file_identity(writer->source.origin), &info) != 0 || stat(path, &now) != 0 ||
        info.st_dev != now.st_dev || info.st_ino != now.st_ino)
        return fsti_error_set(error, FST_E_FILE_CHANGED, location,
                              "the file was replaced while it was being read. Try again");
    return FST_OK;
}

const fsti_source_kind fsti_source_edited = {.fill = copy_data, .unchanged = fsti_origin_unchanged};
const fsti_source_kind fsti_source_copied = {.fill = copy_whole,
                                             .unchanged = fsti_origin_unchanged};
