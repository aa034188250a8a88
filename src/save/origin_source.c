// SPDX-License-Identifier: Apache-2.0
/// Bytes of an existing file: copied whole, or behind a new header.
#include <stdio.h>
#include <sys/stat.h>

#include "io/io.h"
#include "save_state.h"

fst_status fsti_writer_copy_origin(fst_writer *writer, fst_error *error) {
    save_file *file = &writer->files[0];
    const fst_layout *layout = &file->layout;
    fsti_copy copy = {.source = writer->origin,
                      .source_begin = writer->origin_begin,
                      .begin = layout->header_bytes,
                      .report = fsti_writer_report,
                      .context = writer};
    FST_TRY(fsti_output_copy(file->output, &copy, error));
    // Written after the copy, because sharing needs an empty block where the header ends.
    FST_TRY(fsti_output_write(file->output, layout->header, layout->header_bytes, 0, error));
    pthread_mutex_lock(&writer->lock);
    writer->bytes_shared = copy.bytes_shared;
    writer->bytes_copied = copy.bytes_copied;
    writer->counts.bytes_written = layout->header_bytes;
    writer->counts.write_count = copy.call_count + 1;
    writer->counts.engine = copy.engine;
    snprintf(writer->counts.reason, sizeof writer->counts.reason, "%s", copy.reason);
    writer->tensors_done = writer->tensor_count;
    pthread_mutex_unlock(&writer->lock);
    return fsti_writer_report(writer, layout->header_bytes, error);
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

fst_status fsti_writer_check_origin(const fst_writer *writer, fst_error *error) {
    struct stat info, now;
    if (writer->origin == NULL) return FST_OK;
    FST_TRY(fsti_file_check(writer->origin, error));
    const char *path = fsti_file_path(writer->origin);
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    if (fstat(fsti_file_identity(writer->origin), &info) != 0 || stat(path, &now) != 0 ||
        info.st_dev != now.st_dev || info.st_ino != now.st_ino)
        return fsti_error_set(error, FST_E_FILE_CHANGED, location,
                              "the file was replaced while it was being edited");
    return FST_OK;
}
