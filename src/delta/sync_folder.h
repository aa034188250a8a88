// SPDX-License-Identifier: Apache-2.0
/// The folder .weight_sync of a checkpoint: its lock, the note of its version, and the paths of the
/// journal. The lock and the note have the paths and the format that SGLang's receiver uses.
#ifndef FSTI_SYNC_FOLDER_H
#define FSTI_SYNC_FOLDER_H

#include <sys/stat.h>

#include "delta_private.h"

typedef struct sync_folder {
    const char *checkpoint; ///< borrowed
    char *folder, *state_path, *journal_path, *undo_path, *renames_path, *copies_path;
    int lock;
} sync_folder;

/// Makes the folder and takes its lock, which ends with fsti_sync_close() or the process.
/// FST_E_UNSUPPORTED if it is a symbolic link: the files in it would be another folder's.
/// FST_E_TIMEOUT if another process holds it. The caller closes *out, also after an error.
fst_status fsti_sync_open(const char *checkpoint, sync_folder *out, fst_error *error);
/// The same without making anything: a folder that does not exist has no lock.
fst_status fsti_sync_open_to_check(const char *checkpoint, sync_folder *out, fst_error *error);
/// Fills in the paths alone, for callers that only read.
fst_status fsti_sync_paths(const char *checkpoint, sync_folder *out, fst_error *error);
void fsti_sync_close(sync_folder *sync);
/// Reads the version note. out->version is NULL if there is no note. The caller clears *out.
fst_status fsti_sync_read_state(const sync_folder *sync, fsti_delta_state *out, fst_error *error);
/// Reads the note at `path`, which must exist.
fst_status fsti_sync_read_note(const char *path, fsti_delta_state *out, fst_error *error);
/// Replaces a small file of the folder by a rename.
fst_status fsti_sync_replace(const sync_folder *sync, const char *path, fsti_octets text,
                             bool durable, fst_error *error);
/// FST_E_FILE_CHANGED if a file that the note lists has another size or modification time.
fst_status fsti_sync_check_files(const sync_folder *sync, const fsti_delta_state *state,
                                 fst_error *error);
/// Checks a checkpoint that is only read: FST_E_VERSION if its note names another version than
/// `version` (NULL: any), or if an update was interrupted.
fst_status fsti_sync_expect(const char *checkpoint, const char *version, fst_error *error);
/// Writes the version note: the version, and the stamps of the model's current files.
fst_status fsti_sync_write_state(const sync_folder *sync, const char *version,
                                 const fst_model *model, bool durable, fst_error *error);
/// The name of a model's file relative to the checkpoint, with its subfolders. The result points
/// into `path`.
const char *fsti_sync_name(const sync_folder *sync, const char *path);
/// Whether a file still has the size and the modification time of the stamp.
bool fsti_sync_is_same(const char *path, const fsti_delta_stamp *stamp);
/// The modification time in nanoseconds.
uint64_t fsti_sync_modified_ns(const struct stat *info);
/// Reads the stamp of a file: its size and modification time. The name stays unset.
fst_status fsti_sync_stamp(const char *path, fsti_delta_stamp *out, fst_error *error);
/// Whether a path may be there: only ENOENT and ENOTDIR say that it is not.
bool fsti_sync_may_exist(const char *path);
/// Whether files are being changed, or were by a process that was killed.
bool fsti_sync_is_updating(const sync_folder *sync);
/// FST_E_VERSION if a manifest of `version` waits in the folder: the files were not compared with
/// it yet, so that no update may go on to another version. The Python package writes these
/// manifests and compares the files; their names are "manifest-HASH-" and random characters.
fst_status fsti_sync_check_manifest(const sync_folder *sync, const char *version, fst_error *error);
/// Adds to the message in which state the checkpoint is, and what ends this state.
void fsti_sync_add_outcome(const char *outcome, fst_error *error);
/// Deletes a file of the folder. A missing file is not an error.
fst_status fsti_sync_remove(const char *path, fst_error *error);

#endif
