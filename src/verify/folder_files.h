// SPDX-License-Identifier: Apache-2.0
/// The files that a manifest covers. Private to the verify module.
#ifndef FSTI_FOLDER_FILES_H
#define FSTI_FOLDER_FILES_H

#include "base/primitives.h"
#include "fastsafetensors/verify.h"
#include "file_watch.h"

typedef struct folder_files {
    char *folder; ///< with a final slash; "" is the current folder
    char **names; ///< relative to it, sorted, unique
    size_t count, capacity;
    bool is_single; ///< the path is a file
} folder_files;

/// The files of a model, for a list of them. FST_E_NOT_FOUND names files that its index lists and
/// that are missing. Begins to watch them, for the check. *out and *watch must be cleared, also
/// after an error.
fst_status fsti_folder_files(const char *path, folder_files *out, file_watch *watch,
                             fst_error *error);
/// The arguments of fsti_folder_files_check().
typedef struct folder_check {
    const char *path;
    const folder_files *files;
    const file_watch *watch;
} folder_check;
/// When they have been read: FST_E_FILE_CHANGED if a save or another program has replaced some, or
/// removed or added a model. With `is_placed`, only models and their index are compared: the text
/// that describes them may have replaced one of the files. `context`: a folder_check. An
/// fsti_output_check.
fst_status fsti_folder_files_check(void *context, bool is_placed, fst_error *error);
/// fsti_folder_files() for a search for unlisted models: all files of a folder that is not a model,
/// or whose index is invalid; none if the path does not exist.
fst_status fsti_folder_models(const char *path, folder_files *out, fst_error *error);
/// FST_E_ARGUMENT if a manifest cannot list a file because its name is not UTF-8.
fst_status fsti_folder_files_check_names(const folder_files *files, fst_error *error);
/// Leaves out the file at `target`, if it is one of them: the list that will be written there.
void fsti_folder_files_omit(folder_files *files, const char *target);
void fsti_folder_files_clear(folder_files *files);
/// folder + name, from fsti_alloc().
char *fsti_folder_join(const folder_files *files, const char *name);

/// Copies the path of a written manifest or list to the caller's memory, if it wants it.
void fsti_manifest_report_path(const fst_manifest_options *options, const char *path);

#endif
