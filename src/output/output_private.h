// SPDX-License-Identifier: Apache-2.0
/// Shared by the files of the output module.
#ifndef FSTI_OUTPUT_PRIVATE_H
#define FSTI_OUTPUT_PRIVATE_H

#include "store/store.h"
#include "output.h"

struct fsti_output {
    fsti_target target;
    char *hidden; ///< the temporary path, chosen at creation
    bool has_hidden, is_durable;
    bool is_unreserved; ///< the file system can't reserve space
    int fd, fd_direct;
    uint64_t size_bytes;
    bool direct_probed;
    char direct_reason[128];
    void *mapping;
    fsti_upload *upload; ///< for an object, which has no other fields except the target
};

/// FST_E_UNSUPPORTED with a reason.
fst_status fsti_output_refuse_object(const fsti_output *output, fst_error *error);

/// A new temporary path next to `path`; NULL without memory.
char *fsti_hidden_path(const char *folder, const char *path);

/// Bytes that a file occupies on disk.
uint64_t fsti_space_taken(int fd);
/// Free bytes of the file system for this process; UINT64_MAX if unknown.
uint64_t fsti_space_free(int fd);
/// FST_E_NO_SPACE with both sizes. `available`: UINT64_MAX if unknown.
fst_status fsti_space_refuse(const char *path, uint64_t size_bytes, uint64_t available,
                             fst_error *error);

/// Locks the file at the path as in use by this save, so that its temporary name is not deleted as
/// a leftover. -1 if it cannot be opened.
int fsti_lock_old(const char *path);

/// Renames a file to a path that is free: EEXIST if it is not. Without support for that in the file
/// system, a file that comes in between is replaced.
int fsti_rename_new(const char *from, const char *path);

/// Creates a file with the temporary path, locked by this process.
int fsti_hidden_create(const char *hidden);

#endif
