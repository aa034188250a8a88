// SPDX-License-Identifier: Apache-2.0
/// The state of a save. Private to the save module.
#ifndef FSTI_SAVE_STATE_H
#define FSTI_SAVE_STATE_H

#include <pthread.h>
#include <sys/types.h>

#include "coverage.h"
#include "gpu/gpu.h"
#include "journal.h"
#include "layout.h"
#include "store/store.h"
#include "save.h"
#include "save_manifest.h"
#include "snapshot/snapshot.h"
#include "stage.h"

/// A tensor of a save.
typedef struct save_tensor {
    const char *name;
    size_t name_size;
    const char *data;
    fst_device device;           ///< the device of `data`
    uint32_t file, index;        ///< index: in the file's layout
    uint64_t offset, size_bytes; ///< in the file
    bool is_mapped;              ///< the caller fills it in place
    byte_coverage coverage;      ///< ranges written or being written; under the writer's lock
    uint64_t bytes_put;          ///< bytes written; under the writer's lock
} save_tensor;

/// Existing objects in a store's folder when the save starts.
typedef struct remote_objects {
    bool has_index;                  ///< with this stem
    bool is_unknown;                 ///< it may not be listed
    fsti_precondition index, single; ///< versions of the index and the single file
    char **manifests;                ///< URLs of manifests of single files
    size_t manifest_count, manifest_capacity;
    char **members; ///< URLs of files with this stem
    size_t count, capacity;
} remote_objects;

/// A file of a save.
typedef struct save_file {
    fst_layout layout;
    fsti_target target;
    fsti_output *output;
    save_stage *stage; ///< open while bytes are written
    bool header_put;
    listed_file listed;
} save_file;

typedef enum writer_state {
    WRITER_OPEN,
    WRITER_FINISHED,
    WRITER_COMMITTED,
    WRITER_FAILED,
} writer_state;

struct fst_writer {
    // Constant once the writer is open.
    fst_save_options options;
    pid_t owner; ///< a forked child may only close the writer
    save_tensor *tensors;
    size_t tensor_count;
    uint32_t *members; ///< tensors grouped by file, in layout order
    size_t *member_begin;
    char *names;
    save_file *files;
    uint32_t file_count;
    char *folder, *stem;      ///< of a sharded model; NULL: one file
    fsti_anchor anchor;       ///< the working folder when the writer was opened
    unsigned folders_made;    ///< created when opening
    fsti_target index_target; ///< of a sharded model
    char *set_member;         ///< an existing file of the model, for permissions; or NULL
    char **published;         ///< paths for fst_writer_path(), links not followed
    uint64_t bytes_total, start_ns;

    fsti_http_watch watch;       ///< cancellation while waiting for a store
    remote_objects remote_state; ///< existing objects of a sharded model at a store
    char tag[20];                ///< makes file names unique: \"-\" and 16 digits, or \"\"
    bool is_remote;              ///< the files are objects of a store
    bool is_shared;              ///< other processes know the temporary names
    bool is_joined;              ///< joined to another process's file
    bool is_adopted;             ///< files made by other processes, to be published by this one
    bool names_only;             ///< see fst_publish_options

    fsti_file *origin;                   ///< for an edit: the file with the tensors; else NULL
    uint64_t origin_begin;               ///< offset of its data
    uint64_t bytes_shared, bytes_copied; ///< when finishing
    const fsti_header *origin_header; ///< header of `origin` if it is to be compressed; else NULL
    bool is_whole;         ///< the new file has all bytes of the origin, possibly compressed
    uint64_t bytes_packed; ///< bytes saved by compression; under `lock`

    fsti_snapshot *snapshot; ///< where the tensors' bytes come from; NULL: their own memory
    fsti_extent *extents;    ///< of `snapshot`: of all files, in their order
    fsti_snapshot_file *snapshot_files;

    atomic_int state; ///< writer_state
    atomic_bool is_cancelled;
    atomic_bool is_ended; ///< the caller has cancelled

    pthread_mutex_t stream_lock; ///< protects the stage for streamed bytes
    save_file *stream_file;      ///< the file of that stage

    pthread_mutex_t progress_lock; ///< serializes the progress callback; taken before `lock`
    pthread_mutex_t lock;          ///< protects the fields below
    stage_counts counts;
    uint64_t bytes_done, total_ns, sync_count, sync_ns, bytes_hashed, bytes_read;
    size_t tensors_done, leftover_count, step_count;
    char warning[256];

    save_journal journal; ///< during and after the commit
    save_manifest manifest;
    fsti_output *interim_index, *final_index;
};

/// FST_E_UNSUPPORTED in a forked child.
fst_status fsti_writer_check_owner(const fst_writer *writer, fst_error *error);
/// Whether bytes may still be written.
fst_status fsti_writer_check_open(const fst_writer *writer, fst_error *error);
/// FST_E_ARGUMENT with the tensor's name.
fst_status fsti_writer_refuse(const save_tensor *tensor, fst_error *error, const char *why);
/// The same for some of its bytes: "bytes 1 to 2 of the tensor <were why>".
fst_status fsti_writer_refuse_range(const save_tensor *tensor, byte_range range, const char *why,
                                    fst_error *error);

/// Counts bytes and calls the progress callback. For stages; `context` is the writer.
fst_status fsti_writer_report(void *context, uint64_t size_bytes, fst_error *error);

/// Opens the stage of a file, which starts with the header.
fst_status fsti_writer_open_stage(fst_writer *writer, save_file *file, fst_error *error);
fst_status fsti_writer_close_stage(fst_writer *writer, save_file *file, fst_error *error);

/// Writes an edited file: its new header, and the old file's data.
fst_status fsti_writer_copy_origin(fst_writer *writer, fst_error *error);
/// Compresses a finished file, or the origin, in its place.
fst_status fsti_writer_pack(fst_writer *writer, save_file *file, fst_error *error);
/// Copies the origin unchanged.
fst_status fsti_writer_copy_whole(fst_writer *writer, fst_error *error);
/// FST_E_FILE_CHANGED if the edited file has changed since it was opened.
fst_status fsti_writer_check_origin(const fst_writer *writer, fst_error *error);

/// Whether the names refer to the same file, or will: same folder and name if neither exists yet.
bool fsti_save_is_same_file(const char *one, const char *other);
/// Whether an index refers to the file: one in its folder or the parent folder, along the path as
/// written and through links.
fst_status fsti_save_is_indexed(const char *path, bool *is_indexed, fst_error *error);
/// Reads an index of a folder. `out` must be cleared, also after an error.
fst_status fsti_save_read_index(const char *folder, const char *name, fsti_index *out,
                                fst_error *error);

/// What to save.
typedef struct save_request {
    const char *path;
    const fst_save_tensor *tensors;
    size_t tensor_count;
    const fst_save_options *options;
    fsti_file *origin; ///< see fst_writer; the caller keeps it
    uint64_t origin_begin;
    const char *const *hidden;        ///< existing temporary files; else NULL
    const fsti_header *origin_header; ///< see fst_writer
    bool is_whole;
} save_request;
fst_status fsti_writer_begin(const save_request *request, fst_writer **out, fst_error *error);
/// The two halves of it: what needs no disk; and making the files.
fst_status fsti_writer_plan(const save_request *request, fst_writer **out, fst_error *error);
fst_status fsti_writer_create(fst_writer *writer, const char *const *hidden, fst_error *error);

/// Makes a snapshot that the writer's files are written from. For writers that are planned, and
/// whose tensors all have data.
fst_status fsti_writer_plan_snapshot(fst_writer *writer, const fsti_snapshot_options *options,
                                     fst_error *error);
/// Writes a file's data from the snapshot. Its stage is open.
fst_status fsti_writer_put_snapshot(fst_writer *writer, uint32_t file_index, fst_error *error);
/// Frees it. No thread may be copying.
void fsti_writer_drop_snapshot(fst_writer *writer);

/// Syncs an output and counts it.
fst_status fsti_writer_sync(fst_writer *writer, fsti_output *output, fst_error *error);

/// Whether `name` (`size` bytes) is a name that a save with that stem uses: a shard of any number,
/// the single file, or the index.
bool fsti_save_is_shard(const char *name, size_t size, const char *stem);
bool fsti_save_is_single(const char *name, size_t size, const char *stem);
bool fsti_save_is_index(const char *name, size_t size, const char *stem);

/// For a save to a URL: FST_E_UNSUPPORTED for options that need files.
fst_status fsti_writer_check_remote(const fst_writer *writer, const fst_save_options *options,
                                    fst_error *error);
/// Sets the files' paths again.
fst_status fsti_writer_name_files(fst_writer *writer, const char *path, fst_error *error);
/// Lists existing objects, and sets the new files' names and targets.
fst_status fsti_writer_find_objects(fst_writer *writer, fst_error *error);
void fsti_writer_clear_remote_state(fst_writer *writer);
/// Whether the commit writes an index, and the commit's steps.
bool fsti_writer_wants_index(const fst_writer *writer);
fst_status fsti_writer_plan_objects(fst_writer *writer, fst_error *error);

/// Deletes what killed saves of the same targets left behind.
void fsti_writer_sweep(fst_writer *writer);
/// Deletes temporary files that the writer has handed over, unless an index refers to them.
void fsti_writer_take_back(fst_writer *writer);

#endif
