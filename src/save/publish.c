// SPDX-License-Identifier: Apache-2.0
/// The end of a save: publishes finished files with a journal (journal.h), as the target's plan
/// says.
#include <inttypes.h>
#include <stdio.h>

#include "save_state.h"

/// Whether only this process can have written the files.
static bool is_own(const fst_writer *writer) { return writer->publication.role == ROLE_OWN; }

/// Nobody else can write to files that were not handed over, even with others_write.
static fst_status check_written(const fst_writer *writer, fst_error *error) {
    int state = atomic_load(&writer->state);
    bool is_uncommitted = state == WRITER_OPEN || state == WRITER_FINISHED;
    if (!is_uncommitted || !is_own(writer) || writer->options.others_write == 0) return FST_OK;
    return fsti_writer_check_complete(writer, error);
}

/// Syncs what other processes have written.
static fst_status sync_shared(fst_writer *writer, fst_error *error) {
    if (is_own(writer) || writer->options.promise != FST_SAVE_DURABLE) return FST_OK;
    for (uint32_t f = 0; f < writer->contents.file_count; f++)
        FST_TRY(fsti_progress_sync(&writer->progress, writer->contents.files[f].output, error));
    return FST_OK;
}

/// Digests files that were not digested while they were written: other processes wrote them, or
/// might have.
static fst_status digest_shared(fst_writer *writer, fst_error *error) {
    bool is_digested = is_own(writer) && writer->options.others_write == 0;
    if (is_digested || writer->publication.manifest.kind == NULL) return FST_OK;
    for (uint32_t f = 0; f < writer->contents.file_count; f++)
        FST_TRY(fsti_save_manifest_end(writer, &writer->contents.files[f], error));
    return FST_OK;
}

static fst_status run(fst_writer *writer, fst_error *error) {
    const fsti_target_kind *target = writer->target.kind;
    FST_TRY(fsti_anchor_check(writer->target.anchor, writer->target.published[0], error));
    FST_TRY(sync_shared(writer, error));
    FST_TRY(digest_shared(writer, error));
    FST_TRY(target->plan(writer, error));
    if (atomic_load(&writer->progress.cancel_requested))
        return fsti_error_set(error, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled");
    const fsti_source_kind *source = writer->source.kind;
    if (source->unchanged != NULL) FST_TRY(source->unchanged(writer, error));
    FST_TRY(fsti_journal_run(&writer->publication.journal, error));
    if (writer->publication.journal.is_complete && target->clean_up != NULL)
        target->clean_up(writer);
    return FST_OK;
}

static void record_publication(fst_writer *writer) {
    pthread_mutex_lock(&writer->progress.lock);
    writer->progress.total_ns = fsti_now_ns() - writer->progress.start_ns;
    writer->progress.step_count = writer->publication.journal.count;
    writer->progress.sync_count += writer->publication.journal.sync_count;
    writer->progress.sync_ns += writer->publication.journal.sync_ns;
    snprintf(writer->progress.warning, sizeof writer->progress.warning, "%s",
             writer->publication.journal.warning);
    if (fsti_output_is_object(writer->contents.files[0].output))
        fsti_output_describe(writer->contents.files[0].output, writer->progress.counts.reason,
                             sizeof writer->progress.counts.reason);
    pthread_mutex_unlock(&writer->progress.lock);
    fsti_log(FST_LOG_INFO, "saved %s: %zu tensors, %u files, %" PRIu64 " bytes, %s (%s)",
             writer->target.folder != NULL ? writer->target.folder : writer->target.published[0],
             writer->contents.tensor_count, writer->contents.file_count,
             writer->progress.bytes_total,
             writer->progress.counts.engine == NULL ? "" : writer->progress.counts.engine,
             writer->progress.counts.reason);
}

fst_status fsti_writer_commit(fst_writer *writer, fst_error *error) {
    FST_TRY(fsti_writer_check_owner(writer, error));
    if (writer->publication.role == ROLE_JOINED)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "the file belongs to another process: that commits");
    FST_TRY(check_written(writer, error));
    FST_TRY(fsti_writer_make_finished(writer, error));
    int lock = -1;
    fst_status status = fsti_async_await_earlier(writer, error);
    if (status == FST_OK) status = writer->target.kind->lock(writer, &lock, error);
    if (status == FST_OK) status = run(writer, error);
    fsti_folder_unlock(lock);
    atomic_store(&writer->state, status == FST_OK ? WRITER_COMMITTED : WRITER_FAILED);
    if (status == FST_OK) record_publication(writer);
    return status;
}
