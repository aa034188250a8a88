// SPDX-License-Identifier: Apache-2.0
/// All files of a folder and of those below, and their SHA-256: private to the verify room.
#ifndef FSTI_FILE_TREE_H
#define FSTI_FILE_TREE_H

#include <time.h>

#include "base/base.h"
#include "format/format.h"
#include "verify.h"

typedef struct tree_file {
    char *name; ///< relative to the folder
    unsigned char digest[32];
    uint64_t size_bytes;           ///< with a stamp
    fsti_file_stamp stamp;         ///< all zero: another change might not show in it
    const fsti_signed_file *known; ///< what was signed before and may stand; NULL: nothing
    bool is_kept;                  ///< it does, and the file was not read
    bool is_listed;                ///< for who compares: a bundle has it
    fst_error error;               ///< why it could not be read; status FST_OK: it was
} tree_file;

typedef struct file_tree {
    char *folder; ///< with its last slash
    tree_file *files;
    size_t count, capacity;
    bool has_links;
    struct timespec begun;
    uint64_t bytes_read;
} file_tree;

/// What is no part of a folder: names of entries directly in it.
typedef bool (*tree_ignores)(const void *context, const char *name);

/// Lists the files, sorted by name. *out is to be cleared also after an error.
fst_status fsti_file_tree_list(const char *folder, tree_ignores ignores, const void *context,
                               file_tree *out, fst_error *error);
/// The same of files that the caller names, one by one; *out is to be cleared also after an error.
fst_status fsti_file_tree_begin(const char *folder, file_tree *out, fst_error *error);
fst_status fsti_file_tree_push(file_tree *tree, const char *name, fst_error *error);
void fsti_file_tree_sort(file_tree *tree);
/// The file of a name that a bundle lists; NULL: there is none.
tree_file *fsti_file_tree_find(const file_tree *tree, const fsti_signed_file *listed);
/// Digests all of them, several at a time, but those that are as they were when they became known.
fst_status fsti_file_tree_hash(file_tree *tree, const fsti_check_progress *listener,
                               fst_error *error);
/// What was digested, a row a file, from fsti_alloc; names stay the tree's. The error of the first
/// file that could not be read.
fst_status fsti_file_tree_rows(const file_tree *tree, fsti_signed_file **out, fst_error *error);
void fsti_file_tree_clear(file_tree *tree);

/// Whether an error says nothing of the file: the process or the system has come to an end of
/// something.
bool fsti_verify_is_shortage(const fst_error *error);

/// The name that a path has in the folder itself; NULL: it lies elsewhere.
const char *fsti_file_tree_name_inside(const char *folder, const char *path);

#endif
