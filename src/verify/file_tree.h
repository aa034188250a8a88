// SPDX-License-Identifier: Apache-2.0
/// All files of a folder and its subfolders, with SHA-256 digests. Private to the verify module.
#ifndef FSTI_FILE_TREE_H
#define FSTI_FILE_TREE_H

#include <time.h>

#include "base/primitives.h"
#include "format/format.h"
#include "folder_check.h"

typedef struct tree_file {
    char *name; ///< relative to the folder
    unsigned char digest[32];
    uint64_t size_bytes;           ///< if there is a stamp
    fsti_file_stamp stamp;         ///< all zero: it would not show every change
    const fsti_signed_file *known; ///< an earlier signed entry that may be reused; NULL: none
    bool is_kept;                  ///< it was reused, and the file was not read
    bool is_listed;                ///< for checks: the bundle lists it
    fst_error error;               ///< why it could not be read, or FST_OK
} tree_file;

typedef struct file_tree {
    char *folder; ///< with a final slash
    tree_file *files;
    size_t count, capacity;
    bool has_links;
    struct timespec begun;
    uint64_t bytes_read;
} file_tree;

/// Whether an entry directly in the folder is ignored.
typedef bool (*tree_ignores)(const void *context, const char *name);

/// Lists the files, sorted by name. Entries without bytes (FIFOs, sockets, devices, dangling links,
/// link cycles, links to parent folders) are listed with an error. *out must be cleared, also after
/// an error.
fst_status fsti_file_tree_list(const char *folder, tree_ignores ignores, const void *context,
                               file_tree *out, fst_error *error);
/// Starts a list of files that the caller adds one by one. *out must be cleared, also after an
/// error.
fst_status fsti_file_tree_begin(const char *folder, file_tree *out, fst_error *error);
fst_status fsti_file_tree_push(file_tree *tree, const char *name, fst_error *error);
void fsti_file_tree_sort(file_tree *tree);
/// The file with the name of a bundle's entry, or NULL.
tree_file *fsti_file_tree_find(const file_tree *tree, const fsti_signed_file *listed);
/// Digests all files in parallel, except unchanged ones with a known digest.
fst_status fsti_file_tree_hash(file_tree *tree, const fsti_check_progress *listener,
                               fst_error *error);
/// The digests, one row per file, from fsti_alloc(); names belong to the tree. Fails with the error
/// of the first unreadable file.
fst_status fsti_file_tree_rows(const file_tree *tree, fsti_signed_file **out, fst_error *error);
void fsti_file_tree_clear(file_tree *tree);

/// Whether an error is a lack of resources of the process or system, and says nothing about the
/// file.
bool fsti_verify_is_shortage(const fst_error *error);

/// The name of a path directly in the folder; NULL: it is elsewhere.
const char *fsti_file_tree_name_inside(const char *folder, const char *path);

#endif
