// SPDX-License-Identifier: Apache-2.0
/// What all parts of a save share: whether it may go on, what it has counted, and its refusals.
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "save_state.h"

fst_status fsti_writer_refuse(const save_tensor *tensor, fst_error *error, const char *why) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.tensor = tensor->name;
    location.tensor_size = tensor->name_size;
    return fsti_error_set(error, FST_E_ARGUMENT, location, "%s", why);
}

fst_status fsti_writer_refuse_range(const save_tensor *tensor, byte_range range, const char *why,
                                    fst_error *error) {
    char words[128];
    snprintf(words, sizeof words, "bytes %" PRIu64 " to %" PRIu64 " of the tensor %s", range.begin,
             range.end, why);
    return fsti_writer_refuse(tensor, error, words);
}

fst_status fsti_writer_check_owner(const fst_writer *writer, fst_error *error) {
    if (writer->owner == getpid()) return FST_OK;
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                          "the save was opened before fork() and belongs to the parent process");
}

fst_status fsti_writer_check_open(const fst_writer *writer, fst_error *error) {
    FST_TRY(fsti_writer_check_owner(writer, error));
    int state = atomic_load(&writer->state);
    if (state == WRITER_OPEN) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "the save %s",
                          state == WRITER_FAILED ? "has failed" : "is finished");
}

/// Lock order: progress_lock, then lock. The first is held during the callback, so that reports of
/// several threads do not overtake each other; the second is not, because the callback may be slow.
fst_status fsti_writer_report(void *context, uint64_t size_bytes, fst_error *error) {
    fst_writer *writer = context;
    const fst_save_options *options = &writer->options;
    int stop = 0;
    if (options->progress != NULL) pthread_mutex_lock(&writer->progress_lock);
    pthread_mutex_lock(&writer->lock);
    writer->bytes_done += size_bytes;
    uint64_t done = writer->bytes_done;
    size_t tensors_done = writer->tensors_done;
    pthread_mutex_unlock(&writer->lock);
    if (options->progress != NULL) {
        stop = options->progress(options->progress_context, done, writer->bytes_total, tensors_done,
                                 writer->tensor_count);
        pthread_mutex_unlock(&writer->progress_lock);
    }
    if (stop == 0 && !atomic_load(&writer->is_cancelled)) return FST_OK;
    atomic_store(&writer->is_ended, true);
    return fsti_error_set(error, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled");
}

fst_status fsti_writer_sync(fst_writer *writer, fsti_output *output, fst_error *error) {
    uint64_t start = fsti_now_ns();
    fst_status status = fsti_output_sync(output, error);
    pthread_mutex_lock(&writer->lock);
    writer->sync_count++;
    writer->sync_ns += fsti_now_ns() - start;
    pthread_mutex_unlock(&writer->lock);
    return status;
}
