// SPDX-License-Identifier: Apache-2.0
/// Which files a manifest is of: private to the verify room.
#ifndef FSTI_FOLDER_FILES_H
#define FSTI_FOLDER_FILES_H

#include "base/base.h"

typedef struct folder_files {
    char *folder; ///< with its last slash; "" is the current one
    char **names; ///< relative to it, sorted, each once
    size_t count, capacity;
    bool is_single; ///< the path was a file's
} folder_files;

/// *out is to be cleared also after an error.
fst_status fsti_folder_files(const char *path, folder_files *out, fst_error *error);
/// The same for who looks for models of which nothing is said: of a folder that is no model, or one
/// with an index that is none, all files; a path where nothing lies has none.
fst_status fsti_folder_models(const char *path, folder_files *out, fst_error *error);
void fsti_folder_files_clear(folder_files *files);
/// Whether a name is a model file's.
bool fsti_verify_is_model(const char *name);
/// The same, or that of an index, which makes a model of files.
bool fsti_verify_leads_to_model(const char *name);
/// folder + name, from fsti_alloc.
char *fsti_folder_join(const folder_files *files, const char *name);

#endif
