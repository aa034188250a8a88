// SPDX-License-Identifier: Apache-2.0
/// The folder .weight_sync of a checkpoint: its lock, the note of its version, and the paths of the
/// journal. The lock and the note are where SGLang's receiver has them, in its format.
#ifndef FSTI_SYNC_FOLDER_H
#define FSTI_SYNC_FOLDER_H

#include "delta_private.h"

typedef struct sync_folder {
    const char *checkpoint; ///< borrowed
    char *folder, *state_path, *journal_path, *undo_path, *renames_path;
    int lock;
} sync_folder;

/// Makes the folder and takes its lock, which ends with fsti_sync_close() or the process.
/// FST_E_TIMEOUT where another process holds it. *out is to be closed in any case.
fst_status fsti_sync_open(const char *checkpoint, sync_folder *out, fst_error *error);
/// Only the paths: for readers.
fst_status fsti_sync_paths(const char *checkpoint, sync_folder *out, fst_error *error);
void fsti_sync_close(sync_folder *sync);
/// *out is to be cleared; out->version is NULL where there is no note.
fst_status fsti_sync_read_state(const sync_folder *sync, fsti_delta_state *out, fst_error *error);
/// The same of any note; it has to be there.
fst_status fsti_sync_read_note(const char *path, fsti_delta_state *out, fst_error *error);
/// Replaces a small file of the folder by a rename.
fst_status fsti_sync_replace(const sync_folder *sync, const char *path, fsti_octets text,
                             bool durable, fst_error *error);
/// FST_E_FILE_CHANGED where a file that the note lists has another size or modification time.
fst_status fsti_sync_check_files(const sync_folder *sync, const fsti_delta_state *state,
                                 fst_error *error);
/// Refuses a checkpoint that is only read: FST_E_VERSION where its note names another version than
/// `version`, or where an application was interrupted.
fst_status fsti_sync_expect(const char *checkpoint, const char *version, fst_error *error);
/// Notes the version and the model's current files.
fst_status fsti_sync_write_state(const sync_folder *sync, const char *version,
                                 const fst_model *model, bool durable, fst_error *error);
/// The name of a model's file relative to the checkpoint, with its subfolders: it points into
/// `path`.
const char *fsti_sync_name(const sync_folder *sync, const char *path);
/// Whether a file still has the size and the modification time of the stamp.
bool fsti_sync_is_same(const char *path, const fsti_delta_stamp *stamp);
/// Takes the stamp of a file, without the name.
fst_status fsti_sync_stamp(const char *path, fsti_delta_stamp *out, fst_error *error);
/// Removes a file of the folder; one that is not there is fine.
fst_status fsti_sync_remove(const char *path, fst_error *error);

#endif
