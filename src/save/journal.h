// SPDX-License-Identifier: Apache-2.0
/// A commit as a list of named steps, each a change of names that one system call makes: private to
/// the save room. Nothing in a journal needs space for data, so a full disk can't stop it half way.
///
/// Up to its turn every step that was taken can be undone, and is when one fails: the old model is
/// there, whole. Behind the turn the new model is in place, whole, and what follows only tidies up:
/// a step that fails there is told (fst_save_stats.warning, the log), not returned.
#ifndef FSTI_JOURNAL_H
#define FSTI_JOURNAL_H

#include "output/output.h"

typedef enum step_kind {
    STEP_ASIDE,       ///< take a file away that will be untrue; undone by bringing it back
    STEP_NAME,        ///< give a new file its hidden name
    STEP_PLACE,       ///< put a new file at its path; undone by what was there before
    STEP_PLACE_COPY,  ///< the same, and the hidden name stays
    STEP_UNNAME,      ///< remove the hidden name
    STEP_SYNC,        ///< make the names in a folder last
    STEP_REMOVE,      ///< remove a file of an earlier save
    STEP_REMOVE_LAST, ///< the same, unless something was left to tidy up: what that is, it hides
    STEP_CHECK        ///< look whether it still makes sense to go on
} step_kind;

typedef fst_status (*journal_check)(void *context, fst_error *error);

typedef struct journal_step {
    step_kind kind;
    fsti_output *output;          ///< of those that are about new files
    char *path;                   ///< of the others
    const struct fsti_seen *seen; ///< of a removal: what is removed; NULL: whatever is there
    journal_check check;
    void *context;                        ///< of the check
    char *kept;                           ///< a hidden name of what was replaced or taken away
    struct fsti_kept_object *kept_object; ///< an object that was taken away
    const struct fsti_net_watch *watch;   ///< asked while a store is waited for
    int kept_lock;                        ///< a descriptor that says whose it is, or -1
    bool had_old;                         ///< something was replaced
    bool is_done;
} journal_step;

typedef struct save_journal {
    journal_step *steps;
    size_t count, capacity;
    size_t turn;      ///< steps before this one are undone when one of them fails
    bool is_turned;   ///< the new model is in place
    bool is_complete; ///< and nothing is left to tidy up
    uint64_t sync_count, sync_ns;
    char warning[256];
} save_journal;

/// Adds a step for an output, or for a path (copied).
fst_status fsti_journal_add(save_journal *journal, step_kind kind, fsti_output *output,
                            fst_error *error);
fst_status fsti_journal_add_path(save_journal *journal, step_kind kind, const char *path,
                                 fst_error *error);
/// Takes a manifest at an address away. `watch`: asked meanwhile, or NULL.
fst_status fsti_journal_add_aside(save_journal *journal, const char *address,
                                  const struct fsti_net_watch *watch, fst_error *error);
/// What manifests begin with.
#define JOURNAL_MANIFEST_WORD "fastsafetensors-manifest "
/// Removes an object as long as it is what was seen (NULL: whatever it is). `watch` as above. Both
/// stay the caller's.
fst_status fsti_journal_add_removal(save_journal *journal, const char *path,
                                    const struct fsti_seen *seen,
                                    const struct fsti_net_watch *watch, fst_error *error);
fst_status fsti_journal_add_check(save_journal *journal, journal_check check, void *context,
                                  fst_error *error);
/// What was added so far is undone when it fails; what follows is not.
void fsti_journal_turn(save_journal *journal);

/// Takes the steps. On failure those taken are undone; where even that fails, the error says so.
fst_status fsti_journal_run(save_journal *journal, fst_error *error);
void fsti_journal_clear(save_journal *journal);

#endif
