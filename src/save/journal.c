// SPDX-License-Identifier: Apache-2.0
/// Executes a journal: see journal.h.
///
/// Invariant: before cleanup_begin every executed step can be undone; from there on,
/// only cleanup remains. run_until_commit() executes the first part, and undoes it in reverse order
/// on failure.
#include "journal.h"

#include <stdio.h>
#include <string.h>

/// A model with 99,999 files has four steps per file.
#define STEP_COUNT_MAX ((size_t)1 << 20)

fst_status fsti_journal_add(save_journal *journal, const journal_step *step, fst_error *error) {
    if (!fsti_array_reserve((void **)&journal->steps, &journal->capacity, journal->count,
                            sizeof *journal->steps, STEP_COUNT_MAX))
        return fsti_error_memory(error, sizeof *step);
    journal_step *added = &journal->steps[journal->count++];
    *added = *step;
    added->kept_lock = -1;
    if (step->path == NULL) return FST_OK;
    added->path = fsti_string_copy(step->path, strlen(step->path));
    return added->path == NULL ? fsti_error_memory(error, strlen(step->path)) : FST_OK;
}

fst_status fsti_journal_add_output(save_journal *journal, const fsti_step_kind *kind,
                                   fsti_output *output, fst_error *error) {
    return fsti_journal_add(journal, &(journal_step){.kind = kind, .output = output}, error);
}

fst_status fsti_journal_add_path(save_journal *journal, const fsti_step_kind *kind,
                                 const char *path, fst_error *error) {
    return fsti_journal_add(journal, &(journal_step){.kind = kind, .path = (char *)(uintptr_t)path},
                            error);
}

void fsti_journal_set_commit(save_journal *journal) { journal->cleanup_begin = journal->count; }

static fst_status run_step(save_journal *journal, size_t index, fst_error *error) {
    journal_step *step = &journal->steps[index];
    const char *path = step->path == NULL ? "" : step->path;
    step->may_be_undone = index + 1 < journal->cleanup_begin;
    fsti_log(FST_LOG_DEBUG, "save step %zu of %zu: %s, %s", index + 1, journal->count,
             step->kind->name, step->output != NULL ? fsti_output_path(step->output) : path);
    return step->kind->run(journal, step, error);
}

static void release_step(journal_step *step, bool deletes) {
    if (step->kind->release != NULL) step->kind->release(step, deletes);
}

/// Undoes the first `count` steps in reverse order, of which the last has failed. If a file cannot
/// be removed from its path, earlier steps are kept too, because the file may refer to names that
/// they created.
static void undo(save_journal *journal, size_t count, fst_error *error) {
    for (size_t i = count; i-- > 0;) {
        journal_step *step = &journal->steps[i];
        fst_error second = {0};
        if (step->kind->undo == NULL || step->kind->undo(step, &second) == FST_OK) continue;
        journal->keeps_names = true;
        if (i + 1 == count && step->kind->reports_undo) return;
        size_t used = strlen(error->message);
        snprintf(error->message + used, sizeof error->message - used,
                 "; undoing the save failed, too: %.200s", second.message);
        return;
    }
}

static fst_status run_until_commit(save_journal *journal, fst_error *error) {
    fst_error own = {0};
    for (size_t i = 0; i < journal->cleanup_begin; i++) {
        fst_status status = run_step(journal, i, &own);
        if (status == FST_OK) continue;
        undo(journal, i + 1, &own);
        if (error != NULL) *error = own;
        return status;
    }
    journal->is_committed = journal->keeps_names = true;
    return FST_OK;
}

/// Cleans up. A failed step ends cleanup if later steps depend on it.
static void run_cleanup(save_journal *journal) {
    journal->is_complete = true;
    for (size_t i = journal->cleanup_begin; i < journal->count; i++) {
        fst_error error = {0};
        const fsti_step_kind *kind = journal->steps[i].kind;
        if (kind->only_after_success && !journal->is_complete) return;
        fst_status status = run_step(journal, i, &error);
        if (status == FST_OK) continue;
        journal->is_complete = false;
        if (journal->warning[0] == '\0')
            snprintf(journal->warning, sizeof journal->warning, "%.255s", error.message);
        fsti_log(FST_LOG_WARNING, "the save succeeded, with a problem: %s", error.message);
        // After a cancellation each further deletion would wait for its own timeout.
        if (status == FST_E_CANCELLED || !kind->is_independent) return;
    }
}

fst_status fsti_journal_run(save_journal *journal, fst_error *error) {
    FST_TRY(run_until_commit(journal, error));
    for (size_t i = 0; i < journal->cleanup_begin; i++) release_step(&journal->steps[i], true);
    run_cleanup(journal);
    return FST_OK;
}

void fsti_journal_clear(save_journal *journal) {
    for (size_t i = 0; i < journal->count; i++) {
        fsti_free(journal->steps[i].path);
        release_step(&journal->steps[i], false);
    }
    fsti_free(journal->steps);
    *journal = (save_journal){0};
}
