// SPDX-License-Identifier: Apache-2.0
/// Interface of the output module: new files, and their names. Knows files and folders, not tensors
/// or headers.
///
/// A new file has no name if the file system supports O_TMPFILE, and otherwise a temporary (hidden)
/// one next to its target: ".NAME.<16 hex digits>.tmp". Its creator holds a flock() on it, which
/// ends with the process, so a temporary file without a lock was left by a killed save.
///
/// Knows: new files, temporary names, locks, free space.
/// Does not know: tensors, headers, journals.
/// Main types: fsti_output, fsti_target.
#ifndef FSTI_OUTPUT_H
#define FSTI_OUTPUT_H

#include <sys/types.h>

#include "base/primitives.h"

typedef struct fsti_output fsti_output;

/// A path to write, and what exists there now.
typedef struct fsti_target {
    char *folder;    ///< "." if the path has none
    char *path;      ///< includes the folder
    bool has_rights; ///< use the permissions below instead of the folder's defaults
    uint32_t mode, owner, group;
    const char *like; ///< file whose access list is copied, not owned; NULL: the file at the path
    bool is_object;   ///< the path is a URL at a store
    bool may_replace; ///< of an object: one existed there, or that was not checked
    const struct fsti_http_watch *watch; ///< of an object: called while waiting for the store
    const struct fsti_precondition
        *expected_version; ///< of an object: the version it may replace; NULL: any
    bool is_unique;        ///< of an object: no other save uses this name
    bool leads;            ///< of an object: readers find other objects through it
} fsti_target;

/// Resolves a path. `follow`: follow symbolic links; otherwise a link is replaced without its
/// target's permissions. FST_E_NOT_REGULAR for a folder, FIFO or device; FST_E_PERMISSION for a
/// write-protected file, because replacing it would circumvent the protection.
fst_status fsti_target_find(const char *path, bool follow, fsti_target *out, fst_error *error);
/// The target for a new object.
fst_status fsti_target_object(const char *address, fsti_target *out, fst_error *error);
void fsti_target_clear(fsti_target *target);
/// If the target does not exist, the new file gets the permissions of the file `like`, a path that
/// must stay valid until the output is open.
fst_status fsti_target_like(fsti_target *target, const char *like, fst_error *error);
/// Gives a new file the owner, permissions and access list that the target has, as far as possible.
/// What cannot be kept takes permissions away, and gives none.
fst_status fsti_file_keep_rights(int fd, const fsti_target *target, fst_error *error);
/// FST_E_NO_SPACE if the process's file size limit is too small; the kernel would send SIGXFSZ.
fst_status fsti_file_check_limit(const char *path, uint64_t size_bytes, fst_error *error);
/// The last part of a path, as a pointer into it.
const char *fsti_path_name(const char *path);
/// Makes a path absolute and resolves the links of its folder, so that a save stays in the folder
/// where it began although the working folder or a link changes. A link to a file is kept. URLs
/// are copied, as are paths that cannot be resolved (a parent without search permission, longer
/// than PATH_MAX); fsti_anchor_check() guards relative ones. Free *out with fsti_free().
fst_status fsti_path_absolute(const char *path, char **out, fst_error *error);
/// The path that a symbolic link leads to, which may be a link as well; NULL if it is not a link.
/// Free *next with fsti_free().
fst_status fsti_path_link(const char *path, char **next, fst_error *error);
/// The path with the links of its folders resolved, and its own if it is a folder, so that a call
/// stays in one folder if a link changes meanwhile. The path itself if it has no links, is a URL,
/// or cannot be resolved. `out` has PATH_MAX bytes.
const char *fsti_path_settle(const char *path, char *out);
/// The same for a path that may begin with a folder's, which was settled before: then the folder's
/// links are not followed again. Both may be spelled in different ways ("./a", "a//", absolute).
const char *fsti_path_settle_inside(const char *path, const char *folder, const char *settled,
                                    char *out);
/// Resolves the links in the path of a file; the last one only if `follow_last`. The file and its
/// folders need not exist. `out` has PATH_MAX bytes. False if that is too short, or without memory.
bool fsti_path_resolve(const char *path, bool follow_last, char *out);

/// The identity of the working folder at one moment.
typedef struct fsti_anchor {
    bool is_known;
    uint64_t device, inode;
} fsti_anchor;

fsti_anchor fsti_anchor_here(void);
/// FST_E_FILE_CHANGED if `path` is relative and the working folder has changed.
fst_status fsti_anchor_check(fsti_anchor anchor, const char *path, fst_error *error);

// ---- new files ----

/// Creates a file for `target` (copied) and reserves `size_bytes`, so that FST_E_NO_SPACE occurs
/// now. `durable`: writeback starts early.
fst_status fsti_output_open(const fsti_target *target, uint64_t size_bytes, bool durable,
                            fsti_output **out, fst_error *error);
/// Adopts the temporary file at `hidden` in the target's folder, which another process created and
/// holds the lock of.
fst_status fsti_output_adopt(const fsti_target *target, const char *hidden, fsti_output **out,
                             fst_error *error);
/// Lets other processes write to the file: its lock becomes a shared one, by which they recognise
/// it. FST_E_NOT_FOUND if the file was deleted meanwhile.
fst_status fsti_output_share(fsti_output *output, fst_error *error);
/// FST_E_ARGUMENT unless an adopted file is one that a running process shares. On a file system
/// that may not show the locks of other machines, or has none, a missing owner is not noticed.
fst_status fsti_output_check_shared(const fsti_output *output, fst_error *error);
/// Reserves this many bytes in total, as opening does.
fst_status fsti_output_reserve(fsti_output *output, uint64_t size_bytes, fst_error *error);
/// Writes zeros to a range that will be written through a mapping, if opening could not reserve
/// space: FST_E_NO_SPACE occurs now, and not as a SIGBUS.
fst_status fsti_output_allocate(fsti_output *output, uint64_t begin, uint64_t end,
                                fst_error *error);
/// Truncates the file: fewer bytes than reserved were written.
fst_status fsti_output_trim(fsti_output *output, uint64_t size_bytes, fst_error *error);
/// A descriptor for reading the written bytes.
int fsti_output_descriptor(const fsti_output *output);
/// Whether it is an object, and whether it will replace another one.
bool fsti_output_is_object(const fsti_output *output);
bool fsti_output_may_replace(const fsti_output *output);
/// For a published object: the version that the store assigned.
const struct fsti_precondition *fsti_output_mark(const fsti_output *output);
/// For an object: cancels its requests, which end soon with FST_E_CANCELLED. Thread-safe.
void fsti_output_stop(fsti_output *output);
/// For an object: passes its bytes to `observer` (see store.h). Set it before the first write.
typedef fst_status (*fsti_output_observer)(void *context, uint64_t offset, const void *data,
                                           uint64_t size_bytes, fst_error *error);
void fsti_output_observe_parts(fsti_output *output, fsti_output_observer observer, void *context);
/// For an object: describes how it was sent; else writes nothing.
void fsti_output_describe(fsti_output *output, char *text, size_t size);
/// Closes the output and deletes its temporary name. NULL is allowed.
void fsti_output_close(fsti_output *output);
/// Closes the output and keeps its temporary name, because an index refers to it, or it belongs to
/// the parent of this process.
void fsti_output_abandon(fsti_output *output);

const char *fsti_output_path(const fsti_output *output);
/// The descriptor for direct writes, or -1; `reason` explains it.
int fsti_output_direct(fsti_output *output, char *reason, size_t reason_size);
/// Closes that descriptor until it is requested again.
void fsti_output_direct_close(fsti_output *output);
/// Required memory alignment of direct writes (at most FSTI_IO_PAGE_BYTES).
uint32_t fsti_output_memory_alignment(const fsti_output *output);

/// Writes through the page cache. Thread-safe.
fst_status fsti_output_write(fsti_output *output, const void *data, size_t size, uint64_t offset,
                             fst_error *error);
/// Called with the number of copied bytes. Any status except FST_OK ends the copy.
typedef fst_status (*fsti_copy_report)(void *context, uint64_t size_bytes, fst_error *error);

/// A copy, and its result.
typedef struct fsti_copy {
    struct fsti_file *source; ///< opened by path
    uint64_t source_begin;    ///< copy from here to the source's end
    uint64_t begin; ///< to here; blocks are shared if both agree modulo FSTI_OUTPUT_BLOCK_BYTES
    fsti_copy_report report;
    void *context;
    uint64_t bytes_shared, bytes_copied, call_count;
    const char *engine; ///< "shared", "kernel", "buffered"
    char reason[128];
} fsti_copy;

/// Alignment of blocks that files can share.
#define FSTI_OUTPUT_BLOCK_BYTES 4096u

/// Copies the rest of another file: by sharing blocks if the file system supports it, else in the
/// kernel, else through memory. Reserves the space.
fst_status fsti_output_copy(fsti_output *output, fsti_copy *copy, fst_error *error);
/// Maps the whole file shared. Ends with fsti_output_unmap() or the output.
fst_status fsti_output_map(fsti_output *output, char **out, fst_error *error);
void fsti_output_unmap(fsti_output *output);
/// Syncs the file; for an object, waits for its parts.
fst_status fsti_output_sync(fsti_output *output, fst_error *error);

// ---- names ----

/// The temporary name that the output has, or will have.
const char *fsti_output_hidden(const fsti_output *output);
/// The same with its folder.
const char *fsti_output_hidden_path(const fsti_output *output);
/// Whether `name` (without folder) is a temporary name of an output.
bool fsti_hidden_is(const char *name);
/// Gives the output its temporary name, if it has none.
fst_status fsti_output_name(fsti_output *output, fst_error *error);
/// Deletes the temporary name, if it has one.
fst_status fsti_output_unname(fsti_output *output, fst_error *error);
/// Moves the output to its path atomically, replacing what is there. With `keep_hidden` the
/// temporary name stays; without hard links the path gets a copy.
fst_status fsti_output_place(fsti_output *output, bool keep_hidden, fst_error *error);
/// The same for a file whose path must be free: *exists, and nothing happens, if it is not.
fst_status fsti_output_place_new(fsti_output *output, bool *exists, fst_error *error);
/// Checks what a text describes, before and after it is put in place: FST_E_FILE_CHANGED or
/// FST_E_NOT_FOUND if that is not there any more.
typedef fst_status (*fsti_output_check)(void *context, bool is_placed, fst_error *error);
/// The same for a manifest, list or signature, which may not replace a model: FST_E_FILE_CHANGED,
/// and the model stays, if another process has put one at the path. `check` (or NULL) runs when the
/// output is in place, because saves delete older texts when their files are. If it finds a change,
/// the output is deleted if it is still at the path, and what it replaced is restored.
fst_status fsti_output_place_beside(fsti_output *output, fsti_output_check check, void *context,
                                    fst_error *error);
/// Deletes the output from its path; an object only if it is still this output. If that is unknown,
/// the object may belong to another save and is kept. That is an error if readers find other
/// objects through it, because those must then be kept as well.
fst_status fsti_output_displace(fsti_output *output, fst_error *error);
/// Whether the file at its path is this output: 1, 0, or -1 if unknown.
int fsti_output_is_placed(const fsti_output *output);

/// Gives the file at a path a second, temporary name for rollback. *kept is NULL if there is no
/// file or the file system has no hard links; otherwise free it. *lock: a descriptor (or -1) whose
/// lock marks the name as in use until it is closed.
fst_status fsti_path_keep(const char *path, char **kept, int *lock, fst_error *error);
/// Renames the file at a path to a temporary name. *kept is NULL if there was no file.
fst_status fsti_path_hide(const char *path, char **kept, int *lock, fst_error *error);
/// Renames it back to `path`, if nothing is there; deletes it if another file is, which is newer.
fst_status fsti_path_put_back(const char *path, const char *kept, fst_error *error);
/// Renames it back to `path`, and replaces what is there.
fst_status fsti_path_restore(const char *path, const char *kept, fst_error *error);
/// Deletes a name or an object; a missing one is not an error.
fst_status fsti_path_remove(const char *path, fst_error *error);

/// Deletes an object that starts with `word`, and keeps its bytes in *kept. *kept is NULL if the
/// object is missing or may not be read. `watch`: called while waiting for the store, or NULL.
typedef struct fsti_kept_object fsti_kept_object;
fst_status fsti_object_hide(const char *address, const char *word,
                            const struct fsti_http_watch *watch, fsti_kept_object **kept,
                            fst_error *error);
/// Restores the object, unless another one exists now. After a cancellation it has two seconds.
fst_status fsti_object_restore(const char *address, const struct fsti_http_watch *watch,
                               const fsti_kept_object *kept, fst_error *error);
void fsti_object_forget(fsti_kept_object *kept); ///< NULL is allowed

// ---- folders ----

/// Syncs the names in a folder.
fst_status fsti_folder_sync(const char *folder, fst_error *error);
/// A folder that a save uses.
typedef struct fsti_folder_use {
    char *path;          ///< NULL: none
    unsigned made_count; ///< folders that were created for it, and are removed if it fails
    bool is_kept;        ///< a failure removes none
    dev_t device;
    ino_t inode;
    struct fsti_folder_use *next; ///< of this process
} fsti_folder_use;

/// Creates a folder and its parents, syncs their entries if `durable`, and notes that the folder is
/// in use. An existing one is not an error. On success, `use` must not move until it is left.
fst_status fsti_folder_make(const char *folder, bool durable, fsti_folder_use *use,
                            fst_error *error);
/// Notes that an existing folder is in use.
fst_status fsti_folder_use_existing(const char *folder, fsti_folder_use *use, fst_error *error);
/// Lets a failure not remove the folders.
void fsti_folder_keep(fsti_folder_use *use);
/// Ends the use of a folder. `removes`: removes the folders that were created for it, if they are
/// empty; those that another save of this process uses are left to that save. Does nothing for a
/// folder that is not in use.
void fsti_folder_leave(fsti_folder_use *use, bool removes);
/// Waits for the folder's lock, so that one process publishes at a time. *lock is -1 if the file
/// system has no locks. FST_E_TIMEOUT after half a minute.
fst_status fsti_folder_lock(const char *folder, int *lock, fst_error *error);
void fsti_folder_unlock(int lock);

/// FST_E_NO_SPACE if the folder's file system has less free space.
fst_status fsti_folder_check_space(const char *folder, uint64_t size_bytes, fst_error *error);

// ---- leftovers of killed saves ----

typedef struct fsti_leftover {
    const char *name; ///< in the folder
    const char *base; ///< the target's name (long names are truncated); `base_size` bytes
    size_t base_size;
    uint64_t size_bytes;
    bool has_owner; ///< its process is alive, or may be
    int folder;     ///< descriptor
} fsti_leftover;

/// Called with each leftover. One without an owner is locked meanwhile, so it may be deleted.
typedef void (*fsti_leftover_visit)(void *context, const fsti_leftover *leftover);
fst_status fsti_leftovers_visit(const char *folder, fsti_leftover_visit visit, void *context,
                                fst_error *error);
/// Whether the leftover's base matches a file called `name`.
bool fsti_leftover_is_of(const fsti_leftover *leftover, const char *name);
/// Whether the base may be the beginning of a longer name.
bool fsti_leftover_is_cut(const fsti_leftover *leftover);

#endif
