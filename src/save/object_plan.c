// SPDX-License-Identifier: Apache-2.0
/// Plans the commit of objects. Stores have no renaming: files are sent when they are written,
/// become visible when complete, and the index is sent last.
#include <string.h>

#include "commit_plan.h"
#include "store/store.h"

static bool has_stale(const fst_writer *writer) {
    for (size_t i = 0; i < writer->target.store.member_count; i++)
        if (!fsti_save_replaces_single(writer, writer->target.store.members[i])) return true;
    return false;
}

static bool wants_index(const fst_writer *writer) {
    if (writer->contents.file_count > 1) return true;
    // When a single file replaces a sharded model, the index leads to it until the old files are
    // deleted. Without list permission the index may still have been seen.
    const store_state *store = &writer->target.store;
    bool has_index =
        store->is_unlisted ? store->index.kind == FSTI_PRECONDITION_VERSION : store->may_have_index;
    return writer->target.folder != NULL && (has_index || has_stale(writer));
}

static fst_status report_concurrent_save(const fst_writer *writer, const char *what,
                                         fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file =
        writer->target.folder != NULL ? writer->target.folder : writer->target.published[0];
    return fsti_error_set(error, FST_E_FILE_CHANGED, location, "another save %s", what);
}

/// Files of this save, as found by a listing.
typedef struct own_files {
    const fst_writer *writer;
    uint32_t count;
} own_files;

static fst_status count_own(void *context, const char *name, fst_error *error) {
    own_files *own = context;
    const fst_writer *writer = own->writer;
    char *url = fsti_url_sibling(writer->target.published[0], name);
    if (url == NULL) return fsti_error_memory(error, strlen(name));
    for (uint32_t f = 0; f < writer->contents.file_count; f++)
        own->count += strcmp(url, writer->target.published[f]) == 0;
    fsti_free(url);
    return FST_OK;
}

/// Checks, before the index is replaced, that this save's files still exist: a concurrent save may
/// have deleted them as leftovers. (With conditional writes the index would fail as well.)
static fst_status check_own(void *context, fst_error *error) {
    fst_writer *writer = context;
    own_files own = {writer, 0};
    char *folder = fsti_url_sibling(writer->target.published[0], "");
    if (folder == NULL) return fsti_error_memory(error, strlen(writer->target.published[0]));
    fst_status status =
        fsti_store_list(folder, &writer->target.store.watch, count_own, &own, error);
    fsti_free(folder);
    if (status == FST_E_PERMISSION) return FST_OK;
    FST_TRY(status);
    return own.count == writer->contents.file_count
               ? FST_OK
               : report_concurrent_save(writer,
                                        "has removed files of this one, which it "
                                        "mistook for leftovers",
                                        error);
}

/// Checks that no index exists before a single file is published, because an index would hide it.
static fst_status check_no_index(void *context, fst_error *error) {
    fst_writer *writer = context;
    fsti_precondition now;
    FST_TRY(fsti_store_stat(writer->target.index.path, &writer->target.store.watch, &now, error));
    bool is_new = now.kind == FSTI_PRECONDITION_VERSION &&
                  !fsti_precondition_equals(&now, &writer->target.store.index);
    return is_new
               ? report_concurrent_save(writer, "has written an index since this save began", error)
               : FST_OK;
}

/// Old files may be deleted only after checking that no other index refers to them.
static bool lacks_read_permission(const fst_writer *writer) {
    return writer->target.store.index.is_forbidden || writer->target.store.single.is_forbidden;
}

static fst_status report_undeleted_files(void *context, fst_error *error) {
    const fst_writer *writer = context;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = writer->target.folder;
    return fsti_error_set(
        error, FST_E_PERMISSION, location,
        "files of an earlier save are not deleted: without permission to read objects it is "
        "unknown whether another save uses them");
}

/// Checks that an object still is the one that this save wrote.
static fst_status check_unchanged(const fst_writer *writer, const char *path,
                                  const fsti_output *output, fst_error *error) {
    const fsti_precondition *own = fsti_output_mark(output);
    fsti_precondition now;
    FST_TRY(fsti_store_stat(path, &writer->target.store.watch, &now, error));
    bool is_own = own->kind == FSTI_PRECONDITION_NONE || now.kind == FSTI_PRECONDITION_NONE ||
                  fsti_precondition_equals(own, &now);
    return is_own ? FST_OK : report_concurrent_save(writer, "has already replaced this one", error);
}

/// Before old files are deleted: another save whose index refers to them deletes the others.
static fst_status check_index(void *context, fst_error *error) {
    fst_writer *writer = context;
    return check_unchanged(writer, writer->target.index.path, writer->publication.final_index,
                           error);
}

/// Before the manifest is published.
static fst_status check_file(void *context, fst_error *error) {
    fst_writer *writer = context;
    return check_unchanged(writer, writer->target.published[0], writer->contents.files[0].output,
                           error);
}

static fst_status add_check(fst_writer *writer, journal_check check, fst_error *error) {
    journal_step step = {.kind = &fsti_step_check, .check = check, .context = writer};
    return fsti_journal_add(&writer->publication.journal, &step, error);
}

/// Deletes only what existed when this save began; newer objects belong to other saves.
static fst_status add_removals(fst_writer *writer, fst_error *error) {
    const store_state *store = &writer->target.store;
    bool has_index = writer->publication.final_index != NULL;
    if (has_index && (has_stale(writer) || writer->publication.manifest.kind != NULL))
        FST_TRY(add_check(writer, check_index, error));
    for (size_t i = 0; i < store->member_count && !lacks_read_permission(writer); i++) {
        journal_step step = {
            .kind = &fsti_step_remove_object, .path = store->members[i], .watch = &store->watch};
        if (fsti_save_replaces_single(writer, step.path)) continue;
        if (fsti_save_is_single_url(writer, step.path)) step.expected = &store->single;
        FST_TRY(fsti_journal_add(&writer->publication.journal, &step, error));
    }
    return FST_OK;
}

/// The index comes last, because it makes the files visible. But if no index leads to remaining old
/// files, it comes first, so that opening the folder meanwhile reports missing shards. An old
/// manifest is deleted right before the model changes.
static fst_status plan_until_commit(fst_writer *writer, fst_error *error) {
    save_journal *journal = &writer->publication.journal;
    fsti_output *index = writer->publication.final_index;
    bool is_first =
        index != NULL && writer->contents.file_count == 1 && !writer->target.store.may_have_index;
    bool is_last = index != NULL && !is_first;
    if (!is_last) FST_TRY(fsti_save_manifest_aside_objects(writer, error));
    if (is_first) FST_TRY(fsti_journal_add_output(journal, &fsti_step_place_object, index, error));
    if (writer->target.folder != NULL && index == NULL)
        FST_TRY(add_check(writer, check_no_index, error));
    FST_TRY(fsti_commit_add_files(writer, &fsti_step_place_object, error));
    if (!is_last) return FST_OK;
    FST_TRY(add_check(writer, check_own, error));
    FST_TRY(fsti_save_manifest_aside_objects(writer, error));
    return fsti_journal_add_output(journal, &fsti_step_place_object, index, error);
}

static fst_status add_steps(fst_writer *writer, fst_error *error) {
    save_journal *journal = &writer->publication.journal;
    fsti_output *index = writer->publication.final_index;
    FST_TRY(plan_until_commit(writer, error));
    fsti_journal_set_commit(journal);
    FST_TRY(add_removals(writer, error));
    // Remaining files are hidden by an index of the new file.
    bool leaves_some =
        writer->target.store.is_unlisted || (lacks_read_permission(writer) && has_stale(writer));
    if (writer->contents.file_count == 1 && index != NULL && !leaves_some)
        FST_TRY(fsti_journal_add_output(journal, &fsti_step_remove_new_index, index, error));
    if (writer->publication.manifest.kind != NULL && index == NULL)
        FST_TRY(add_check(writer, check_file, error));
    FST_TRY(fsti_save_manifest_place(writer, error));
    return lacks_read_permission(writer) && has_stale(writer)
               ? add_check(writer, report_undeleted_files, error)
               : FST_OK;
}

fst_status fsti_commit_plan_objects(fst_writer *writer, fst_error *error) {
    if (wants_index(writer))
        FST_TRY(fsti_commit_make_index(writer, false, &writer->publication.final_index, error));
    FST_TRY(fsti_commit_make_manifest(writer, error));
    return add_steps(writer, error);
}
