// SPDX-License-Identifier: Apache-2.0
/// Steps of a commit that change names of files, and checks.
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/io.h"
#include "journal_steps.h"

fst_status fsti_step_refuse_undo(const journal_step *step, fst_error *error) {
    fsti_error_location where = FSTI_NO_LOCATION;
    where.file = fsti_output_path(step->output);
    return fsti_error_set(error, FST_E_IO, where, "the old file could not be backed up");
}

// ---- kept files ----

/// The kept name no longer exists, or belongs to another process.
static void clear_kept(journal_step *step) {
    if (step->kept_lock >= 0) close(step->kept_lock);
    step->kept_lock = -1;
    fsti_free(step->kept);
    step->kept = NULL;
}

static void release_kept(journal_step *step, bool deletes) {
    if (deletes && step->kept != NULL && fsti_path_remove(step->kept, NULL) != FST_OK)
        fsti_log(FST_LOG_WARNING, "%s was not deleted", step->kept);
    clear_kept(step);
}

static fst_status restore_kept(journal_step *step, const char *path, fst_error *error) {
    FST_TRY(fsti_path_restore(path, step->kept, error));
    clear_kept(step);
    return FST_OK;
}

// ---- new files ----

static fst_status name_file(save_journal *journal, journal_step *step, fst_error *error) {
    (void)journal;
    return fsti_output_name(step->output, error);
}

static fst_status unname_file(save_journal *journal, journal_step *step, fst_error *error) {
    (void)journal;
    return fsti_output_unname(step->output, error);
}

/// A name that stays is no reason to keep the new model.
static fst_status undo_name(journal_step *step, fst_error *error) {
    if (fsti_output_unname(step->output, error) != FST_OK && error != NULL)
        fsti_log(FST_LOG_WARNING, "a temporary file could not be deleted: %s", error->message);
    return FST_OK;
}

/// Keeps the old file first if a later step may fail.
static fst_status place_file(save_journal *journal, journal_step *step, fst_error *error) {
    struct stat info;
    const char *path = fsti_output_path(step->output);
    (void)journal;
    step->had_old = lstat(path, &info) == 0 || errno != ENOENT;
    if (step->may_be_undone && step->had_old)
        FST_TRY(fsti_path_keep(path, &step->kept, &step->kept_lock, error));
    return fsti_output_place(step->output, false, error);
}

/// The old manifest was moved aside, so what is there now is of another save.
static fst_status place_manifest(save_journal *journal, journal_step *step, fst_error *error) {
    (void)journal;
    return fsti_output_place_beside(step->output, NULL, NULL, error);
}

/// Restores what was at the path, even if the step failed halfway.
static fst_status undo_place(journal_step *step, fst_error *error) {
    if (fsti_output_is_placed(step->output) == 0) {
        release_kept(step, true);
        return FST_OK;
    }
    if (step->kept != NULL) return restore_kept(step, fsti_output_path(step->output), error);
    return step->had_old ? fsti_step_refuse_undo(step, error)
                         : fsti_output_displace(step->output, error);
}

static fst_status link_file(save_journal *journal, journal_step *step, fst_error *error) {
    (void)journal;
    return fsti_output_place(step->output, true, error);
}

// ---- files of an earlier save ----

/// Restores the file, even if the step failed halfway. A newer file of another save stays.
static fst_status undo_hide(journal_step *step, fst_error *error) {
    if (step->kept != NULL) FST_TRY(fsti_path_put_back(step->path, step->kept, error));
    clear_kept(step);
    return FST_OK;
}

/// The file is examined again under its temporary name: another save may have put a model there
/// since the commit was planned.
static fst_status hide_file(save_journal *journal, journal_step *step, fst_error *error) {
    bool describes = false;
    (void)journal;
    FST_TRY(fsti_save_describes_model(step->path, &describes, error));
    if (!describes) return FST_OK;
    FST_TRY(fsti_path_hide(step->path, &step->kept, &step->kept_lock, error));
    if (step->kept == NULL) return FST_OK;
    FST_TRY(fsti_save_describes_model(step->kept, &describes, error));
    return describes ? FST_OK : undo_hide(step, error);
}

/// A file that another process wrote there since hide_file(): it describes the model that was
/// replaced.
static fst_status drop_file(save_journal *journal, journal_step *step, fst_error *error) {
    fst_status status = hide_file(journal, step, error);
    if (status == FST_OK)
        release_kept(step, true);
    else
        (void)undo_hide(step, NULL);
    return status;
}

/// A file that is at the path now describes the new model, which is being undone.
static fst_status undo_hide_late(journal_step *step, fst_error *error) {
    journal_step later = {.path = step->path, .kept_lock = -1};
    (void)drop_file(NULL, &later, NULL);
    return undo_hide(step, error);
}

static fst_status remove_file(save_journal *journal, journal_step *step, fst_error *error) {
    (void)journal;
    return fsti_path_remove(step->path, error);
}

static fst_status sync_folder(save_journal *journal, journal_step *step, fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    fst_status status = fsti_folder_sync(step->path, error);
    journal->sync_count++;
    journal->sync_ns += fsti_now_ns() - start_ns;
    return status;
}

static fst_status run_check(save_journal *journal, journal_step *step, fst_error *error) {
    (void)journal;
    return step->check(step->context, error);
}

// ---- the kinds ----

const fsti_step_kind fsti_step_name_file = {
    .name = "temporary name for the new file", .run = name_file, .undo = undo_name};
// While old files remain, no manifest is published, because it would not list them.
const fsti_step_kind fsti_step_place_file = {.name = "the new file in place",
                                             .run = place_file,
                                             .undo = undo_place,
                                             .release = release_kept,
                                             .only_after_success = true};
const fsti_step_kind fsti_step_place_manifest = {.name = "the manifest in place",
                                                 .run = place_manifest,
                                                 .undo = undo_place,
                                                 .release = release_kept,
                                                 .only_after_success = true};
const fsti_step_kind fsti_step_link_file = {.name = "the new file under its own name",
                                            .run = link_file};
const fsti_step_kind fsti_step_unname_file = {
    .name = "its hidden name removed", .run = unname_file, .is_independent = true};
const fsti_step_kind fsti_step_hide_file = {
    .name = "the manifest or digests of an earlier save moved aside",
    .run = hide_file,
    .undo = undo_hide,
    .release = release_kept};
const fsti_step_kind fsti_step_hide_late_file = {
    .name = "a manifest or digests that were written meanwhile moved aside",
    .run = hide_file,
    .undo = undo_hide_late,
    .release = release_kept};
const fsti_step_kind fsti_step_drop_file = {.name =
                                                "a manifest or digests of an earlier save removed",
                                            .run = drop_file,
                                            .release = release_kept,
                                            .is_independent = true};
const fsti_step_kind fsti_step_remove_file = {
    .name = "a file of an earlier save removed", .run = remove_file, .is_independent = true};
// While old files remain, the index stays by which the next save finds and deletes them.
const fsti_step_kind fsti_step_remove_index = {
    .name = "the index of an earlier save removed", .run = remove_file, .only_after_success = true};
const fsti_step_kind fsti_step_sync_folder = {.name = "names synced to disk", .run = sync_folder};
const fsti_step_kind fsti_step_check = {.name = "existing files checked", .run = run_check};

fst_status fsti_journal_add_sync(save_journal *journal, fst_save_promise promise,
                                 const char *folder, fst_error *error) {
    if (promise != FST_SAVE_DURABLE) return FST_OK;
    return fsti_journal_add_path(journal, &fsti_step_sync_folder, folder, error);
}
