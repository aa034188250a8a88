// SPDX-License-Identifier: Apache-2.0
/// Saves to object stores: finds existing objects, and chooses the names of the new ones.
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "commit_plan.h"

static fst_status check_options(const fst_writer *writer, fst_error *error) {
    const fst_save_options *options = &writer->options;
    const char *path =
        writer->target.folder != NULL ? writer->target.folder : writer->target.published[0];
    const char *why = NULL;
    if (writer->source.origin != NULL)
        why = "edits and rewritten files can only be saved to local files";
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
    return fsti_save_is_shard(name, size, writer->target.stem) ||
           fsti_save_is_single(name, size, writer->target.stem);
}

static fst_status report_existing_model(const fst_writer *writer, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = writer->target.folder;
    (void)!fsti_error_set(error, FST_E_IO, location,
                          "a model exists already, and create_only is set");
    if (error != NULL) error->os_errno = EEXIST;
    return FST_E_IO;
}

#define STALE_COUNT_MAX ((size_t)1 << 20)
#define LISTED_NAME_BYTES 1100u

static fst_status record_path(const fst_writer *writer, const char *name, char ***paths,
                              size_t *count, size_t *capacity, fst_error *error) {
    char *path = fsti_url_sibling(writer->target.published[0], name);
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
           fsti_save_is_index(described, strlen(described), writer->target.stem);
}

static fst_status record_key(void *context, const char *name, fst_error *error) {
    fst_writer *writer = context;
    store_state *store = &writer->target.store;
    bool is_index = fsti_save_is_index(name, strlen(name), writer->target.stem);
    if (is_manifest(writer, name))
        return record_path(writer, name, &store->manifests, &store->manifest_count,
                           &store->manifest_capacity, error);
    if (!is_index && !is_member(writer, name)) return FST_OK;
    if (fsti_store_forbids_overwrite()) return report_existing_model(writer, error);
    if (is_index) {
        store->may_have_index = true;
        return FST_OK;
    }
    return record_path(writer, name, &store->members, &store->member_count, &store->member_capacity,
                       error);
}

/// Lists existing objects. Without list permission the save works too, but deletes nothing of an
/// earlier model.
static fst_status list_existing(fst_writer *writer, fst_error *error) {
    fst_error cause = {0};
    char *folder = fsti_url_sibling(writer->target.published[0], "");
    if (folder == NULL) return fsti_error_memory(error, strlen(writer->target.published[0]));
    fst_status status =
        fsti_store_list(folder, &writer->target.store.watch, record_key, writer, &cause);
    fsti_free(folder);
    if (status == FST_E_PERMISSION) {
        fsti_log(FST_LOG_WARNING,
                 "files of an earlier save are not deleted, because the folder can't be listed: %s",
                 cause.message);
        fsti_save_store_clear(&writer->target.store);
        writer->target.store.may_have_index = writer->target.store.is_unlisted = true;
        return FST_OK;
    }
    if (status != FST_OK && error != NULL) *error = cause;
    return status;
}

/// Files of a sharded model get unique names next to the existing ones. Readers see the old model
/// until the index is replaced, and then the new one.
static fst_status choose_names(fst_writer *writer, fst_error *error) {
    const store_state *store = &writer->target.store;
    bool is_free = !store->may_have_index && store->member_count == 0;
    if (writer->contents.file_count == 1 || is_free || fsti_store_forbids_overwrite())
        return FST_OK;
    snprintf(writer->target.store.tag, sizeof writer->target.store.tag, "-%016" PRIx64,
             fsti_random());
    return fsti_writer_name_files(writer, writer->target.folder, error);
}

/// Examines objects that will be replaced, so that a concurrent save is detected: the later request
/// has the version that is found here as its condition.
static fst_status examine_replaced(fst_writer *writer, fst_error *error) {
    store_state *store = &writer->target.store;
    const char *index = writer->target.published[writer->contents.file_count];
    store->index = (fsti_precondition){.kind = FSTI_PRECONDITION_ABSENT};
    if (store->may_have_index)
        FST_TRY(fsti_store_stat(index, &writer->target.store.watch, &store->index, error));
    // Of the files to delete, only the single file's name can be reused by another save.
    for (size_t i = 0; i < store->member_count; i++)
        if (fsti_save_is_single_url(writer, store->members[i]))
            FST_TRY(fsti_store_stat(store->members[i], &writer->target.store.watch, &store->single,
                                    error));
    return FST_OK;
}

/// What must exist at the path of a sharded model's object when it is published.
static void set_expected_version(fst_writer *writer, uint32_t file) {
    static const fsti_precondition nothing = {.kind = FSTI_PRECONDITION_ABSENT};
    if (file == writer->contents.file_count) {
        writer->target.index.expected_version = &writer->target.store.index;
        writer->target.index.leads = true;
        return;
    }
    fsti_target *target = &writer->contents.files[file].target;
    target->is_unique = writer->target.store.tag[0] != '\0';
    // The first files of another model would get the same names.
    if (writer->contents.file_count > 1 && !target->is_unique) target->expected_version = &nothing;
}

/// Once the caller has cancelled, do not call it again: rollback polls it too.
static fst_status ask_caller(void *context, uint64_t zero, fst_error *error) {
    save_progress *progress = context;
    if (atomic_load(&progress->cancel_reported))
        return fsti_error_set(error, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled");
    return fsti_progress_report(progress, zero, error);
}

static fst_status find_objects(fst_writer *writer, fst_error *error) {
    bool is_sharded = writer->target.folder != NULL;
    writer->target.store.watch = (fsti_http_watch){.ask = ask_caller, .context = &writer->progress};
    if (is_sharded) FST_TRY(list_existing(writer, error));
    if (is_sharded) FST_TRY(examine_replaced(writer, error));
    if (is_sharded) FST_TRY(choose_names(writer, error));
    for (uint32_t f = 0; f < writer->contents.file_count + (is_sharded ? 1 : 0); f++) {
        bool is_index = f == writer->contents.file_count;
        fsti_target *target = is_index ? &writer->target.index : &writer->contents.files[f].target;
        FST_TRY(fsti_target_object(writer->target.published[f], target, error));
        target->watch = &writer->target.store.watch;
        if (is_sharded) set_expected_version(writer, f);
        // A single object is not checked for existence.
        target->may_replace = is_index ? writer->target.store.may_have_index : !is_sharded;
    }
    for (size_t i = 0; i < writer->target.store.member_count; i++)
        if (fsti_save_replaces_single(writer, writer->target.store.members[i]))
            writer->contents.files[0].target.may_replace = true;
    return FST_OK;
}

// ---- the table ----

/// From the folder's URL: a stem may contain characters that URLs must escape.
static char *join_url(const char *folder, const char *name) {
    char *base = fsti_path_with_ending(folder, "/");
    if (base == NULL) return NULL;
    char *url = fsti_url_sibling(base, name);
    fsti_free(base);
    return url;
}

/// URLs have no links.
static bool resolve_url(const char *path, bool follow_last, char *out) {
    (void)follow_last;
    return snprintf(out, PATH_MAX, "%s", path) < PATH_MAX;
}

/// Errors of a store must be reported before anything is published.
static fst_status settle_object(fst_writer *writer, fsti_output *output, fst_error *error) {
    (void)writer;
    return fsti_output_sync(output, error);
}

static fst_status lock_nothing(const fst_writer *writer, int *lock, fst_error *error) {
    (void)writer;
    (void)error;
    *lock = -1;
    return FST_OK;
}

static void stop_uploads(fst_writer *writer) {
    for (uint32_t f = 0; f < writer->contents.file_count; f++)
        fsti_output_stop(writer->contents.files[f].output);
}

const fsti_target_kind fsti_target_objects = {.check = check_options,
                                              .join = join_url,
                                              .resolve = resolve_url,
                                              .find = find_objects,
                                              .settle = settle_object,
                                              .lock = lock_nothing,
                                              .plan = fsti_commit_plan_objects,
                                              .stop = stop_uploads};
