// SPDX-License-Identifier: Apache-2.0
/// Walking a journal: see journal.h.
#include "journal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "net/net.h"

/// A set of 99,999 files takes four steps a file.
#define STEP_COUNT_MAX ((size_t)1 << 20)

static const char *const step_names[] = {
    [STEP_ASIDE] = "the manifest of an earlier save taken away",
    [STEP_NAME] = "a hidden name for the new file",
    [STEP_PLACE] = "the new file in place",
    [STEP_PLACE_COPY] = "the new file under its own name",
    [STEP_UNNAME] = "its hidden name removed",
    [STEP_SYNC] = "names made to last",
    [STEP_REMOVE] = "a file of an earlier save removed",
    [STEP_REMOVE_LAST] = "the index of an earlier save removed",
    [STEP_CHECK] = "what is there looked at",
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

fst_status fsti_journal_add_removal(save_journal *journal, const char *path, const fsti_seen *seen,
                                    const fsti_net_watch *watch, fst_error *error) {
    FST_TRY(fsti_journal_add_path(journal, STEP_REMOVE, path, error));
    journal->steps[journal->count - 1].seen = seen;
    journal->steps[journal->count - 1].watch = watch;
    return FST_OK;
}

fst_status fsti_journal_add_aside(save_journal *journal, const char *address,
                                  const fsti_net_watch *watch, fst_error *error) {
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

void fsti_journal_turn(save_journal *journal) { journal->turn = journal->count; }

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

/// Replaces what is at the path. If a later step may fail, that is kept first.
static fst_status place(journal_step *step, bool may_come_back, fst_error *error) {
    struct stat info;
    const char *path = fsti_output_path(step->output);
    bool is_object = fsti_output_is_object(step->output);
    step->had_old = is_object ? fsti_output_had_object(step->output)
                              : lstat(path, &info) == 0 || errno != ENOENT;
    if (may_come_back && step->had_old && !is_object)
        FST_TRY(fsti_path_keep(path, &step->kept, &step->kept_lock, error));
    return fsti_output_place(step->output, false, error);
}

static fst_status put_aside(journal_step *step, fst_error *error) {
    return fsti_net_is_url(step->path)
               ? fsti_object_hide(step->path, JOURNAL_MANIFEST_WORD, step->watch,
                                  &step->kept_object, error)
               : fsti_path_hide(step->path, &step->kept, &step->kept_lock, error);
}

static fst_status take_away(const journal_step *step, fst_error *error) {
    if (step->output != NULL) return fsti_output_displace(step->output, error);
    return fsti_net_is_url(step->path)
               ? fsti_net_remove(step->path, step->seen, step->watch, NULL, error)
               : fsti_path_remove(step->path, error);
}

static fst_status take_step(save_journal *journal, size_t index, fst_error *error) {
    journal_step *step = &journal->steps[index];
    switch (step->kind) {
    case STEP_ASIDE: return put_aside(step, error);
    case STEP_NAME: return fsti_output_name(step->output, error);
    case STEP_PLACE: return place(step, index + 1 < journal->turn, error);
    case STEP_PLACE_COPY: return fsti_output_place(step->output, true, error);
    case STEP_UNNAME: return fsti_output_unname(step->output, error);
    case STEP_SYNC: return sync_names(journal, step->path, error);
    case STEP_REMOVE:
    case STEP_REMOVE_LAST: return take_away(step, error);
    case STEP_CHECK: return step->check(step->context, error);
    }
    return FST_OK;
}

/// The kept name is gone, or nobody's.
static void forget_kept(journal_step *step) {
    if (step->kept_lock >= 0) close(step->kept_lock);
    step->kept_lock = -1;
    fsti_free(step->kept);
    step->kept = NULL;
    fsti_object_forget(step->kept_object);
    step->kept_object = NULL;
}

static void drop_kept(journal_step *step) {
    if (step->kept != NULL && fsti_path_remove(step->kept, NULL) != FST_OK)
        fsti_log(FST_LOG_WARNING, "%s stays behind", step->kept);
    forget_kept(step);
}

/// Brings back what was at a path before a step, also one that failed half way.
static fst_status undo_place(journal_step *step, fst_error *error) {
    const char *path = fsti_output_path(step->output);
    if (fsti_output_is_placed(step->output) == 0) {
        drop_kept(step);
        return FST_OK;
    }
    if (step->kept != NULL) {
        FST_TRY(fsti_path_restore(path, step->kept, error));
        forget_kept(step);
        return FST_OK;
    }
    if (!step->had_old) return fsti_output_displace(step->output, error);
    // An object that a store has not said to have taken may be the new one, or the old one still.
    fsti_error_place where = FSTI_NOWHERE;
    where.file = path;
    return fsti_error_set(error, FST_E_IO, where, "the old file could not be kept");
}

/// Brings back what was taken away, also by a step that failed half way.
static fst_status undo_aside(journal_step *step, fst_error *error) {
    if (step->kept_object != NULL)
        FST_TRY(fsti_object_restore(step->path, step->watch, step->kept_object, error));
    else if (step->kept != NULL)
        FST_TRY(fsti_path_restore(step->path, step->kept, error));
    forget_kept(step);
    return FST_OK;
}

static fst_status undo_step(journal_step *step, fst_error *error) {
    if (step->kind == STEP_ASIDE) return undo_aside(step, error);
    return step->kind == STEP_PLACE ? undo_place(step, error) : FST_OK;
}

/// Undoes the first `count` steps, last first. Where a file can't be taken from its place, what was
/// done before stays as well: it may lead to files that those steps named.
static void undo(save_journal *journal, size_t count, fst_error *error) {
    for (size_t i = count; i-- > 0;) {
        journal_step *step = &journal->steps[i];
        fst_error second = {0};
        if (step->kind == STEP_NAME && fsti_output_unname(step->output, &second) != FST_OK)
            fsti_log(FST_LOG_WARNING, "a hidden file stays behind: %s", second.message);
        if (undo_step(step, &second) == FST_OK) continue;
        journal->is_turned = true; // so that closing removes no names
        bool is_said = i + 1 == count && step->kind == STEP_PLACE &&
                       fsti_output_is_object(step->output); // by the step that failed
        if (is_said) return;
        size_t used = strlen(error->message);
        snprintf(error->message + used, sizeof error->message - used,
                 "; taking back what was done failed, too: %.200s", second.message);
        return;
    }
}

static fst_status run_to_turn(save_journal *journal, fst_error *error) {
    fst_error own = {0};
    for (size_t i = 0; i < journal->turn; i++) {
        const journal_step *step = &journal->steps[i];
        fsti_log(FST_LOG_DEBUG, "save step %zu of %zu: %s, %s", i + 1, journal->count,
                 step_names[step->kind], step_path(step));
        fst_status status = take_step(journal, i, &own);
        journal->steps[i].is_done = status == FST_OK;
        if (status == FST_OK) continue;
        undo(journal, i + 1, &own);
        if (error != NULL) *error = own;
        return status;
    }
    journal->is_turned = true;
    return FST_OK;
}

/// Tidies up. A step that others build on ends it; removals are each for themselves.
static void run_from_turn(save_journal *journal) {
    journal->is_complete = true;
    for (size_t i = journal->turn; i < journal->count; i++) {
        fst_error error = {0};
        journal_step *step = &journal->steps[i];
        // What hides a file that was left, and a manifest that does not list it, must not come.
        bool needs_all = step->kind == STEP_REMOVE_LAST || step->kind == STEP_PLACE;
        if (needs_all && !journal->is_complete) return;
        fsti_log(FST_LOG_DEBUG, "save step %zu of %zu: %s, %s", i + 1, journal->count,
                 step_names[step->kind], step_path(step));
        fst_status status = take_step(journal, i, &error);
        step->is_done = status == FST_OK;
        if (step->is_done) continue;
        journal->is_complete = false;
        if (journal->warning[0] == '\0')
            snprintf(journal->warning, sizeof journal->warning, "%.255s", error.message);
        fsti_log(FST_LOG_WARNING, "the new model is in place, but: %s", error.message);
        // Each of those that follow would wait as long.
        bool is_over = status == FST_E_CANCELLED;
        if (is_over || (step->kind != STEP_REMOVE && step->kind != STEP_UNNAME)) return;
    }
}

fst_status fsti_journal_run(save_journal *journal, fst_error *error) {
    FST_TRY(run_to_turn(journal, error));
    for (size_t i = 0; i < journal->turn; i++) drop_kept(&journal->steps[i]);
    run_from_turn(journal);
    return FST_OK;
}

void fsti_journal_clear(save_journal *journal) {
    for (size_t i = 0; i < journal->count; i++) {
        fsti_free(journal->steps[i].path);
        forget_kept(&journal->steps[i]);
    }
    fsti_free(journal->steps);
    *journal = (save_journal){0};
}
