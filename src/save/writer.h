// SPDX-License-Identifier: Apache-2.0
/// A save in progress: private to the save room.
#ifndef FSTI_WRITER_H
#define FSTI_WRITER_H

#include <pthread.h>
#include <sys/types.h>

#include "coverage.h"
#include "gpu/gpu.h"
#include "journal.h"
#include "layout.h"
#include "net/net.h"
#include "save.h"
#include "save_manifest.h"
#include "stage.h"

/// A tensor of a save.
typedef struct save_tensor {
    const char *name;
    size_t name_size;
    const char *data;
    fst_device device;           ///< whose address `data` is
    uint32_t file, index;        ///< index: in the file's layout
    uint64_t offset, size_bytes; ///< in the file
    bool is_mapped;              ///< the caller fills it in place
    byte_coverage coverage;      ///< what came, or is coming; under the writer's lock
    uint64_t bytes_put;          ///< what has come; under the writer's lock
} save_tensor;

/// What a set's folder at a store holds when the save begins.
typedef struct remote_scene {
    bool has_index;          ///< of this stem
    bool is_unknown;         ///< it may not be listed
    fsti_seen index, single; ///< what is at the places of the index and of the single file
    char **manifests;        ///< addresses of manifests of single files of the set
    size_t manifest_count, manifest_capacity;
    char **members; ///< addresses of files of this stem
    size_t count, capacity;
} remote_scene;

/// A file of a save.
typedef struct save_file {
    fst_layout layout;
    fsti_target target;
    fsti_output *output;
    save_stage *stage; ///< open while bytes come
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
    // What does not change once the writer is open.
    fst_save_options options;
    pid_t owner; ///< a child of this process may close the writer, nothing else
    save_tensor *tensors;
    size_t tensor_count;
    uint32_t *members; ///< tensors, grouped by file, in layout index order
    size_t *member_begin;
    char *names;
    save_file *files;
    uint32_t file_count;
    char *folder, *stem;      ///< of a set; NULL: one file
    unsigned folders_made;    ///< by opening
    fsti_target index_target; ///< of a set
    char *set_member;         ///< a file of the set that is there: new ones get its rights. Or NULL
    char **published;         ///< paths for fst_writer_path(), links not followed
    uint64_t bytes_total, start_ns;

    fsti_net_watch watch; ///< whether to go on waiting for a store
    remote_scene scene;   ///< of a set there
    char tag[20];         ///< of files beside others' of their names: \"-\" and 16 digits; or \"\"
    bool is_remote;       ///< the files are objects of a store
    bool is_shared;       ///< the files have hidden names that other processes know
    bool is_joined;       ///< to a file that is another process's
    bool is_adopted;      ///< the files were made by other processes, to be published by this one
    bool without_index;   ///< see fst_publish_options

    fsti_file *origin;     ///< of an edit: the file whose tensors the new one has; else NULL
    uint64_t origin_begin; ///< of its data
    uint64_t bytes_shared, bytes_copied; ///< by finishing
    const fsti_header *origin_header;    ///< where `origin` is to be packed: its header; else NULL
    bool is_whole;         ///< the new file is the origin's bytes, header and all, or these packed
    uint64_t bytes_packed; ///< that packing has saved; under `lock`

    atomic_int state; ///< writer_state
    atomic_bool is_cancelled;
    atomic_bool is_ended; ///< the caller has said once that it is to end

    pthread_mutex_t stream_lock; ///< the stage that streamed bytes go through
    save_file *stream_file;      ///< whose stage that is

    pthread_mutex_t progress_lock; ///< one call of the callback at a time; taken before `lock`
    pthread_mutex_t lock;          ///< for what follows
    stage_counts counts;
    uint64_t bytes_done, total_ns, sync_count, sync_ns, bytes_hashed, bytes_read;
    size_t tensors_done, leftover_count, step_count;
    char warning[256];

    save_journal journal; ///< while and after the writer commits
    save_manifest manifest;
    fsti_output *interim_index, *final_index;
};

/// FST_E_UNSUPPORTED in a child of the process that opened the writer.
fst_status fsti_writer_check_owner(const fst_writer *writer, fst_error *error);
/// Whether bytes may still come.
fst_status fsti_writer_check_open(const fst_writer *writer, fst_error *error);
/// FST_E_ARGUMENT that names the tensor.
fst_status fsti_writer_refuse(const save_tensor *tensor, fst_error *error, const char *why);
/// The same for some of its bytes: "bytes 1 to 2 of the tensor <were why>".
fst_status fsti_writer_refuse_range(const save_tensor *tensor, byte_range range, const char *why,
                                    fst_error *error);

/// Counts bytes, and asks the caller whether to go on. For stages; `context` is the writer.
fst_status fsti_writer_report(void *context, uint64_t size_bytes, fst_error *error);

/// The stage of a file, which begins with the header.
fst_status fsti_writer_open_stage(fst_writer *writer, save_file *file, fst_error *error);
fst_status fsti_writer_close_stage(fst_writer *writer, save_file *file, fst_error *error);

/// The whole of an edited file: its header, and what the old one has behind its own.
fst_status fsti_writer_copy_origin(fst_writer *writer, fst_error *error);
/// Packs a file that is finished, or the origin, in its place.
fst_status fsti_writer_pack(fst_writer *writer, save_file *file, fst_error *error);
/// The whole of the origin, as it is.
fst_status fsti_writer_copy_whole(fst_writer *writer, fst_error *error);
/// FST_E_FILE_CHANGED where the file that is edited is not what it was. Without one, FST_OK.
fst_status fsti_writer_check_origin(const fst_writer *writer, fst_error *error);

/// Whether the names are of one file, or will be: of the same folder, where none is there yet.
bool fsti_save_is_same_file(const char *one, const char *other);
/// Whether an index leads to the file: one in its folder or in the folder above, as the path has
/// them and as its links lead to them.
fst_status fsti_save_is_indexed(const char *path, bool *is_indexed, fst_error *error);
/// Reads an index of a folder. `out` is to be cleared, also after an error.
fst_status fsti_save_read_index(const char *folder, const char *name, fsti_index *out,
                                fst_error *error);

/// What is to be saved.
typedef struct save_request {
    const char *path;
    const fst_save_tensor *tensors;
    size_t tensor_count;
    const fst_save_options *options;
    fsti_file *origin; ///< see fst_writer; it stays the caller's
    uint64_t origin_begin;
    const char *const *hidden;        ///< the files, where they are there already; else NULL
    const fsti_header *origin_header; ///< see fst_writer
    bool is_whole;
} save_request;
fst_status fsti_writer_begin(const save_request *request, fst_writer **out, fst_error *error);

/// Syncs an output, counted.
fst_status fsti_writer_sync(fst_writer *writer, fsti_output *output, fst_error *error);

/// Whether `name` (`size` bytes) is one that a save with that stem gives a file: a shard of any
/// numbers, the single file, the index.
bool fsti_save_is_shard(const char *name, size_t size, const char *stem);
bool fsti_save_is_single(const char *name, size_t size, const char *stem);
bool fsti_save_is_index(const char *name, size_t size, const char *stem);

/// Of a save to an address: FST_E_UNSUPPORTED for what needs files.
fst_status fsti_writer_check_remote(const fst_writer *writer, const fst_save_options *options,
                                    fst_error *error);
/// Gives the files their paths, anew.
fst_status fsti_writer_name_files(fst_writer *writer, const char *path, fst_error *error);
/// What is there, what names the new files get beside it, and their targets.
fst_status fsti_writer_find_objects(fst_writer *writer, fst_error *error);
void fsti_writer_clear_scene(fst_writer *writer);
/// Whether an index is among the steps that put objects in place, and the steps.
bool fsti_writer_wants_index(const fst_writer *writer);
fst_status fsti_writer_plan_objects(fst_writer *writer, fst_error *error);

/// Removes what killed saves of the writer's targets have left behind.
void fsti_writer_sweep(fst_writer *writer);
/// Removes the hidden names that the writer has handed over, unless an index leads to them.
void fsti_writer_take_back(fst_writer *writer);

#endif
