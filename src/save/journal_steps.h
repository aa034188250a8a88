// SPDX-License-Identifier: Apache-2.0
/// The kinds of steps of a commit: of files, and of objects at a store. Private to the save module.
#ifndef FSTI_JOURNAL_STEPS_H
#define FSTI_JOURNAL_STEPS_H

#include "fastsafetensors/writer.h"
#include "journal.h"

/// Gives a new file its temporary name.
extern const fsti_step_kind fsti_step_name_file;
/// Renames a new file to its path; undone by restoring the old file.
extern const fsti_step_kind fsti_step_place_file;
/// The same for a manifest: FST_E_FILE_CHANGED if a model is at its path.
extern const fsti_step_kind fsti_step_place_manifest;
/// The same, but the temporary name stays as a second name.
extern const fsti_step_kind fsti_step_link_file;
/// Removes the temporary name.
extern const fsti_step_kind fsti_step_unname_file;
/// Moves a file aside that will become outdated; undone by moving it back.
extern const fsti_step_kind fsti_step_hide_file;
/// The same for a file that was written while the save ran, when the new files are in place. Undone
/// by deleting what describes the new model, too.
extern const fsti_step_kind fsti_step_hide_late_file;
/// Deletes such a file after the commit step.
extern const fsti_step_kind fsti_step_drop_file;
/// Deletes a file of an earlier save.
extern const fsti_step_kind fsti_step_remove_file;
/// Deletes the index of an earlier save, but only if cleanup left nothing, because the next save
/// finds leftovers by it.
extern const fsti_step_kind fsti_step_remove_index;
/// Syncs the names in a folder.
extern const fsti_step_kind fsti_step_sync_folder;
/// Adds that step to a durable save.
fst_status fsti_journal_add_sync(save_journal *journal, fst_save_promise promise,
                                 const char *folder, fst_error *error);
/// Checks whether the commit may continue.
extern const fsti_step_kind fsti_step_check;

/// Completes an upload. An object that is there already is replaced, and cannot be restored.
extern const fsti_step_kind fsti_step_place_object;
/// Deletes a manifest at a store, and keeps its bytes; undone by writing it again.
extern const fsti_step_kind fsti_step_hide_object;
/// The same, and FST_E_ARGUMENT if another object is there.
extern const fsti_step_kind fsti_step_clear_object;
/// Deletes an object of an earlier save if it still has the expected version.
extern const fsti_step_kind fsti_step_remove_object;
/// Deletes the new index, if cleanup left nothing that it must hide.
extern const fsti_step_kind fsti_step_remove_new_index;

/// The first word of manifests.
#define JOURNAL_MANIFEST_WORD "fastsafetensors-manifest "

/// Sets *describes if the file exists and describes the bytes of a model, as manifests do. A file
/// that cannot be opened or read is an error.
fst_status fsti_save_describes_model(const char *path, bool *describes, fst_error *error);

/// FST_E_IO: the old file cannot be restored.
fst_status fsti_step_refuse_undo(const journal_step *step, fst_error *error);

#endif
