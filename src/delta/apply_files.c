// SPDX-License-Identifier: Apache-2.0
/// Applies a chain of deltas to a checkpoint's files: determines the folder's version, uses one
/// journal for each span of the chain, and recovers after a kill or an error.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "apply_job.h"
#include "new_files.h"
#include "output/output.h"

static fst_status refuse_file(const char *path, const char *what, fst_error *error) {
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_UNSUPPORTED, location, "%s", what);
}

/// Opens a file of the checkpoint for changes in place. Refuses symbolic links, which lead to a
/// file of another folder, and files with several hard links, because the change would be visible
/// through every name.
static fst_status open_file(apply_job *job, uint32_t file, bool is_written, fst_error *error) {
    struct stat info;
    const model_file *opened = &job->base->files[file];
    const char *path = fsti_file_path(opened->file);
    if (job->descriptors[file] >= 0) return FST_OK;
    if (opened->packed != NULL)
        return refuse_file(path,
                           "a delta cannot be applied to a compressed file; decompress it "
                           "first ('fastsafetensors convert --decompress')",
                           error);
    if (job->makes_files)
        return fsti_new_file_make(path, &job->descriptors[file], &job->stamps[file], error);
    int flags = is_written ? O_RDWR | O_NOFOLLOW : O_RDONLY;
    int fd = open(path, flags | O_CLOEXEC);
    if (fd < 0 && errno == ELOOP)
        return refuse_file(path,
                           "the file is a symbolic link, and changing it in place would "
                           "change another folder's file; copy the checkpoint first",
                           error);
    if (fd < 0) return fsti_error_errno(error, errno, path, "opening for changes");
    job->descriptors[file] = fd;
    if (fstat(fd, &info) != 0) return fsti_error_errno(error, errno, path, "examining the file");
    if (is_written && info.st_nlink > 1)
        return refuse_file(path,
                           "the file has several hard links, and a change in place would be "
                           "seen through all of them; copy the checkpoint first",
                           error);
    if ((uint64_t)info.st_size != fsti_file_size(opened->file))
        return fsti_file_check(opened->file, error);
    return is_written ? fsti_file_check_limit(path, (uint64_t)info.st_size, error) : FST_OK;
}

static void clear_job(apply_job *job) {
    for (size_t i = 0; job->descriptors != NULL && i < job->base->file_count; i++)
        if (job->descriptors[i] >= 0) close(job->descriptors[i]);
    fsti_free(job->descriptors);
    fsti_free(job->stamps);
    fsti_free(job->tensors);
    fsti_journal_close(&job->journal);
}

/// Binds the span to the model and opens the files that it changes. The caller clears *job, also
/// after an error.
static fst_status begin_job(apply_job *job, bool is_written, const fst_delta_options *options,
                            fst_error *error) {
    job->journal.undo_fd = -1;
    job->is_written = is_written;
    job->thread_count =
        fsti_pool_threads(options->thread_count, fsti_delta_decoders(job->delta, job->span));
    job->descriptors = fsti_alloc_zeroed(job->base->file_count + 1, sizeof *job->descriptors);
    for (size_t i = 0; job->descriptors != NULL && i < job->base->file_count; i++)
        job->descriptors[i] = -1;
    job->stamps = fsti_alloc_zeroed(job->base->file_count + 1, sizeof *job->stamps);
    if (job->descriptors == NULL || job->stamps == NULL)
        return fsti_error_memory(error, job->base->file_count);
    FST_TRY(fsti_delta_bind(job->delta, job->span, job->base, &job->tensors, &job->tensor_count,
                            error));
    job->block_count = 0;
    for (size_t i = 0; i < job->tensor_count; i++) {
        job->tensors[i].first_block = job->block_count;
        job->block_count += apply_count_blocks(&job->tensors[i]);
        FST_TRY(open_file(job, job->tensors[i].file, is_written, error));
    }
    return FST_OK;
}

/// A hash of the tensors and their positions. A journal with the same hash describes this
/// update.
static uint64_t hash_order(const apply_job *job) {
    uint64_t hash = 0;
    for (size_t i = 0; i < job->tensor_count; i++) {
        const bound_tensor *tensor = &job->tensors[i];
        uint64_t row[4] = {hash, fsti_hash(tensor->tensor->name, tensor->tensor->name_size, 0),
                           tensor->offset, tensor->size_bytes};
        hash = fsti_hash(row, sizeof row, tensor->file);
    }
    return hash;
}

/// Counts the tensors that this span changes and the versions before it, from `first` on, do not.
static void count_tensors(const apply_job *job, size_t first, fst_delta_stats *stats) {
    delta_span before = {first, job->span.first};
    for (size_t i = 0; i < job->tensor_count; i++) {
        if (fsti_delta_frames(job->delta, job->tensors[i].tensor, before).count > 0) continue;
        stats->tensor_bytes += job->tensors[i].size_bytes;
        stats->tensor_count++;
    }
}

static void count_job(const apply_job *job, fst_delta_stats *stats) {
    stats->bytes_read += atomic_load(&job->bytes_read);
    stats->bytes_written += atomic_load(&job->bytes_written);
    stats->bytes_hashed += atomic_load(&job->bytes_hashed);
    stats->thread_count = job->thread_count;
    for (size_t i = 0; i < job->tensor_count; i++) {
        delta_frames frames = fsti_delta_frames(job->delta, job->tensors[i].tensor, job->span);
        for (size_t k = 0; k < frames.count; k++)
            stats->stored_bytes += frames.frames[k].size_bytes;
    }
}

static fst_status sync_files(const apply_job *job, fst_error *error) {
    for (size_t i = 0; i < job->base->file_count; i++)
        if (job->descriptors[i] >= 0 && fdatasync(job->descriptors[i]) != 0)
            return fsti_error_errno(error, errno, fsti_file_path(job->base->files[i].file),
                                    "writing to the device");
    return FST_OK;
}

/// Records that the folder has `version` (NULL: deletes the note), and deletes the journal. The
/// note is written first, so that a kill between the two steps is resumed.
static fst_status end_journal(const apply_job *job, const sync_folder *sync, const char *version,
                              bool durable, fst_error *error) {
    if (durable) FST_TRY(sync_files(job, error));
    FST_TRY(version == NULL ? fsti_sync_remove(sync->state_path, error)
                            : fsti_sync_write_state(sync, version, job->base, durable, error));
    FST_TRY(fsti_sync_remove(sync->journal_path, error));
    // Without a journal the undo file is not read, so it may stay.
    (void)fsti_sync_remove(sync->undo_path, NULL);
    return FST_OK;
}

/// Restores the old bytes of all changed blocks. *error stays as the caller set it unless the
/// roll-back fails as well.
static fst_status roll_back(apply_job *job, const sync_folder *sync, fst_error *error) {
    const journal_head *head = job->journal.head;
    fst_error own = {0};
    const char *outcome = "could not be rolled back and holds tensors of two versions";
    fst_status status = fsti_apply_settle(job, &own);
    // The direction changes only after the slots are settled, because it decides what a slot means.
    if (status == FST_OK) atomic_store(&job->journal.head->is_backward, 1);
    // A process that was killed at its end may have written the note of the new version.
    if (status == FST_OK && access(sync->state_path, F_OK) == 0)
        status = fsti_sync_remove(sync->state_path, &own);
    if (status == FST_OK) status = fsti_apply_backward(job, &own);
    if (status == FST_OK) outcome = "has its old tensors again, but not the note of its version";
    // The undo values are no longer needed, and on a full disk the note needs their space.
    if (status == FST_OK && job->journal.undo_fd >= 0) (void)!ftruncate(job->journal.undo_fd, 0);
    const char *base = head->had_state ? fsti_journal_text(&job->journal, 0) : NULL;
    if (status == FST_OK) status = end_journal(job, sync, base, false, &own);
    if (status != FST_OK) {
        fsti_sync_add_outcome(outcome, &own);
        if (error != NULL) *error = own;
    }
    return status;
}

/// Completes the update that a journal describes, or rolls it back. Sets *rolled_back if the
/// folder has its base version again.
static fst_status run_journal(apply_job *job, const sync_folder *sync, bool durable,
                              bool *rolled_back, fst_error *error) {
    fst_error own;
    fst_status status = FST_OK;
    *rolled_back = atomic_load(&job->journal.head->is_backward) != 0;
    if (!*rolled_back) {
        status = fsti_apply_forward(job, &own);
        if (status == FST_OK) status = fsti_apply_check_names(job, &own);
        if (status == FST_OK)
            status = end_journal(job, sync, fsti_journal_text(&job->journal, 1), durable, &own);
        if (status == FST_OK) return FST_OK;
        if (error != NULL) *error = own;
    }
    *rolled_back = true;
    fst_status undone = roll_back(job, sync, error);
    return undone != FST_OK ? undone : status;
}

/// Changes copies of the files and renames them to the files' names. A failure before the renames
/// leaves the checkpoint unchanged.
static fst_status replace_files(apply_job *job, const sync_folder *sync, const char *version,
                                bool durable, fst_error *error) {
    fst_status status = fsti_apply_forward(job, error);
    if (status == FST_OK && durable) status = sync_files(job, error);
    FST_TRY(status);
    bool *is_changed = fsti_alloc_zeroed(job->base->file_count + 1, sizeof *is_changed);
    if (is_changed == NULL) return fsti_error_memory(error, job->base->file_count);
    for (size_t i = 0; i < job->base->file_count; i++) is_changed[i] = job->descriptors[i] >= 0;
    new_file_set set = {job->base, is_changed, job->stamps, version, durable};
    status = fsti_new_files_publish(sync, &set, error);
    fsti_free(is_changed);
    return status;
}

/// Applies one span, in place with a journal or to copies of the files. `had_state`: the folder has
/// a version note, which a roll-back restores.
static fst_status apply_span(apply_job *job, const sync_folder *sync,
                             const fst_delta_options *options, bool had_state, fst_error *error) {
    bool durable = (options->flags & FST_DELTA_DURABLE) != 0, rolled_back;
    const char *version = job->delta->versions[job->span.end - 1].text.version;
    job->makes_files = (options->flags & FST_DELTA_NEW_FILES) != 0;
    job->sync = sync;
    if (job->makes_files) FST_TRY(fsti_new_files_begin(sync, job->base, error));
    FST_TRY(begin_job(job, true, options, error));
    if (job->tensor_count == 0) {
        if (job->makes_files) fsti_new_files_remove(sync); // the list of no copies
        return fsti_sync_write_state(sync, version, job->base, durable, error);
    }
    if (job->makes_files) return replace_files(job, sync, version, durable, error);
    journal_plan plan = {.delta = job->delta,
                         .span = job->span,
                         .base = job->base,
                         .descriptors = job->descriptors,
                         .tensor_count = job->tensor_count,
                         .block_count = job->block_count,
                         .order_hash = hash_order(job),
                         .slot_count = job->thread_count,
                         .had_state = had_state};
    FST_TRY(fsti_apply_reserve(job, error));
    FST_TRY(fsti_journal_create(sync, &plan, &job->journal, error));
    // Until the new note is written, other programs find none and would copy the base.
    fst_status status = fsti_sync_remove(sync->state_path, error);
    if (status != FST_OK) { // nothing is changed yet
        if (fsti_sync_remove(sync->journal_path, NULL) != FST_OK)
            fsti_sync_add_outcome("has its old tensors, but its update counts as interrupted",
                                  error);
        (void)fsti_sync_remove(sync->undo_path, NULL);
        return status;
    }
    return run_journal(job, sync, durable, &rolled_back, error);
}

/// Decodes and verifies a span without changing anything.
static fst_status check_span(const fst_delta *delta, delta_span span, const fst_model *base,
                             const fst_delta_options *options, fst_delta_stats *stats,
                             fst_error *error) {
    apply_job job = {.delta = delta, .span = span, .base = base};
    if (span.end - span.first > DELTA_FOLD_MAX)
        return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                              "at most %u versions can be verified at once", DELTA_FOLD_MAX);
    fst_status status = begin_job(&job, false, options, error);
    if (status == FST_OK) status = fsti_apply_forward(&job, error);
    if (status == FST_OK) count_job(&job, stats);
    if (status == FST_OK && (options->flags & FST_DELTA_CHECK_ONLY) != 0)
        count_tensors(&job, span.first, stats);
    clear_job(&job);
    return status;
}

/// A folder that a journal names must be local: a file must not lead to the network. A URL is
/// opened only if the caller has given it, too.
static fst_status check_folder(const char *folder, const fst_delta *given, fst_error *error) {
    for (size_t i = 0; given != NULL && i < given->version_count; i++)
        if (strcmp(given->versions[i].folder, folder) == 0) return FST_OK;
    return fsti_location_require_file(
        folder, "a URL is not opened because a journal names it; apply the same delta again",
        error);
}

/// The files of an interrupted update are missing.
static fst_status refuse_gone(const char *const *folders, size_t count, fst_error *error) {
    fsti_error_location location = {.file = folders[count - 1], .byte_offset = FST_NO_OFFSET};
    for (size_t i = 0; i < count; i++)
        if (access(folders[i], F_OK) != 0) location.file = folders[i];
    return fsti_error_set(error, FST_E_NOT_FOUND, location,
                          "the delta is gone, and an update by it was interrupted; put it back, or "
                          "copy the checkpoint again and delete .weight_sync");
}

/// Opens the delta that a journal names; its indexes and checksums must be the same.
static fst_status open_recorded(const apply_journal *journal, const fst_delta *given,
                                fst_delta **out, fst_error *error) {
    const char *folders[DELTA_FOLD_MAX];
    const journal_head *head = journal->head;
    for (size_t i = 0; i < head->version_count; i++) {
        folders[i] = fsti_journal_text(journal, 2 + i);
        FST_TRY(check_folder(folders[i], given, error));
    }
    fst_status status = fsti_delta_open(folders, head->version_count, out, error);
    if (status == FST_E_NOT_FOUND) return refuse_gone(folders, head->version_count, error);
    FST_TRY(status);
    for (size_t i = 0; i < head->version_count; i++) {
        const delta_version *version = &(*out)->versions[i];
        if (memcmp(version->index_digest, head->index_digests[i], 16) == 0) continue;
        fsti_error_location location = {.file = version->index_path, .byte_offset = FST_NO_OFFSET};
        status = fsti_error_set(
            error, FST_E_FILE_CHANGED, location,
            "the delta was replaced while an update by it was interrupted; put the old one back, "
            "or copy the checkpoint again and delete .weight_sync");
        fsti_delta_close(*out);
        *out = NULL;
        return status;
    }
    return FST_OK;
}

/// Checks that the journal is about this folder and this delta, before anything is written.
static fst_status check_job(apply_job *job, fst_error *error) {
    const journal_head *head = job->journal.head;
    fsti_error_location place = {.file = job->sync->checkpoint, .byte_offset = FST_NO_OFFSET};
    if (job->tensor_count != head->tensor_count || job->block_count != head->block_count ||
        job->base->file_count != head->file_count || hash_order(job) != head->order_hash)
        return fsti_error_set(error, FST_E_FILE_CHANGED, place,
                              "the checkpoint's files are not those of the interrupted "
                              "update; copy the checkpoint again and delete .weight_sync");
    FST_TRY(fsti_apply_check(job, error));
    return fsti_apply_check_names(job, error);
}

/// Takes over the journal and opens what it is about. The caller clears *job.
static fst_status begin_resume(apply_job *job, apply_journal *journal,
                               const fst_delta_options *options, fst_error *error) {
    job->span = (delta_span){0, job->delta->version_count};
    fst_status status = begin_job(job, true, options, error);
    job->journal = *journal;
    *journal = (apply_journal){.undo_fd = -1};
    job->thread_count = (uint32_t)fsti_min(job->thread_count, job->journal.head->slot_count);
    return status == FST_OK ? check_job(job, error) : status;
}

/// Finishes or rolls back the update of a journal, whose versions and model are those of the job.
static fst_status resume_job(apply_job *job, apply_journal *journal,
                             const fst_delta_options *options, fst_delta_stats *stats,
                             fst_error *error) {
    bool rolled_back = false, durable = (options->flags & FST_DELTA_DURABLE) != 0;
    fst_status status = begin_resume(job, journal, options, error);
    if (status == FST_OK) status = fsti_apply_settle(job, error);
    if (status == FST_OK && job->rolls_back) atomic_store(&job->journal.head->is_backward, 1);
    if (status == FST_OK) status = run_journal(job, job->sync, durable, &rolled_back, error);
    stats->recovered = rolled_back ? 2 : 1;
    count_job(job, stats);
    count_tensors(job, job->span.first, stats);
    clear_job(job);
    return status;
}

/// Opens what a journal is about, and resumes it. The lock must be held. `given`: the caller's
/// delta, or NULL.
static fst_status resume(const sync_folder *sync, apply_journal *journal, const fst_delta *given,
                         const fst_delta_options *options, fst_delta_stats *stats,
                         fst_error *error) {
    fst_delta *delta = NULL;
    fst_model *model;
    model_request request = {0};
    FST_TRY(fsti_journal_check_files(sync, journal, error));
    fst_status status = open_recorded(journal, given, &delta, error);
    if (status == FST_OK) status = fsti_model_open(sync->checkpoint, &request, &model, error);
    if (status == FST_OK) {
        apply_job job = {.journal.undo_fd = -1, .sync = sync, .delta = delta, .base = model};
        job.rolls_back = (options->flags & FST_DELTA_ROLL_BACK) != 0;
        status = resume_job(&job, journal, options, stats, error);
        fsti_model_unref(model);
    }
    fsti_delta_close(delta);
    return status;
}

/// Finds the version of the chain to begin with: the one that is based on `current`, after versions
/// that a call before this one has applied. FST_E_VERSION if no version is. `is_recovered`: this
/// call has finished an update, or removed its last files, perhaps those of the chain's last one.
static fst_status find_start(const fst_delta *delta, const char *current, bool is_recovered,
                             const char *checkpoint, size_t *first, fst_error *error) {
    const fsti_delta_text *start = &delta->versions[0].text;
    const fsti_delta_text *last = &delta->versions[delta->version_count - 1].text;
    fsti_error_location location = {.file = checkpoint, .byte_offset = FST_NO_OFFSET};
    for (*first = 0; *first < delta->version_count; (*first)++)
        if (fsti_version_compare(delta->versions[*first].text.base, current) == FSTI_VERSION_SAME)
            return FST_OK;
    fsti_version_order order = fsti_version_compare(last->version, current);
    if (order == FSTI_VERSION_SAME && is_recovered) return FST_OK;
    if (order == FSTI_VERSION_SAME)
        return fsti_error_set(error, FST_E_VERSION, location, "version %s was applied already",
                              current);
    if (order == FSTI_VERSION_OLDER)
        return fsti_error_set(error, FST_E_VERSION, location,
                              "version %s is older than version %s, which the checkpoint has",
                              last->version, current);
    if (fsti_version_compare(start->base, current) == FSTI_VERSION_NEWER)
        return fsti_error_set(error, FST_E_VERSION, location,
                              "versions between %s, which the checkpoint has, and %s, which the "
                              "delta is based on, are missing",
                              current, start->base);
    return fsti_error_set(error, FST_E_VERSION, location,
                          "the checkpoint has version %s, but the delta is based on %s", current,
                          start->base);
}

/// Whether the chain leads from `version` to `current`: an earlier call with the same arguments,
/// which was killed, may have come that far.
static bool is_passed(const fst_delta *delta, const char *version, const char *current) {
    bool is_behind = false;
    for (size_t i = 0; i < delta->version_count; i++) {
        const fsti_delta_text *text = &delta->versions[i].text;
        is_behind = is_behind || fsti_version_compare(text->base, version) == FSTI_VERSION_SAME;
        if (is_behind && fsti_version_compare(text->version, current) == FSTI_VERSION_SAME)
            return true;
    }
    return false;
}

/// The version that the folder has: from its note, else from the caller's options, else the delta's
/// base.
static fst_status read_current(const sync_folder *sync, const fst_delta *delta,
                               const fst_delta_options *options, char *current, bool *had_state,
                               fst_error *error) {
    fsti_delta_state state;
    FST_TRY(fsti_sync_read_state(sync, &state, error));
    *had_state = state.version != NULL;
    const char *version = state.version != NULL      ? state.version
                          : options->version != NULL ? options->version
                                                     : delta->versions[0].text.base;
    strncpy(current, version, FST_DELTA_VERSION_BYTES - 1);
    current[FST_DELTA_VERSION_BYTES - 1] = '\0';
    fst_status status = fsti_sync_check_files(sync, &state, error);
    if (status == FST_OK && *had_state && options->version != NULL &&
        fsti_version_compare(options->version, current) != FSTI_VERSION_SAME &&
        !is_passed(delta, options->version, current))
        status =
            fsti_error_set(error, FST_E_VERSION, FSTI_NO_LOCATION,
                           "the checkpoint has version %s according to its version note, not %s",
                           current, options->version);
    fsti_delta_state_clear(&state);
    return status;
}

/// Applies the versions after those of `done`, which this call has applied and counted.
static fst_status apply_chain(const sync_folder *sync, const fst_delta *delta, delta_span done,
                              const fst_delta_options *options, fst_delta_stats *stats,
                              fst_error *error) {
    fst_model *model;
    model_request request = {0};
    fsti_delta_state state;
    size_t first = done.end;
    FST_TRY(fsti_model_open(sync->checkpoint, &request, &model, error));
    fst_status status = FST_OK;
    if ((options->flags & (FST_DELTA_CHECK_FIRST | FST_DELTA_CHECK_ONLY)) != 0)
        status = check_span(delta, (delta_span){first, delta->version_count}, model, options, stats,
                            error);
    bool is_check = (options->flags & FST_DELTA_CHECK_ONLY) != 0;
    while (status == FST_OK && !is_check && first < delta->version_count) {
        apply_job job = {.delta = delta, .span = fsti_delta_span(delta, first), .base = model};
        job.journal.undo_fd = -1;
        status = fsti_sync_read_state(sync, &state, error);
        bool had_state = status == FST_OK && state.version != NULL;
        if (status == FST_OK) fsti_delta_state_clear(&state);
        if (status == FST_OK) status = apply_span(&job, sync, options, had_state, error);
        count_job(&job, stats);
        count_tensors(&job, done.first, stats);
        first = job.span.end;
        clear_job(&job);
        if (job.makes_files && status != FST_OK && !fsti_sync_may_exist(sync->renames_path))
            fsti_new_files_remove(sync);
        if (job.makes_files && status == FST_OK && first < delta->version_count) {
            fsti_model_unref(model); // the next span begins with the new files
            status = fsti_model_open(sync->checkpoint, &request, &model, error);
            if (status != FST_OK) return status;
        }
    }
    fsti_model_unref(model);
    return status;
}

/// Finishes the renames or the journal of a process that was killed. The lock must be held.
/// *version_count: how many versions the journal is about.
static fst_status resume_any(const sync_folder *sync, const fst_delta *given,
                             const fst_delta_options *options, size_t *version_count,
                             fst_delta_stats *stats, fst_error *error) {
    apply_journal journal;
    bool is_done;
    *version_count = 0;
    bool durable = (options->flags & FST_DELTA_DURABLE) != 0;
    FST_TRY(fsti_new_files_resume(sync, durable, &is_done, error));
    if (is_done) stats->recovered = 1;
    FST_TRY(fsti_journal_open(sync, &journal, error));
    if (journal.map == NULL) return FST_OK;
    *version_count = journal.head->version_count;
    fst_status status = resume(sync, &journal, given, options, stats, error);
    fsti_journal_close(&journal);
    return status;
}

/// Removes the files of a process that was killed at the end of its update. Returns whether there
/// were any. The lock must be held, and no journal be left.
static bool remove_leftovers(const sync_folder *sync) {
    bool had_undo = unlink(sync->undo_path) == 0;
    bool had_copies = fsti_sync_may_exist(sync->copies_path);
    fsti_new_files_remove(sync);
    return had_undo || (had_copies && !fsti_sync_may_exist(sync->copies_path));
}

/// Refuses a folder with an interrupted update. Used by checks, which must not finish it.
static fst_status refuse_interrupted(const sync_folder *sync, fst_error *error) {
    if (!fsti_sync_is_updating(sync)) return FST_OK;
    fsti_error_location location = {.file = sync->checkpoint, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_VERSION, location,
                          "an update by a delta was interrupted, so the files are of two "
                          "versions; run 'fastsafetensors delta recover' first");
}

fst_status fsti_delta_apply(const fst_delta *delta, const char *checkpoint,
                            const fst_delta_options *options, fst_delta_stats *stats,
                            fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    char current[FST_DELTA_VERSION_BYTES];
    bool had_state;
    size_t first = 0, resumed = 0;
    sync_folder sync;
    bool is_check = (options->flags & FST_DELTA_CHECK_ONLY) != 0;
    fst_status status = is_check ? fsti_sync_open_to_check(checkpoint, &sync, error)
                                 : fsti_sync_open(checkpoint, &sync, error);
    if (status == FST_OK)
        status = is_check ? refuse_interrupted(&sync, error)
                          : resume_any(&sync, delta, options, &resumed, stats, error);
    bool is_finished = status == FST_OK && !is_check && remove_leftovers(&sync);
    if (status == FST_OK) status = read_current(&sync, delta, options, current, &had_state, error);
    if (status == FST_OK)
        status = find_start(delta, current, is_finished || stats->recovered != 0, checkpoint,
                            &first, error);
    bool is_old = status == FST_OK && first == delta->version_count;
    if (is_old && stats->recovered == 0) stats->recovered = 1;
    if (status == FST_OK && !is_check && first < delta->version_count)
        status = fsti_sync_check_manifest(&sync, current, error);
    delta_span done = {first - fsti_min(first, resumed), first};
    if (status == FST_OK) status = apply_chain(&sync, delta, done, options, stats, error);
    fsti_sync_close(&sync);
    stats->total_ns = fsti_now_ns() - start_ns;
    return status;
}

fst_status fsti_delta_recover(const char *checkpoint, const fst_delta_options *options,
                              fst_delta_stats *stats, fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    size_t resumed;
    sync_folder sync;
    fst_status status = fsti_sync_paths(checkpoint, &sync, error);
    // Without these files there is nothing to do, so no right to write to the folder is needed.
    bool has_files =
        status == FST_OK && (fsti_sync_is_updating(&sync) || fsti_sync_may_exist(sync.undo_path) ||
                             fsti_sync_may_exist(sync.copies_path));
    if (has_files) {
        fsti_sync_close(&sync);
        status = fsti_sync_open(checkpoint, &sync, error);
    }
    if (has_files && status == FST_OK)
        status = resume_any(&sync, NULL, options, &resumed, stats, error);
    if (has_files && status == FST_OK) (void)remove_leftovers(&sync);
    fsti_sync_close(&sync);
    stats->total_ns = fsti_now_ns() - start_ns;
    return status;
}
