// SPDX-License-Identifier: Apache-2.0
/// The state of a save, and its parts. Private to the save module.
#ifndef FSTI_SAVE_STATE_H
#define FSTI_SAVE_STATE_H

#include <pthread.h>
#include <sys/types.h>

#include "journal.h"
#include "save.h"
#include "save_contents.h"
#include "save_manifest.h"
#include "save_progress.h"
#include "save_source.h"
#include "save_target.h"

/// What of a tensor the caller has written; under the progress lock.
typedef struct tensor_coverage {
    byte_coverage claimed; ///< ranges written or being written
    uint64_t bytes_put;    ///< bytes written
    bool is_mapped;        ///< the caller fills it in place
} tensor_coverage;

/// Bytes that the caller writes piece by piece.
typedef struct save_stream {
    tensor_coverage *coverage; ///< by tensor
    pthread_mutex_t lock;      ///< protects the stage for streamed bytes
    save_file *file;           ///< the file of that stage
} save_stream;

/// Which part of the work this process has.
typedef enum save_role {
    ROLE_OWN,         ///< all of it
    ROLE_HANDED_OVER, ///< has written files whose temporary names other processes know
    ROLE_JOINED,      ///< writes parts of another process's file
    ROLE_ADOPTED,     ///< publishes files that other processes have written
} save_role;

/// How the files are given their names.
typedef struct save_publication {
    save_role role;
    bool names_only;      ///< see fst_publish_options
    save_journal journal; ///< during and after the commit
    save_manifest manifest;
    fsti_output *interim_index, *final_index;
} save_publication;

typedef enum writer_state {
    WRITER_OPEN,
    WRITER_FINISHED,
    WRITER_COMMITTED,
    WRITER_FAILED,
} writer_state;

struct fst_writer {
    fst_save_options options;
    pid_t owner;      ///< a forked child may only close the writer
    atomic_int state; ///< writer_state
    save_contents contents;
    save_source source;
    save_target target;
    save_stream stream;
    save_progress progress;
    save_publication publication;
};

/// FST_E_UNSUPPORTED in a forked child.
fst_status fsti_writer_check_owner(const fst_writer *writer, fst_error *error);
/// Waits, if the path is a link, for the asynchronous saves that may replace it.
fst_status fsti_async_await_link(fst_writer *writer, fst_error *error);
/// Waits for the end of the asynchronous saves of the same files that were started before this one,
/// so that they do not replace its files, or until it is cancelled. For other saves than those.
fst_status fsti_async_await_earlier(fst_writer *writer, fst_error *error);
/// The same before a file is read that is then replaced.
fst_status fsti_async_await_file(const char *path, fst_progress_callback report,
                                 void *report_context, fst_error *error);
/// Whether bytes may still be written.
fst_status fsti_writer_check_open(const fst_writer *writer, fst_error *error);
/// Finishes the writer if it is open; FST_E_ARGUMENT if it has failed or was committed.
fst_status fsti_writer_make_finished(fst_writer *writer, fst_error *error);
/// Whether this process has written every byte of the tensors without data. FST_E_ARGUMENT with
/// tensor and range if not.
fst_status fsti_writer_check_complete(const fst_writer *writer, fst_error *error);

/// Opens the stage of a file, which starts with the header.
fst_status fsti_writer_open_stage(fst_writer *writer, save_file *file, fst_error *error);
fst_status fsti_writer_close_stage(fst_writer *writer, save_file *file, fst_error *error);

/// Fills a file through its stage, which `fill` finds open.
typedef fst_status (*fill_stage)(fst_writer *writer, uint32_t file_index, fst_error *error);
fst_status fsti_writer_fill_staged(fst_writer *writer, uint32_t file_index, fill_stage fill,
                                   fst_error *error);

/// FST_E_FILE_CHANGED if the origin has changed since it was opened.
fst_status fsti_origin_unchanged(const fst_writer *writer, fst_error *error);

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
    save_source source;        ///< `kind`: NULL for memory
    const char *const *hidden; ///< existing temporary files; else NULL
} save_request;
fst_status fsti_writer_begin(const save_request *request, fst_writer **out, fst_error *error);
/// The two halves of it: what needs no disk; and making the files.
fst_status fsti_writer_plan(const save_request *request, fst_writer **out, fst_error *error);
fst_status fsti_writer_create(fst_writer *writer, const char *const *hidden, fst_error *error);

/// Whether `name` (`size` bytes) is a name that a save with that stem uses: a shard of any number,
/// the single file, or the index.
bool fsti_save_is_shard(const char *name, size_t size, const char *stem);
bool fsti_save_is_single(const char *name, size_t size, const char *stem);
bool fsti_save_is_index(const char *name, size_t size, const char *stem);

/// The name by which an index or a manifest lists a file (or the index: `file` is the number of
/// files), which for a URL is unescaped. From fsti_alloc(); NULL without memory.
char *fsti_save_listed_name(const fst_writer *writer, uint32_t file);
/// FST_E_ARGUMENT if a single file would get the name of an index.
fst_status fsti_save_refuse_index_name(const char *path, fst_error *error);

/// `path` and `ending`, from fsti_alloc(). NULL without memory.
char *fsti_path_with_ending(const char *path, const char *ending);
/// Sets the files' paths again.
fst_status fsti_writer_name_files(fst_writer *writer, const char *path, fst_error *error);

/// Deletes what killed saves of the same targets left behind.
void fsti_writer_sweep(fst_writer *writer);
/// Deletes temporary files that the writer has handed over, unless an index refers to them.
void fsti_writer_take_back(fst_writer *writer);

#endif
