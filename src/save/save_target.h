// SPDX-License-Identifier: Apache-2.0
/// Where the files of a save go: one table of functions for files, one for objects of a store.
/// Private to the save module.
#ifndef FSTI_SAVE_TARGET_H
#define FSTI_SAVE_TARGET_H

#include "store/store.h"
#include "output/output.h"
#include "save.h"

typedef struct fsti_target_kind {
    /// FST_E_UNSUPPORTED for a save that cannot go there. NULL: all can.
    fst_status (*check)(const fst_writer *writer, fst_error *error);
    /// The path of `name` in a folder, from fsti_alloc(). NULL without memory.
    char *(*join)(const char *folder, const char *name);
    /// What a path leads to, for comparing two. `out` has PATH_MAX bytes. False: unknown.
    bool (*resolve)(const char *path, bool follow_last, char *out);
    /// Finds what is there, and sets the targets of the files and the index.
    fst_status (*find)(fst_writer *writer, fst_error *error);
    /// Checks that there is space for all files. NULL: that shows when they are written.
    fst_status (*check_space)(const fst_writer *writer, fst_error *error);
    /// Waits until the bytes of a finished file are where they must be before the commit.
    fst_status (*settle)(fst_writer *writer, fsti_output *output, fst_error *error);
    /// Takes the lock under which names change. *lock is -1 without one.
    fst_status (*lock)(const fst_writer *writer, int *lock, fst_error *error);
    /// Writes index and manifest, and plans the steps of the commit.
    fst_status (*plan)(fst_writer *writer, fst_error *error);
    /// After a complete commit: deletes what killed saves left behind. NULL: nothing is left.
    void (*clean_up)(fst_writer *writer);
    /// Cancels requests in flight, from any thread. NULL: a save there sends none.
    void (*stop)(fst_writer *writer);
} fsti_target_kind;

extern const fsti_target_kind fsti_target_files, fsti_target_objects;

/// What a save to a store knows of it.
typedef struct store_state {
    fsti_http_watch watch; ///< cancellation while waiting
    char tag[20];          ///< makes file names unique: "-" and 16 digits, or ""
    bool may_have_index;   ///< one with this stem existed when the save began, or that is unknown
    bool is_unlisted;      ///< permission to list the folder is missing
    fsti_precondition index, single; ///< versions of the index and the single file
    char **manifests;                ///< URLs of manifests of single files
    size_t manifest_count, manifest_capacity;
    char **members; ///< URLs of files with this stem
    size_t member_count, member_capacity;
} store_state;

typedef struct save_target {
    const fsti_target_kind *kind;
    char *folder, *stem; ///< of a sharded model; NULL: one file
    char **published;    ///< paths for fst_writer_path(), links not followed
    fsti_target index;   ///< of a sharded model

    // Of files.
    char *followed;     ///< what the path was a link to when an asynchronous save began; or NULL
    fsti_anchor anchor; ///< the working folder when the writer was opened
    fsti_folder_use folder_use; ///< the folder of the files
    char *set_member;           ///< an existing file of the model, for permissions; or NULL

    store_state store; ///< of objects
} save_target;

/// Frees the lists.
void fsti_save_store_clear(store_state *store);
/// Whether an existing object is the single file of the model.
bool fsti_save_is_single_url(const fst_writer *writer, const char *member);
/// Whether an existing object has the name of the single file that this save writes.
bool fsti_save_replaces_single(const fst_writer *writer, const char *member);

#endif
