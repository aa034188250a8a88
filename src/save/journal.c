// SPDX-License-Identifier: Apache-2.0
/// Executes a journal: see journal.h.
///
/// Invariant: before the commit step (commit_index), every executed step can be undone; after it,
/// only cleanup remains. run() executes steps before commit_index and undoes them in reverse order
/// on failure.
#include "journal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/store.h"

/// A model with 99,999 files has four steps per file.
#define STEP_COUNT_MAX ((size_t)1 << 20)

static const char *const step_names[] = {
    [STEP_ASIDE] = "the manifest or digests of an earlier save moved aside",
    [STEP_NAME] = "temporary name for the new file",
    [STEP_PLACE] = "the new file in place",
    [STEP_LINK] = "the new file under its own name",
    [STEP_UNNAME] = "its hidden name removed",
    [STEP_SYNC] = "names synced to disk",
    [STEP_REMOVE] = "a file of an earlier save removed",
    [STEP_REMOVE_LAST] = "the index of an earlier save removed",
    [STEP_CHECK] = "existing files checked",
};

static journal_step *add_step(save_journal *journal, step_kind kind) {
    if (!fsti_array_reserve((void **)&journal->steps, &journal->capacity, journal->count,
                            sizeof *journal->steps, STEP_COUNT_MAX))
        return NULL;
    journal_step *step = &journal->steps[journal->count++];
    *step = (journal_step){.kind = kind, .kept_lock = -1};
    return step;
}

fst_status fsti_journal_add(save_journal *journal, step_kind kind, fsti_output *output,
                            fst_error *error) {
    journal_step *step = add_step(journal, kind);
    if (step == NULL) return fsti_error_memory(error, sizeof *step);
    step->output = output;
    return FST_OK;
}

fst_status fsti_journal_add_path(save_journal *journal, step_kind kind, const char *path,
                                 fst_error *error) {
    journal_step *step = add_step(journal, kind);
    if (step != NULL) step->path = fsti_string_copy(path, strlen(path));
    if (step == NULL || step->path == NULL) return fsti_error_memory(error, strlen(path));
    return FST_OK;
}

fst_status fsti_journal_add_removal(save_journal *journal, const char *path,
                                    const fsti_precondition *expected, const fsti_http_watch *watch,
                                    fst_error *error) {
    FST_TRY(fsti_journal_add_path(journal, STEP_REMOVE, path, error));
    journal->steps[journal->count - 1].expected_version = expected;
    journal->steps[journal->count - 1].watch = watch;
    return FST_OK;
}

fst_status fsti_journal_add_aside(save_journal *journal, const char *address,
                                  const fsti_http_watch *watch, fst_error *error) {
    FST_TRY(fsti_journal_add_path(journal, STEP_ASIDE, address, error));
    journal->steps[journal->count - 1].watch = watch;
    return FST_OK;
}

fst_status fsti_journal_add_check(save_journal *journal, journal_check check, void *context,
                                  fst_error *error) {
    FST_TRY(fsti_journal_add_path(journal, STEP_CHECK, "", error));
    journal->steps[journal->count - 1].check = check;
    journal->steps[journal->count - 1].context = context;
    return FST_OK;
}

void fsti_journal_set_commit(save_journal *journal) { journal->commit_index = journal->count; }

static const char *step_path(const journal_step *step) {
    return step->output != NULL ? fsti_output_path(step->output) : step->path;
}

static fst_status sync_names(save_journal *journal, const char *folder, fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    fst_status status = fsti_folder_sync(folder, error);
    journal->sync_count++;
    journal->sync_ns += fsti_now_ns() - start_ns;
    return status;
}

/// Replaces the file at the path. Keeps the old one first if a later step may fail.
static fst_status replace_file(journal_step *step, bool may_be_undone, fst_error *error) {
    struct stat info;
    const char *path = fsti_output_path(step->output);
    bool is_object = fsti_output_is_object(step->output);
    step->had_old = is_object ? fsti_output_had_object(step->output)
                              : lstat(path, &info) == 0 || errno != ENOENT;
    if (may_be_undone && step->had_old && !is_object)
        FST_TRY(fsti_path_keep(path, &step->kept, &step->kept_lock, error));
    return fsti_output_place(step->output, false, error);
}

static fst_status move_aside(journal_step *step, fst_error *error) {
    return fsti_location_is_url(step->path)
               ? fsti_object_hide(step->path, JOURNAL_MANIFEST_WORD, step->watch,
                                  &step->kept_object, error)
               : fsti_path_hide(step->path, &step->kept, &step->kept_lock, error);
}

static fst_status remove_step_path(const journal_step *step, fst_error *error) {
    if (step->output != NULL) return fsti_output_displace(step->output, error);
    return fsti_location_is_url(step->path)
               ? fsti_store_remove(step->path, step->expected_version, step->watch, NULL, error)
               : fsti_path_remove(step->path, error);
}

static fst_status run_step(save_journal *journal, size_t index, fst_error *error) {
    journal_step *step = &journal->steps[index];
    switch (step->kind) {
    case STEP_ASIDE: return move_aside(step, error);
    case STEP_NAME: return fsti_output_name(step->output, error);
    case STEP_PLACE: return replace_file(step, index + 1 < journal->commit_index, error);
    case STEP_LINK: return fsti_output_place(step->output, true, error);
    case STEP_UNNAME: return fsti_output_unname(step->output, error);
    case STEP_SYNC: return sync_names(journal, step->path, error);
    case STEP_REMOVE:
    case STEP_REMOVE_LAST: return remove_step_path(step, error);
    case STEP_CHECK: return step->check(step->context, error);
    }
    return FST_OK;
}

/// The kept name no longer exists, or belongs to another process.
static void clear_kept(journal_step *step) {
    if (step->kept_lock >= 0) close(step->kept_lock);
    step->kept_lock = -1;
    fsti_free(step->kept);
    step->kept = NULL;
    fsti_object_forget(step->kept_object);
    step->kept_object = NULL;
}

static void drop_kept(journal_step *step) {
    if (step->kept != NULL && fsti_path_remove(step->kept, NULL) != FST_OK)
        fsti_log(FST_LOG_WARNING, "%s was not deleted", step->kept);
    clear_kept(step);
}

/// Restores what was at a path before a step, even if the step failed halfway.
static fst_status undo_place(journal_step *step, fst_error *error) {
    const char *path = fsti_output_path(step->output);
    if (fsti_output_is_placed(step->output) == 0) {
        drop_kept(step);
        return FST_OK;
    }
    if (step->kept != NULL) {
        FST_TRY(fsti_path_restore(path, step->kept, error));
        clear_kept(step);
        return FST_OK;
    }
    if (!step->had_old) return fsti_output_displace(step->output, error);
    // If a store's response was lost, the object may be the new one or the old one.
    fsti_error_location where = FSTI_NO_LOCATION;
    where.file = path;
    return fsti_error_set(error, FST_E_IO, where, "the old file could not be backed up");
}

/// Restores a file that was moved aside, even if the step failed halfway.
static fst_status undo_aside(journal_step *step, fst_error *error) {
    if (step->kept_object != NULL)
        FST_TRY(fsti_object_restore(step->path, step->watch, step->kept_object, error));
    else if (step->kept != NULL)
        FST_TRY(fsti_path_restore(step->path, step->kept, error));
    clear_kept(step);
    return FST_OK;
}

static fst_status undo_step(journal_step *step, fst_error *error) {
    if (step->kind == STEP_ASIDE) return undo_aside(step, error);
    return step->kind == STEP_PLACE ? undo_place(step, error) : FST_OK;
}

/// Undoes the first `count` steps in reverse order. If a file cannot be removed from its path,
/// earlier steps are kept too, because the file may refer to names that they created.
static void undo(save_journal *journal, size_t count, fst_error *error) {
    for (size_t i = count; i-- > 0;) {
        journal_step *step = &journal->steps[i];
        fst_error second = {0};
        if (step->kind == STEP_NAME && fsti_output_unname(step->output, &second) != FST_OK)
            fsti_log(FST_LOG_WARNING, "a temporary file could not be deleted: %s", second.message);
        if (undo_step(step, &second) == FST_OK) continue;
        journal->is_committed = true; // so that close() deletes no names
        bool is_said = i + 1 == count && step->kind == STEP_PLACE &&
                       fsti_output_is_object(step->output); // by the failed step
        if (is_said) return;
        size_t used = strlen(error->message);
        snprintf(error->message + used, sizeof error->message - used,
                 "; undoing the save failed, too: %.200s", second.message);
        return;
    }
}

static fst_status run_until_commit(save_journal *journal, fst_error *error) {
    fst_error own = {0};
    for (size_t i = 0; i < journal->commit_index; i++) {
        const journal_step *step = &journal->steps[i];
        fsti_log(FST_LOG_DEBUG, "save step %zu of %zu: %s, %s", i + 1, journal->count,
                 step_names[step->kind], step_path(step));
        fst_status status = run_step(journal, i, &own);
        journal->steps[i].is_done = status == FST_OK;
        if (status == FST_OK) continue;
        undo(journal, i + 1, &own);
        if (error != NULL) *error = own;
        return status;
    }
    journal->is_committed = true;
    return FST_OK;
}

/// Cleans up. A failed step ends cleanup if later steps depend on it; deletions are independent.
static void run_cleanup(save_journal *journal) {
    journal->is_complete = true;
    for (size_t i = journal->commit_index; i < journal->count; i++) {
        fst_error error = {0};
        journal_step *step = &journal->steps[i];
        // While old files remain, keep the index by which the next save finds and deletes them, and
        // do not publish a manifest, because it would not list them.
        bool needs_all = step->kind == STEP_REMOVE_LAST || step->kind == STEP_PLACE;
        if (needs_all && !journal->is_complete) return;
        fsti_log(FST_LOG_DEBUG, "save step %zu of %zu: %s, %s", i + 1, journal->count,
                 step_names[step->kind], step_path(step));
        fst_status status = run_step(journal, i, &error);
        step->is_done = status == FST_OK;
        if (step->is_done) continue;
        journal->is_complete = false;
        if (journal->warning[0] == '\0')
            snprintf(journal->warning, sizeof journal->warning, "%.255s", error.message);
        fsti_log(FST_LOG_WARNING, "the save succeeded, with a problem: %s", error.message);
        // After a cancellation each further deletion would wait for its own timeout.
        bool is_over = status == FST_E_CANCELLED;
        if (is_over || (step->kind != STEP_REMOVE && step->kind != STEP_UNNAME)) return;
    }
}

fst_status fsti_journal_run(save_journal *journal, fst_error *error) {
    FST_TRY(run_until_commit(journal, error));
    for (size_t i = 0; i < journal->commit_index; i++) drop_kept(&journal->steps[i]);
    run_cleanup(journal);
    return FST_OK;
}

void fsti_journal_clear(save_journal *journal) {
    for (size_t i = 0; i < journal->count; i++) {
        fsti_free(journal->steps[i].path);
        clear_kept(&journal->steps[i]);
    }
    fsti_free(journal->steps);
    *journal = (save_journal){0};
}
