// SPDX-License-Identifier: Apache-2.0
/// Saves to addresses. A store has no hidden names and no renaming: files are sent as they come,
/// seen when each is whole, and an index is sent when all of them are.
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "net/net.h"
#include "writer.h"

fst_status fsti_writer_check_remote(const fst_writer *writer, const fst_save_options *options,
                                    fst_error *error) {
    const char *path = writer->folder != NULL ? writer->folder : writer->published[0];
    const char *why = NULL;
    if (writer->origin != NULL) why = "edits and rewritten files are saved to files only";
    if (options->compress != FST_COMPRESS_NONE)
        why = "compressed files are made as files: save one, and copy it there";
    if (options->manifest != NULL)
        why = "no manifest is made at addresses: save to files, and copy them there";
    if (options->others_write != 0) why = "several processes can't write one object";
    if (options->engine != FST_SAVE_ENGINE_AUTO)
        why = "an engine writes to disks, and this is an address";
    return why == NULL ? FST_OK : fsti_address_refuse(path, why, error);
}

// ---- what is there ----

typedef struct key_search {
    fst_writer *writer;
    bool is_planning; ///< else targets are being found
    bool must_be_new;
} key_search;

/// The number of the file with that name; file_count: none of them.
static uint32_t find_file(const fst_writer *writer, const char *name) {
    for (uint32_t f = 0; f < writer->file_count; f++)
        if (strcmp(fsti_path_name(writer->published[f]), name) == 0) return f;
    return writer->file_count;
}

/// Files of an earlier set of the same stem.
static bool is_stale(const fst_writer *writer, const char *name) {
    size_t size = strlen(name);
    return fsti_save_is_shard(name, size, writer->stem) ||
           (writer->file_count > 1 && fsti_save_is_single(name, size, writer->stem));
}

static fst_status refuse_key(const fst_writer *writer, fst_error *error) {
    fsti_error_place place = FSTI_NOWHERE;
    place.file = writer->folder;
    (void)!fsti_error_set(error, FST_E_IO, place, "there is a model already (no_overwrite)");
    if (error != NULL) error->os_errno = EEXIST;
    return FST_E_IO;
}

static fst_status look_at_key(void *context, const char *name, fst_error *error) {
    const key_search *search = context;
    fst_writer *writer = search->writer;
    uint32_t file = find_file(writer, name);
    bool is_index = fsti_save_is_index(name, strlen(name), writer->stem);
    if (search->must_be_new) {
        bool is_own = file < writer->file_count || is_index || is_stale(writer, name);
        return is_own && !search->is_planning ? refuse_key(writer, error) : FST_OK;
    }
    if (file < writer->file_count) {
        writer->files[file].target.had_object = true;
        return FST_OK;
    }
    if (is_index) writer->index_target.had_object = true;
    if (!search->is_planning || !is_stale(writer, name)) return FST_OK;
    char *path = fsti_url_beside(writer->published[0], name);
    if (path == NULL) return fsti_error_memory(error, strlen(name));
    fst_status status = fsti_journal_add_path(&writer->journal, STEP_REMOVE, path, error);
    fsti_free(path);
    return status;
}

/// Who may write and not list saves as well: then nothing of an earlier set is removed.
static fst_status look_at_keys(fst_writer *writer, bool is_planning, fst_error *error) {
    key_search search = {writer, is_planning, fsti_net_must_be_new()};
    fst_error cause = {0};
    char *folder = fsti_url_beside(writer->published[0], "");
    if (folder == NULL) return fsti_error_memory(error, strlen(writer->published[0]));
    fst_status status = fsti_net_list(folder, look_at_key, &search, &cause);
    fsti_free(folder);
    if (status == FST_E_PERMISSION) {
        fsti_log(FST_LOG_WARNING, "what lies there is not known: %s", cause.message);
        for (uint32_t f = 0; f < writer->file_count; f++) writer->files[f].target.had_object = true;
        return FST_OK;
    }
    if (status != FST_OK && error != NULL) *error = cause;
    return status;
}

fst_status fsti_writer_find_objects(fst_writer *writer, fst_error *error) {
    for (uint32_t f = 0; f < writer->file_count; f++)
        FST_TRY(fsti_target_object(writer->published[f], &writer->files[f].target, error));
    if (writer->folder == NULL) return FST_OK;
    FST_TRY(
        fsti_target_object(writer->published[writer->file_count], &writer->index_target, error));
    return look_at_keys(writer, false, error);
}

// ---- the journal ----

fst_status fsti_writer_plan_objects(fst_writer *writer, fst_error *error) {
    save_journal *journal = &writer->journal;
    for (uint32_t f = 0; f < writer->file_count; f++)
        FST_TRY(fsti_journal_add(journal, STEP_PLACE, writer->files[f].output, error));
    if (writer->final_index != NULL)
        FST_TRY(fsti_journal_add(journal, STEP_PLACE, writer->final_index, error));
    fsti_journal_turn(journal);
    if (writer->folder == NULL) return FST_OK;
    // An index of the earlier set leads away from a single file: first.
    if (writer->file_count == 1 && writer->index_target.had_object)
        FST_TRY(fsti_journal_add_path(journal, STEP_REMOVE, writer->index_target.path, error));
    return look_at_keys(writer, true, error);
}

void fsti_writer_part_objects(fst_writer *writer, fst_error *error) {
    uint32_t placed_count = 0, replaced_count = 0;
    for (uint32_t f = 0; f < writer->file_count; f++) {
        const save_file *file = &writer->files[f];
        bool is_placed = file->output != NULL && fsti_output_is_placed(file->output) == 1;
        placed_count += is_placed;
        replaced_count += is_placed && file->target.had_object;
    }
    if (writer->folder == NULL || replaced_count == 0) return;
    // Undone were those that replaced nothing.
    bool is_whole = placed_count == writer->file_count && replaced_count == placed_count;
    bool is_good = true;
    if (writer->index_target.had_object)
        is_good = fsti_net_remove(writer->index_target.path, NULL) == FST_OK;
    for (uint32_t f = 0; f < writer->file_count && !is_whole; f++)
        if (fsti_output_is_placed(writer->files[f].output) == 1)
            is_good = fsti_net_remove(writer->published[f], NULL) == FST_OK && is_good;
    if (error == NULL) return;
    size_t used = strlen(error->message);
    snprintf(error->message + used, sizeof error->message - used,
             !is_good   ? "; what is there now is of two models"
             : is_whole ? "; all new files are there, without an index"
                        : "; the set that was there is gone");
}
