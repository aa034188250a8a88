// SPDX-License-Identifier: Apache-2.0
/// Plans the commit of files. At every instant, also after a kill or a power cut between two steps,
/// the path leads to the complete old model or to the complete new one:
///
///   one file             it is renamed to its path
///   a sharded model      an index is published first, then the files it names; until the last one,
///   where none was       opening reports which shards are missing
///   a sharded model, or  files get temporary names; publishing an index that names these commits
///   one file, where one  the new model; then the files get their final names, a final index
///   was                  follows, and temporary names and old files are deleted
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "commit_plan.h"

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
    if (name[0] != '.' && fsti_name_leads_to_model(name)) models->is_empty = false;
    if (fsti_save_is_shard(name, strlen(name), models->stem)) models->has_shards = true;
    return FST_OK;
}

static fst_status list_folder_models(const fst_writer *writer, folder_models *models,
                                     fst_error *error) {
    struct stat info;
    *models = (folder_models){.stem = writer->target.stem, .is_empty = true};
    models->has_index = lstat(writer->target.index.path, &info) == 0 || errno != ENOENT;
    return fsti_folder_visit(writer->target.folder, note_model, models, error);
}

/// Adds a deletion for each file that an earlier save with the same stem left.
typedef struct stale_search {
    fst_writer *writer;
    bool with_single; ///< include the single file, because it is not being saved
} stale_search;

static bool is_published(const fst_writer *writer, const char *name, size_t size) {
    // Shards of one model differ only in their number.
    if (!fsti_save_is_shard(name, size, writer->target.stem)) return false;
    const char *last = fsti_path_name(writer->target.published[writer->contents.file_count - 1]);
    return writer->contents.file_count > 1 && strcmp(strrchr(name, '-'), strrchr(last, '-')) == 0;
}

static fst_status add_stale(void *context, const fsti_folder_entry *entry, fst_error *error) {
    const stale_search *search = context;
    const char *name = entry->name;
    fst_writer *writer = search->writer;
    size_t size = strlen(name);
    bool is_stale =
        fsti_save_is_shard(name, size, writer->target.stem)
            ? !is_published(writer, name, size)
            : search->with_single && fsti_save_is_single(name, size, writer->target.stem);
    if (!is_stale) return FST_OK;
    char *path = writer->target.kind->join(writer->target.folder, name);
    if (path == NULL) return fsti_error_memory(error, size);
    fst_status status =
        fsti_journal_add_path(&writer->publication.journal, &fsti_step_remove_file, path, error);
    if (status == FST_OK) status = fsti_save_sidecars_drop(writer, path, error);
    fsti_free(path);
    return status;
}

static fst_status add_removals(fst_writer *writer, bool with_single, fst_error *error) {
    stale_search search = {writer, with_single};
    return fsti_folder_visit(writer->target.folder, add_stale, &search, error);
}

// ---- the journal ----

static fst_status add_sync(fst_writer *writer, const char *folder, fst_error *error) {
    return fsti_journal_add_sync(&writer->publication.journal, writer->options.promise, folder,
                                 error);
}

/// Plans the commit of a single file that no index refers to.
static fst_status plan_file(fst_writer *writer, fst_error *error) {
    FST_TRY(fsti_commit_make_manifest(writer, error));
    FST_TRY(fsti_save_manifest_aside(writer, error));
    FST_TRY(fsti_commit_add_files(writer, &fsti_step_place_file, error));
    FST_TRY(fsti_save_manifest_drop(writer, true, error));
    FST_TRY(add_sync(writer, writer->contents.files[0].target.folder, error));
    FST_TRY(fsti_save_manifest_place(writer, error));
    fsti_journal_set_commit(&writer->publication.journal);
    return FST_OK;
}

static fst_status add_removal_of_index(fst_writer *writer, fst_error *error) {
    return fsti_journal_add_path(&writer->publication.journal, &fsti_step_remove_index,
                                 writer->target.index.path, error);
}

static fst_status plan_first_set(fst_writer *writer, fst_error *error) {
    FST_TRY(fsti_commit_make_index(writer, false, &writer->publication.final_index, error));
    FST_TRY(fsti_commit_make_manifest(writer, error));
    FST_TRY(fsti_save_manifest_aside(writer, error));
    FST_TRY(fsti_journal_add_output(&writer->publication.journal, &fsti_step_place_file,
                                    writer->publication.final_index, error));
    FST_TRY(fsti_commit_add_files(writer, &fsti_step_place_file, error));
    FST_TRY(fsti_save_manifest_drop(writer, true, error));
    FST_TRY(add_sync(writer, writer->target.folder, error));
    FST_TRY(fsti_save_manifest_place(writer, error));
    fsti_journal_set_commit(&writer->publication.journal);
    if (!writer->publication.names_only) return FST_OK;
    FST_TRY(add_removal_of_index(writer, error));
    return add_sync(writer, writer->target.folder, error);
}

static fst_status plan_next_set(fst_writer *writer, bool had_index, fst_error *error) {
    save_journal *journal = &writer->publication.journal;
    bool is_single = writer->contents.file_count == 1;
    FST_TRY(fsti_commit_make_index(writer, true, &writer->publication.interim_index, error));
    FST_TRY(fsti_commit_make_index(writer, false, &writer->publication.final_index, error));
    FST_TRY(fsti_commit_make_manifest(writer, error));
    FST_TRY(fsti_save_manifest_aside(writer, error));
    FST_TRY(fsti_commit_add_files(writer, &fsti_step_name_file, error));
    FST_TRY(add_sync(writer, writer->target.folder, error));
    FST_TRY(fsti_journal_add_output(journal, &fsti_step_place_file,
                                    writer->publication.interim_index, error));
    FST_TRY(add_sync(writer, writer->target.folder, error));
    fsti_journal_set_commit(journal);
    FST_TRY(fsti_commit_add_files(writer, &fsti_step_link_file, error));
    FST_TRY(add_sync(writer, writer->target.folder, error));
    FST_TRY(fsti_journal_add_output(journal, &fsti_step_place_file, writer->publication.final_index,
                                    error));
    FST_TRY(fsti_save_manifest_drop(writer, false, error));
    FST_TRY(add_sync(writer, writer->target.folder, error));
    FST_TRY(fsti_commit_add_files(writer, &fsti_step_unname_file, error));
    if (is_single || !writer->publication.names_only)
        FST_TRY(add_removals(writer, !is_single, error));
    if (is_single || (writer->publication.names_only && !had_index))
        FST_TRY(add_removal_of_index(writer, error));
    // After the deletion of files that it does not list.
    FST_TRY(fsti_save_manifest_place(writer, error));
    return add_sync(writer, writer->target.folder, error);
}

fst_status fsti_commit_plan_files(fst_writer *writer, fst_error *error) {
    folder_models models;
    if (writer->target.folder == NULL) return plan_file(writer, error);
    FST_TRY(list_folder_models(writer, &models, error));
    if (writer->contents.file_count == 1 && !models.has_index && !models.has_shards)
        return plan_file(writer, error);
    return models.is_empty ? plan_first_set(writer, error)
                           : plan_next_set(writer, models.has_index, error);
}
