// SPDX-License-Identifier: Apache-2.0
/// The door of the output room: files being made, and the names that they get. Knows files and
/// folders, never tensors or headers.
///
/// A file being made has no name where the file system can do that (O_TMPFILE), else a hidden one
/// beside its target: ".NAME.<16 hex digits>.tmp". Its maker holds a lock (flock) on it, which goes
/// with the process: a hidden file without a lock is left over from a save that was killed.
#ifndef FSTI_OUTPUT_H
#define FSTI_OUTPUT_H

#include "base/base.h"

typedef struct fsti_output fsti_output;

/// Where a path leads, and what is there now.
typedef struct fsti_target {
    char *folder;    ///< "." where the path has none
    char *path;      ///< folder included
    bool has_rights; ///< the new file gets those that follow, not what the folder gives
    uint32_t mode, owner, group;
    const char *like; ///< whose access list it gets, not owned; NULL: what is at the path
    bool is_object;   ///< the path is an address of a store, and no file
    bool had_object;  ///< of a set: there was one
    const struct fsti_net_watch *watch; ///< of an object: asked while its store is waited for
    const struct fsti_seen *seen;       ///< of an object: all that it may replace; NULL: anything
    bool is_unique;                     ///< of an object: nobody else gives one this name
    bool leads;                         ///< of an object: others are found by it
} fsti_target;

/// `follow`: symbolic links lead on; else a link is what will be replaced, and nothing is kept of
/// what it leads to. FST_E_NOT_REGULAR for a folder, FIFO or device; FST_E_PERMISSION for a file
/// that may not be written to: replacing it would get around what its owner asked for.
fst_status fsti_target_find(const char *path, bool follow, fsti_target *out, fst_error *error);
/// The address of an object to be made.
fst_status fsti_target_object(const char *address, fsti_target *out, fst_error *error);
void fsti_target_clear(fsti_target *target);
/// Where nothing is at the target yet, the new file gets the rights of the file `like`, a path that
/// is to stay until the output is open.
fst_status fsti_target_like(fsti_target *target, const char *like, fst_error *error);
/// The last part of a path; points into it.
const char *fsti_path_name(const char *path);

// ---- a file being made ----

/// Makes a new file for `target` (copied) with room for `size_bytes`: FST_E_NO_SPACE now rather
/// than in the middle. `durable`: its writes are pushed to the device early.
fst_status fsti_output_open(const fsti_target *target, uint64_t size_bytes, bool durable,
                            fsti_output **out, fst_error *error);
/// Takes over the file at a hidden path in the target's folder, which another process has made and
/// holds the lock of.
fst_status fsti_output_adopt(const fsti_target *target, const char *hidden, fsti_output **out,
                             fst_error *error);
/// Makes room for so many bytes in all, as opening does.
fst_status fsti_output_reserve(fsti_output *output, uint64_t size_bytes, fst_error *error);
/// Ends the file there: less than was reserved has come.
fst_status fsti_output_trim(fsti_output *output, uint64_t size_bytes, fst_error *error);
/// The descriptor that its bytes can be read from, as far as they are written.
int fsti_output_descriptor(const fsti_output *output);
/// Whether it is to be an object, and of one, whether that will replace another.
bool fsti_output_is_object(const fsti_output *output);
bool fsti_output_had_object(const fsti_output *output);
/// Of an object that is in place: the mark that its store has given it.
const struct fsti_seen *fsti_output_mark(const fsti_output *output);
/// Of an object: has what is sent end soon, with FST_E_CANCELLED. From any thread.
void fsti_output_stop(fsti_output *output);
/// Of an object: gives its bytes to `taker` (net.h), before the first write.
typedef fst_status (*fsti_output_taker)(void *context, uint64_t offset, const void *data,
                                        uint64_t size_bytes, fst_error *error);
void fsti_output_give_parts(fsti_output *output, fsti_output_taker taker, void *context);
/// Of an object: how it was sent, in words; else nothing.
void fsti_output_describe(fsti_output *output, char *text, size_t size);
/// Drops the output and its hidden name. NULL is allowed.
void fsti_output_close(fsti_output *output);
/// Drops the output; the hidden name, if it has one, is left as it is: somebody leads to it, or it
/// belongs to the process that this one was forked from.
void fsti_output_abandon(fsti_output *output);

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
/// Told of bytes that were copied; anything but FST_OK ends the copy.
typedef fst_status (*fsti_copy_report)(void *context, uint64_t size_bytes, fst_error *error);

/// What a copy is to be, and was.
typedef struct fsti_copy {
    struct fsti_file *source; ///< opened by its path
    uint64_t source_begin;    ///< what is there up to the source's end ..
    uint64_t begin; ///< .. comes here; agreeing modulo FSTI_OUTPUT_BLOCK_BYTES it can be shared
    fsti_copy_report report;
    void *context;
    uint64_t bytes_shared, bytes_copied, call_count;
    const char *engine; ///< "shared", "kernel", "buffered"
    char reason[128];
} fsti_copy;

/// Blocks of files that share them begin at multiples of this.
#define FSTI_OUTPUT_BLOCK_BYTES 4096u

/// Brings the rest of another file: shared where the file system does that, else copied by the
/// kernel, else through memory. Reserves what it needs.
fst_status fsti_output_copy(fsti_output *output, fsti_copy *copy, fst_error *error);
/// Shared mapping of the whole file; it goes with fsti_output_unmap() or the output.
fst_status fsti_output_map(fsti_output *output, char **out, fst_error *error);
void fsti_output_unmap(fsti_output *output);
/// Puts what was written on the device; of an object, waits for its parts.
fst_status fsti_output_sync(fsti_output *output, fst_error *error);

// ---- names ----

/// The hidden name that the output has, or will have, in its folder.
const char *fsti_output_hidden(const fsti_output *output);
/// The same with its folder.
const char *fsti_output_hidden_path(const fsti_output *output);
/// Whether `name` (no folder) is one that outputs are given until they are published.
bool fsti_hidden_is(const char *name);
/// Gives the output its hidden name, if it has none.
fst_status fsti_output_name(fsti_output *output, fst_error *error);
/// Removes it, if it has one.
fst_status fsti_output_unname(fsti_output *output, fst_error *error);
/// Puts the output at its path, in place of what is there, in one step. With `keep_hidden` the
/// hidden name stays as well; where the file system has no hard links, a copy goes to the path.
fst_status fsti_output_place(fsti_output *output, bool keep_hidden, fst_error *error);
/// Takes away what lies at its path; of an object, as long as that is the output. Where a store has
/// not said so, what lies there may be another save's, and stays: an error of one by which others
/// are found, as those must stay then, too.
fst_status fsti_output_displace(fsti_output *output, fst_error *error);
/// Whether the output is what lies at its path: 1, 0, or -1 where that can't be told.
int fsti_output_is_placed(const fsti_output *output);

/// A second, hidden name for what lies at a path, so that it can be brought back. *kept is NULL
/// where nothing lies there, or the file system has no hard links; else to be freed. *lock: a
/// descriptor (or -1) by which others see that the hidden name is in use, until it is closed.
fst_status fsti_path_keep(const char *path, char **kept, int *lock, fst_error *error);
/// The same, but the file has that name alone from then on: nothing lies at the path. *kept is NULL
/// where nothing did.
fst_status fsti_path_hide(const char *path, char **kept, int *lock, fst_error *error);
/// Brings it back to `path`.
fst_status fsti_path_restore(const char *path, const char *kept, fst_error *error);
/// Removes a name, or an object; one that is not there is fine.
fst_status fsti_path_remove(const char *path, fst_error *error);

/// The same of an object that begins with `word`: its bytes are kept meanwhile, in *kept, which is
/// NULL where it is none, or may not be read. `watch`: asked while its store is waited for, or
/// NULL.
typedef struct fsti_kept_object fsti_kept_object;
fst_status fsti_object_hide(const char *address, const char *word,
                            const struct fsti_net_watch *watch, fsti_kept_object **kept,
                            fst_error *error);
/// Brings it back, unless something has come meanwhile. A watch that ends the save leaves it two
/// seconds.
fst_status fsti_object_restore(const char *address, const struct fsti_net_watch *watch,
                               const fsti_kept_object *kept, fst_error *error);
void fsti_object_forget(fsti_kept_object *kept); ///< NULL is allowed

// ---- folders ----

/// Makes names in a folder last.
fst_status fsti_folder_sync(const char *folder, fst_error *error);
/// Makes a folder (and those above it); one that is there is fine. *made_count: how many were made.
/// `durable`: their own entries are synced, too.
fst_status fsti_folder_make(const char *folder, bool durable, unsigned *made_count,
                            fst_error *error);
/// Takes back the making of `made_count` folders, as far as they are empty.
void fsti_folder_unmake(const char *folder, unsigned made_count);
/// One process at a time publishes in a folder: waits for it. *lock is -1 where the file system has
/// no locks. FST_E_TIMEOUT after half a minute.
fst_status fsti_folder_lock(const char *folder, int *lock, fst_error *error);
void fsti_folder_unlock(int lock);

// ---- what killed saves left behind ----

typedef struct fsti_leftover {
    const char *name; ///< in the folder
    const char *base; ///< what it was to become (long names are cut); `base_size` bytes
    size_t base_size;
    uint64_t size_bytes;
    bool has_owner; ///< whose maker lives, or may live
    int folder;     ///< descriptor
} fsti_leftover;

/// Called with each; a lock is held meanwhile on one without an owner, so it may be removed.
typedef void (*fsti_leftover_visit)(void *context, const fsti_leftover *leftover);
fst_status fsti_leftovers_visit(const char *folder, fsti_leftover_visit visit, void *context,
                                fst_error *error);
/// Whether `base` is what the hidden name of a file called `name` begins with.
bool fsti_leftover_is_of(const fsti_leftover *leftover, const char *name);
/// Whether that may be the beginning of a longer name only.
bool fsti_leftover_is_cut(const fsti_leftover *leftover);

#endif
