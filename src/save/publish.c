// SPDX-License-Identifier: Apache-2.0
/// The end of a save: publishes finished files with a journal (journal.h). At every instant, also
/// after a kill or a power cut between two steps, the path leads to the complete old model or to
/// the complete new one:
///
///   one file             it is renamed to its path
///   a sharded model      an index is published first, then the files it names; until the last one,
///   where none was       opening reports which shards are missing
///   a sharded model, or  files get temporary names; publishing an index that names these commits
///   one file, where one  the new model; then the files get their final names, a final index
///   was                  follows, and temporary names and old files are deleted
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "save_state.h"

// ---- the index ----

static fst_status make_index_text(const fst_writer *writer, bool hidden, char **text, size_t *size,
                                  fst_error *error) {
    size_t count = writer->tensor_count;
    uint64_t total_bytes = 0;
    fsti_index_row *rows = fsti_alloc((count + 1) * sizeof *rows);
    if (rows == NULL) return fsti_error_memory(error, count * sizeof *rows);
    for (size_t i = 0; i < count; i++) {
        const save_tensor *tensor = &writer->tensors[i];
        const char *file = hidden ? fsti_output_hidden(writer->files[tensor->file].output)
                                  : fsti_path_name(writer->published[tensor->file]);
        total_bytes += tensor->size_bytes;
        rows[i] = (fsti_index_row){tensor->name, tensor->name_size, file};
    }
    fst_status status = fsti_index_write(rows, count, total_bytes, text, size, error);
    fsti_free(rows);
    return status;
}

/// Writes an index and syncs it if durable, before any name changes, so that a full disk is noticed
/// now.
static fst_status make_index(fst_writer *writer, bool hidden, fsti_output **out, fst_error *error) {
    char *text = NULL;
    size_t size = 0;
    bool durable = writer->options.promise == FST_SAVE_DURABLE;
    FST_TRY(make_index_text(writer, hidden, &text, &size, error));
    fst_status status = fsti_output_open(&writer->index_target, size, durable, out, error);
    if (status == FST_OK) status = fsti_output_write(*out, text, size, 0, error);
    if (status == FST_OK && durable && !writer->is_remote)
        status = fsti_writer_sync(writer, *out, error);
    fsti_free(text);
    return status;
}

/// Writes the manifest's text, if requested. It includes the final index of a sharded model.
static fst_status make_manifest(fst_writer *writer, fst_error *error) {
    char *index = NULL;
    size_t size = 0;
    if (writer->manifest.kind == NULL) return FST_OK;
    if (writer->final_index != NULL && writer->file_count > 1)
        FST_TRY(make_index_text(writer, false, &index, &size, error));
    fst_status status = fsti_save_manifest_write(writer, index, size, error);
    fsti_free(index);
    return status;
}

// ---- existing files ----

/// What is in a folder when a sharded model is published.
typedef struct folder_models {
    const char *stem;
    bool is_empty;   ///< has no model
    bool has_index;  ///< with this stem
    bool has_shards; ///< with this stem
} folder_models;

static fst_status note_model(void *context, const fsti_folder_entry *entry, fst_error *error) {
    folder_models *models = context;
    const char *name = entry->name;
    (void)error;
    if (name[0] != '.' &&
        (fsti_ends_with(name, ".safetensors") || fsti_ends_with(name, ".safetensors.index.json")))
        models->is_empty = false;
    if (fsti_save_is_shard(name, strlen(name), models->stem)) models->has_shards = true;
    return FST_OK;
}

static fst_status list_folder_models(const fst_writer *writer, folder_models *models,
                                     fst_error *error) {
    struct stat info;
    *models = (folder_models){.stem = writer->stem, .is_empty = true};
    models->has_index = lstat(writer->index_target.path, &info) == 0 || errno != ENOENT;
    return fsti_folder_visit(writer->folder, note_model, models, error);
}

/// Adds a deletion for each file that an earlier save with the same stem left.
typedef struct stale_search {
    fst_writer *writer;
    bool with_single; ///< include the single file, because it is not being saved
} stale_search;

static bool is_published(const fst_writer *writer, const char *name, size_t size) {
    // Shards of one model differ only in their number.
    if (!fsti_save_is_shard(name, size, writer->stem)) return false;
    const char *last = fsti_path_name(writer->published[writer->file_count - 1]);
    return writer->file_count > 1 && strcmp(strrchr(name, '-'), strrchr(last, '-')) == 0;
}

static fst_status add_stale(void *context, const fsti_folder_entry *entry, fst_error *error) {
    const stale_search *search = context;
    const char *name = entry->name;
    fst_writer *writer = search->writer;
    size_t size = strlen(name);
    bool is_stale = fsti_save_is_shard(name, size, writer->stem)
                        ? !is_published(writer, name, size)
                        : search->with_single && fsti_save_is_single(name, size, writer->stem);
    if (!is_stale) return FST_OK;
    size_t capacity = strlen(writer->folder) + size + 2;
    char *path = fsti_alloc(capacity);
    if (path == NULL) return fsti_error_memory(error, capacity);
    snprintf(path, capacity, "%s/%s", writer->folder, name);
    fst_status status = fsti_journal_add_path(&writer->journal, STEP_REMOVE, path, error);
    fsti_free(path);
    return status;
}

static fst_status add_removals(fst_writer *writer, bool with_single, fst_error *error) {
    stale_search search = {writer, with_single};
    return fsti_folder_visit(writer->folder, add_stale, &search, error);
}

// ---- the journal ----

static fst_status add_files(fst_writer *writer, step_kind kind, fst_error *error) {
    for (uint32_t f = 0; f < writer->file_count; f++)
        FST_TRY(fsti_journal_add(&writer->journal, kind, writer->files[f].output, error));
    return FST_OK;
}

static fst_status add_sync(fst_writer *writer, const char *folder, fst_error *error) {
    if (writer->options.promise != FST_SAVE_DURABLE) return FST_OK;
    return fsti_journal_add_path(&writer->journal, STEP_SYNC, folder, error);
}

/// Plans the commit of a single file that no index refers to.
static fst_status plan_file(fst_writer *writer, fst_error *error) {
    FST_TRY(make_manifest(writer, error));
    FST_TRY(fsti_save_manifest_aside(writer, error));
    FST_TRY(add_files(writer, STEP_PLACE, error));
    FST_TRY(add_sync(writer, writer->files[0].target.folder, error));
    FST_TRY(fsti_save_manifest_place(writer, error));
    fsti_journal_set_commit(&writer->journal);
    return FST_OK;
}

static fst_status add_removal_of_index(fst_writer *writer, fst_error *error) {
    return fsti_journal_add_path(&writer->journal, STEP_REMOVE_LAST, writer->index_target.path,
                                 error);
}

static fst_status plan_first_set(fst_writer *writer, fst_error *error) {
    FST_TRY(make_index(writer, false, &writer->final_index, error));
    FST_TRY(make_manifest(writer, error));
    FST_TRY(fsti_save_manifest_aside(writer, error));
    FST_TRY(fsti_journal_add(&writer->journal, STEP_PLACE, writer->final_index, error));
    FST_TRY(add_files(writer, STEP_PLACE, error));
    FST_TRY(add_sync(writer, writer->folder, error));
    FST_TRY(fsti_save_manifest_place(writer, error));
    fsti_journal_set_commit(&writer->journal);
    if (!writer->names_only) return FST_OK;
    FST_TRY(add_removal_of_index(writer, error));
    return add_sync(writer, writer->folder, error);
}

static fst_status plan_next_set(fst_writer *writer, bool had_index, fst_error *error) {
    save_journal *journal = &writer->journal;
    bool is_single = writer->file_count == 1;
    FST_TRY(make_index(writer, true, &writer->interim_index, error));
    FST_TRY(make_index(writer, false, &writer->final_index, error));
    FST_TRY(make_manifest(writer, error));
    FST_TRY(fsti_save_manifest_aside(writer, error));
    FST_TRY(add_files(writer, STEP_NAME, error));
    FST_TRY(add_sync(writer, writer->folder, error));
    FST_TRY(fsti_journal_add(journal, STEP_PLACE, writer->interim_index, error));
    FST_TRY(add_sync(writer, writer->folder, error));
    fsti_journal_set_commit(journal);
    FST_TRY(add_files(writer, STEP_LINK, error));
    FST_TRY(add_sync(writer, writer->folder, error));
    FST_TRY(fsti_journal_add(journal, STEP_PLACE, writer->final_index, error));
    FST_TRY(add_sync(writer, writer->folder, error));
    FST_TRY(add_files(writer, STEP_UNNAME, error));
    if (is_single || !writer->names_only) FST_TRY(add_removals(writer, !is_single, error));
    if (is_single || (writer->names_only && !had_index))
        FST_TRY(add_removal_of_index(writer, error));
    // After the deletion of files that it does not list.
    FST_TRY(fsti_save_manifest_place(writer, error));
    return add_sync(writer, writer->folder, error);
}

static fst_status plan(fst_writer *writer, fst_error *error) {
    folder_models models;
    if (writer->is_remote) {
        if (fsti_writer_wants_index(writer))
            FST_TRY(make_index(writer, false, &writer->final_index, error));
        FST_TRY(make_manifest(writer, error));
        return fsti_writer_plan_objects(writer, error);
    }
    if (writer->folder == NULL) return plan_file(writer, error);
    FST_TRY(list_folder_models(writer, &models, error));
    if (writer->file_count == 1 && !models.has_index && !models.has_shards)
        return plan_file(writer, error);
    return models.is_empty ? plan_first_set(writer, error)
                           : plan_next_set(writer, models.has_index, error);
}

/// Syncs what other processes have written.
static fst_status sync_shared(fst_writer *writer, fst_error *error) {
    if (!writer->is_shared || writer->options.promise != FST_SAVE_DURABLE) return FST_OK;
    for (uint32_t f = 0; f < writer->file_count; f++)
        FST_TRY(fsti_writer_sync(writer, writer->files[f].output, error));
    return FST_OK;
}

/// Digests files written by other processes, which this process has not seen.
static fst_status digest_shared(fst_writer *writer, fst_error *error) {
    if (!writer->is_shared || writer->manifest.kind == NULL) return FST_OK;
    for (uint32_t f = 0; f < writer->file_count; f++)
        FST_TRY(fsti_save_manifest_end(writer, &writer->files[f], error));
    return FST_OK;
}

static fst_status run(fst_writer *writer, fst_error *error) {
    FST_TRY(fsti_anchor_check(writer->anchor, writer->published[0], error));
    FST_TRY(sync_shared(writer, error));
    FST_TRY(digest_shared(writer, error));
    FST_TRY(plan(writer, error));
    if (atomic_load(&writer->is_cancelled))
        return fsti_error_set(error, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled");
    FST_TRY(fsti_writer_check_origin(writer, error));
    fst_status status = fsti_journal_run(&writer->journal, error);
    FST_TRY(status);
    if (writer->journal.is_complete && !writer->is_remote) fsti_writer_sweep(writer);
    return FST_OK;
}

static void record_publication(fst_writer *writer) {
    pthread_mutex_lock(&writer->lock);
    writer->total_ns = fsti_now_ns() - writer->start_ns;
    writer->step_count = writer->journal.count;
    writer->sync_count += writer->journal.sync_count;
    writer->sync_ns += writer->journal.sync_ns;
    snprintf(writer->warning, sizeof writer->warning, "%s", writer->journal.warning);
    if (writer->is_remote)
        fsti_output_describe(writer->files[0].output, writer->counts.reason,
                             sizeof writer->counts.reason);
    pthread_mutex_unlock(&writer->lock);
    fsti_log(FST_LOG_INFO, "saved %s: %zu tensors, %u files, %" PRIu64 " bytes, %s (%s)",
             writer->folder != NULL ? writer->folder : writer->published[0], writer->tensor_count,
             writer->file_count, writer->bytes_total,
             writer->counts.engine == NULL ? "" : writer->counts.engine, writer->counts.reason);
}

/// Takes the folder's lock: two saves would mix their names, and of two edits the later would undo
/// the earlier. A single-file save is one rename and needs no lock. *lock is -1 without a lock; an
/// edit continues without one if the folder may not be read.
static fst_status lock_folder(const fst_writer *writer, int *lock, fst_error *error) {
    const char *folder = writer->folder;
    if (folder == NULL && (writer->origin != NULL || writer->manifest.kind != NULL)) {
        folder = writer->files[0].target.folder;
        if (faccessat(AT_FDCWD, folder, R_OK, AT_EACCESS) != 0 && errno == EACCES) folder = NULL;
    }
    *lock = -1;
    return folder == NULL || writer->is_remote ? FST_OK : fsti_folder_lock(folder, lock, error);
}

fst_status fsti_writer_commit(fst_writer *writer, fst_error *error) {
    FST_TRY(fsti_writer_check_owner(writer, error));
    if (writer->is_joined)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "the file belongs to another process: that commits");
    if (atomic_load(&writer->state) == WRITER_OPEN) FST_TRY(fsti_writer_finish(writer, error));
    int state = atomic_load(&writer->state);
    if (state != WRITER_FINISHED)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "the save %s",
                              state == WRITER_FAILED ? "has failed" : "is committed");
    int lock;
    fst_status status = lock_folder(writer, &lock, error);
    if (status == FST_OK) status = run(writer, error);
    fsti_folder_unlock(lock);
    atomic_store(&writer->state, status == FST_OK ? WRITER_COMMITTED : WRITER_FAILED);
    if (status == FST_OK) record_publication(writer);
    return status;
}
