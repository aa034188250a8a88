// SPDX-License-Identifier: Apache-2.0
/// Saves to object stores, which have no renaming: files are sent when they are written, become
/// visible when complete, and the index is sent last.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "store/store.h"
#include "save_state.h"

fst_status fsti_writer_check_remote(const fst_writer *writer, const fst_save_options *options,
                                    fst_error *error) {
    const char *path = writer->folder != NULL ? writer->folder : writer->published[0];
    const char *why = NULL;
    if (writer->origin != NULL) why = "edits and rewritten files can only be saved to local files";
    if (options->compress != FST_COMPRESS_NONE)
        why = "compressed files can only be saved locally. Save one and copy it";
    if (options->others_write != 0) why = "one object can't be written by several processes";
    if (options->engine != FST_SAVE_ENGINE_AUTO) why = "an engine can't be chosen for a URL";
    return why == NULL ? FST_OK : fsti_url_refuse(path, why, error);
}

// ---- existing objects ----

/// Whether it is a file of a sharded model with the same stem, except its index.
static bool is_member(const fst_writer *writer, const char *name) {
    size_t size = strlen(name);
    return fsti_save_is_shard(name, size, writer->stem) ||
           fsti_save_is_single(name, size, writer->stem);
}

static fst_status report_existing_model(const fst_writer *writer, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = writer->folder;
    (void)!fsti_error_set(error, FST_E_IO, location,
                          "a model exists already, and create_only is set");
    if (error != NULL) error->os_errno = EEXIST;
    return FST_E_IO;
}

#define STALE_COUNT_MAX ((size_t)1 << 20)
#define LISTED_NAME_BYTES 1100u

static fst_status record_path(const fst_writer *writer, const char *name, char ***paths,
                              size_t *count, size_t *capacity, fst_error *error) {
    char *path = fsti_url_sibling(writer->published[0], name);
    if (path == NULL ||
        !fsti_array_reserve((void **)paths, capacity, *count, sizeof **paths, STALE_COUNT_MAX)) {
        fsti_free(path);
        return fsti_error_memory(error, strlen(name));
    }
    (*paths)[(*count)++] = path;
    return FST_OK;
}

/// Whether it is the manifest of such a file, or of its index.
static bool is_manifest(const fst_writer *writer, const char *name) {
    char described[LISTED_NAME_BYTES];
    if (!fsti_ends_with(name, ".manifest") || strlen(name) >= sizeof described) return false;
    snprintf(described, sizeof described, "%.*s", (int)(strlen(name) - strlen(".manifest")), name);
    return is_member(writer, described) ||
           fsti_save_is_index(described, strlen(described), writer->stem);
}

static fst_status record_key(void *context, const char *name, fst_error *error) {
    fst_writer *writer = context;
    remote_objects *remote_state = &writer->remote_state;
    bool is_index = fsti_save_is_index(name, strlen(name), writer->stem);
    if (is_manifest(writer, name))
        return record_path(writer, name, &remote_state->manifests, &remote_state->manifest_count,
                           &remote_state->manifest_capacity, error);
    if (!is_index && !is_member(writer, name)) return FST_OK;
    if (fsti_store_forbids_overwrite()) return report_existing_model(writer, error);
    if (is_index) {
        remote_state->has_index = true;
        return FST_OK;
    }
    return record_path(writer, name, &remote_state->members, &remote_state->count,
                       &remote_state->capacity, error);
}

void fsti_writer_clear_remote_state(fst_writer *writer) {
    for (size_t i = 0; i < writer->remote_state.count; i++)
        fsti_free(writer->remote_state.members[i]);
    for (size_t i = 0; i < writer->remote_state.manifest_count; i++)
        fsti_free(writer->remote_state.manifests[i]);
    fsti_free(writer->remote_state.members);
    fsti_free(writer->remote_state.manifests);
    writer->remote_state = (remote_objects){0};
}

/// Lists existing objects. Without list permission the save works too, but deletes nothing of an
/// earlier model.
static fst_status list_existing(fst_writer *writer, fst_error *error) {
    fst_error cause = {0};
    char *folder = fsti_url_sibling(writer->published[0], "");
    if (folder == NULL) return fsti_error_memory(error, strlen(writer->published[0]));
    fst_status status = fsti_store_list(folder, &writer->watch, record_key, writer, &cause);
    fsti_free(folder);
    if (status == FST_E_PERMISSION) {
        fsti_log(FST_LOG_WARNING,
                 "files of an earlier save are not deleted, because the folder can't be listed: %s",
                 cause.message);
        fsti_writer_clear_remote_state(writer);
        writer->remote_state.has_index = writer->remote_state.is_unknown = true;
        return FST_OK;
    }
    if (status != FST_OK && error != NULL) *error = cause;
    return status;
}

static bool is_single(const fst_writer *writer, const char *member) {
    const char *name = fsti_path_name(member);
    return fsti_save_is_single(name, strlen(name), writer->stem);
}

/// Whether an existing object has a name that this save writes.
static bool is_own(const fst_writer *writer, const char *member) {
    return writer->file_count == 1 && strcmp(member, writer->published[0]) == 0;
}

/// Files of a sharded model get unique names next to the existing ones. Readers see the old model
/// until the index is replaced, and then the new one.
static fst_status choose_names(fst_writer *writer, fst_error *error) {
    const remote_objects *remote_state = &writer->remote_state;
    bool is_free = !remote_state->has_index && remote_state->count == 0;
    if (writer->file_count == 1 || is_free || fsti_store_forbids_overwrite()) return FST_OK;
    snprintf(writer->tag, sizeof writer->tag, "-%016" PRIx64, fsti_random());
    return fsti_writer_name_files(writer, writer->folder, error);
}

/// Examines objects that will be replaced, so that a concurrent save is detected: the later request
/// has the version that is found here as its condition.
static fst_status examine_replaced(fst_writer *writer, fst_error *error) {
    remote_objects *remote_state = &writer->remote_state;
    const char *index = writer->published[writer->file_count];
    remote_state->index = (fsti_precondition){.kind = FSTI_PRECONDITION_ABSENT};
    if (remote_state->has_index)
        FST_TRY(fsti_store_stat(index, &writer->watch, &remote_state->index, error));
    // Of the files to delete, only the single file's name can be reused by another save.
    for (size_t i = 0; i < remote_state->count; i++)
        if (is_single(writer, remote_state->members[i]))
            FST_TRY(fsti_store_stat(remote_state->members[i], &writer->watch, &remote_state->single,
                                    error));
    return FST_OK;
}

static void set_expected_version(fst_writer *writer, uint32_t file) {
    static const fsti_precondition nothing = {.kind = FSTI_PRECONDITION_ABSENT};
    bool is_index = file == writer->file_count;
    if (is_index) writer->index_target.expected_version = &writer->remote_state.index;
    // The first files of another model would get the same names.
    bool has_usual_name = writer->file_count > 1 && writer->tag[0] == '\0';
    if (!is_index && has_usual_name) writer->files[file].target.expected_version = &nothing;
    if (!is_index) writer->files[file].target.is_unique = writer->tag[0] != '\0';
    writer->index_target.leads = true;
}

/// Once the caller has cancelled, do not call it again: rollback polls it too.
static fst_status ask_caller(void *context, uint64_t zero, fst_error *error) {
    fst_writer *writer = context;
    if (atomic_load(&writer->is_ended))
        return fsti_error_set(error, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled");
    return fsti_writer_report(writer, zero, error);
}

fst_status fsti_writer_find_objects(fst_writer *writer, fst_error *error) {
    bool is_sharded = writer->folder != NULL;
    writer->watch = (fsti_http_watch){.ask = ask_caller, .context = writer};
    if (is_sharded) FST_TRY(list_existing(writer, error));
    if (is_sharded) FST_TRY(examine_replaced(writer, error));
    if (is_sharded) FST_TRY(choose_names(writer, error));
    for (uint32_t f = 0; f < writer->file_count + (is_sharded ? 1 : 0); f++) {
        bool is_index = f == writer->file_count;
        fsti_target *target = is_index ? &writer->index_target : &writer->files[f].target;
        FST_TRY(fsti_target_object(writer->published[f], target, error));
        target->watch = &writer->watch;
        if (is_sharded) set_expected_version(writer, f);
        // A single object is not checked for existence.
        target->had_object = is_index ? writer->remote_state.has_index : !is_sharded;
    }
    for (size_t i = 0; i < writer->remote_state.count; i++)
        if (is_own(writer, writer->remote_state.members[i]))
            writer->files[0].target.had_object = true;
    return FST_OK;
}

// ---- the journal ----

static bool has_stale(const fst_writer *writer) {
    for (size_t i = 0; i < writer->remote_state.count; i++)
        if (!is_own(writer, writer->remote_state.members[i])) return true;
    return false;
}

bool fsti_writer_wants_index(const fst_writer *writer) {
    if (writer->file_count > 1) return true;
    // When a single file replaces a sharded model, the index leads to it until the old files are
    // deleted. Without list permission the index may still have been seen.
    const remote_objects *remote_state = &writer->remote_state;
    bool has_index = remote_state->is_unknown
                         ? remote_state->index.kind == FSTI_PRECONDITION_VERSION
                         : remote_state->has_index;
    return writer->folder != NULL && (has_index || has_stale(writer));
}

static fst_status add_files(fst_writer *writer, fst_error *error) {
    for (uint32_t f = 0; f < writer->file_count; f++)
        FST_TRY(fsti_journal_add(&writer->journal, STEP_PLACE, writer->files[f].output, error));
    return FST_OK;
}

static fst_status report_concurrent_save(const fst_writer *writer, const char *what,
                                         fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = writer->folder != NULL ? writer->folder : writer->published[0];
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
    char *url = fsti_url_sibling(writer->published[0], name);
    if (url == NULL) return fsti_error_memory(error, strlen(name));
    for (uint32_t f = 0; f < writer->file_count; f++)
        own->count += strcmp(url, writer->published[f]) == 0;
    fsti_free(url);
    return FST_OK;
}

/// Checks, before the index is replaced, that this save's files still exist: a concurrent save may
/// have deleted them as leftovers. (With conditional writes the index would fail as well.)
static fst_status check_own(void *context, fst_error *error) {
    fst_writer *writer = context;
    own_files own = {writer, 0};
    char *folder = fsti_url_sibling(writer->published[0], "");
    if (folder == NULL) return fsti_error_memory(error, strlen(writer->published[0]));
    fst_status status = fsti_store_list(folder, &writer->watch, count_own, &own, error);
    fsti_free(folder);
    if (status == FST_E_PERMISSION) return FST_OK;
    FST_TRY(status);
    return own.count == writer->file_count
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
    FST_TRY(fsti_store_stat(writer->index_target.path, &writer->watch, &now, error));
    bool is_new = now.kind == FSTI_PRECONDITION_VERSION &&
                  !fsti_precondition_equals(&now, &writer->remote_state.index);
    return is_new
               ? report_concurrent_save(writer, "has written an index since this save began", error)
               : FST_OK;
}

/// Old files may be deleted only after checking that no other index refers to them.
static bool lacks_list_permission(const fst_writer *writer) {
    return writer->remote_state.index.is_forbidden || writer->remote_state.single.is_forbidden;
}

static fst_status report_hidden_files(void *context, fst_error *error) {
    const fst_writer *writer = context;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = writer->folder;
    return fsti_error_set(
        error, FST_E_PERMISSION, location,
        "files of an earlier save are not deleted: without permission to read objects it is "
        "unknown whether another save uses them");
}

/// Checks, before deleting old files, that no concurrent save's index refers to them; that save
/// deletes the others.
static fst_status check_index(void *context, fst_error *error) {
    fst_writer *writer = context;
    const fsti_precondition *own = fsti_output_mark(writer->final_index);
    fsti_precondition now;
    FST_TRY(fsti_store_stat(writer->index_target.path, &writer->watch, &now, error));
    bool is_own = own->kind == FSTI_PRECONDITION_NONE || now.kind == FSTI_PRECONDITION_NONE ||
                  fsti_precondition_equals(own, &now);
    return is_own ? FST_OK : report_concurrent_save(writer, "has already replaced this one", error);
}

/// Checks that the file is still this save's before its manifest is published.
static fst_status check_file(void *context, fst_error *error) {
    fst_writer *writer = context;
    const fsti_precondition *own = fsti_output_mark(writer->files[0].output);
    fsti_precondition now;
    FST_TRY(fsti_store_stat(writer->published[0], &writer->watch, &now, error));
    bool is_own = own->kind == FSTI_PRECONDITION_NONE || now.kind == FSTI_PRECONDITION_NONE ||
                  fsti_precondition_equals(own, &now);
    return is_own ? FST_OK : report_concurrent_save(writer, "has already replaced this one", error);
}

/// Deletes only what existed when this save began; newer objects belong to other saves.
static fst_status add_removals(fst_writer *writer, fst_error *error) {
    const remote_objects *remote_state = &writer->remote_state;
    save_journal *journal = &writer->journal;
    bool has_index = writer->final_index != NULL;
    if (has_index && (has_stale(writer) || writer->manifest.kind != NULL))
        FST_TRY(fsti_journal_add_check(journal, check_index, writer, error));
    for (size_t i = 0; i < remote_state->count && !lacks_list_permission(writer); i++) {
        const char *member = remote_state->members[i];
        const fsti_precondition *expected =
            is_single(writer, member) ? &remote_state->single : NULL;
        if (!is_own(writer, member))
            FST_TRY(fsti_journal_add_removal(journal, member, expected, &writer->watch, error));
    }
    return FST_OK;
}

/// The index comes last, because it makes the files visible. But if no index leads to remaining old
/// files, it comes first, so that opening the folder meanwhile reports missing shards. An old
/// manifest is deleted right before the model changes.
static fst_status plan_until_commit(fst_writer *writer, fst_error *error) {
    save_journal *journal = &writer->journal;
    fsti_output *index = writer->final_index;
    bool is_first = index != NULL && writer->file_count == 1 && !writer->remote_state.has_index;
    bool is_last = index != NULL && !is_first;
    if (!is_last) FST_TRY(fsti_save_manifest_aside_objects(writer, error));
    if (is_first) FST_TRY(fsti_journal_add(journal, STEP_PLACE, index, error));
    if (writer->folder != NULL && index == NULL)
        FST_TRY(fsti_journal_add_check(journal, check_no_index, writer, error));
    FST_TRY(add_files(writer, error));
    if (!is_last) return FST_OK;
    FST_TRY(fsti_journal_add_check(journal, check_own, writer, error));
    FST_TRY(fsti_save_manifest_aside_objects(writer, error));
    return fsti_journal_add(journal, STEP_PLACE, index, error);
}

fst_status fsti_writer_plan_objects(fst_writer *writer, fst_error *error) {
    save_journal *journal = &writer->journal;
    fsti_output *index = writer->final_index;
    FST_TRY(plan_until_commit(writer, error));
    fsti_journal_set_commit(journal);
    FST_TRY(add_removals(writer, error));
    // Remaining files are hidden by an index of the new file.
    bool leaves_some =
        writer->remote_state.is_unknown || (lacks_list_permission(writer) && has_stale(writer));
    if (writer->file_count == 1 && index != NULL && !leaves_some)
        FST_TRY(fsti_journal_add(journal, STEP_REMOVE_LAST, index, error));
    if (writer->manifest.kind != NULL && index == NULL)
        FST_TRY(fsti_journal_add_check(journal, check_file, writer, error));
    FST_TRY(fsti_save_manifest_place(writer, error));
    return lacks_list_permission(writer) && has_stale(writer)
               ? fsti_journal_add_check(journal, report_hidden_files, writer, error)
               : FST_OK;
}
