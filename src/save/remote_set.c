// SPDX-License-Identifier: Apache-2.0
/// Saves to addresses. A store has no hidden names and no renaming: files are sent as they come,
/// seen when each is whole, and an index is sent when all of them are.
#include <errno.h>
#include <inttypes.h>
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

/// Files of a set of the same stem, its index left out.
static bool is_member(const fst_writer *writer, const char *name) {
    size_t size = strlen(name);
    return fsti_save_is_shard(name, size, writer->stem) ||
           fsti_save_is_single(name, size, writer->stem);
}

static fst_status refuse_key(const fst_writer *writer, fst_error *error) {
    fsti_error_place place = FSTI_NOWHERE;
    place.file = writer->folder;
    (void)!fsti_error_set(error, FST_E_IO, place, "there is a model already (no_overwrite)");
    if (error != NULL) error->os_errno = EEXIST;
    return FST_E_IO;
}

#define STALE_COUNT_MAX ((size_t)1 << 20)

static fst_status note_key(void *context, const char *name, fst_error *error) {
    fst_writer *writer = context;
    remote_scene *scene = &writer->scene;
    bool is_index = fsti_save_is_index(name, strlen(name), writer->stem);
    if (!is_index && !is_member(writer, name)) return FST_OK;
    if (fsti_net_must_be_new()) return refuse_key(writer, error);
    if (is_index) {
        scene->has_index = true;
        return FST_OK;
    }
    char *path = fsti_url_beside(writer->published[0], name);
    if (path == NULL ||
        !fsti_array_reserve((void **)&scene->members, &scene->capacity, scene->count,
                            sizeof *scene->members, STALE_COUNT_MAX)) {
        fsti_free(path);
        return fsti_error_memory(error, strlen(name));
    }
    scene->members[scene->count++] = path;
    return FST_OK;
}

void fsti_writer_clear_scene(fst_writer *writer) {
    for (size_t i = 0; i < writer->scene.count; i++) fsti_free(writer->scene.members[i]);
    fsti_free(writer->scene.members);
    writer->scene = (remote_scene){0};
}

/// Who may write and not list saves as well: then nothing of an earlier set is removed.
static fst_status look_at_keys(fst_writer *writer, fst_error *error) {
    fst_error cause = {0};
    char *folder = fsti_url_beside(writer->published[0], "");
    if (folder == NULL) return fsti_error_memory(error, strlen(writer->published[0]));
    fst_status status = fsti_net_list(folder, &writer->watch, note_key, writer, &cause);
    fsti_free(folder);
    if (status == FST_E_PERMISSION) {
        fsti_log(FST_LOG_WARNING, "what lies there is not known: %s", cause.message);
        fsti_writer_clear_scene(writer);
        writer->scene.has_index = writer->scene.is_unknown = true;
        return FST_OK;
    }
    if (status != FST_OK && error != NULL) *error = cause;
    return status;
}

/// Whether what is there is what this save makes, too: one file of a name.
static bool is_own(const fst_writer *writer, const char *member) {
    return writer->file_count == 1 && strcmp(member, writer->published[0]) == 0;
}

/// Files of a set come beside those of another, never in their place: until the index leads to the
/// new ones it leads to the old ones, whole, and a reader has the one set or the other.
static fst_status choose_names(fst_writer *writer, fst_error *error) {
    const remote_scene *scene = &writer->scene;
    bool is_free = !scene->has_index && scene->count == 0;
    if (writer->file_count == 1 || is_free || fsti_net_must_be_new()) return FST_OK;
    snprintf(writer->tag, sizeof writer->tag, "-%016" PRIx64, fsti_net_random());
    return fsti_writer_name_files(writer, writer->folder, error);
}

fst_status fsti_writer_find_objects(fst_writer *writer, fst_error *error) {
    bool is_set = writer->folder != NULL;
    writer->watch = (fsti_net_watch){fsti_writer_report, writer};
    if (is_set) FST_TRY(look_at_keys(writer, error));
    if (is_set) FST_TRY(choose_names(writer, error));
    for (uint32_t f = 0; f < writer->file_count + (is_set ? 1 : 0); f++) {
        bool is_index = f == writer->file_count;
        fsti_target *target = is_index ? &writer->index_target : &writer->files[f].target;
        FST_TRY(fsti_target_object(writer->published[f], target, error));
        target->watch = &writer->watch;
        // Of a single object nobody looks whether there is one.
        target->had_object = is_index ? writer->scene.has_index : !is_set;
    }
    for (size_t i = 0; i < writer->scene.count; i++)
        if (is_own(writer, writer->scene.members[i])) writer->files[0].target.had_object = true;
    return FST_OK;
}

// ---- the journal ----

static bool has_stale(const fst_writer *writer) {
    for (size_t i = 0; i < writer->scene.count; i++)
        if (!is_own(writer, writer->scene.members[i])) return true;
    return false;
}

bool fsti_writer_wants_index(const fst_writer *writer) {
    if (writer->file_count > 1) return true;
    // From a set to one file an index leads, until the files of the set are gone.
    return writer->folder != NULL && (writer->scene.has_index || has_stale(writer)) &&
           !writer->scene.is_unknown;
}

static fst_status add_files(fst_writer *writer, fst_error *error) {
    for (uint32_t f = 0; f < writer->file_count; f++)
        FST_TRY(fsti_journal_add(&writer->journal, STEP_PLACE, writer->files[f].output, error));
    return FST_OK;
}

/// The index comes last: what leads to the files. But where none leads to old files that stay until
/// one file has come, it comes first: who opens the folder meanwhile is told what is missing.
fst_status fsti_writer_plan_objects(fst_writer *writer, fst_error *error) {
    save_journal *journal = &writer->journal;
    fsti_output *index = writer->final_index;
    bool is_first = index != NULL && writer->file_count == 1 && !writer->scene.has_index;
    if (is_first) FST_TRY(fsti_journal_add(journal, STEP_PLACE, index, error));
    FST_TRY(add_files(writer, error));
    if (index != NULL && !is_first) FST_TRY(fsti_journal_add(journal, STEP_PLACE, index, error));
    fsti_journal_turn(journal);
    // Only what was there when this save began: what has come since is another save's.
    for (size_t i = 0; i < writer->scene.count; i++)
        if (!is_own(writer, writer->scene.members[i]))
            FST_TRY(fsti_journal_add_path(journal, STEP_REMOVE, writer->scene.members[i], error));
    if (writer->file_count > 1 || index == NULL) return FST_OK;
    return fsti_journal_add_path(journal, STEP_REMOVE_LAST, writer->index_target.path, error);
}
