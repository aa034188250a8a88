// SPDX-License-Identifier: Apache-2.0
/// A commit as a list of steps, most of them one system call that changes a name. Private to the
/// save module. No step needs disk space for data, so a full disk cannot stop it halfway.
///
/// Before the commit step (commit_index) a failed step undoes the earlier ones, and the old model
/// is intact. After it the new model is complete, and the rest is cleanup, whose failures are only
/// reported (fst_save_stats.warning, the log).
#ifndef FSTI_JOURNAL_H
#define FSTI_JOURNAL_H

#include "output/output.h"

typedef enum step_kind {
    STEP_ASIDE,       ///< move a file aside that will become outdated; undone by moving it back
    STEP_NAME,        ///< give a new file its temporary name
    STEP_PLACE,       ///< rename a new file to its path; undone by restoring the old file
    STEP_LINK,        ///< the same, but the temporary name stays as a second name
    STEP_UNNAME,      ///< remove the temporary name
    STEP_SYNC,        ///< sync the names in a folder
    STEP_REMOVE,      ///< delete a file of an earlier save
    STEP_REMOVE_LAST, ///< the same, but only if cleanup left nothing, because it hides leftovers
    STEP_CHECK        ///< check whether the commit may continue
} step_kind;

typedef fst_status (*journal_check)(void *context, fst_error *error);

typedef struct journal_step {
    step_kind kind;
    fsti_output *output; ///< for steps about new files
    char *path;          ///< for other steps
    const struct fsti_precondition
        *expected_version; ///< for a deletion: the version to delete; NULL: any
    journal_check check;
    void *context; ///< of the check
    char *kept;    ///< temporary name of a file that was replaced or moved aside
    struct fsti_kept_object *kept_object; ///< an object that was deleted
    const struct fsti_http_watch *watch;  ///< called while waiting for a store
    int kept_lock; ///< a locked descriptor that marks `kept` as in use, or -1
    bool had_old;  ///< a file was replaced
    bool is_done;
} journal_step;

typedef struct save_journal {
    journal_step *steps;
    size_t count, capacity;
    size_t commit_index; ///< steps before this one are undone on failure
    bool is_committed;   ///< the new model is in place
    bool is_complete;    ///< cleanup is done too
    uint64_t sync_count, sync_ns;
    char warning[256];
} save_journal;

/// Adds a step for an output, or for a path (copied).
fst_status fsti_journal_add(save_journal *journal, step_kind kind, fsti_output *output,
                            fst_error *error);
fst_status fsti_journal_add_path(save_journal *journal, step_kind kind, const char *path,
                                 fst_error *error);
/// Adds a step that deletes a remote manifest. `watch`: called meanwhile, or NULL.
fst_status fsti_journal_add_aside(save_journal *journal, const char *address,
                                  const struct fsti_http_watch *watch, fst_error *error);
/// The first word of manifests.
#define JOURNAL_MANIFEST_WORD "fastsafetensors-manifest "
/// Adds a step that deletes an object if it still has the given version (NULL: any). `watch` as
/// above. The caller keeps both.
fst_status fsti_journal_add_removal(save_journal *journal, const char *path,
                                    const struct fsti_precondition *expected,
                                    const struct fsti_http_watch *watch, fst_error *error);
fst_status fsti_journal_add_check(save_journal *journal, journal_check check, void *context,
                                  fst_error *error);
/// Marks the commit step: steps so far are undone on failure, later ones are not.
void fsti_journal_set_commit(save_journal *journal);

/// Executes the steps. On failure undoes them; if that fails too, the error says so.
fst_status fsti_journal_run(save_journal *journal, fst_error *error);
void fsti_journal_clear(save_journal *journal);

#endif
