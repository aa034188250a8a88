// SPDX-License-Identifier: Apache-2.0
/// A commit as a list of steps, most of them one system call or request that changes a name.
/// Private to the save module. No step needs disk space for data, so a full disk cannot stop it
/// halfway.
///
/// The steps before cleanup_begin, of which the last one commits, are undone if one of them fails,
/// and the old model is intact. After them the new model is complete, and the rest is cleanup,
/// whose failures are only reported (fst_save_stats.warning, the log).
#ifndef FSTI_JOURNAL_H
#define FSTI_JOURNAL_H

#include "output/output.h"

typedef struct save_journal save_journal;
typedef struct journal_step journal_step;

/// What a step does. The kinds are in journal_steps.h.
typedef struct fsti_step_kind {
    const char *name; ///< for the log
    fst_status (*run)(save_journal *journal, journal_step *step, fst_error *error);
    /// Undoes the step, also one that failed halfway. NULL: there is nothing to undo.
    fst_status (*undo)(journal_step *step, fst_error *error);
    /// Frees what `run` kept for `undo`. `deletes`: the commit succeeded, so a kept name is deleted
    /// as well. NULL: it keeps nothing.
    void (*release)(journal_step *step, bool deletes);
    bool reports_undo; ///< the error of a failed run says all about the target: `undo` adds nothing
    bool only_after_success; ///< after the commit: runs only if everything before it succeeded
    bool is_independent;     ///< after the commit: later steps run even if it fails
} fsti_step_kind;

typedef fst_status (*journal_check)(void *context, fst_error *error);

struct journal_step {
    const fsti_step_kind *kind;
    fsti_output *output; ///< of steps about new files
    char *path;          ///< of other steps
    bool may_be_undone;  ///< set by the journal: a later step may fail

    // Of steps about files.
    char *kept;    ///< temporary name of a file that was replaced or moved aside
    int kept_lock; ///< a locked descriptor that marks `kept` as in use, or -1
    bool had_old;  ///< a file was replaced

    // Of steps about objects.
    const struct fsti_http_watch *watch;      ///< called while waiting for the store, or NULL
    const struct fsti_precondition *expected; ///< the version to delete; NULL: any
    struct fsti_kept_object *kept_object;     ///< an object that was deleted

    // Of checks.
    journal_check check;
    void *context;
};

struct save_journal {
    journal_step *steps;
    size_t count, capacity;
    size_t cleanup_begin; ///< the first step after the commit
    bool is_committed;    ///< the new model is in place
    bool keeps_names;     ///< of new files: after the commit, or because undoing it failed
    bool is_complete;     ///< cleanup is done too
    uint64_t sync_count, sync_ns;
    char warning[256];
};

/// Adds a step. The path is copied; the caller keeps everything else.
fst_status fsti_journal_add(save_journal *journal, const journal_step *step, fst_error *error);
/// Adds a step that needs only an output, or only a path.
fst_status fsti_journal_add_output(save_journal *journal, const fsti_step_kind *kind,
                                   fsti_output *output, fst_error *error);
fst_status fsti_journal_add_path(save_journal *journal, const fsti_step_kind *kind,
                                 const char *path, fst_error *error);
/// Marks the commit step: steps so far are undone on failure, later ones are not.
void fsti_journal_set_commit(save_journal *journal);

/// Executes the steps. On failure undoes them; if that fails too, the error says so.
fst_status fsti_journal_run(save_journal *journal, fst_error *error);
void fsti_journal_clear(save_journal *journal);

#endif
