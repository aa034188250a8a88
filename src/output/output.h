// SPDX-License-Identifier: Apache-2.0
/// The door of the output room: files being made, and the names that they get. Knows files and
/// folders, never tensors or headers.
#ifndef FSTI_OUTPUT_H
#define FSTI_OUTPUT_H

#include "base/base.h"

/// A file being made: without a name, or with a hidden one, until it is published.
typedef struct fsti_output fsti_output;

/// Where a path leads: symbolic links followed, and what is there now.
typedef struct fsti_target {
    char *folder; ///< "." where the path has none
    char *path;   ///< folder included
    bool exists;
    uint32_t mode, owner, group; ///< of what exists
} fsti_target;

/// FST_E_NOT_REGULAR for a folder, FIFO or device; FST_E_PERMISSION for a file that may not be
/// written to: replacing it would get around what its owner asked for.
fst_status fsti_target_find(const char *path, fsti_target *out, fst_error *error);
void fsti_target_clear(fsti_target *target);

/// Makes a new file for `target` (copied) with room for `size_bytes`: FST_E_NO_SPACE now rather
/// than in the middle. `durable`: its writes are pushed to the device early.
fst_status fsti_output_open(const fsti_target *target, uint64_t size_bytes, bool durable,
                            fsti_output **out, fst_error *error);
/// Drops the output; unless it was published, nothing is left of it. NULL is allowed.
void fsti_output_close(fsti_output *output);

const char *fsti_output_path(const fsti_output *output);
/// The descriptor for writes past the page cache, or -1; `reason` says why.
int fsti_output_direct(fsti_output *output, char *reason, size_t reason_size);

/// Closes that descriptor until it is asked for again.
void fsti_output_direct_close(fsti_output *output);
/// What the address of a direct write must be a multiple of (at most FSTI_IO_PAGE_BYTES).
uint32_t fsti_output_memory_alignment(const fsti_output *output);

/// Writes through the page cache. From any thread.
fst_status fsti_output_write(fsti_output *output, const void *data, size_t size, uint64_t offset,
                             fst_error *error);
/// Shared mapping of the whole file; it goes with fsti_output_unmap() or the output.
fst_status fsti_output_map(fsti_output *output, char **out, fst_error *error);
void fsti_output_unmap(fsti_output *output);
/// Puts what was written on the device.
fst_status fsti_output_sync(fsti_output *output, fst_error *error);

/// Gives the output its hidden name, if it has none. *name (may be NULL): the name in its folder.
fst_status fsti_output_link(fsti_output *output, const char **name, fst_error *error);
/// Puts it in place of what is at its path, in one step. With `keep_hidden` the hidden name stays
/// as well (false comes back in *kept where the file system has no hard links).
fst_status fsti_output_publish(fsti_output *output, bool keep_hidden, bool *kept, fst_error *error);
/// Removes the hidden name that publishing kept.
void fsti_output_drop_hidden(fsti_output *output);

/// Makes names in a folder last.
fst_status fsti_folder_sync(const char *folder, fst_error *error);
/// Makes a folder (and those above it); one that is there is fine.
fst_status fsti_folder_make(const char *folder, fst_error *error);

#endif
